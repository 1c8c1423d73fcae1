"""The business: the read models that this package ships, and what belongs to them."""
