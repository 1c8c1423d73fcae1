"""In what form a record that could not be applied is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from balance_service.engine.records import DeadLetter

    Headers = list[tuple[str, str | bytes | None]]

# Of a batch with nothing else in it, besides key and value: headers, of which names of topics are the longest.
_ENVELOPE_BYTES = 2 << 10


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the dead letters of one read model on one source partition have in common.

    What would not fit into `largest_bytes` is kept without its value, and without its key if need be: refused by the
    brokers, it would stop its partition for ever.
    """

    read_model: str
    source: str
    partition: int
    application_id: str
    largest_bytes: int

    def of(self, letter: DeadLetter) -> tuple[bytes | None, bytes | None, Headers]:
        """Key, value and headers of the record that keeps it."""
        key, value = letter.key, letter.value
        headers: Headers = [
            ("dead-letter-cause", letter.cause.encode()),
            ("dead-letter-read-model", self.read_model.encode()),
            ("dead-letter-topic", self.source.encode()),
            ("dead-letter-application-id", self.application_id.encode()),
            ("dead-letter-partition", str(self.partition).encode()),
            ("dead-letter-offset", str(letter.offset).encode()),
            ("dead-letter-timestamp", str(letter.timestamp_ms).encode()),
        ]
        room = self.largest_bytes - _ENVELOPE_BYTES
        if value is not None and len(key or b"") + len(value) > room:
            headers.append(("dead-letter-value-bytes", str(len(value)).encode()))
            value = None
        if key is not None and len(key) > room:
            headers.append(("dead-letter-key-bytes", str(len(key)).encode()))
            key = None
        return key, value, headers
