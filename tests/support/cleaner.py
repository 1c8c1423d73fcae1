"""The broker's cleaner of compacted topics, told to be quick."""

from __future__ import annotations

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

# Only closed segments are cleaned, and one is closed only when something is appended.
_EAGER = {
    "min.compaction.lag.ms": "0",
    "min.cleanable.dirty.ratio": "0",
    "segment.ms": "100",
    "delete.retention.ms": "100",
    "file.delete.delay.ms": "100",
}


def clean_eagerly(bootstrap_servers: str, topic: str) -> None:
    """Have the cleaner go over a topic again and again, and drop its tombstones a tenth of a second later."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    wanted = [(ResourceType.BROKER, "1", {"log.cleaner.backoff.ms": "100"}), (ResourceType.TOPIC, topic, _EAGER)]
    for kind, name, values in wanted:
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in values.items()
        ]
        resource = ConfigResource(kind, name, incremental_configs=entries)
        admin.incremental_alter_configs([resource])[resource].result(10)
