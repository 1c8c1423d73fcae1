"""Other instances: which are trusted, and how they are asked."""
