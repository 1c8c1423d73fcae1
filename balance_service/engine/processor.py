"""What a stage does with a batch: folds it into states, or passes its events on. Reads the store, writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import structlog

from balance_service.engine.dead_letter import OWN_CODE_FAILED, is_reserved
from balance_service.errors import ConfigurationError, PoisonRecordError, TaskHaltedError
from balance_service.model.outputs import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.dead_letters import Letters
    from balance_service.engine.records import DeadLetter, Output, Position, Record, TaskBatch
    from balance_service.engine.store import StateStore


@dataclass(slots=True)
class BatchOutcome:
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


class StageProcessor(Protocol):
    """What the tasks of one stage do with their batches."""

    @property
    def position_codec(self) -> AvroCodec:
        """Of the position records in the stage's changelog."""

    @property
    def letters(self) -> Letters:
        """How its dead letters are kept."""

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, store: StateStore, /) -> BatchOutcome:
        """What a batch comes to; apart from how often the last state of a key is sent, wherever batches are cut.

        Args:
            stands_at: the store's position.
        """


P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)


class OwnCodeFailedError(PoisonRecordError):
    """A read model's own code failed, it did not refuse the event; `__cause__` is what it raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(OWN_CODE_FAILED, str(error))

    def require_letter(self, batch: TaskBatch, read_model: str, source: str, offset: int) -> None:
        """Returns if the record was a dead letter that is tried again: it stays one, for an operator.

        Args:
            source: a topic and its partition.

        Raises:
            TaskHaltedError: it is an event that comes, and to pass over it would skip it.
        """
        # No more of the exception, which may quote the event: probes are told this without a token.
        kind = type(self.__cause__).__name__
        told = f"the code of the read model {read_model} fails at offset {offset} of {source} with {kind}"
        if offset not in batch.retried:
            raise TaskHaltedError(f"{told}; correct it, and restart the instance") from self.__cause__
        log.error(
            "a dead letter waits for an operator",
            read_model=read_model,
            reason=f"{told}; correct it and redrive the record, or discard it",
            exc_info=self.__cause__,
        )


def call_own(code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a read model's own code makes.

    Raises:
        OwnCodeFailedError: it has failed.
        PoisonRecordError: it refuses the event.
    """
    try:
        return code(*args, **kwargs)
    except PoisonRecordError as error:
        if is_reserved(error.cause):
            why = f"the cause '{error.cause}' says that a record could not be read; name another"
            raise OwnCodeFailedError(error) from ConfigurationError(why)
        raise
    except Exception as error:  # whatever is wrong with it
        raise OwnCodeFailedError(error) from error


def made_by_own(code: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> list[Any]:
    """The records that a read model's own code makes, of whatever form. Raises as `call_own`."""
    # Taken out of it here: a generator fails only then.
    return call_own(lambda: [*listed(code(*args, **kwargs))])
