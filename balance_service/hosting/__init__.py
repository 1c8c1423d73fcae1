"""One instance, put together: its engine, what it serves, and what it says of itself."""
