"""The interface of stage processors, and calls of a read model's own code."""

from __future__ import annotations

import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import structlog

from balance_service.engine.dead_letter import OWN_CODE_FAILED, is_reserved
from balance_service.engine.records import RESERVED_PREFIX, FailedAt
from balance_service.errors import ConfigurationError, PoisonRecordError, TaskHaltedError
from balance_service.model.events import DEAD_LETTER, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.batch import TaskBatch
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.dead_letters import Letters
    from balance_service.engine.records import DeadLetter, Output, Position, Record
    from balance_service.engine.store import StateStore
    from balance_service.model.events import OnFailure

P = ParamSpec("P")
T = TypeVar("T")
_MOST_FAILURES, _OF_EVENTS = 20, 1_000
_FIRST_FAILURES = 5
_NEVER_OF_ONE_EVENT = (MemoryError, ImportError)
_MOST_ERROR = 500
_PACKAGE = Path(__file__).parents[1]

OWN_CODE = "the code of the read model "
"""How the reason of a task begins that its read model's own code has halted."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class BatchOutcome:
    """The states, outputs and dead letters that a batch results in.

    `columns` are pairs of keys and framed states, row for row. A state is null if `others` has it, or if it does not
    change. Large batches stay in columns because Python objects would take several times their bytes. `others` are
    further states and the idempotency markers, framed; a key without a value is a deleted state. `outputs` are in the
    order of the events that they are made of. `letters` are records that the stage schedules; they did not fail.
    `newest` is, by the key of records, the offset of the last event that is applied, if it may supersede dead letters.
    `duplicates`, `created` and `deleted` are numbers of events, new states and deleted states.
    """

    stream_time_ms: int
    columns: list[tuple[pa.Array, pa.Array]] = field(default_factory=list)
    others: list[Record] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)
    newest: dict[bytes, int] = field(default_factory=dict)
    duplicates: int = 0
    created: int = 0
    deleted: int = 0

    def add(self, key: bytes, frame: bytes | None, *, is_new: bool) -> None:
        """Adds a state, or the deletion of one. `is_new` says whether the key has none yet."""
        if frame is None and is_new:
            return
        self.others.append((key, frame))
        self.created += is_new
        self.deleted += frame is None

    def records(self) -> Iterator[Record]:
        """Yields the records for the changelog and the store."""
        for keys, frames in self.columns:
            yield from (
                (key, frame)
                for key, frame in zip(keys.to_pylist(), frames.to_pylist(), strict=True)
                if frame is not None
            )
        yield from self.others

    def changed_keys(self, most: int) -> list[bytes] | None:
        """The keys of the states that change; None if they are more than `most`."""
        changed = [key for key, _ in self.others if not key.startswith(RESERVED_PREFIX)]
        if len(changed) + sum(len(frames) - frames.null_count for _, frames in self.columns) > most:
            return None
        for keys, frames in self.columns:
            # The frames stay in their column: they may be large.
            changed += keys.filter(frames.is_valid()).to_pylist()
        return changed


class StageProcessor(Protocol):
    """Processes the batches of one stage, for all of its tasks: folds them into states, or passes records on."""

    @property
    def position_codec(self) -> AvroCodec:
        """The codec of the position records in the stage's changelog."""

    @property
    def letters(self) -> Letters:
        """The stage's dead letters."""

    def outcome(self, batch: TaskBatch, partition: int, position: Position, store: StateStore, /) -> BatchOutcome:
        """Returns the outcome of a batch, without writing it.

        The outcomes of consecutive batches together do not depend on where batches begin and end, with two exceptions.
        The last state of a key may be sent more or less often. A state of standard folds is encoded only at the end of
        a batch, so an event whose state does not fit the schema is no dead letter if a later event of the batch makes
        it fit.

        Args:
            position: the store's position.
        """


class OwnCodeFailedError(PoisonRecordError):
    """A read model's own code failed, rather than refused the event. `__cause__` is the exception that it raised."""

    def __init__(self, error: Exception) -> None:
        text = str(error)
        super().__init__(OWN_CODE_FAILED, f"{type(error).__name__}: {text}" if text else type(error).__name__)

    def require_retried(
        self,
        batch: TaskBatch,
        read_model: str,
        source: str,
        offset: int,
        key: bytes | None,
        why_not: str | None = "",
    ) -> None:
        """Logs the failure if the record becomes, or stays, a dead letter for an operator.

        Args:
            source: a topic and its partition.
            offset, key: of the record.
            why_not: why a new event must not become a dead letter, if there is more to say; None if it may. See
                `Tolerance`.

        Raises:
            TaskHaltedError: the record is a new event, which the task must not skip.
        """
        # The exception's text may quote the event, and probes return this reason without authentication.
        kind = type(self.__cause__).__name__
        failure = f"{OWN_CODE}{read_model} fails at offset {offset} of {source} with {kind}"
        if offset not in batch.retried and why_not is not None:
            raise TaskHaltedError(f"{failure}{why_not}; correct it, and restart the instance", key) from self.__cause__
        log.error(
            "a dead letter waits for an operator",
            read_model=read_model,
            reason=f"{failure}; correct it and redrive the record, or discard it",
            exc_info=self.__cause__,
        )


def failed_at(halted: TaskHaltedError) -> FailedAt | None:
    """Returns where a read model's own code failed that halted a task; None if there is another reason."""
    error = halted.__cause__
    if error is None:
        return None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_of_the_service(frame.filename)]
    # What the model calls fails further below; the line that the author wrote says more.
    last = next((frame for frame in reversed(own) if frame.filename == own[0].filename), None)
    line = "" if last is None else f"{last.filename}:{last.lineno}, in {last.name}: {last.line}"
    return FailedAt(halted.key, line, "".join(traceback.format_exception_only(error)).strip()[:_MOST_ERROR])


def _is_of_the_service(file: str) -> bool:
    """Whether a file is of this package, without the models that ship."""
    path = Path(file)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "read_models")


class Tolerance:
    """Decides whether an event at which a read model's own code fails may become a dead letter. For any thread.

    A deployment that fails at all events must not turn a topic into dead letters, so the failures are few.
    """

    def __init__(self, on_failure: OnFailure) -> None:
        self._is_on = on_failure is DEAD_LETTER
        self._failures: dict[int, deque[int]] = {}
        """The offsets of the last failures, by partition."""
        self._has_applied: set[int] = set()
        """The partitions where an event was applied since the start."""

    def applied(self, partition: int) -> None:
        """Notes that an event of the partition was applied."""
        self._has_applied.add(partition)

    def why_not(self, error: OwnCodeFailedError, partition: int, offset: int) -> str | None:
        """Returns why the task must halt, as the rest of a sentence; None if the event may become a dead letter."""
        if not self._is_on or isinstance(error.__cause__, _NEVER_OF_ONE_EVENT):
            return ""
        failures = self._failures.setdefault(partition, deque(maxlen=_MOST_FAILURES))
        if offset in failures:
            # A batch whose commit failed is folded again.
            return None
        if partition not in self._has_applied and len(failures) + 1 >= _FIRST_FAILURES:
            return f", as at the first {_FIRST_FAILURES} events since the start"
        if len(failures) == _MOST_FAILURES and offset - failures[0] < _OF_EVENTS:
            return f", as at {_MOST_FAILURES} of the {_OF_EVENTS:,} records before"
        failures.append(offset)
        return None


def call_own_code(code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function that the read model's author wrote.

    Raises:
        OwnCodeFailedError: the function failed.
        PoisonRecordError: the function refuses the event.
    """
    try:
        return code(*args, **kwargs)
    except PoisonRecordError as error:
        if is_reserved(error.cause):
            why = f"the cause '{error.cause}' is reserved for records that could not be read; use another"
            reserved = ConfigurationError(why)
            raise OwnCodeFailedError(reserved) from reserved
        raise
    except Exception as error:  # own code may raise anything
        raise OwnCodeFailedError(error) from error


def records_of_own_code(code: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> list[Any]:
    """Returns the records that a function of the author makes: one, several or none. Raises as `call_own_code`."""
    # A generator must be exhausted within the call: it runs, and fails, only then.
    return call_own_code(_all, code, *args, **kwargs)


def _all(code: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
    return [*listed(code(*args, **kwargs))]
