"""Authentication, authorization and rate limits of clients."""
