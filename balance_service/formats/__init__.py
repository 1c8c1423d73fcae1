"""The formats of records on topics: each is one object, which says how bytes become values and values bytes."""
