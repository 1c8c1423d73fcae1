"""The results of calls. Amounts, and all other numbers with a fraction, are `Decimal`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import quote, urlencode
from uuid import UUID

from balance_service.client.errors import InvalidCallError

if TYPE_CHECKING:
    from decimal import Decimal

V_co = TypeVar("V_co", covariant=True)
Role = Literal["active", "standby", "halted"]
_POSITION = re.compile("([0-9]{1,10}):([0-9]{1,18})")


OneKey = str | int | UUID | bytes
"""A key that is not composite: its text, a number, a UUID or bytes."""
Key = OneKey | Mapping[str, str | int]
"""A key: its value, or the columns of a composite key."""


def key_text(key: OneKey) -> str:
    """Returns the text of a key that is no composite one: bytes in hexadecimal digits."""
    return key.hex() if isinstance(key, bytes) else str(key)


def shown_key(key: str | Mapping[str, str | int]) -> dict[str, Any]:
    """Returns the fields `key` and `columns` of a result, given the key that an answer shows."""
    if isinstance(key, str):
        return {"key": key}
    return {"key": urlencode(key, quote_via=quote, safe=""), "columns": key}


class Position(NamedTuple):
    """An offset in a partition of the source topic. An answer at a position has exactly the events below it."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"

    @staticmethod
    def parse(text: str) -> Position:
        """Parses `partition:offset`. Raises InvalidCallError."""
        match = _POSITION.fullmatch(text)
        if match is None:
            raise InvalidCallError(f"{text[:100]!r} is not a position; a position is partition:offset, such as 1:42")
        return Position(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAnswer:
    """Origin and position of an answer for one key."""

    application_server: str
    """`host:port` of the instance whose store gave the answer."""
    role: Role
    """`active`: the owner of the key's partition. `halted`: the owner, which the read model's own code has halted.
    `standby`: any other copy."""
    position: Position
    epoch: int
    """Fencing number of the task that answered: a later owner has a higher one."""
    lag: int | None
    """Records of the partition that the answer does not include yet; None if unknown."""
    age: float | None
    """With `max_age`, the answer includes all events of the partition until so many seconds ago; otherwise None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance(KeyAnswer):
    """The balance of a customer; `amount` is None if no event has named the customer below the position."""

    customer_id: str
    amount: Decimal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class State(KeyAnswer, Generic[V_co]):
    """A read model's answer for a key; `value` is None if the key has no state at the position."""

    key: str
    """Of a composite key, its text: `card=c1&day=20`. As the answer has it; if there is none, as the call names it."""
    value: V_co
    columns: Mapping[str, str | int] = field(default_factory=dict)
    """Of a composite key; otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FundsAdded:
    """An addition that is in the topic. It is visible from `position` on."""

    position: Position
    idempotency_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionAnswer:
    """Position of one partition's part of an answer; the attributes are those of `KeyAnswer`."""

    offset: int
    role: Role
    epoch: int
    lag: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Origin and positions of an answer that an instance gathers from all partitions. Each is read at one position."""

    application_server: str
    """`host:port` of the instance that gathered the answer."""
    generation: int | None
    """The generation that answered; None from an instance of a version that does not say it."""
    partitions: Mapping[int, PartitionAnswer]
    missing: frozenset[int]
    """The partitions that the answer lacks; empty unless the call allows that by `partial`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[V_co]):
    """A key of a read model and its value; `key` and `columns` are as those of a `State`."""

    key: str
    value: V_co
    scan: Scan
    """The reading of the page that has the entry."""
    columns: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCount:
    """How many keys of a read model have a state."""

    count: int
    scan: Scan


@dataclass(frozen=True, slots=True, kw_only=True)
class Top(Generic[V_co]):
    """The entries with the greatest values of a field, greatest first."""

    entries: tuple[Entry[V_co], ...]
    is_cut_off: bool
    """Whether the instance left out entries because the answer would exceed 1 MiB."""
    scan: Scan


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The outcome of a decision about dead letters."""

    accepted: tuple[str, ...]
    """The ids of those that it was carried out for."""
    refused: Mapping[str, str]
    """The reason by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether an instance can answer queries."""

    is_ready: bool
    reasons: str
    """Why it is not ready; empty while it is."""
    problems: tuple[str, ...]
    """Problems of some read models, while the instance is ready."""


class Source(NamedTuple):
    """The task whose commits a change stream reports for a partition."""

    partition: int
    epoch: int
    application_server: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Generic[V_co]):
    """The new value of a key; None: the key has no state. `key` and `columns` are as those of a `State`."""

    key: str
    value: V_co
    generation: int
    """The generation of the read model that the value is of. After a switch it is another one."""
    positions: Mapping[int, int]
    """The offset of each partition, below which the stream has reported every change; empty within a snapshot."""
    sources: Mapping[int, Source]
    """The source of each partition's changes, as far as the stream has named them."""
    columns: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SnapshotBegin:
    """All keys of the range follow. Keys from before that the snapshot does not have no longer have a state."""

    generation: int


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """The snapshot is complete. Changes follow."""

    generation: int
    positions: Mapping[int, int]
