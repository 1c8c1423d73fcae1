"""The write side: a command appends an event to the source, and nothing else."""
