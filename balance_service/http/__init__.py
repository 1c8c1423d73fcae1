"""Queries, commands and operations over HTTP."""
