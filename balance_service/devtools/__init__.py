"""What stands beside the service: a local stack, sample events, load, the copy of a topic."""
