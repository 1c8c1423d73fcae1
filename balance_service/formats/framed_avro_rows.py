"""How Spark reads framed Avro: `java/Resolving.java` decodes by the schemas that this module looks up and tells it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import structlog
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.classic.column import Column as ClassicColumn

from balance_service.avro.codec import SCHEMA_HEADER, framed
from balance_service.avro.frames import ID_BYTES, schema_id_of
from balance_service.avro.registry import ask_together
from balance_service.avro.rules import rules_of
from balance_service.avro.schemas import full_name, is_shipped, subject_of
from balance_service.errors import PoisonRecordError, RetriableError
from balance_service.formats.rows import Rows, first_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.avro.writer_schema import WriterSchema
    from balance_service.model.stage import Stage

log = structlog.get_logger(__name__)

_MOST_NAMES = 16


class FramedAvroRows(Rows):
    """Every plan, also one that runs, knows the schema ids that are resolved.

    An id is resolved once, because its schema never changes. An id that the registry does not know is looked up again,
    because it may be registered later.
    """

    def __init__(self, jvm: Any, registry: SchemaRegistry, stage: Stage, texts: Sequence[str] | None) -> None:
        self._stage = stage
        self._registry = registry
        self._frames: Any = None if texts is None else jvm.parts.code.balance.Resolving([*texts], stage.reads_rekeyed)
        self._known: set[int] = set()
        self.rules: dict[int, int] = {}
        self._resolving = threading.Lock()

    def of(self, value: Column, headers: Column) -> Column:  # noqa: ARG002
        return ClassicColumn(self._frames.of(value._jc))

    def names_schema(self, value: Column, headers: Column) -> Column:
        # Its value may look like a frame.
        return value.isNotNull() & first_header(headers, SCHEMA_HEADER).isNotNull()

    def resolve(self, schema_ids: Iterable[int]) -> set[int]:
        wanted = set(schema_ids)
        if self._frames is None:
            return wanted
        if unknown := sorted(schema_id for schema_id in wanted if schema_id not in self._known):
            for schema_id, writer in zip(unknown, ask_together(self._registry.writer_schema, unknown), strict=True):
                if writer is not None:
                    self._learn(schema_id, writer)
        return {schema_id for schema_id in wanted if schema_id in self._known}

    def resolve_all(self) -> set[int]:
        """Resolves the schemas that the registry has for the source; returns them.

        Others' schemas that cannot be resolved now are left until a record names them.

        Registers the shipped schemas, because this application writes such events. Other schemas are registered by
        their producers: a reader's version, which may lack columns, would become the newest version of the subject.

        Raises:
            RetriableError: the registry does not respond.
        """
        known = set[int]()
        for topic, records in self._stage.written_to.items():
            known |= self._resolve_all_of(topic, [self._stage.schemas[record] for record in records])
        return known

    def _resolve_all_of(self, topic: str, schemas: Sequence[Schema]) -> set[int]:
        ours = [self._registry.register(subject_of(topic, one), one) for one in schemas if is_shipped(one)]
        known = self.resolve(ours)
        theirs = self._registry.schema_ids(topic, map(full_name, schemas))
        try:
            return known | self.resolve(theirs)
        except RetriableError as error:
            log.warning("schemas are left until records name them", topic=topic, reason=str(error))
        return known | {schema_id for schema_id in theirs if schema_id in self._known}

    def ask_anew(self) -> None:
        self._registry.ask_anew()

    def framed(self, record: dict[str, Any]) -> dict[str, Any]:
        headers = record["headers"] or ()
        if self._frames is None or record["value"] is None or all(one["key"] != SCHEMA_HEADER for one in headers):
            return record
        value = framed(record["value"], [(one["key"], one["value"]) for one in headers], self._registry)
        return {**record, "value": value, "headers": [one for one in headers if one["key"] != SCHEMA_HEADER] or None}

    def framed_records(self, records: DataFrame, frames: Mapping[bytes, bytes]) -> DataFrame:
        if self._frames is None:
            return records
        is_named = f"header -> header.key = '{SCHEMA_HEADER}' and octet_length(header.value) > 0"
        # As in `framed`, the last one counts.
        named = F.expr(f"get(filter(headers, {is_named}), size(filter(headers, {is_named})) - 1).value")
        is_id = (F.octet_length(named) == ID_BYTES) & (F.hex(F.substring(named, 1, 1)) == "00")
        before = F.when(is_id, named)
        for header, frame in frames.items():
            before = before.when(named == F.lit(bytearray(header)), F.lit(bytearray(frame)))
        others = F.expr(f"filter(headers, header -> header.key != '{SCHEMA_HEADER}')")
        is_framed = F.col("value").isNotNull() & before.isNotNull()
        return records.withColumns(
            {
                "value": F.when(is_framed, F.concat(before, F.col("value"))).otherwise(F.col("value")),
                "headers": F.when(is_framed, F.when(F.size(others) > 0, others)).otherwise(F.col("headers")),
            }
        )

    def frame_header_of(self, header: bytes) -> bytes | None:
        try:
            return framed(b"", [(SCHEMA_HEADER, header)], self._registry)
        except PoisonRecordError:
            return None

    def schema_id(self, value: bytes | None) -> int | None:
        return schema_id_of(value, takes_fingerprints=self._stage.reads_rekeyed)

    def _learn(self, schema_id: int, writer: WriterSchema) -> None:
        with self._resolving:
            if schema_id in self._known:
                return
            try:
                reason = self._told(schema_id, writer)
            except Exception as error:  # py4j raises many types of errors.
                # A JVM that lacks memory at present says nothing about the schema.
                # py4j names the Java exception in the second line.
                said = " ".join(line.strip() for line in str(error).strip().splitlines()[:2]) or type(error).__name__
                raise RetriableError(f"Spark's JVM does not take schema {schema_id}: {said}") from error
            if not writer.problem and (rules := rules_of(writer.text, self._stage.wanted_schemas)) > 1:
                self.rules = {**self.rules, schema_id: rules}
            self._known.add(schema_id)
        if reason is not None:
            log.warning(
                "events under a schema become dead letters",
                topic=self._stage.source,
                schema_id=schema_id,
                reason=reason,
            )

    def _names(self, writer: WriterSchema) -> list[str]:
        """Returns the names of a writer's records that may be the model's, or else the first of all.

        Each costs a call of the JVM, and a schema may have tens of thousands.
        """
        ours = {str(name) for schema in self._stage.wanted_schemas.values() for name in schema.get("aliases", ())}
        ours = {name.rpartition(".")[2] for name in (*ours, *self._stage.records)}
        return [name for name in writer.records if name.rpartition(".")[2] in ours][:_MOST_NAMES] or [
            *writer.records[:1]
        ]

    def _told(self, schema_id: int, writer: WriterSchema) -> str | None:
        """Returns why the model's records under the schema cannot be read; None if they can be, or if it has none."""
        if not writer.problem:
            return self._frames.tell(schema_id, writer.text, self._names(writer))  # type: ignore[no-any-return]
        problem = f"schema {schema_id} {writer.problem}"
        is_of_the_model = self._frames.refuse(schema_id, self._names(writer), writer.cause, problem)
        return problem if is_of_the_model else None
