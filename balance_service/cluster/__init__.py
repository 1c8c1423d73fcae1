"""Who owns what, and where it is."""
