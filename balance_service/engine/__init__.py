"""What is kept: the state store, its changelog, the commit protocol, and the task that owns all three."""
