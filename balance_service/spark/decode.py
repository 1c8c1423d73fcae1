"""Decodes Kafka records into typed columns on Spark, in one plan that does not depend on the writers' schemas.

Every record becomes one row. The `cause` in a row's note classifies it: null, or no note, is an update to fold;
`IGNORED` a record of another type; `UNRESOLVED` a record whose schema is not known yet; any other cause a dead letter.
`java/Resolving.java` reads the frames.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import structlog
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.classic.column import Column as ClassicColumn

from balance_service.avro.codec import SCHEMA_HEADER, AvroCodec, framed
from balance_service.avro.registry import ask_together
from balance_service.avro.rules import rules_of
from balance_service.avro.schemas import full_name, is_shipped, subject_of
from balance_service.engine.outputs import SENDER_HEADER
from balance_service.errors import RetriableError
from balance_service.kafka.clients import IDEMPOTENCY_HEADER
from balance_service.model.made_records import UNFIT
from balance_service.model.record_folds import IGNORED
from balance_service.model.record_keys import KEY_FORMAT_HEADER
from balance_service.model.transform import ENVELOPE, FRAMES, ROW, TRANSFORM_FAILED, TRANSFORM_TOO_LARGE
from balance_service.observability.tracing import TRACEPARENT_HEADER
from balance_service.spark.columns import (
    any_of,
    cause_column,
    detail_column,
    ignored_column,
    key_column,
    read_schemas,
    refusals_column,
    reserved_cause,
    stored_key,
    update_columns,
)
from balance_service.spark.combine import NOTE, UNRESOLVED
from balance_service.spark.made_records import MadeRecords
from balance_service.spark.row_query import in_short

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.avro.writer_schema import WriterSchema
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.model.transform import Transform

log = structlog.get_logger(__name__)

_SAMPLED = "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]$"
_MOST_NAMES = 16
# Of `java/Bounded.java`: how the failure of an expression begins that would make too large a value.
_TOO_LARGE = "[TRANSFORM_TOO_LARGE]"
# No field of a model can have these names.
_FRAME, _CAUSE, _SCHEMA_ID, _PARTITION, _FAILURE = "#frame", "#cause", "#schema id", "#partition", "#failure"
# The columns of records that `_key` and so on are in a transform; `_topic` is a constant.
_OF_RECORD = dict(zip(ENVELOPE, ("record_key", "headers", "timestamp", "", _PARTITION, "offset"), strict=True))


class Decoder:
    """Decodes records by the writer's schema, found by id. Thread-safe.

    Every plan, also one that runs, knows the schema ids that are resolved. An id is resolved once, because its schema
    never changes. An id that the registry does not know is looked up again, because it may be registered later.
    """

    def __init__(
        self,
        spark: SparkSession,
        read_model: ReadModel | None,
        stage: Stage,
        registry: SchemaRegistry,
        *,
        with_traces: bool = False,
    ) -> None:
        """Args:
        read_model: None decodes nothing, and hands over every record unchanged.
        stage: the stage of the read model whose records are decoded.
        with_traces: whether the plan also returns the `traceparent` header of sampled records.
        """
        self._traceparent = (TRACEPARENT_HEADER,) if with_traces else ()
        self._read_model = read_model
        self._stage = stage
        self._takes_any_key = stage.by is not None or read_model is None or not read_model.has_states()
        self._takes_tombstones = stage.tombstones
        self._registry = registry
        self._frames: Any = None
        self._made: MadeRecords
        self._writing: Any = None
        if read_model is not None:
            jvm: Any = spark._jvm
            self._made = MadeRecords(spark, read_model, stage)
            self._frames = jvm.parts.code.balance.Resolving([*map(json.dumps, read_schemas(read_model, stage))])
            if stage.transform is not None and stage.passes_on:
                codec = AvroCodec(registry, subject_of(stage.rekeyed, stage.transform.schema), stage.transform.schema)
                writing, text = jvm.parts.code.balance.Writing, json.dumps(stage.transform.schema)
                self._writing = writing(text, codec.schema_id, writing.typeOf(text))
        self._known: set[int] = set()
        self.rules: dict[int, int] = {}
        """The schema ids whose records were decoded to other values before: → the rules since when they are not."""
        self._resolving = threading.Lock()

    def resolve(self, schema_ids: Iterable[int]) -> set[int]:
        """Looks unknown schema ids up in the registry; returns the ids that are known.

        Raises:
            RetriableError: the registry or Spark's JVM does not answer; the ids that were resolved before are kept.
        """
        wanted = set(schema_ids)
        if self._read_model is None:
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
        """Forgets which schemas the registry did not know, so that they are looked up at once."""
        self._registry.ask_anew()

    def framed(self, record: dict[str, Any]) -> dict[str, Any]:
        """Returns a record as Kafka's, with the frame of its value if a header names its schema.

        Raises:
            PoisonRecordError: the header names no schema that the registry knows.
            RetriableError: the registry does not answer.
        """
        headers = record["headers"] or ()
        if self._read_model is None or record["value"] is None or all(one["key"] != SCHEMA_HEADER for one in headers):
            return record
        value = framed(record["value"], [(one["key"], one["value"]) for one in headers], self._registry)
        return {**record, "value": value, "headers": [one for one in headers if one["key"] != SCHEMA_HEADER] or None}

    def _learn(self, schema_id: int, writer: WriterSchema) -> None:
        with self._resolving:
            if schema_id in self._known:
                return
            try:
                reason = self._told(schema_id, writer)
            except Exception as error:  # py4j raises many types of errors.
                # A JVM that lacks memory at present says nothing about the schema.
                raise RetriableError(f"Spark's JVM does not take schema {schema_id}: {in_short(error)}") from error
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

    def updates(self, records: DataFrame) -> DataFrame:
        """Returns the plan: Kafka records → one row each.

        Returns:
            Columns `offset`; `key` and the update columns, null if there is no update; `note`, null for a plain update,
            else a list with one struct; and the record's `partition`. A note has `cause`; `detail`, why; `record`, the
            name of a record of another type; `idempotency_key` of an update that has one; `timestamp` (ms),
            `record_key` and `value`, unless the record is ignored or its update does not need them; `headers` if
            unresolved, and `schema_id` unless one of them names the schema; `traceparent` if requested and not ignored.
        """
        columns = update_columns(self._read_model, self._stage)
        if self._read_model is None:
            return self._unconverted(records, columns)
        key = key_column(self._stage)
        keyed = {} if key is None else {"key": key}
        # Separate projections: otherwise Spark inlines and repeats the computation in every column below.
        framed = self._framed(records)
        if self._stage.transform is not None:
            framed = self._transformed(framed, self._stage.transform)
        updates = framed.withColumns(
            {
                **columns,
                **keyed,
                **self._made.tried(),
                # A truncation has no key.
                _CAUSE: F.coalesce(refusals_column(self._stage), _CAUSE, cause_column(self._read_model, self._stage)),
            }
        )
        refused = F.coalesce(_CAUSE, reserved_cause(self._stage, F.col("key")), self._made.cause())
        judged = updates.withColumn(_CAUSE, refused)
        cause = F.col(_CAUSE)
        detail = F.when(cause == F.col(f"`{_FRAME}`.cause"), F.col(f"`{_FRAME}`.detail"))
        if self._stage.transform is not None:
            detail = F.coalesce(detail, F.when(cause.isin(TRANSFORM_FAILED, TRANSFORM_TOO_LARGE), F.col(_FAILURE)))
        detail = F.coalesce(detail, F.when(cause == UNFIT, self._made.detail()))
        of_key = detail_column(self._read_model, self._stage, cause)
        keep_record = F.when(cause.isNull(), F.col("idempotency_key").isNotNull()).otherwise(cause != IGNORED)
        note = F.struct(
            cause.alias("cause"),
            F.when(cause == IGNORED, detail).alias("record"),
            F.when(cause != IGNORED, F.coalesce(detail, of_key)).alias("detail"),
            F.when(cause == UNRESOLVED, F.col(_SCHEMA_ID)).alias("schema_id"),
            F.when(keep_record, F.col("timestamp") if "timestamp" in columns else F.unix_millis("timestamp")).alias(
                "timestamp"
            ),
            F.when(keep_record, F.col("record_key")).alias("record_key"),
            F.when(keep_record, F.col("value")).alias("value"),
            F.when(cause == UNRESOLVED, F.col("headers")).alias("headers"),
            F.when(cause.isNull(), F.col("idempotency_key")).alias("idempotency_key"),
            *(F.when(~cause.eqNullSafe(IGNORED), F.col(name)).alias(name) for name in self._traceparent),
        )
        is_noted = any_of(F.col(name).isNotNull() for name in (_CAUSE, "idempotency_key", *self._traceparent))
        return judged.select(
            "offset",
            *(F.when(cause.isNull(), F.col(f"`{name}`")).alias(name) for name in ("key", *columns)),
            *(F.when(cause.isNull(), column).alias(name) for name, column in self._made.columns().items()),
            # A null list takes a fifth of the bytes of a struct of nulls, and most rows have no note.
            F.when(is_noted, F.array(note)).alias(NOTE),
            F.col(_PARTITION).alias("partition"),
        )

    def _transformed(self, framed: DataFrame, transform: Transform) -> DataFrame:
        """Returns the events with their rows. An event without a row is ignored; one with a failure has its cause."""
        if (ignored := ignored_column(self._stage)) is not None:
            framed = framed.withColumn(_CAUSE, F.coalesce(_CAUSE, ignored))
        columns = {name: [column] for name, column in _OF_RECORD.items()}
        if len(self._stage.records) == 1:
            (record,) = self._stage.records
            columns |= {name: [record, name] for name in transform.used}
        else:
            columns |= {record: [record] for record in self._stage.records}
        made = transform.analysed.apply(framed, transform.names, columns, self._stage.source, _CAUSE)
        has_row = made.row.isNotNull()
        if transform.analysed.multiplies:
            has_row = F.coalesce(F.size(made.row) > 0, F.lit(False))
        cause = F.when(made.failure.startswith(_TOO_LARGE), TRANSFORM_TOO_LARGE)
        cause = cause.when(made.failure.isNotNull(), TRANSFORM_FAILED).when(~has_row, IGNORED)
        judged = {_CAUSE: F.coalesce(_CAUSE, cause), _FAILURE: made.failure, ROW: made.row}
        rows: DataFrame = made.records.withColumns(judged)
        if self._writing is None:
            return rows
        if not transform.analysed.multiplies:
            return rows.withColumn(FRAMES, F.array(ClassicColumn(self._writing.of(F.col(ROW)._jc))))
        rows = rows.withColumn(FRAMES, ClassicColumn(self._writing.ofAll(F.col(ROW)._jc)))
        is_too_large = F.col(f"`{FRAMES}`").isNull()
        return rows.withColumn(_CAUSE, F.coalesce(_CAUSE, F.when(is_too_large, TRANSFORM_TOO_LARGE)))

    def _unconverted(self, records: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
        """Returns the plan for records of any bytes; none is ignored or becomes a dead letter."""
        traces = {name: _kept_trace(F.col("headers")) for name in self._traceparent}
        # The last four are those of dead letters, which records become that are read apart.
        fields = (
            *(("cause", "string"), ("record", "string"), ("schema_id", "bigint"), ("detail", "string")),
            *(("timestamp", "bigint"), ("record_key", "binary"), ("value", "binary")),
        )
        nothing = [F.lit(None).cast(kind).alias(name) for name, kind in fields]
        note = F.struct(*nothing, *(trace.alias(name) for name, trace in traces.items()))
        is_noted = any_of(trace.isNotNull() for trace in traces.values())
        return records.select(
            "offset",
            "key",
            *(column.alias(name) for name, column in columns.items()),
            F.when(is_noted, F.array(note)).alias(NOTE),
            "partition",
        )

    def _framed(self, records: DataFrame) -> DataFrame:
        """Returns the records with a struct for each type of event. One of them is set, or there is a cause."""
        frame = ClassicColumn(self._frames.of(F.col("value")._jc))
        named = (_first_header(F.col("headers"), name) for name in (SENDER_HEADER, KEY_FORMAT_HEADER))
        read = records.select(
            F.col("partition").alias(_PARTITION),
            "offset",
            "timestamp",
            stored_key(self._stage, F.col("key"), *named).alias("key"),
            F.col("key").alias("record_key"),
            "value",
            "headers",
            _first_header(F.col("headers"), IDEMPOTENCY_HEADER).alias("idempotency_key"),
            *(_kept_trace(F.col("headers")).alias(name) for name in self._traceparent),
            frame.alias(_FRAME),
        )
        lacks_key = F.lit(False) if self._takes_any_key else F.col("record_key").isNull()
        lacks_value = F.lit(False) if self._takes_tombstones else F.col("value").isNull()
        own = self._stage.own_key
        # Its value may look like a frame.
        names_schema = F.col("value").isNotNull() & _first_header(F.col("headers"), SCHEMA_HEADER).isNotNull()
        cause = F.when(lacks_key, "key-null")
        if own is not None:
            cause = cause.when(F.col("key").isNull(), own.cause)
        cause = (
            cause.when(names_schema, UNRESOLVED).when(lacks_value, "value-null").otherwise(F.col(f"`{_FRAME}`.cause"))
        )
        events = {name: F.col(f"`{_FRAME}`.`{name}`") for name in self._stage.records}
        schema_id = F.when(~names_schema, F.col(f"`{_FRAME}`.schema_id"))
        return read.withColumns({_CAUSE: cause, _SCHEMA_ID: schema_id, **events})


def _kept_trace(headers: Column) -> Column:
    """Returns the header `traceparent` if it is valid and has the flag "sampled", its last bit."""
    traceparent = _first_header(headers, TRACEPARENT_HEADER).cast("string")
    return F.when(traceparent.rlike(_SAMPLED), traceparent)


def _first_header(headers: Column, name: str) -> Column:
    """Returns the value of the first header of that name, unless it is empty."""
    # A lambda over the headers would be simpler, but Spark generates no code for a plan with lambdas.
    first = F.get(headers["value"], F.array_position(headers["key"], name).cast("int") - 1)
    return F.when(F.octet_length(first) > 0, first)
