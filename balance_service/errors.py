"""All errors of the service, by what handles them.

BalanceServiceError
├── RetriableError          retry after a back-off
│   ├── ChangelogCutError   the next opening of the task restores its store
│   └── MustAskError        call its `ask` on a thread without an event loop, and try again
├── InvalidInputError       report to the caller: 400 over HTTP, exit code 2 on the command line
├── PoisonRecordError       write the record to the dead letters and continue
├── TaskMigratedError       close the task: another instance owns its partition
├── StoreFullError          stop folding until the disk has space; the store is consistent
├── StoreCorruptedError     delete the local store and restore it from the changelog
│   └── UnreadableRecordError   stop only this task: the changelog has no other record
├── TaskHaltedError         stop only this task until an operator intervenes: its topic has changed
├── ConfigurationError      name the wrong setting; exit code 2
│   └── NotAuthorizedError  likewise at start; a running task retries, because it can be authorized later
└── FatalError              stop the process
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_DETAIL_CHARACTERS = 500


class BalanceServiceError(Exception):
    """Base of all errors of the service. The message is one sentence for users."""


class RetriableError(BalanceServiceError):
    """A broker, the registry or a peer is temporarily unavailable."""


class ChangelogCutError(RetriableError):
    """A changelog ends before its store does: it was recreated or truncated."""


class MustAskError(RetriableError):
    """A schema is not known yet, and a request for it would stop the event loop of this thread.

    `ask` makes the request, and raises as it fails.
    """

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__("the schema of what is stored is not known yet; try again")
        self.ask = ask


class InvalidInputError(BalanceServiceError):
    """A query or command is invalid; the message names the part and the rule."""


class PoisonRecordError(BalanceServiceError):
    """A record cannot be applied; `cause` is the cause in its dead letter, for programs."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause

    @property
    def detail(self) -> str:
        """The message, as a dead letter has it. A read model's own code may raise one of any length and characters."""
        return str(self)[:_MOST_DETAIL_CHARACTERS].encode("utf-8", "replace").decode()


class TaskMigratedError(BalanceServiceError):
    """The producer of a task was fenced, or its partition was revoked."""


class StoreFullError(BalanceServiceError):
    """The disk is full."""


class StoreCorruptedError(BalanceServiceError):
    """The local store is damaged; the changelog is not."""


class UnreadableRecordError(StoreCorruptedError):
    """A record of the service is whole, and the class or schema registry that it was written with is another now."""


class TaskHaltedError(BalanceServiceError):
    """A task cannot continue without skipping or misplacing events: its topic has changed, or its model's code failed.

    `key` is that of the event at which a read model's own code failed, if that is the reason. The message, which probes
    get without a token, has neither the key nor the text of `__cause__`.
    """

    def __init__(self, message: str, key: bytes | None = None) -> None:
        super().__init__(message)
        self.key = key


class ConfigurationError(BalanceServiceError):
    """A setting, or what it refers to, is wrong; the message names the setting and the remedy."""


class NotAuthorizedError(ConfigurationError):
    """The brokers do not authorize an operation; the message names the operation and the ACL."""


class FatalError(BalanceServiceError):
    """An invariant is violated."""
