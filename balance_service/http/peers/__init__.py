"""Queries to other instances: connections, proofs, and the proxy."""
