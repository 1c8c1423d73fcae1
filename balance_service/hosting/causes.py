"""The causes of trouble in a service: one for each thing that an operator can act on, or may wait for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Self

from balance_service.http import operations
from balance_service.process.runtime import iso_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_NAMES = 4
_MOST_FOLLOWING = 20


class Kind(StrEnum):
    """A kind of cause, by its name for programs; `section` is that of the runbook, empty for none."""

    section: str

    def __new__(cls, name: str, section: str) -> Self:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.section = section
        return kind

    BEGUN_AGAIN = ("begun-again", "BalanceLagGrowing")
    BEHIND = ("behind", "BalanceLagGrowing")
    BROKER = ("broker", "BalanceEndsUnknown")
    BUILDING = ("building", "GenerationBuilding")
    CONTROL_RECORD = ("control-record", "BalanceControlRecordRefused")
    ENDS_UNKNOWN = ("ends-unknown", "BalanceEndsUnknown")
    HALTED = ("halted", "BalanceTaskHalted")
    JOINING = ("joining", "BalanceNotReady")
    LETTERS = ("letters", "BalanceDeadLettersWaiting")
    LOSING_RECORDS = ("losing-records", "BalanceTopicLosesRecords")
    MISPLACED = ("misplaced", "BalanceDeadLetters")
    NOT_FOLDED = ("not-folded", "BalanceStreamFailing")
    NOT_READY = ("not-ready", "BalanceNotReady")
    READ_OTHERWISE = ("read-otherwise", "")
    READY = ("ready", "GenerationReady")
    REFUSED = ("refused", "BalanceNotReady")
    RESTORING = ("restoring", "BalanceRestoring")
    SHARED_ADDRESS = ("shared-address", "BalanceAddressShared")
    SILENT = ("silent", "BalanceInstanceDown")
    STANDBY = ("standby", "BalanceStandbyBehind")
    STANDS_STILL = ("stands-still", "BalanceFoldingStopped")
    STARTING = ("starting", "BalanceNotReady")
    UNCONFIRMED = ("unconfirmed", "BalanceNotReady")
    UNHEARD = ("unheard", "BalanceNotReady")
    UNKNOWN_SETTING = ("unknown-setting", "")
    UNOWNED = ("unowned", "BalancePartitionUnanswered")
    WAITING = ("waiting", "BalanceTaskWaiting")


class Urgency(IntEnum):
    """How soon an operator must act."""

    NONE = 0
    """Not at all, or it informs only."""
    SOON = 1
    """Within hours: answers become older, or there is less redundancy, or a decision is wanted."""
    NOW = 2
    """At night, too: queries get no answer, or one that becomes more and more outdated."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that is not as it should be.

    `what` and `action` are sentences without a full stop: the trouble and the remedy. `heals`
    is whether waiting suffices. `since_ms` is since when, in ms since 1970; None if that is not known. `tasks` are the
    tasks that it concerns, `servers` the instances where it is, `follows` what follows, in words.
    """

    kind: Kind
    urgency: Urgency
    what: str
    action: str
    _: KW_ONLY
    heals: bool = False
    since_ms: int | None = None
    tasks: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()

    def shown(self) -> operations.Cause:
        """Returns the cause as clients see it."""
        return operations.Cause.showing(
            self,
            urgency=self.urgency.name.lower(),
            since=None if self.since_ms is None else iso_time(self.since_ms),
            section=self.kind.section,
            follows=self.follows[:_MOST_FOLLOWING],
        )


def starting(reason: str, since_ms: int) -> Cause:
    """Returns the cause of an instance that starts.

    Args:
        reason: what it waits for; empty for nothing.
        since_ms: since when it waits, or starts.
    """
    if not reason:
        return Cause(Kind.STARTING, Urgency.NONE, "This instance is starting", "Wait", heals=True, since_ms=since_ms)
    what = f"This instance is starting, and waits: {reason}"
    return Cause(
        Kind.STARTING, Urgency.SOON, what, "Restore what it waits for: it goes on by itself", since_ms=since_ms
    )


def unknown_settings(names: Sequence[str]) -> Iterator[Cause]:
    """Yields the cause of variables that begin like settings and are none, if there are any."""
    if names:
        like = "begins like a setting and is none" if len(names) == 1 else "begin like settings and are none"
        action = "Correct or remove what is misspelt, and restart this instance"
        yield Cause(Kind.UNKNOWN_SETTING, Urgency.NONE, f"{listed(names)} {like}: ignored", action)


def listed(names: Sequence[str]) -> str:
    """Returns names in words: a few, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
