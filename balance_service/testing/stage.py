"""One stage of a read model on one partition, on the processor and commit code of the service and a store on disk."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from balance_service.engine.assembly import Surroundings, processor_of
from balance_service.engine.commit import Committed, commit, decide, write_position
from balance_service.engine.fold import FoldProcessor
from balance_service.engine.records import POSITION_KEY, RESERVED_PREFIX, Position, TaskBatch
from balance_service.engine.store import StateStore
from balance_service.errors import FatalError
from balance_service.kafka.topic_specs import MAX_MESSAGE_BYTES
from balance_service.spark.combine import PartitionRows
from balance_service.testing.fakes import FakeWriter
from balance_service.testing.rows import letter_of, rows_of, written

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from balance_service.engine.dead_letter import Letter, Status
    from balance_service.engine.records import KeyedUpdate, Output
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.testing.fakes import FakeRegistry
    from balance_service.testing.rows import Given

_EVERY_KEY = 1_000_000
_EVERY_MS = 300_000
_LARGEST_BYTES = 1 << 20
_CONFIG = {MAX_MESSAGE_BYTES: str(_LARGEST_BYTES), "cleanup.policy": "delete"}


class DrivenTask:
    """The task of a stage on its one partition; every event that came, by its offset, is in `events`."""

    def __init__(
        self,
        read_model: ReadModel,
        stage: Stage,
        registry: FakeRegistry,
        folder: str,
        *,
        few_rows: dict[str, int],
        is_accelerated: bool,
        idempotency_window_ms: int,
    ) -> None:
        self._read_model = read_model
        self._stage = stage
        self.name = stage.name
        self._folder = folder
        self._few_rows = few_rows
        self._has_states = not stage.passes_on and read_model.has_states()
        self.now_ms = 0
        around = Surroundings(
            registry=registry,
            partitions=lambda _name: 1,
            topic_id=lambda _name: "source",
            config=lambda _name: _CONFIG,
            joined=_joins_nothing,
            largest_bytes=_LARGEST_BYTES,
            retry_every_ms=_EVERY_MS,
            idempotency_window_ms=idempotency_window_ms,
            now_ms=lambda: self.now_ms,
        )
        processor = processor_of(stage, read_model, around)
        if isinstance(processor, FoldProcessor) and not is_accelerated:
            processor = replace(processor, acceleration=None)
        self._processor = processor
        self.writer = FakeWriter()
        self.store = self._new_store()
        stands_at = Position(0, 1, "source", source=f"{stage.source}:0")
        write_position(stands_at, self._processor.position_codec, self.store, self.writer)
        self.events: list[Given] = []
        self.last: TaskBatch | None = None

    def commit(self, events: Sequence[Given]) -> Committed:
        """Do it to some events in one batch; returns what that did."""
        start, end = len(self.events), len(self.events) + len(events)
        events = [written(given, self._stage) for given in events]
        self.events += events
        batch = self._batch(start, end, dict(enumerate(events, start)))
        self.last = batch if events else self.last
        return self.deliver(batch)

    def _batch(self, start: int, end: int, events: Mapping[int, Given]) -> TaskBatch:
        if not events:
            return TaskBatch(start, end)
        rows = PartitionRows(rows_of(self._read_model, self._stage, events))
        part = rows.combined(self._read_model.combine, **self._few_rows) if self._has_states else rows.as_they_came()
        return TaskBatch(
            start=start,
            end=end,
            updates=part.updates,
            events=part.events,
            applied=part.applied,
            ignored=part.ignored,
            dead_letters=part.dead_letters,
            singles=partial(self._singles, rows),
        )

    def due(self) -> TaskBatch | None:
        """The dead letters that are to be tried again now, or forgotten; None if there are none."""
        # Brings Spark along, which most tests of a model do without.
        from balance_service.spark.redrive import redriven

        due = self._processor.letters.due(self.store)
        if not due.again and not due.forgotten:
            return None
        events = {letter.offset: self.events[letter.offset] for letter in due.again}
        rows = PartitionRows(rows_of(self._read_model, self._stage, events)) if events else None
        letters = {at: letter_of(self._read_model, self._stage, given, at) for at, given in events.items()}
        return redriven(rows, [*events], letters, len(self.events), due, has_states=self._has_states)

    def decide(self, offsets: Sequence[int], status: Status) -> None:
        """Discard dead letters, or have them tried again, as an operator does."""
        letters = self._processor.letters.at(self.store, offsets).values()
        decide(letters, status, (), self._processor, self.store, self.writer)

    def letters(self) -> list[Letter]:
        """Every dead letter that is kept, in the order of the records."""
        return [*self._processor.letters.between(self.store, 0)]

    def rebuild(self) -> None:
        """Fold everything from the start once more, as a rebuild does: it keeps what was sent and the letters."""
        before = self.store.position
        if before is None:
            raise AssertionError("the store has no position")
        carried = self._processor.letters.carry_over(self.letters())
        self.store.close()
        self.store = self._new_store()
        self.writer.commits, self.writer.end = [], 0
        sent_before = max(before.offset, before.emitted_up_to)
        stands_at = replace(before, offset=0, keys=0, emitted_up_to=sent_before, stream_time_ms=-1)
        write_position(stands_at, self._processor.position_codec, self.store, self.writer, carried)
        left_out = set(self._processor.letters.left_out_from(self.store, 0))
        events = {at: given for at, given in enumerate(self.events) if at not in left_out}
        self.deliver(self._batch(0, len(self.events), events))

    def mend(self, cause: str) -> None:
        """Have every event read from now on that could not be read for a cause."""
        self.events = [replace(given, unreadable=None) if given.unreadable == cause else given for given in self.events]

    def deliver(self, batch: TaskBatch) -> Committed:
        """Commit a batch."""
        return commit(batch, 0, self._processor, self.store, self.writer)

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
        for records, _, position_frame in self.writer.commits:
            offset += len(records) + 1
            self.store.write([*records, (POSITION_KEY, position_frame)], offset)
            offset += 1
        if (self.states(), self.store.position) != (before, position):
            raise AssertionError("the changelog does not have what the store had")

    def _singles(self, rows: PartitionRows, keys: Sequence[bytes]) -> list[KeyedUpdate]:
        letters = {at: letter_of(self._read_model, self._stage, given, at) for at, given in enumerate(self.events)}
        return rows.singly(rows.updates_of(keys), letters)

    def _new_store(self) -> StateStore:
        return StateStore(Path(tempfile.mkdtemp(dir=self._folder)), self._processor.position_codec)


def _joins_nothing(stage: Stage) -> NoReturn:
    """Stages that join are not driven: the driver is given the records that they make."""
    raise FatalError(f"stage {stage.name} joins, and is driven")
