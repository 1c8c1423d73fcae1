"""The business: each read model is one small file."""
