"""How Spark reads the records of one format, in a plan that does not depend on the writers' schemas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column, DataFrame


class Rows(ABC):
    """Reads values as structs, and says which of them need a schema that is not known yet. Thread-safe.

    Formats without a registry need none: the methods that are not abstract are theirs.
    """

    rules: Mapping[int, int] = {}
    """The schema ids whose records were decoded to other values before: → the rules since when they are not."""

    @abstractmethod
    def of(self, value: Column, headers: Column) -> Column:
        """Returns the struct of a value: `cause`, `detail`, `schema_id`, and a struct for each record of the reader.

        A null cause means that one of the records is set. Of a record of another type, `detail` is the name.
        """

    def names_schema(self, value: Column, headers: Column) -> Column | None:  # noqa: ARG002
        """Returns whether a header names the schema of a value, which then may look like any; None if none does."""
        return None

    def resolve(self, schema_ids: Iterable[int]) -> set[int]:
        """Looks unknown schema ids up in the registry; returns the ids that are known.

        Raises:
            RetriableError: the registry or Spark's JVM does not answer; the ids that were resolved before are kept.
        """
        return set(schema_ids)

    def resolve_all(self) -> set[int]:
        """Resolves the schemas that the registry has for the source; returns them. Raises as `resolve`."""
        return set()

    def ask_anew(self) -> None:  # noqa: B027  (most formats have nothing to forget)
        """Forgets which schemas the registry did not know, so that they are looked up at once."""

    def framed(self, record: dict[str, Any]) -> dict[str, Any]:
        """Returns a record as Kafka's, with the frame of its value if a header names its schema.

        Raises:
            PoisonRecordError: the header names no schema that the registry knows.
            RetriableError: the registry does not answer.
        """
        return record

    def framed_records(self, records: DataFrame, frames: Mapping[bytes, bytes]) -> DataFrame:  # noqa: ARG002
        """Returns Kafka's records as `framed` does.

        Args:
            frames: what a header says → what precedes a value then: see `frame_header_of`. Records with another header
                are returned as they are, unless it has an id.
        """
        return records

    def frame_header_of(self, header: bytes) -> bytes | None:  # noqa: ARG002
        """Returns what precedes a value whose schema a header names; None if the registry does not know the schema.

        Raises RetriableError: the registry does not answer.
        """
        return None

    def schema_id(self, value: bytes | None) -> int | None:  # noqa: ARG002
        """Returns the id of the schema that a value names; None if it names none."""
        return None


def first_header(headers: Column, name: str) -> Column:
    """Returns the value of the first header of that name, unless it is empty."""
    # A lambda over the headers would be simpler, but Spark generates no code for a plan with lambdas.
    first = F.get(headers["value"], F.array_position(headers["key"], name).cast("int") - 1)
    return F.when(F.octet_length(first) > 0, first)
