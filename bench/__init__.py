"""The benchmark: this service and Kafka Streams side by side, on one broker, in one run; `python -m bench -h`."""
