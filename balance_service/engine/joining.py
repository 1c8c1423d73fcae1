"""What a stage that joins does: it makes a record of each event and its rows, and passes that on by another key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.avro.types import fields_of
from balance_service.engine.outputs import Sender, encoded, passed_on
from balance_service.engine.passing import of_each_event
from balance_service.engine.records import RESERVED_PREFIX
from balance_service.errors import PoisonRecordError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.schemas import Schema
    from balance_service.engine.letters.letters import Letters
    from balance_service.engine.outputs import Target
    from balance_service.engine.passing import Row
    from balance_service.engine.records import Output, Position, TaskBatch
    from balance_service.engine.store.store import StateStore
    from balance_service.engine.tables.joined import JoinedTables
    from balance_service.engine.work import Folded
    from balance_service.model.keys import KeyType

    Headers = list[tuple[str, bytes | None]]

MISSING = "join-missing"
_NULL = "field-null"
_RESERVED = "key-reserved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """Joins each event with rows as of its time.

    What is passed on is kept, and names in its headers the version of each row: `playerVersion: partition:offset`. It
    is not made a second time but where a commit has failed.
    """

    source: str
    record: str
    """The events', by its simple name."""
    joined: JoinedTables
    schema: Schema
    """Of what is made."""
    codec: AvroCodec
    """Of the same."""
    key_type: KeyType
    target: Target
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, _store: StateStore) -> Folded:
        """See `Work.outcome`. Raises as `JoinedTables.as_of` does."""
        sender = Sender(self.target, self.source, partition)
        # Many events of a batch name one row.
        rows: dict[bytes, Row] = {}

        def made(_key: bytes | None, row: Row) -> Sequence[Output]:
            # What was made of it is kept, and its dead letter too: a second join might come to something else.
            is_new = batch.is_to_be_sent(row["offset"], stands_at.emitted_up_to)
            return self._made(row, partition, rows, sender) if is_new else ()

        return of_each_event(batch, stands_at, made)

    def _made(self, row: Row, partition: int, rows: dict[bytes, Row], sender: Sender) -> Sequence[Output]:
        """What is passed on of an event: a record, or nothing.

        Args:
            rows: those of the batch that are decoded already, by their frames.
        """
        event, timestamp_ms = row[self.record], row["timestamp"]
        values, versions = dict(event), passed_on(row["headers"])
        for join in self.joined.joins:
            if event[join.on] is None:
                raise PoisonRecordError(_NULL, f"the event has no '{join.on}'")
            own, version = self.joined.as_of(join, join.key_of(event[join.on]), timestamp_ms, partition)
            if version is not None and version.frame is not None:
                if version.frame not in rows:
                    rows[version.frame] = self.joined.row(join, version.frame)
                of_row = rows[version.frame]
                versions.append((join.version_header, f"{own}:{version.offset}".encode()))
            elif join.missing == "null":
                of_row = dict.fromkeys(join.take)
            elif join.missing == "drop":
                return ()
            else:
                raise PoisonRecordError(
                    MISSING, f"there is no {join.table.record} {event[join.on]} in '{join.table.topic}'"
                )
            values |= {name: of_row[column] for column, name in join.take.items()}
        record = {name: values[name] for name in fields_of(self.schema)}
        key = self._key(record[self.key_type.column])
        return (sender.output(row["offset"], timestamp_ms, key, encoded(self.codec, record), versions),)

    def _key(self, value: Any) -> bytes:
        if value is None:
            raise PoisonRecordError(_NULL, f"what is made has no '{self.key_type.column}'")
        key = self.key_type.encode(value if self.key_type.is_number else str(value))
        if key.startswith(RESERVED_PREFIX):
            raise PoisonRecordError(_RESERVED, "the key of what is made begins with 0xFF")
        return key
