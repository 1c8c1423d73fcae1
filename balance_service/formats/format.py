"""What a format is: how the bytes of a topic's records become rows in Spark and values in Python, and values bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.avro.flat_records import FlatRecords
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.formats.rows import Rows
    from balance_service.model.stage import Stage

    Headers = Sequence[tuple[str, bytes | None]]


class RecordReader(Protocol):
    """Reads records of untrusted producers as records of one schema. Any thread may use it."""

    def framed(self, value: bytes, headers: Headers) -> bytes:
        """Returns a record's value in the form that `decode_foreign` takes, without the headers.

        Raises:
            PoisonRecordError: it has no such form.
            RetriableError: the registry does not answer.
        """

    def decode_foreign(self, frame: bytes) -> dict[str, Any]:
        """Returns the record. Raises as `framed`, for a value that is no record of the schema."""


class RecordCodec(RecordReader, Protocol):
    """Writes records of one schema too."""

    @property
    def header(self) -> bytes | None:
        """What precedes the Avro body in each value; None if a value is made in another way."""

    @property
    def flat(self) -> FlatRecords | None:
        """What encodes many records at once; None if some need another way, or all."""

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """Returns the value of a record. Raises an error of any type if the schema does not allow it; see `misfit`."""

    def frame(self, body: bytes) -> bytes:
        """Returns the value of a record whose Avro body, without a header, is known."""

    def reframed(self, frame: bytes) -> bytes:
        """Returns the value of a record that the service has encoded as one of the same schema on another topic."""

    def misfit(self, record: Any) -> str:
        """Returns which value of a record `encode` refuses, and why; empty if that is not known."""

    def decode(self, frame: bytes) -> dict[str, Any]:
        """Returns the record of a value that `encode` or `frame` returned."""


class Format(ABC):
    """Each of its causes says what no other format says."""

    name: str
    """As declarations have it."""
    final: frozenset[str] = frozenset()
    """The causes of records that no change of code or schemas makes readable."""
    transient: frozenset[str] = frozenset()
    """The causes of records that may become readable by themselves, and so are retried."""
    blocking: frozenset[str] = frozenset()
    """The causes for which later records of the key may have to wait, since a change may make the record readable."""

    @abstractmethod
    def rows(self, jvm: Any, registry: SchemaRegistry, stage: Stage, texts: Sequence[str] | None) -> Rows:
        """Returns how Spark reads the records of a stage's source.

        Args:
            jvm: Spark's, as py4j shows it; None if `texts` is.
            texts: the schemas of the wanted records, as `columns.read_schemas` returns them; None if none is read.
        """

    @abstractmethod
    def reader(self, registry: SchemaRegistry, schema: Schema) -> RecordReader: ...

    @abstractmethod
    def codec(self, registry: SchemaRegistry, topic: str, schema: Schema) -> RecordCodec:
        """Returns the codec of a record on a topic, whose schema is registered if the format has a registry.

        Raises:
            ConfigurationError: the registry rejects the schema.
            RetriableError: the registry does not answer.
        """
