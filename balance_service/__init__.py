"""Live queries over Kafka-backed state: an event-sourced balance read model."""

__version__ = "0.1.0"
