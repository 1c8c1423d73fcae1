"""The engine of an instance, its readiness and status, its metrics, and rebuilds."""
