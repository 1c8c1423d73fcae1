"""How every Kafka client of ours is configured, and the topics they need."""
