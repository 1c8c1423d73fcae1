"""The compose file on a real Docker engine: `make compose-test`."""
