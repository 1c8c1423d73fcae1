"""What a read model sends, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from balance_service.model.conditions import checked

if TYPE_CHECKING:
    from balance_service.model.conditions import Condition
    from balance_service.model.event import Event

Sent = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""A record to send, or several, or none."""


class Each(Enum):
    """How often a read model sends what has become of a key."""

    EVENT = "event"
    LAST = "last"


EVENT = Each.EVENT
"""For each event, with the state after it."""
LAST = Each.LAST
"""Once for each key that a commit has changed, with its last state there."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Records of a type for a topic, in the transaction of the commit that they come of.

    Without a record type: of a model with states, the state itself; of one without, the event's record as it is. A
    record's key is that of the state, or without states that of the event's record.
    """

    topic: str
    record: str | None = None
    each: Each = EVENT
    where: Condition | None = None
    """Of which events; of all if None. For a model without states."""
    make: Callable[[Event], Sent] | None = None
    """An event → what is sent of it, pure. For a model without states; one with states has `emit`."""

    def __post_init__(self) -> None:
        if self.where is not None:
            checked(self.where)


def listed(sent: Sent) -> Sequence[Mapping[str, Any]]:
    """Records to send, be they one, several or none."""
    if sent is None:
        return ()
    return (sent,) if isinstance(sent, Mapping) else sent
