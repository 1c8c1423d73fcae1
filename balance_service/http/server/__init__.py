"""The HTTP server: the application, its connections and limits, TLS, and the fast path for plain queries."""
