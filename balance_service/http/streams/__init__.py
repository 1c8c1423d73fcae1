"""Streams of events to clients: the form, the changes of read models, and the connections between instances."""
