"""The values that a model's code receives, events, updates and states; and the records that it emits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from balance_service.model.conditions import checked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balance_service.model.conditions import Condition

State = Mapping[str, Any]
"""The state of a key: an Avro record of the read model's state schema."""

Update = Mapping[str, Any]
"""The changes that one event, or several combined events, make to a state, by update column.

Each standard fold has a column with the name of its field. If the model's own code receives events, each record of the
source has a column with its simple name: the event's fields, or None if the event is of another record.
"""


class Event(dict[str, Any]):
    record: str
    """The simple name of its record."""
    timestamp_ms: int
    """The timestamp of its record in the topic, in ms since 1970."""

    def __init__(self, record: str, fields: Mapping[str, Any], timestamp_ms: int) -> None:
        super().__init__(fields)
        self.record = record
        self.timestamp_ms = timestamp_ms


def event_of(records: Iterable[str], update: Update, timestamp_ms: int) -> Event | None:
    """Returns the event of an update that carries event fields; None for a tombstone.

    Args:
        records: the simple names of the possible records.
    """
    for record in records:
        if (fields := update.get(record)) is not None:
            return Event(record, fields, timestamp_ms)
    return None


class Order(Enum):
    """The treatment of a key's later events while an earlier one is a dead letter that may still be applied."""

    ANY = "any"
    PER_KEY = "per-key"


ANY = Order.ANY
"""Later events are applied, and the dead letter whenever it can be. For folds whose result does not depend on order."""
PER_KEY = Order.PER_KEY
"""Later events become dead letters too, and are applied after the earlier one, in their original order."""


class OnFailure(Enum):
    """What a task does if the model's own code fails at a new event, rather than refuses it."""

    HALT = "halt"
    DEAD_LETTER = "dead-letter"


HALT = OnFailure.HALT
"""The task halts until the code is corrected: queries for its keys get 503, and nothing is applied out of turn."""
DEAD_LETTER = OnFailure.DEAD_LETTER
"""The event becomes a dead letter, which is applied late, once the code is corrected and an operator redrives it."""


Sent = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""A record to emit, or several, or none."""


class Each(Enum):
    """How often a read model emits the state of a key."""

    EVENT = "event"
    LAST = "last"


EVENT = Each.EVENT
"""For each event, with the state after it."""
LAST = Each.LAST
"""Once for each key that a commit has changed, with the key's last state."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Records for a topic, written in the transaction of the commit that produces them.

    Without a record type, a model with states emits the state itself, and one without states the event's record
    unchanged. The record's key is the key of the state; without states, the key of the event's record.
    """

    topic: str
    record: str | None = None
    each: Each = EVENT
    where: Condition | None = None
    """The events to emit; None for all. For models without states."""
    make: Callable[[Event], Sent] | None = None
    """Makes the records for an event; pure. For models without states; one with states overrides `emit`."""

    def __post_init__(self) -> None:
        if self.where is not None:
            checked(self.where)


def listed(sent: Sent) -> Sequence[Mapping[str, Any]]:
    if sent is None:
        return ()
    return (sent,) if isinstance(sent, Mapping) else sent
