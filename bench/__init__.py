"""The benchmark: this service and Kafka Streams, or an earlier checkout, on one broker, in one run; see README.md."""
