"""One read model on one partition of each stage, on the service's own code; stages feed each other until quiet."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from balance_service.avro.codec import AvroCodec
from balance_service.engine.dead_letter import Status
from balance_service.errors import TaskMigratedError
from balance_service.model.json_view import exact_json
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import Given, driven_stages, key_of
from balance_service.testing.stage import DrivenTask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.engine.commit import Committed
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.records import Output
    from balance_service.model.read_model import ReadModel

_A_DAY_MS = 24 * 60 * 60 * 1000


class Refused(NamedTuple):
    """An event that became a dead letter, and its cause."""

    event: Given
    cause: str


class Driver:
    """Runs a read model over events: `Driver(Balance()).given(events).when(event).then(view)`.

    Of a model that joins, only what comes after its joins is run: its events are the records that those make.
    Close it, or use it as a context manager: it has a store on disk, in a temporary folder.
    """

    def __init__(
        self,
        read_model: ReadModel | type[ReadModel],
        *,
        combines_few: bool = False,
        is_accelerated: bool = True,
        idempotency_window_ms: int = _A_DAY_MS,
    ) -> None:
        """Args:
        read_model: whose schemas are files; see `Schemas`.
        combines_few: whether few events are combined too, which the service folds one by one.
        is_accelerated: whether a fold's acceleration is used, as the service does.
        """
        self._registry = FakeRegistry()
        self._read_model = read_model = read_model() if isinstance(read_model, type) else read_model
        self._folder = tempfile.TemporaryDirectory()
        self._stages = [
            DrivenTask(
                read_model,
                stage,
                self._registry,
                self._folder.name,
                few_rows={"few_rows": 0} if combines_few else {},
                is_accelerated=is_accelerated,
                idempotency_window_ms=idempotency_window_ms,
            )
            for stage in driven_stages(read_model)
        ]
        self._last = self._stages[-1]
        if read_model.has_states():
            self.state_codec = AvroCodec(self._registry, "states", read_model.state_schema)

    def given(self, *events: Given | Mapping[str, Any]) -> Self:
        """Fold some events, in one batch. A mapping is the fields of the source's only record type."""
        self.commit([self._given(event) for event in events])
        return self

    def when(self, *events: Given | Mapping[str, Any]) -> Self:
        """The same; `then` is about the key of the last one."""
        return self.given(*events)

    def then(self, view: Any) -> Self:
        """Check what a query for the key of the last event answers; None: that there is no such key.

        Raises:
            AssertionError: it answers something else.
            ValueError: there was no event yet.
        """
        if not self._last.events:
            raise ValueError("no event was given yet, so there is no key to ask for; call `given` or `when` first")
        given = self._last.events[-1]
        key = key_of(self._read_model, self._read_model.stages[-1], given) or b""
        found = self._view(key)
        if found != view:
            shown = self._read_model.key_type.decode(key)
            raise AssertionError(f"a query for '{shown}' answers {exact_json(found)}, not {exact_json(view)}")
        return self

    def view(self, key: str) -> Any:
        """What a query for a key answers; None if the key has no state."""
        return self._view(self._read_model.key_type.parse(key))

    def emitted(self, topic: str) -> list[Mapping[str, Any] | None]:
        """Every record that was sent to a topic that the model emits to, in order; None: one that deletes its key."""
        return [self._record(topic, output) for output in self._last.sent(topic)]

    def last_emitted(self, topic: str) -> dict[bytes | None, Mapping[str, Any] | None]:
        """By key, the last record that was sent to a topic."""
        return {output.key: self._record(topic, output) for output in self._last.sent(topic)}

    def dead_letters(self) -> list[Refused]:
        """Every event that could not be applied, in the order in which each stage found them."""
        return [Refused(given, cause) for stage in self._stages for given, cause in stage.dead_letters()]

    def redeliver(self) -> Self:
        """Hand the last batch over once more, as a query that fails after a commit does; it changes nothing.

        Raises:
            AssertionError: it was taken.
        """
        delivered = [(stage, stage.last) for stage in self._stages if stage.last is not None]
        if not delivered:
            raise ValueError("nothing was delivered yet")
        before = self._everything()
        for stage, batch in delivered:
            try:
                stage.deliver(batch)
            except TaskMigratedError:
                continue
            raise AssertionError("a batch that was committed before was taken again")
        if self._everything() != before:
            raise AssertionError("a batch that was refused has changed something")
        return self

    def restart(self) -> Self:
        """Go on from new stores, restored from the changelogs, as another instance does.

        Raises:
            AssertionError: a changelog does not have what the store had.
        """
        for stage in self._stages:
            stage.restart()
        return self

    def rebuild(self) -> Self:
        """Fold again what the last stage reads, from its start, as a rebuild of the read model does."""
        self._last.rebuild()
        return self

    def commit(self, events: Sequence[Given]) -> Committed:
        """Take some events in one batch, and what each stage passes on in another; returns what the last one did."""
        return self._passed_on(self._stages[0].commit(events))

    def mend(self, cause: str) -> Self:
        """What could not be read for a cause can be from now on, such as once its schema is registered."""
        for stage in self._stages:
            stage.mend(cause)
        return self

    def advance(self, *, minutes: float) -> Self:
        """Let time pass: dead letters that are due are tried again, until none is."""
        for stage in self._stages:
            stage.now_ms += int(minutes * 60_000)
            while (batch := stage.due()) is not None:
                self._passed_on(stage.deliver(batch))
        return self

    def letters(self) -> list[Letter]:
        """Every dead letter that the last stage keeps, in the order of the records."""
        return self._last.letters()

    def letter_counts(self) -> Mapping[str, int]:
        """How many dead letters the last stage keeps, by cause and status, as its commits have counted them."""
        position = self._last.store.position
        return {} if position is None else position.letters

    def redrive(self, *offsets: int) -> Self:
        """Have dead letters of the last stage tried again at once, as an operator does."""
        self._last.decide(offsets, Status.SCHEDULED)
        return self.advance(minutes=0)

    def discard(self, *offsets: int) -> Self:
        """Have dead letters of the last stage never applied."""
        self._last.decide(offsets, Status.DISCARDED)
        return self.advance(minutes=0)

    def _passed_on(self, done: Committed) -> Committed:
        for before, after in pairwise(self._stages):
            # What is passed on is the record as it is, under another key.
            passed = before.writer.sent[len(after.events) :]
            done = after.commit([replace(before.events[o.offset], record_key=o.key) for o in passed])
        return done

    def states(self) -> dict[bytes, bytes]:
        """Every state by key, framed."""
        return self._last.states()

    @property
    def counted(self) -> int:
        """How many keys have a state, as each commit has counted them."""
        position = self._last.store.position
        return 0 if position is None else position.keys

    def close(self) -> None:
        """Remove the stores. Idempotent."""
        for stage in self._stages:
            stage.store.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _view(self, key: bytes) -> Any:
        (frame,) = self._last.store.get_many([key])
        return None if frame is None else self._read_model.told(self.state_codec.decode(frame))

    def _everything(self) -> list[tuple[dict[bytes, bytes], list[Output]]]:
        return [(stage.states(), [*stage.writer.sent]) for stage in self._stages]

    def _record(self, topic: str, output: Output) -> Mapping[str, Any] | None:
        (emit,) = (emit for emit in self._read_model.outputs if emit.topic == topic)
        if output.value is None:
            return None
        if emit.record is None and not self._read_model.has_states():
            return self._last.events[output.offset].values
        schema = self._read_model.state_schema if emit.record is None else self._read_model.made_schemas[emit.record]
        return AvroCodec(self._registry, topic, schema).decode(output.value)

    def _given(self, event: Given | Mapping[str, Any]) -> Given:
        if isinstance(event, Given):
            return event
        (record,) = driven_stages(self._read_model)[0].records
        return Given(record, event)
