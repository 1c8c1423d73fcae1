"""One stage of a read model on one partition, on the work and commit code of the service and a store on disk."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.cluster.partitioner import partitions_of, partitions_of_keys
from balance_service.events.combine import PartitionRows
from balance_service.state.commit import Committed, commit, write_position
from balance_service.state.emission import Emission
from balance_service.state.fold import Folding
from balance_service.state.outputs import Target
from balance_service.state.passing import Emitting, Rekeying
from balance_service.state.records import POSITION_KEY, RESERVED_PREFIX, Position, TaskBatch
from balance_service.state.store.store import StateStore
from balance_service.testing.fakes import FakeWriter
from balance_service.testing.rows import letter_of, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from balance_service.read_models.flow import Leg
    from balance_service.read_models.outputs import Emit
    from balance_service.read_models.read_model import ReadModel
    from balance_service.state.records import KeyedUpdate, Output
    from balance_service.state.work import Work
    from balance_service.testing.fakes import FakeRegistry
    from balance_service.testing.rows import Given

_EVERY_KEY = 1_000_000
_LARGEST_BYTES = 1 << 20


def target_of(topic: str, leg: Leg) -> Target:
    """A topic of one partition."""
    return Target(topic, 1, _LARGEST_BYTES, is_compacted=False, sender=leg.name)


class DrivenStage:
    """Does the work of a leg; every event that came, by its offset, is in `events`."""

    def __init__(
        self,
        read_model: ReadModel,
        leg: Leg,
        registry: FakeRegistry,
        folder: str,
        *,
        few_rows: dict[str, int],
        is_accelerated: bool,
        idempotency_window_ms: int,
    ) -> None:
        self._read_model = read_model
        self._leg = leg
        self._registry = registry
        self._folder = folder
        self._few_rows = few_rows
        self._work = self._work_of(leg, is_accelerated=is_accelerated, window_ms=idempotency_window_ms)
        self.writer = FakeWriter()
        self.store = self._new_store()
        stands_at = Position(0, 1, "source", source=f"{leg.topic}:0")
        write_position(stands_at, self._work.position_codec, self.store, self.writer)
        self.events: list[Given] = []
        self.last: TaskBatch | None = None

    def commit(self, events: Sequence[Given]) -> Committed:
        """Do it to some events in one batch; returns what that did."""
        start, end = len(self.events), len(self.events) + len(events)
        self.events += events
        if not events:
            return self.deliver(TaskBatch(start, end))
        rows = PartitionRows(rows_of(self._read_model, self._leg, events, start))
        has_states = isinstance(self._work, Folding)
        part = rows.combined(self._read_model.combine, **self._few_rows) if has_states else rows.as_they_came()
        self.last = TaskBatch(
            start=start,
            end=end,
            updates=part.updates,
            events=part.events,
            applied=part.applied,
            ignored=part.ignored,
            dead_letters=part.dead_letters,
            singles=partial(self._singles, rows),
        )
        return self.deliver(self.last)

    def deliver(self, batch: TaskBatch) -> Committed:
        """Commit a batch."""
        return commit(batch, 0, self._work, self.store, self.writer)

    def sent(self, topic: str) -> list[Output]:
        """What was sent to a topic, in order."""
        return [output for output in self.writer.sent if output.topic == topic]

    def dead_letters(self) -> Iterator[tuple[Given, str]]:
        """Every event that could not be applied, and its cause."""
        letters = (letter for _, batch, _ in self.writer.commits for letter in batch)
        yield from ((self.events[letter.offset], letter.cause) for letter in letters)

    def states(self) -> dict[bytes, bytes]:
        """Every state by key, framed."""
        keys = self.store.keys(b"", RESERVED_PREFIX, _EVERY_KEY)
        return {key: frame for key, frame in zip(keys, self.store.get_many(keys), strict=True) if frame is not None}

    def restart(self) -> None:
        """Go on from a new store, restored from the changelog. Raises AssertionError: it has not what the store had."""
        before, position = self.states(), self.store.position
        self.store.close()
        self.store = self._new_store()
        offset = 0
        for records, _, written in self.writer.commits:
            offset += len(records) + 1
            self.store.write([*records, (POSITION_KEY, written)], offset)
            offset += 1
        if (self.states(), self.store.position) != (before, position):
            raise AssertionError("the changelog does not have what the store had")

    def _singles(self, rows: PartitionRows, keys: Sequence[bytes]) -> list[KeyedUpdate]:
        letters = {at: letter_of(self._read_model, self._leg, given, at) for at, given in enumerate(self.events)}
        return rows.singly(rows.updates_of(keys), letters)

    def _new_store(self) -> StateStore:
        return StateStore(Path(tempfile.mkdtemp(dir=self._folder)), self._work.position_codec)

    def _work_of(self, leg: Leg, *, is_accelerated: bool, window_ms: int) -> Work:
        read_model, position_codec = self._read_model, self._codec("positions", load_schema("Position"))
        if leg.by is not None:
            return Rekeying(source=leg.topic, target=target_of(leg.name, leg), position_codec=position_codec)
        if not read_model.has_states():
            outputs = [(emit, target_of(emit.topic, leg), self._made(emit)) for emit in read_model.outputs]
            return Emitting(
                read_model=read_model.name,
                source=leg.topic,
                records=leg.records,
                outputs=outputs,
                position_codec=position_codec,
            )
        state_codec = self._codec("states", read_model.state_schema)
        emissions = [
            Emission(
                read_model=read_model,
                emit=emit,
                target=target_of(emit.topic, leg),
                codec=self._made(emit) or state_codec,
                source=leg.topic,
            )
            for emit in read_model.outputs
        ]
        return Folding(
            read_model=read_model,
            acceleration=read_model.acceleration(state_codec) if is_accelerated else None,
            state_codec=state_codec,
            position_codec=position_codec,
            marker_codec=self._codec("markers", load_schema("IdempotencyMarker")),
            partitions_of=partial(partitions_of, partitions=1),
            partitions_of_keys=partial(partitions_of_keys, partitions=1),
            idempotency_window_ms=window_ms,
            emission=next(iter(emissions), None),
        )

    def _made(self, emit: Emit) -> AvroCodec | None:
        return None if emit.record is None else self._codec(emit.topic, load_schema(emit.record))

    def _codec(self, subject: str, schema: Any) -> AvroCodec:
        return AvroCodec(self._registry, subject, schema)
