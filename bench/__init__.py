"""The benchmark: compares this service with other systems or an earlier checkout; see README.md."""
