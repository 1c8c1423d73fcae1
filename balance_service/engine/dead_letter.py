"""A dead letter as the stage that wrote it knows it: why, what comes next, and when."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping, Sequence

    from balance_service.engine.records import DeadLetter, Record


BEHIND_CAUSE = "behind-another"
"""Of a record that waits for an earlier one of its key."""
OWN_CODE_FAILED = "own-code-failed"
"""Of a dead letter that was tried again, and at which the read model's own code failed."""
SPARK_FAILED = "spark-failed"
"""Of a dead letter that was tried again, and that Spark itself failed to decode."""
GONE = "record-gone"
"""Of a record that its topic has dropped since."""
RETRY = "retry"
"""Of a record that another producer keeps as a dead letter: it is sent on, for one more attempt, when it is due."""

_HEALING = frozenset({"schema-id-unknown", "join-missing", SPARK_FAILED, RETRY})
# Of records that nobody has judged; one that a fold refuses was judged in its turn.
_HOLDING = frozenset(
    {
        "decimal-loses-digits",
        "field-null",
        "schema-id-unknown",
        "schema-incompatible",
        "time-out-of-range",
        BEHIND_CAUSE,
        SPARK_FAILED,
        OWN_CODE_FAILED,
    }
)
_FINAL = frozenset(
    {
        "body-undecodable",
        "frame-missing",
        "idempotency-key-reused",
        "key-not-of-this-partition",
        "key-null",
        "key-reserved",
        "magic-byte-unknown",
        "text-malformed",
        "value-null",
        GONE,
    }
)
_FINAL_AFFIXES = ("key-is-not-", "-malformed")
_MOST_ATTEMPTS = 10
# With attempts every five minutes at first, six hours.
_LONGEST = 72
# The changelog might refuse a longer one, again and again. No state has one so long.
_MOST_KEY_BYTES = 64 << 10
# An operator who comes back after a week-end finds what became of a letter.
KEPT_CLOSED_MS = 7 * 24 * 60 * 60 * 1000
NEVER = -1


class Status(Enum):
    """What becomes of a letter next."""

    SCHEDULED = "scheduled"
    """It is tried again when it is due."""
    WAITING = "waiting"
    """For an operator."""
    BEHIND = "behind"
    """It is tried again once what it waits behind is closed."""
    PARKED = "parked"
    """It was tried in vain too often; for an operator."""
    APPLIED = "applied"
    DISCARDED = "discarded"

    @property
    def is_open(self) -> bool:
        """Whether the record may still be applied."""
        return self not in (Status.APPLIED, Status.DISCARDED)


def is_final(cause: str) -> bool:
    """Whether a record with this cause can never be applied, whatever is mended around it."""
    start, end = _FINAL_AFFIXES
    return cause in _FINAL or cause.startswith(start) or cause.endswith(end)


def is_reserved(cause: str) -> bool:
    """Whether a cause decides what becomes of a letter next, so that a read model's own code must not name it."""
    return cause in _HEALING or cause in _HOLDING


def holds_key(cause: str) -> bool:
    """Whether later records of its key wait for a record with this cause, where their order matters."""
    return cause in _HOLDING


@dataclass(frozen=True, slots=True)
class Letter:
    """One letter; times in ms since 1970. It is about the record at `offset` of the stage's source.

    `due_ms` is when it is tried again, or, once closed, forgotten; -1: never by itself. `key` is the record's, None too
    where that is longer than 64 KiB. `is_sent`: it was applied once, and what comes of it was sent then.
    """

    offset: int
    cause: str
    status: Status
    attempt: int
    written_ms: int
    due_ms: int
    key: bytes | None
    is_sent: bool = False

    @staticmethod
    def first(offset: int, cause: str, key: bytes | None, now_ms: int, every_ms: int) -> Letter:
        """Of a record that could not be applied."""
        return Letter(offset, cause, Status.WAITING, 0, now_ms, NEVER, _kept(key))._next(cause, now_ms, every_ms)

    @staticmethod
    def retry(offset: int, key: bytes | None, attempt: int, timestamp_ms: int, now_ms: int, every_ms: int) -> Letter:
        """Of a record that is to be sent on; `attempt` times it was before, and it is as old as its timestamp says."""
        letter = Letter(offset, RETRY, Status.WAITING, attempt, now_ms, NEVER, _kept(key))
        # A clock that was ahead must not have it wait for ever.
        return letter._next(RETRY, min(max(timestamp_ms, 0), now_ms), every_ms)

    @staticmethod
    def sent_before(offset: int, now_ms: int) -> Letter:
        """Of a record that was sent on, as the topic says that it went to."""
        return Letter(offset, RETRY, Status.WAITING, 0, now_ms, NEVER, None).closed(Status.APPLIED, now_ms)

    def failed_again(self, cause: str, now_ms: int, every_ms: int) -> Letter:
        """After another attempt."""
        if cause == BEHIND_CAUSE:
            return replace(self, cause=cause, status=Status.BEHIND, due_ms=NEVER)
        return replace(self, attempt=self.attempt + 1)._next(cause, now_ms, every_ms)

    def due_at_once(self, now_ms: int) -> Letter:
        """To be tried again with the next tick."""
        return replace(self, status=Status.SCHEDULED, due_ms=now_ms)

    def failed_in_replay(self, cause: str, key: bytes | None, now_ms: int) -> Letter:
        """To be tried again with the next tick; it was closed, and its record could not be applied in a replay."""
        return replace(self, cause=cause, key=_kept(key)).due_at_once(now_ms)

    def closed(self, status: Status, now_ms: int) -> Letter:
        """Applied, or discarded."""
        is_sent = self.is_sent or status is Status.APPLIED
        return replace(self, status=status, due_ms=now_ms + KEPT_CLOSED_MS, is_sent=is_sent)

    @property
    def holds_key(self) -> bool:
        """Whether later records of its key wait for it, where their order matters."""
        return self.status.is_open and self.key is not None and holds_key(self.cause)

    @property
    def count(self) -> str:
        """What it is counted as."""
        return f"{self.cause}/{self.status.value}"

    def record(self) -> dict[str, Any]:
        """The Avro record `Letter`."""
        return {
            "cause": self.cause,
            "status": self.status.value,
            "attempt": self.attempt,
            "writtenAt": self.written_ms,
            "dueAt": self.due_ms,
            "key": self.key,
            "sent": self.is_sent,
        }

    @staticmethod
    def of(offset: int, record: Mapping[str, Any]) -> Letter:
        """Of the Avro record `Letter`."""
        return Letter(
            offset,
            record["cause"],
            Status(record["status"]),
            record["attempt"],
            record["writtenAt"],
            record["dueAt"],
            record["key"],
            record["sent"],
        )

    def _next(self, cause: str, since_ms: int, every_ms: int) -> Letter:
        status, due_ms = Status.WAITING, NEVER
        if cause == BEHIND_CAUSE:
            status = Status.BEHIND
        elif cause in _HEALING and self.attempt < _MOST_ATTEMPTS:
            status, due_ms = Status.SCHEDULED, since_ms + every_ms * min(2**self.attempt, _LONGEST)
        elif cause in _HEALING:
            status = Status.PARKED
        return replace(self, cause=cause, status=status, due_ms=due_ms)


def _kept(key: bytes | None) -> bytes | None:
    return None if key is None or len(key) > _MOST_KEY_BYTES else key


def open_letters(counts: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """How many letters are open, by cause and status, of what a position counts."""
    found: dict[tuple[str, str], int] = {}
    for name, count in counts.items():
        cause, _, status = name.rpartition("/")
        if Status(status).is_open:
            found[cause, status] = count
    return found


@dataclass(frozen=True, slots=True)
class DueLetters:
    """Letters whose time has come, in the order of their records: to be tried again, or to be forgotten."""

    again: Sequence[Letter] = ()
    forgotten: Sequence[Letter] = ()


@dataclass(slots=True)
class LetterChanges:
    """What a commit makes of letters: `records` for the changelog and the store, `counts` for the position."""

    counts: Counter[str]
    records: list[Record] = field(default_factory=list)
    fresh: list[DeadLetter] = field(default_factory=list)
    """Records that could not be applied and had no letter before."""
    after: dict[int, Letter] = field(default_factory=dict)
    """The letters as they are now, by offset."""
    freed: set[bytes] = field(default_factory=set)
    """Keys that a letter held and holds no more."""

    @property
    def counted(self) -> dict[str, int]:
        """How many letters there are, by cause and status."""
        return {name: count for name, count in self.counts.items() if count}

    @property
    def applied(self) -> int:
        """How many letters are closed because their records are applied."""
        return sum(letter.status is Status.APPLIED for letter in self.after.values())
