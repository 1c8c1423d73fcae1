"""What a stage of retries does: it schedules what another producer could not process, and sends it when it is due."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.engine.letters.letter import Letter
from balance_service.engine.outputs import Sender, passed_on
from balance_service.engine.passing import of_each_event, rows_of
from balance_service.engine.work import Folded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.letters.letters import Letters
    from balance_service.engine.outputs import Target
    from balance_service.engine.passing import Row
    from balance_service.engine.records import Output, Position, TaskBatch
    from balance_service.engine.store.store import StateStore

ATTEMPT_HEADER = "retry-attempt"
"""Says how often a record was sent to be tried again; set by us, and kept by a producer that fails once more."""
_NUMBER = re.compile(rb"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrying:
    """Schedules each record as it comes. Tried again, when it is due, it is sent as it is, one attempt further."""

    source: str
    target: Target
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, _store: StateStore) -> Folded:
        """See `Work.outcome`."""
        if batch.retried:
            sender = Sender(self.target, self.source, partition)
            return of_each_event(batch, stands_at, lambda key, row: (_sent(key, row, sender),))
        folded, now_ms, every_ms = Folded(stands_at.stream_time_ms), self.letters.now_ms(), self.letters.every_ms
        for key, row in rows_of(batch.updates):
            attempt = attempts_before(row["headers"])
            folded.letters.append(Letter.retry(row["offset"], key, attempt, row["timestamp"], now_ms, every_ms))
        return folded


def _sent(key: bytes | None, row: Row, sender: Sender) -> Output:
    """A record as it is, one attempt further."""
    headers = [(name, value) for name, value in passed_on(row["headers"]) if name != ATTEMPT_HEADER]
    headers.append((ATTEMPT_HEADER, str(attempts_before(row["headers"]) + 1).encode()))
    return sender.output(row["offset"], row["timestamp"], key, row["value"], headers)


def attempts_before(headers: Sequence[Mapping[str, Any]] | None) -> int:
    """What the last header of that name says; 0 if there is none, or no number of up to nine digits in it."""
    said = [header["value"] for header in headers or () if header["key"] == ATTEMPT_HEADER]
    return int(said[-1]) if said and said[-1] is not None and _NUMBER.fullmatch(said[-1]) else 0
