"""Every error of the service, grouped by what to do about it.

BalanceServiceError
├── RetriableError          try again, after a back-off
├── InvalidInputError       tell the caller what to correct: 400 over HTTP, exit code 2 on the command line
├── PoisonRecordError       write the record to the dead letters and go on
├── TaskMigratedError       drop the task: another instance owns its partition now
├── StoreFullError          fold nothing until the disk has room; what is stored is right
├── StoreCorruptedError     wipe the local store and restore it from the changelog
├── TaskHaltedError         stop this task alone and tell the person: its topic is not what it was
├── ConfigurationError      tell the person which setting is wrong; exit code 2
│   └── NotAuthorizedError  the same at start; a task that met it tries again, for a grant may come
└── FatalError              stop the process, loudly
"""

from __future__ import annotations


class BalanceServiceError(Exception):
    """Base of all errors raised on purpose; the message is one sentence for a person."""


class RetriableError(BalanceServiceError):
    """Something outside is unavailable for now: a broker, the registry, a peer."""


class InvalidInputError(BalanceServiceError):
    """A query or command that cannot be accepted as it is; the message names the part and the rule."""


class PoisonRecordError(BalanceServiceError):
    """A record that can never be applied; `cause` is the dead letter's machine-readable cause."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class TaskMigratedError(BalanceServiceError):
    """The task was fenced, or its partition taken away, while it worked."""


class StoreFullError(BalanceServiceError):
    """The disk has no room for what comes next."""


class StoreCorruptedError(BalanceServiceError):
    """The local store cannot be trusted; the changelog can."""


class TaskHaltedError(BalanceServiceError):
    """Going on would skip or misplace events, so the task waits for a person."""


class ConfigurationError(BalanceServiceError):
    """A setting, or what it names, is wrong; the message names it and the way out."""


class NotAuthorizedError(ConfigurationError):
    """The brokers do not allow an operation; the message names it and what to grant."""


class FatalError(BalanceServiceError):
    """An invariant does not hold."""
