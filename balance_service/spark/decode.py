"""Decodes Kafka records into typed columns on Spark, in one plan for each format.

Every record becomes one row. The `cause` in a row's note classifies it: null, or no note, is an update to fold;
`IGNORED` a record of another type; `UNRESOLVED` a record whose schema is not known yet; any other cause a dead letter.
`formats` has what reads the values.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.classic.column import Column as ClassicColumn

from balance_service.avro.codec import AvroCodec
from balance_service.avro.frames import SCHEMA_PREFIX
from balance_service.avro.schemas import subject_of
from balance_service.engine.outputs import SENDER_HEADER
from balance_service.formats.known import FORMATS
from balance_service.formats.rows import first_header
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
    event_column,
    ignored_column,
    key_column,
    named_event,
    read_schemas,
    refusals_column,
    reserved_cause,
    stored_key,
    update_columns,
)
from balance_service.spark.combine import NOTE, UNRESOLVED
from balance_service.spark.made_records import MadeRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.model.transform import Transform

_SAMPLED = "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]$"
# Of `java/Bounded.java`: how the failure of an expression begins that would make too large a value.
_TOO_LARGE = "[TRANSFORM_TOO_LARGE]"
# No field of a model can have these names.
_FRAME, _CAUSE, _SCHEMA_ID, _PARTITION, _FAILURE = "#frame", "#cause", "#schema id", "#partition", "#failure"
# The columns of records that `_key` and so on are in a transform; `_topic` is a constant.
_OF_RECORD = dict(zip(ENVELOPE, ("record_key", "headers", "timestamp", "", _PARTITION, "offset"), strict=True))


class Decoder:
    """Decodes the records of a stage's source, in the source's format. Thread-safe."""

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
        registry: `OwnSchemas` of the application.
        with_traces: whether the plan also returns the `traceparent` header of sampled records.
        """
        self._traceparent = (TRACEPARENT_HEADER,) if with_traces else ()
        self._read_model = read_model
        self._stage = stage
        self._takes_any_key = stage.by is not None or read_model is None or not read_model.has_states()
        self._takes_tombstones = stage.tombstones
        jvm: Any = None if read_model is None else spark._jvm
        texts = None if read_model is None else [*map(json.dumps, read_schemas(read_model, stage))]
        self._rows = FORMATS[stage.format].rows(
            jvm, registry if stage.reads_rekeyed else registry.of_producers, stage, texts
        )
        self._has_texts = stage.reads_rekeyed and registry.has_fingerprints
        self._made: MadeRecords
        self._writing: Any = None
        if read_model is not None:
            self._made = MadeRecords(spark, read_model, stage)
            if stage.transform is not None and stage.passes_on:
                codec = AvroCodec(registry, subject_of(stage.rekeyed, stage.transform.schema), stage.transform.schema)
                writing, text = jvm.parts.code.balance.Writing, json.dumps(stage.transform.schema)
                self._writing = writing(text, codec.header, writing.typeOf(text))

    @property
    def rules(self) -> Mapping[int, int]:
        """The schema ids whose records were decoded to other values before: → the rules since when they are not."""
        return self._rows.rules

    def resolve(self, schema_ids: Iterable[int]) -> set[int]:
        """As `Rows.resolve`."""
        return self._rows.resolve(schema_ids)

    def resolve_all(self) -> set[int]:
        """As `Rows.resolve_all`."""
        return self._rows.resolve_all()

    def ask_anew(self) -> None:
        """As `Rows.ask_anew`."""
        self._rows.ask_anew()

    def framed(self, record: dict[str, Any]) -> dict[str, Any]:
        """As `Rows.framed`."""
        return self._rows.framed(record)

    def framed_records(self, records: DataFrame, frames: Mapping[bytes, bytes]) -> DataFrame:
        """As `Rows.framed_records`."""
        return self._rows.framed_records(records, frames)

    def frame_header_of(self, header: bytes) -> bytes | None:
        """As `Rows.frame_header_of`."""
        return self._rows.frame_header_of(header)

    def schema_id(self, value: bytes | None) -> int | None:
        """As `Rows.schema_id`."""
        return self._rows.schema_id(value)

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
            columns |= {name: [named_event(record), name] for name in transform.used}
        else:
            columns |= {record: [named_event(record)] for record in self._stage.records}
        made = transform.analysed.apply(framed, transform.names, columns, self._stage.source, _CAUSE)
        has_row = made.row.isNotNull()
        if transform.analysed.multiplies:
            has_row = F.coalesce(F.size(made.row) > 0, F.lit(False))
        cause = F.when(made.failure.startswith(_TOO_LARGE), TRANSFORM_TOO_LARGE)
        cause = cause.when(made.failure.isNotNull(), TRANSFORM_FAILED).when(~has_row, IGNORED)
        judged = {_CAUSE: F.coalesce(_CAUSE, cause), _FAILURE: made.failure, named_event(ROW): made.row}
        rows: DataFrame = made.records.withColumns(judged)
        if self._writing is None:
            return rows
        if not transform.analysed.multiplies:
            return rows.withColumn(FRAMES, F.array(ClassicColumn(self._writing.of(event_column(ROW)._jc))))
        rows = rows.withColumn(FRAMES, ClassicColumn(self._writing.ofAll(event_column(ROW)._jc)))
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
        frame = self._rows.of(F.col("value"), F.col("headers"))
        named = (first_header(F.col("headers"), name) for name in (SENDER_HEADER, KEY_FORMAT_HEADER))
        read = records.select(
            F.col("partition").alias(_PARTITION),
            "offset",
            "timestamp",
            stored_key(self._stage, F.col("key"), *named).alias("key"),
            F.col("key").alias("record_key"),
            "value",
            "headers",
            first_header(F.col("headers"), IDEMPOTENCY_HEADER).alias("idempotency_key"),
            *(_kept_trace(F.col("headers")).alias(name) for name in self._traceparent),
            frame.alias(_FRAME),
        )
        lacks_key = F.lit(False) if self._takes_any_key else F.col("record_key").isNull()
        lacks_value = F.lit(False) if self._takes_tombstones else F.col("value").isNull()
        own = self._stage.own_key
        names_schema = self._rows.names_schema(F.col("value"), F.col("headers"))
        cause = F.when(lacks_key, "key-null")
        if self._has_texts:
            # Another record has the text of their schema.
            is_text = F.substring("record_key", 1, len(SCHEMA_PREFIX)) == F.lit(bytearray(SCHEMA_PREFIX))
            cause = F.when(is_text, IGNORED).when(lacks_key, "key-null")
        if own is not None:
            cause = cause.when(F.col("key").isNull(), own.cause)
        schema_id = F.col(f"`{_FRAME}`.schema_id")
        if names_schema is not None:
            cause, schema_id = cause.when(names_schema, UNRESOLVED), F.when(~names_schema, schema_id)
        cause = cause.when(lacks_value, "value-null").otherwise(F.col(f"`{_FRAME}`.cause"))
        events = {named_event(name): F.col(f"`{_FRAME}`.`{name}`") for name in self._stage.records}
        return read.withColumns({_CAUSE: cause, _SCHEMA_ID: schema_id, **events})


def _kept_trace(headers: Column) -> Column:
    """Returns the header `traceparent` if it is valid and has the flag "sampled", its last bit."""
    traceparent = first_header(headers, TRACEPARENT_HEADER).cast("string")
    return F.when(traceparent.rlike(_SAMPLED), traceparent)
