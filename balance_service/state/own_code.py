"""The calls of a read model's own code: its `fold`, and what it makes of events to send."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

from balance_service.errors import PoisonRecordError, TaskHaltedError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class OwnCodeFailedError(PoisonRecordError):
    """A read model's own code failed, it did not refuse the event; `__cause__` is what it raised."""

    def halting(self, read_model: str, source: str, offset: int) -> TaskHaltedError:
        """What the task halts for: to pass over the event would skip it.

        Args:
            source: a topic and its partition.
        """
        halted = TaskHaltedError(
            f"the code of the read model {read_model} fails at offset {offset} of {source} with {self.__cause__!r}; "
            "correct it, and restart the instance"
        )
        halted.__cause__ = self.__cause__
        return halted


def call_own(code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a read model's own code makes.

    Raises:
        OwnCodeFailedError: it has failed.
        PoisonRecordError: it refuses the event.
    """
    try:
        return code(*args, **kwargs)
    except PoisonRecordError:
        raise
    except Exception as error:  # whatever is wrong with it
        raise OwnCodeFailedError("", str(error)) from error
