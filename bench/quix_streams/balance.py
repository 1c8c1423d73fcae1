"""The balance as a Quix Streams program: exactly once, state in RocksDB. Runs in its own environment."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import fastavro
from quixstreams import Application, State

_HEADER_BYTES = 5


def main(bootstrap_servers: str, topic: str, group: str, client: str, state_dir: str, schema_file: str) -> None:
    """Fold the topic until SIGTERM.

    Args:
        client: the name of this process in the group.
        schema_file: the writer's schema of the events.
    """
    application = Application(
        bootstrap_servers,
        consumer_group=group,
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        state_dir=state_dir,
        loglevel="WARNING",
        consumer_extra_config={"client.id": client, "fetch.message.max.bytes": 4 << 20, "queued.min.messages": 500_000},
        producer_extra_config={"linger.ms": 100, "batch.size": 256 << 10, "queue.buffering.max.messages": 1_000_000},
    )
    schema = fastavro.parse_schema(_plain(json.loads(Path(schema_file).read_text(encoding="utf-8"))))

    def fold(frame: bytes, state: State) -> None:
        body = io.BytesIO(frame)
        body.seek(_HEADER_BYTES)
        event: Any = fastavro.schemaless_reader(body, schema, None)
        state.set("cents", state.get("cents", 0) + int.from_bytes(event["amount"], "big", signed=True))

    events = application.topic(topic, key_deserializer="bytes", value_deserializer="bytes")
    application.dataframe(events).update(fold, stateful=True)
    application.run()


def _plain(schema: Any) -> Any:
    """The schema without logical types, whose conversion would double the time."""
    if isinstance(schema, dict):
        return {name: _plain(value) for name, value in schema.items() if name != "logicalType"}
    return [_plain(part) for part in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    main(*sys.argv[1:])
