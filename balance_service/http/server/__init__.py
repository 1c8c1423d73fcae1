"""The HTTP server: connections, limits, TLS, and problems as answers."""
