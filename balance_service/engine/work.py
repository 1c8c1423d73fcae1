"""What a stage does with a batch: folds it into states, or passes its events on. Reads the store, writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.letters.letter import Letter
    from balance_service.engine.letters.letters import Letters
    from balance_service.engine.records import DeadLetter, Output, Position, Record, TaskBatch
    from balance_service.engine.store.store import StateStore


@dataclass(slots=True)
class Folded:
    """New states and markers, framed; the events that turned out not to be applicable, or were applied before.

    `columns` are keys and states, row for row, some at a time and null where `others` has the state, if anything: as
    Python's objects, those of a large batch would take a multiple of their bytes. A deleted state is among `others`, as
    a key without a value. `outputs` is what is sent to other topics, in the order of the events that it comes of.
    `letters` are of records that are to be taken up later: they are no dead letters.
    """

    stream_time_ms: int
    columns: list[tuple[pa.Array, pa.Array]] = field(default_factory=list)
    others: list[Record] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)
    duplicates: int = 0
    created: int = 0
    deleted: int = 0

    def records(self) -> Iterator[Record]:
        """All that is new or gone, for the changelog and for the store."""
        for keys, frames in self.columns:
            yield from (
                (key, frame)
                for key, frame in zip(keys.to_pylist(), frames.to_pylist(), strict=True)
                if frame is not None
            )
        yield from self.others


class Work(Protocol):
    """What the tasks of one stage do with their batches."""

    @property
    def position_codec(self) -> AvroCodec:
        """Of the position records in the stage's changelog."""

    @property
    def letters(self) -> Letters:
        """How its dead letters are kept."""

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, store: StateStore, /) -> Folded:
        """What a batch comes to; apart from how often the last state of a key is sent, wherever batches are cut.

        Args:
            stands_at: the store's position.
        """
