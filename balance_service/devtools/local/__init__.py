"""A Kafka broker, a schema registry and instances of the service on this machine, as child processes."""
