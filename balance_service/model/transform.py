"""What a read model's `transform` makes of each event: rows, records of a type of their own.

`spark/transform.py` analyses the code with Spark. Only models with a `transform` need it, so it is imported by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from balance_service.avro.schemas import fields_of
from balance_service.errors import ConfigurationError
from balance_service.process.package import remedy_for

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.stream import Stream

ROW = "Row"
"""The simple name of the rows' record."""
ENVELOPE = ("_key", "_headers", "_timestamp", "_topic", "_partition", "_offset")
"""The columns of Kafka's record, which follow those of the event. No column of a row begins with an underscore."""
FRAMES, KEYS = "#frames", "#keys"
"""The columns with the rows of an event that a stage passes on, and their keys."""
TRANSFORM_FAILED = "transform-failed"
"""The cause of an event on which an expression of the `transform` fails."""
TRANSFORM_TOO_LARGE = "transform-too-large"
"""The cause of an event that a `transform` makes more rows of than one transaction may hold, or too large a value."""


class Analysed(Protocol):
    """The analysed code. `names` are the columns of rows that are wanted."""

    multiplies: bool
    """Whether an event may become several rows."""
    explained: str
    """Spark's own plans of the code, as written and optimised, for people."""

    def used(self, names: Collection[str]) -> frozenset[str]:
        """Returns the columns of events that these columns of rows, and the filters, are computed from."""

    def untouched(self, name: str) -> str | None:
        """Returns the column of events that a column of rows is; None if it is computed."""

    def fingerprint(self, names: Collection[str]) -> str:
        """Returns a text that is equal for equal computations of these columns, on every machine."""

    def apply(
        self, records: Any, names: Sequence[str], columns: Mapping[str, Sequence[str]], topic: str, cause: str
    ) -> Any:
        """Adds the steps to the decoder's plan; see `spark.transform`."""


@dataclass(frozen=True, slots=True)
class Transform:
    """The rows that a stage makes of its events.

    Attributes:
        schema: the Avro record of the rows, with the columns that the model uses.
        analysed: the code.
    """

    schema: Schema = field(repr=False)
    analysed: Analysed = field(compare=False, repr=False)

    @property
    def names(self) -> Sequence[str]:
        """The columns of rows that the model uses."""
        return tuple(fields_of(self.schema))

    @property
    def used(self) -> frozenset[str]:
        """The columns of events that are read."""
        return self.analysed.used(self.names)

    @property
    def fingerprint(self) -> str:
        return self.analysed.fingerprint(self.names)

    def only(self, names: Collection[str]) -> Transform:
        """Returns the same with some of its columns."""
        fields = [one for one in self.schema["fields"] if one["name"] in names]
        return replace(self, schema={**self.schema, "fields": fields})


def transform_of(model: Any, schemas: Mapping[str, Schema], source: Stream | None) -> Transform:
    """Analyses the `transform` of a read model; starts Spark unless this process has.

    Args:
        schemas: of the events, by simple name.
        source: the second argument of the code, if the model has several sources.

    Raises:
        ConfigurationError: the code fails, does what Spark cannot do for single events, or there is no Spark or no
            Java. The message of the code's fault is the rest of a sentence about the model.
    """
    try:
        spark = import_module("balance_service.spark.transform")
    except ModuleNotFoundError as error:
        if not (remedy := remedy_for(error)):
            raise
        raise ConfigurationError(f"has a `transform`, which Spark runs: {remedy}") from error
    found: Transform = spark.analysed(model, schemas, source)
    if not found.names:
        raise ConfigurationError("returns no column in `transform`: select the key and what is folded")
    return found
