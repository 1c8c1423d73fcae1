"""Runs one read model on one partition per stage, with the service's own code and a store on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, overload

from balance_service.avro.codec import AvroCodec
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.engine.assembly import StageServices, processor_of
from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.commit import Committed, commit, decide, write_position
from balance_service.engine.dead_letter import Status
from balance_service.engine.fold import FoldProcessor
from balance_service.engine.records import POSITION_KEY, RESERVED_PREFIX, Position
from balance_service.engine.stateless import JoinProcessor, RowsProcessor
from balance_service.engine.store import StateStore
from balance_service.errors import TaskMigratedError
from balance_service.formats.known import FORMATS
from balance_service.kafka.clients import IDEMPOTENCY_HEADER
from balance_service.kafka.topic_specs import MAX_MESSAGE_BYTES
from balance_service.model.converters import record_converter
from balance_service.model.json_view import exact_json
from balance_service.model.record_keys import RecordKey, key_text
from balance_service.spark.combine import PartitionRows
from balance_service.testing.fakes import FakeRegistry, FakeTables, FakeWriter
from balance_service.testing.rows import (
    InputEvent,
    RecordKeyOf,
    TableRow,
    driven_stages,
    encoded,
    given_schemas,
    key_of,
    letter_of,
    rows_of,
    way_of,
)
from balance_service.testing.rows import event as of_instance

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _typeshed import DataclassInstance

    from balance_service.engine.batch import KeyedUpdate
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.records import Output
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage

V = TypeVar("V")
_A_DAY_MS = 24 * 60 * 60 * 1000
_EVERY_KEY = 1_000_000
_EVERY_MS = 300_000
_LARGEST_BYTES = 1 << 20
_CONFIG = {MAX_MESSAGE_BYTES: str(_LARGEST_BYTES), "cleanup.policy": "delete"}


class Refused(NamedTuple):
    """An event that became a dead letter, its cause, and what is wrong with it."""

    event: InputEvent
    cause: str
    detail: str = ""


class DrivenTask:
    """The task of a stage on its only partition. `events` holds every event by offset."""

    def __init__(
        self,
        read_model: ReadModel,
        stage: Stage,
        registry: FakeRegistry,
        tables: FakeTables,
        folder: str,
        *,
        few_rows: dict[str, int],
        is_accelerated: bool,
        idempotency_window_ms: int,
    ) -> None:
        self._read_model = read_model
        self._registry = registry
        self.stage = stage
        self.name = stage.name
        self._folder = folder
        self._few_rows = few_rows
        self._has_states = not stage.passes_on and read_model.has_states()
        self.now_ms = 0
        services = StageServices(
            schemas=OwnSchemas(registry),
            partitions=lambda _name: 1,
            topic_id=lambda _name: "source",
            config=lambda _name: _CONFIG,
            joined=tables.joined,
            largest_bytes=_LARGEST_BYTES,
            retry_every_ms=_EVERY_MS,
            idempotency_window_ms=idempotency_window_ms,
            now_ms=lambda: self.now_ms,
        )
        processor = processor_of(stage, read_model, services)
        if isinstance(processor, FoldProcessor) and not is_accelerated:
            processor = replace(processor, acceleration=None, steps=None)
        self.processor = processor
        self.writer = FakeWriter()
        self.store = self._new_store()
        stands_at = Position(0, 1, "source", source=f"{stage.source}:0")
        write_position(stands_at, self.processor.position_codec, self.store, self.writer)
        self.events: list[InputEvent] = []
        self._removed: set[int] = set()
        self._passed_on = 0
        self.last: TaskBatch | None = None

    def passed_on(self) -> list[InputEvent]:
        """Returns what the stage passed on since the last call: each event under another key, or joined."""
        new, self._passed_on = self.writer.sent[self._passed_on :], len(self.writer.sent)
        return [self._event_of(output) for output in new]

    def _event_of(self, output: Output) -> InputEvent:
        event = replace(self.events[output.offset], record_key=output.key)
        makes = self.stage.makes
        if not isinstance(self.processor, JoinProcessor | RowsProcessor) or output.value is None or makes is None:
            return event
        once = dict(output.headers).get(IDEMPOTENCY_HEADER)
        made = self.processor.codec.decode(output.value)
        return replace(event, record=makes["name"], fields=made, idempotency_key=once)

    def commit(self, events: Sequence[InputEvent]) -> Committed:
        start, end = len(self.events), len(self.events) + len(events)
        events = [encoded(given, self.stage) for given in events]
        self.events += events
        batch = self.batch(start, end, dict(enumerate(events, start)))
        self.last = batch if events else self.last
        return self.deliver(batch)

    def batch(self, start: int, end: int, events: Mapping[int, InputEvent]) -> TaskBatch:
        """Returns the batch of the events of `[start, end)`, by offset; without those that are left out."""
        if not events:
            return TaskBatch(start, PartitionUpdates(end))
        rows = PartitionRows(rows_of(self._read_model, self.stage, events, self._registry))
        updates = rows.folded_by(self._read_model, **self._few_rows) if self._has_states else rows.uncombined()
        return TaskBatch(start, replace(updates, end=end, singles=partial(self._singles, rows)))

    def due(self) -> TaskBatch | None:
        """Returns the dead letters that must be retried or forgotten now; None if there are none."""
        # Imports Spark, which most tests of a model do not need.
        from balance_service.spark.redrive import redriven

        due = self.processor.letters.due(self.store)
        if not due.again and not due.forgotten:
            return None
        again = [letter.offset for letter in due.again]
        events = {at: self.events[at] for at in again if at not in self._removed}
        rows = PartitionRows(rows_of(self._read_model, self.stage, events, self._registry)) if events else None
        letters = {at: letter_of(self._read_model, self.stage, given, at) for at, given in events.items()}
        return redriven(rows, again, letters, len(self.events), due, has_states=self._has_states)

    def decide(self, offsets: Sequence[int], status: Status) -> None:
        letters = self.processor.letters
        changes = letters.on_decision(self.store, letters.at(self.store, offsets).values(), status)
        decide(changes, (), self.processor, self.store, self.writer)

    def letters(self) -> list[Letter]:
        return [*self.processor.letters.between(self.store, 0)]

    def rebuild(self) -> None:
        """Folds all events again from the start, as a rebuild does: sent records and dead letters are kept."""
        before = self.store.position
        if before is None:
            raise AssertionError("the store has no position")
        carried = self.processor.letters.carry_over(self.letters())
        self.store.close()
        self.store = self._new_store()
        self.writer.commits, self.writer.end = [], 0
        sent_before = max(before.offset, before.emitted_up_to)
        stands_at = replace(before, offset=0, keys=0, emitted_up_to=sent_before, stream_time_ms=-1)
        write_position(stands_at, self.processor.position_codec, self.store, self.writer, carried)
        left_out = frozenset(self.processor.letters.left_out_from(self.store, 0))
        events = {at: given for at, given in enumerate(self.events) if at not in left_out | self._removed}
        self.deliver(replace(self.batch(0, len(self.events), events), left_out=left_out))

    def compact(self) -> None:
        """Removes from the source what compaction may: records with a later one of their key, and tombstones."""
        last = {key_of(self._read_model, self.stage, given): at for at, given in enumerate(self.events)}
        kept = {at for at in last.values() if self.events[at].body is not None}
        self._removed = {*range(len(self.events))} - kept

    def mend(self, cause: str) -> None:
        self.events = [replace(given, unreadable=None) if given.unreadable == cause else given for given in self.events]

    def deliver(self, batch: TaskBatch) -> Committed:
        return commit(batch, 0, self.processor, self.store, self.writer)

    def sent(self, topic: str) -> list[Output]:
        return [output for output in self.writer.sent if output.topic == topic]

    def dead_letters(self) -> Iterator[Refused]:
        letters = (letter for _, batch, _ in self.writer.commits for letter in batch)
        yield from (Refused(self.events[letter.offset], letter.cause, letter.detail) for letter in letters)

    def states(self) -> dict[bytes, bytes]:
        keys = self.store.keys(b"", RESERVED_PREFIX, _EVERY_KEY)
        return {key: frame for key, frame in zip(keys, self.store.get_many(keys), strict=True) if frame is not None}

    def restart(self) -> None:
        """Restores a new store from the changelog. Raises AssertionError if it differs from the old one."""
        before, position = self.states(), self.store.position
        self.store.close()
        self.store = self._new_store()
        offset = 0
        for records, _, position_frame in self.writer.commits:
            offset += len(records) + 1
            self.store.write([*records, (POSITION_KEY, position_frame)], offset)
            offset += 1
        if (self.states(), self.store.position) != (before, position):
            raise AssertionError("the changelog differs from the store")

    def _singles(self, rows: PartitionRows, keys: Sequence[bytes]) -> list[KeyedUpdate]:
        letters = {at: letter_of(self._read_model, self.stage, given, at) for at, given in enumerate(self.events)}
        return rows.single_updates(rows.updates_of(keys), letters)

    def _new_store(self) -> StateStore:
        return StateStore(Path(tempfile.mkdtemp(dir=self._folder)), self.processor.position_codec)


class Driver:
    """Runs a read model over events: `Driver(Balance()).given(events).when(event).then(view)`.

    All stages of the model run, one after the other. Close the driver, or use it as a context manager: it has stores in
    a temporary folder.
    """

    def __init__(
        self,
        read_model: ReadModel | type[ReadModel],
        *,
        after_joins: bool = False,
        combines_few: bool = False,
        is_accelerated: bool = True,
        idempotency_window_ms: int = _A_DAY_MS,
    ) -> None:
        """Args:
        read_model: its schemas must be files; see `Schemas`.
        after_joins: whether only the stages after the last join run, so that the events are joined records.
        combines_few: whether to combine even a few events, which the service folds one by one.
        is_accelerated: whether to use the fold's acceleration, as the service does.
        """
        self._registry = FakeRegistry()
        self._read_model = read_model = read_model() if isinstance(read_model, type) else read_model
        self._folder = tempfile.TemporaryDirectory()
        stages = driven_stages(read_model, after_joins=after_joins)
        self._tables = FakeTables(read_model.name, stages, self._registry, Path(self._folder.name))
        self.stages = [
            DrivenTask(
                read_model,
                stage,
                self._registry,
                self._tables,
                self._folder.name,
                few_rows={"few_rows": 0} if combines_few else {},
                is_accelerated=is_accelerated,
                idempotency_window_ms=idempotency_window_ms,
            )
            for stage in stages
        ]
        self._placed = stages
        self._given_records = [*given_schemas(read_model, after_joins=after_joins)]
        self.last_stage = self.stages[-1]
        if read_model.has_states():
            self.state_codec = AvroCodec(self._registry, "states", read_model.state_schema)

    def given(self, *events: DataclassInstance | Mapping[str, Any]) -> Self:
        """Folds events in one batch: those of `event`, instances of their dataclasses, and rows.

        A mapping has the fields of the source's only record type. Rows of the call are in their tables before its
        events are joined.
        """
        self._tables.put([given for given in events if isinstance(given, TableRow)])
        self.commit([self._given(event) for event in events if not isinstance(event, TableRow)])
        return self

    def when(self, *events: DataclassInstance | Mapping[str, Any]) -> Self:
        """As `given`; `then` checks the key of the last event."""
        return self.given(*events)

    def then(self, view: Any) -> Self:
        """Checks the answer to a query for the key of the last event; None if the key has no state.

        Raises:
            AssertionError: the answer differs.
            ValueError: no event has reached the last stage yet.
        """
        if not self.last_stage.events:
            refused = ", ".join(dict.fromkeys(one.cause for one in self.dead_letters()))
            why = f"every event is a dead letter ({refused})" if refused else "there was no event yet"
            raise ValueError(f"{why}, so there is no key to query; call `given` or `when` first")
        given = self.last_stage.events[-1]
        key_type = self._read_model.key_type
        sent = key_of(self._read_model, self._read_model.stages[-1], given)
        if sent is None and isinstance(key_type, RecordKey):
            raise ValueError("the last event has no key to query: give it a `record_key`")
        key = key_type.stored(sent or b"")
        found = self._view(key)
        if found != view:
            shown = key_type.text(key)
            letters = "".join(f"; a dead letter: {one.cause}, {one.detail}" for one in self.dead_letters())
            raise AssertionError(f"a query for '{shown}' answers {exact_json(found)}, not {exact_json(view)}{letters}")
        return self

    @overload
    def view(self, key: RecordKeyOf | Mapping[str, str | int]) -> Any: ...

    @overload
    def view(self, key: RecordKeyOf | Mapping[str, str | int], *, into: type[V]) -> V | None: ...

    def view(self, key: RecordKeyOf | Mapping[str, str | int], *, into: Any = None) -> Any:
        """Returns the answer to a query for a key; None if the key has no state.

        Args:
            key: its text, number, UUID or bytes; the columns of a composite key, such as `{"card": "c1", "day": 20}`.
            into: the type that a client reads the answer into, as in `client.get(…, into=Spent)`.
        """
        key_type = self._read_model.key_type
        given = key_type.text_of_shown(key) if isinstance(key, Mapping) else key_text(key)
        found = self._view(key_type.parse(given))
        if into is None or found is None:
            return found
        # Imports an HTTP client, which `try` does not need.
        from balance_service.client.exchange import exact
        from balance_service.client.typed import lacks, read

        answer = exact(exact_json(found))
        shown = key_type.shown(given)
        columns = shown if isinstance(shown, dict) else {key_type.columns[0]: shown}
        return read(into, answer, columns if lacks(into, answer) else None)

    @overload
    def emitted(self, topic: str) -> list[Mapping[str, Any] | None]: ...

    @overload
    def emitted(self, topic: str, *, into: type[V]) -> list[V | None]: ...

    def emitted(self, topic: str, *, into: Any = None) -> list[Any]:
        """Returns every record that the model sent to a topic, in order; None for a tombstone.

        Args:
            into: the dataclass of the records.
        """
        found = [self._record(topic, output) for output in self.last_stage.sent(topic)]
        if into is None:
            return found
        return [None if record is None else record_converter(into).from_record(record) for record in found]

    def last_emitted(self, topic: str) -> dict[bytes | None, Mapping[str, Any] | None]:
        """Returns the last record that the model sent to a topic, by key."""
        return {output.key: self._record(topic, output) for output in self.last_stage.sent(topic)}

    def dead_letters(self) -> list[Refused]:
        """Returns every event that could not be applied, in the order of rejection by each stage."""
        return [refused for stage in self.stages for refused in stage.dead_letters()]

    def redeliver(self) -> Self:
        """Delivers the last batch again, as a query that fails after its commit does; this must change nothing.

        Raises:
            AssertionError: the batch was accepted.
        """
        delivered = [(stage, stage.last) for stage in self.stages if stage.last is not None]
        if not delivered:
            raise ValueError("no batch was delivered yet")
        before = self._everything()
        for stage, batch in delivered:
            try:
                stage.deliver(batch)
            except TaskMigratedError:
                continue
            raise AssertionError("a batch that was committed before was accepted again")
        if self._everything() != before:
            raise AssertionError("a batch that was refused has changed the state")
        return self

    def restart(self) -> Self:
        """Restores new stores from the changelogs and continues with them, as another instance does.

        Raises:
            AssertionError: a changelog differs from its store.
        """
        for stage in self.stages:
            stage.restart()
        return self

    def compact(self) -> Self:
        """Compacts a source with `compacted=True`: each key keeps its newest record, unless that is a tombstone.

        The states stay as they are. `rebuild` then folds what is left.

        Raises:
            ValueError: the source is not compacted.
        """
        if not self.last_stage.stage.compacted:
            raise ValueError(f"the source of {self._read_model.name} is not `Stream(…, compacted=True)`")
        self.last_stage.compact()
        return self

    def rebuild(self) -> Self:
        """Folds all events of the last stage again, as a rebuild of the read model does."""
        self.last_stage.rebuild()
        return self

    def commit(self, events: Sequence[InputEvent]) -> Committed:
        """Commits events in one batch, and the records that a stage passes on in another; returns the last result.

        Events of several sources arrive at the last stage in their order.
        """
        arrived: list[InputEvent] = []
        for first, some in groupby(events, lambda given: way_of(self._placed, given)[0].name):
            arrived += self._passed(self._task_of(first), [*some])
        return self.last_stage.commit(arrived)

    def mend(self, cause: str) -> Self:
        """Makes events readable that are `unreadable` for a cause, such as once their schema is registered."""
        for stage in self.stages:
            stage.mend(cause)
        return self

    def advance(self, *, minutes: float) -> Self:
        """Lets time pass: retries the dead letters that are due, until none is."""
        for stage in self.stages:
            stage.now_ms += int(minutes * 60_000)
            while (batch := stage.due()) is not None:
                stage.deliver(batch)
                if stage is not self.last_stage:
                    self.last_stage.commit(self._passed(self._after(stage), stage.passed_on()))
        return self

    def letters(self) -> list[Letter]:
        """Returns every dead letter of the last stage, by offset."""
        return self.last_stage.letters()

    def letter_counts(self) -> Mapping[str, int]:
        """Returns the number of dead letters of the last stage by cause and status, according to its commits."""
        position = self.last_stage.store.position
        return {} if position is None else position.letters

    def redrive(self, *offsets: int) -> Self:
        """Retries dead letters of the last stage at once, as an operator does."""
        self.last_stage.decide(offsets, Status.SCHEDULED)
        return self.advance(minutes=0)

    def discard(self, *offsets: int) -> Self:
        """Discards dead letters of the last stage permanently."""
        self.last_stage.decide(offsets, Status.DISCARDED)
        return self.advance(minutes=0)

    def _passed(self, stage: DrivenTask, events: list[InputEvent]) -> list[InputEvent]:
        """Commits events from a stage on, up to the last one; returns those that reach it."""
        while stage is not self.last_stage:
            stage.commit(events)
            stage, events = self._after(stage), stage.passed_on()
        return events

    def _after(self, stage: DrivenTask) -> DrivenTask:
        """Returns the stage that reads the topic that a stage passes records on to."""
        return next(after for after in self.stages if after.stage.source == stage.stage.rekeyed)

    def _task_of(self, name: str) -> DrivenTask:
        return next(stage for stage in self.stages if stage.name == name)

    def states(self) -> dict[bytes, bytes]:
        return self.last_stage.states()

    @property
    def counted(self) -> int:
        """The number of keys with a state, according to the commits."""
        position = self.last_stage.store.position
        return 0 if position is None else position.keys

    def close(self) -> None:
        """Removes the stores. Idempotent."""
        for stage in self.stages:
            stage.store.close()
        self._tables.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _view(self, key: bytes) -> Any:
        (frame,) = self.last_stage.store.get_many([key])
        return None if frame is None else self._read_model.view_of(self.state_codec.decode(frame))

    def _everything(self) -> list[tuple[dict[bytes, bytes], list[Output]]]:
        return [(stage.states(), [*stage.writer.sent]) for stage in self.stages]

    def _record(self, topic: str, output: Output) -> Mapping[str, Any] | None:
        (emit,) = (emit for emit in self._read_model.outputs if emit.topic == topic)
        if output.value is None:
            return None
        if emit.record is None and not self._read_model.has_states():
            return self.last_stage.events[output.offset].values
        schema = self._read_model.state_schema if emit.record is None else self._read_model.made_schemas[emit.record]
        return FORMATS[emit.format].codec(self._registry, topic, schema).decode(output.value)

    def _given(self, event: DataclassInstance | Mapping[str, Any]) -> InputEvent:
        if isinstance(event, InputEvent):
            return event
        if not isinstance(event, Mapping):
            return of_instance(event)
        if len(self._given_records) > 1:
            raise ValueError(
                f"{self._read_model.name} reads several records: give `event(record, fields)` instead of a mapping, "
                f"with one of {', '.join(self._given_records)}"
            )
        return InputEvent(self._given_records[0], event)
