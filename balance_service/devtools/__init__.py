"""Tools for development: a local stack, sample events, load, copies of topics."""
