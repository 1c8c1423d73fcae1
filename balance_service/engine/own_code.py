"""The calls of a read model's own code: its `fold`, and what it makes of events to send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import structlog

from balance_service.engine.letters.letter import OWN_CODE_FAILED, is_reserved
from balance_service.errors import ConfigurationError, PoisonRecordError, TaskHaltedError
from balance_service.model.outputs import listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.engine.records import TaskBatch

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
