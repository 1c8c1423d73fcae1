"""Authentication, authorisation and rate limits of clients."""
