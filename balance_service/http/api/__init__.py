"""The routes as values, and what is made of them."""
