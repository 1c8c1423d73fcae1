"""The state of a dead letter: its cause, its status, and when it is retried or forgotten."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from balance_service.formats.known import FORMATS
from balance_service.model.transform import TRANSFORM_FAILED, TRANSFORM_TOO_LARGE
from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping


BEHIND_CAUSE = "behind-another"
"""The record waits for an earlier record of its key that could not be applied."""
OWN_CODE_FAILED = "own-code-failed"
"""The read model's own code failed: when the dead letter was retried, or at once if the model says `DEAD_LETTER`."""
DECODER_FAILED = "decoder-failed"
"""Spark failed twice at this record alone, or its JVM ended."""
SET_ASIDE = "set-aside"
"""An operator skipped the record, because the position did not move."""
GONE = "record-gone"
"""The source topic no longer contains the record."""
RETRY = "retry"
"""Another producer wrote the record as its dead letter; it is sent on for one more attempt when it is due."""

TRANSIENT = frozenset({"join-missing", RETRY}).union(*(one.transient for one in FORMATS.values()))
# No state has these records. A record that the fold refused has had its turn, and blocks no other.
BLOCKING = frozenset(
    {
        "decimal-loses-digits",
        "field-null",
        "time-out-of-range",
        BEHIND_CAUSE,
        DECODER_FAILED,
        # Its name in dead letters of earlier versions.
        "spark-failed",
        OWN_CODE_FAILED,
        SET_ASIDE,
        TRANSFORM_FAILED,
        TRANSFORM_TOO_LARGE,
    }
).union(*(one.blocking for one in FORMATS.values()))
FINAL = frozenset(
    {
        "idempotency-key-reused",
        "key-not-of-this-partition",
        "key-null",
        "key-reserved",
        "text-malformed",
        "value-null",
        GONE,
    }
).union(*(one.final for one in FORMATS.values()))
_FINAL_AFFIXES = ("key-is-not-", "-malformed")
_MAX_ATTEMPTS = 10
# In retry intervals: six hours at the default interval of five minutes.
_MAX_BACKOFF = 72
# The changelog could reject a longer key on every attempt. No state has a key this long.
_MAX_KEY_BYTES = 64 << 10
# An operator who returns after a weekend still finds the outcome.
KEPT_CLOSED_MS = 7 * 24 * 60 * 60 * 1000
NEVER = -1


class Status(Enum):
    SCHEDULED = "scheduled"
    """The record is retried when it is due."""
    WAITING = "waiting"
    """An operator must redrive or discard the record."""
    BEHIND = "behind"
    """The record is retried once the dead letter that blocks its key is closed."""
    PARKED = "parked"
    """Every scheduled retry failed; an operator must redrive or discard the record."""
    APPLIED = "applied"
    DISCARDED = "discarded"
    SUPERSEDED = "superseded"
    """A later record of its key is the state, so this one never counts."""

    @property
    def is_open(self) -> bool:
        """Whether the record may still be applied."""
        return self not in (Status.APPLIED, Status.DISCARDED, Status.SUPERSEDED)

    @property
    def never_counts(self) -> bool:
        return self in (Status.DISCARDED, Status.SUPERSEDED)

    @property
    def needs_decision(self) -> bool:
        """Whether an operator must redrive or discard the record."""
        return self in (Status.WAITING, Status.PARKED)


def is_final(cause: str) -> bool:
    """Whether no change of code, schemas or tables can make a record with this cause applicable."""
    start, end = _FINAL_AFFIXES
    return cause in FINAL or cause.startswith(start) or cause.endswith(end)


def is_reserved(cause: str) -> bool:
    """Whether a cause controls retries or ordering, so that a read model's own code must not raise it."""
    return cause in TRANSIENT or cause in BLOCKING


def blocks_key(cause: str) -> bool:
    """Whether later records of the key wait for a record with this cause, if the read model keeps order."""
    return cause in BLOCKING


@dataclass(frozen=True, slots=True)
class Letter(
    Struct,
    names={"written_ms": "writtenAt", "due_ms": "dueAt", "is_sent": "sent", "is_in_topic": "inTopic"},
    beside=("offset",),
):
    """The dead letter of the record at `offset` of the stage's source. Times are in ms since 1970.

    `due_ms` is the time of the next retry or, for a closed dead letter, the time when it is forgotten; -1 for neither.
    `key` is the record's key, or None if that is longer than 64 KiB. `is_sent` is whether the record's outputs were
    sent, `is_in_topic` whether the topic of dead letters has it. `detail` is that of the last attempt's `DeadLetter`.
    """

    offset: int
    cause: str
    status: Status
    attempt: int
    written_ms: int
    due_ms: int
    key: bytes | None
    is_sent: bool = False
    detail: str = ""
    is_in_topic: bool = True

    @staticmethod
    def first(offset: int, cause: str, key: bytes | None, now_ms: int, every_ms: int, detail: str = "") -> Letter:
        letter = Letter(offset, cause, Status.WAITING, 0, now_ms, NEVER, kept_key(key), detail=detail)
        return letter._next(cause, now_ms, every_ms)

    @staticmethod
    def retry(offset: int, key: bytes | None, attempt: int, timestamp_ms: int, now_ms: int, every_ms: int) -> Letter:
        """Schedules another producer's record. `attempt` counts earlier attempts; the wait begins at the timestamp."""
        letter = Letter(offset, RETRY, Status.WAITING, attempt, now_ms, NEVER, kept_key(key))
        # A producer's clock that was ahead must not delay the record.
        return letter._next(RETRY, min(max(timestamp_ms, 0), now_ms), every_ms)

    @staticmethod
    def sent_before(offset: int, now_ms: int) -> Letter:
        """Returns the closed dead letter of a record that the target topic already contains."""
        return Letter(offset, RETRY, Status.WAITING, 0, now_ms, NEVER, None).closed(Status.APPLIED, now_ms)

    def failed_again(self, cause: str, now_ms: int, every_ms: int, detail: str = "") -> Letter:
        if cause == BEHIND_CAUSE:
            return replace(self, cause=cause, status=Status.BEHIND, due_ms=NEVER, detail=detail)
        return replace(self, attempt=self.attempt + 1, detail=detail)._next(cause, now_ms, every_ms)

    def due_at_once(self, now_ms: int) -> Letter:
        return replace(self, status=Status.SCHEDULED, due_ms=now_ms)

    def failed_in_replay(self, cause: str, key: bytes | None, now_ms: int, detail: str = "") -> Letter:
        """Reopens a closed dead letter whose record could not be applied in a replay, and makes it due.

        One that an operator set aside waits instead: its record stopped the replay, and a retry could stop it again.
        """
        again = replace(self, cause=cause, key=kept_key(key), detail=detail)
        return replace(again, status=Status.WAITING, due_ms=NEVER) if cause == SET_ASIDE else again.due_at_once(now_ms)

    def closed(self, status: Status, now_ms: int) -> Letter:
        is_sent = self.is_sent or status is Status.APPLIED
        return replace(self, status=status, due_ms=now_ms + KEPT_CLOSED_MS, is_sent=is_sent)

    def to_be_replayed(self, now_ms: int) -> Letter:
        """Closes an open dead letter, so that a replay applies its record in its turn, and sends its outputs."""
        return replace(self, status=Status.APPLIED, due_ms=now_ms + KEPT_CLOSED_MS)

    @property
    def blocks_key(self) -> bool:
        """Whether later records of the key wait for this one, if the read model keeps order."""
        return self.status.is_open and self.key is not None and blocks_key(self.cause)

    @property
    def counter(self) -> str:
        """The name under which a position counts it: `cause/status`."""
        return f"{self.cause}/{self.status.value}"

    def _next(self, cause: str, since_ms: int, every_ms: int) -> Letter:
        status, due_ms = Status.WAITING, NEVER
        if cause == BEHIND_CAUSE:
            status = Status.BEHIND
        elif cause in TRANSIENT and self.attempt < _MAX_ATTEMPTS:
            status, due_ms = Status.SCHEDULED, since_ms + every_ms * min(2**self.attempt, _MAX_BACKOFF)
        elif cause in TRANSIENT:
            status = Status.PARKED
        return replace(self, cause=cause, status=status, due_ms=due_ms)


def kept_key(key: bytes | None) -> bytes | None:
    return None if key is None or len(key) > _MAX_KEY_BYTES else key


def open_letters(counts: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Returns the number of open dead letters by cause and status, from the counters of a position."""
    found: dict[tuple[str, str], int] = {}
    for name, count in counts.items():
        cause, _, status = name.rpartition("/")
        if Status(status).is_open:
            found[cause, status] = count
    return found
