"""What a read model is: the contract between the business and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from balance_service.avro.schemas import Schema

State = Mapping[str, Any]
"""What is kept per key: an Avro record of the read model's state schema."""

Update = Mapping[str, Any]
"""What an event, or several combined, changes: the read model's update columns by name."""


class Combine(Enum):
    """How updates of one key within a micro-batch become one; values are Arrow's aggregate functions."""

    SUM = "sum"
    MAX = "max"
    LAST = "last"


class ReadModel(Protocol):
    """A queryable fold of events. Implementations hold no state of their own."""

    @property
    def name(self) -> str:
        """Names store, changelog and metrics, e.g. `balance`."""

    @property
    def event_schemas(self) -> Mapping[str, Schema]:
        """The events it folds: Avro full name → the schema it wants them in. Others are ignored."""

    @property
    def state_schema(self) -> Schema:
        """Avro schema of its states."""

    @property
    def combine(self) -> Mapping[str, Combine] | None:
        """Update column → how to combine it; None: every event is folded singly, in offset order."""

    def updates(self, events: DataFrame) -> DataFrame:
        """On Spark, events → updates, one row each.

        Args:
            events: among others the columns `key` (binary, the record's), `event_type` (Avro full name) and,
                per event type, a struct under its simple name: null where the row is of another type or could
                not be decoded.

        Returns:
            The same rows with columns added: the update columns, and `cause`: null, or why this event can
            never be applied. `key` may be replaced by the key whose state the event changes.
        """

    @property
    def adds(self) -> str | None:
        """The decimal that `fold` adds, if that is all it does: the update column and the state's second field.

        The state's first field is a string that stays; of a key of 1 to 63 printable ASCII characters it is the key,
        and the first amount is its first sum. While sums are within 64 bits (unscaled), such states may be made and
        added to without `fold`, many at once. None: `fold` is called for each key.
        """

    def fold(self, state: State | None, update: Update) -> State:
        """The next state; pure. `update` also carries `key`.

        Raises:
            PoisonRecordError: the update cannot be applied to this state.
        """

    def view(self, state: State) -> Mapping[str, Any]:
        """What the query answers."""
