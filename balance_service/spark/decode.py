"""Decodes Kafka records into typed columns on Spark, in one plan.

Every record becomes one row. The `cause` in a row's note classifies it: null, or no note, is an update to fold;
`IGNORED` a record of another type; `UNRESOLVED` a record whose schema is not known yet; any other cause a dead letter.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.avro.codec import MAGIC, SCHEMA_HEADER, SCHEMA_IN_HEADER, frame_header
from balance_service.avro.schemas import is_shipped, subject_of
from balance_service.engine.records import RESERVED_PREFIX
from balance_service.kafka.clients import IDEMPOTENCY_HEADER
from balance_service.observability.tracing import TRACEPARENT_HEADER
from balance_service.spark.columns import cause_column, key_column, update_columns
from balance_service.spark.combine import IGNORED, NOTE, UNRESOLVED
from balance_service.spark.shape import PROBLEM, any_of, decoded, field_types, in_shape_of, struct_type

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.writer_schema import WriterSchema
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage

_HEADER_BYTES = 5
_SAMPLED = "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]$"
_ENVELOPE = ("offset", "timestamp", "key", "record_key", "value", "idempotency_key", "partition")
# Other fields of the record, which only some stages hand over.
_CARRIED = ("headers",)


class Decoder:
    """Decodes records by the writer's schema, found by id. Thread-safe.

    A plan knows the schema ids that were resolved when it was made. An id is resolved once, because its schema never
    changes. An id that the registry does not know is looked up again each time, because it may be registered later.
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
        self._spark = spark
        self._traceparent = (TRACEPARENT_HEADER,) if with_traces else ()
        self._read_model = read_model
        self._stage = stage
        self._readers = stage.wanted_schemas
        self._decoded = partial(decoded, skips_others=stage.columns is not None)
        self._takes_any_key = stage.by is not None or read_model is None or not read_model.has_states()
        self._takes_tombstones = read_model is not None and read_model.source.tombstones
        self._registry = registry
        self._events: dict[int, WriterSchema] = {}
        self._ignored: dict[int, str] = {}
        self._incompatible: set[int] = set()
        self._known = threading.Lock()
        self._resolving = threading.Lock()

    def resolve(self, schema_ids: Iterable[int]) -> set[int]:
        """Looks unknown schema ids up in the registry; returns the ids that a new plan will know.

        Raises:
            RetriableError: the registry does not answer; the ids that were resolved before are kept.
        """
        if self._read_model is None:
            return set(schema_ids)
        with self._resolving:
            return {schema_id for schema_id in schema_ids if self._is_known(schema_id) or self._learn(schema_id)}

    def resolve_all(self) -> set[int]:
        """Resolves every schema that the registry has for the source, so that the first plan knows them; returns them.

        Registers the shipped schemas, because this application writes such events. Other schemas are registered by
        their producers: a reader's version, which may lack columns, would become the newest version of the subject.

        Raises:
            RetriableError: the registry does not respond.
        """
        if not self._stage.schemas:
            return set()
        topic, schemas = self._stage.written_to, filter(is_shipped, self._stage.schemas.values())
        ours = [self._registry.register(subject_of(topic, schema), schema) for schema in schemas]
        return self.resolve({*ours, *self._registry.schema_ids(topic, self._stage.event_schemas)})

    def _is_known(self, schema_id: int) -> bool:
        return any(schema_id in known for known in (self._events, self._ignored, self._incompatible))

    def _learn(self, schema_id: int) -> bool:
        writer = self._registry.writer_schema(schema_id)
        if writer is None:
            return False
        is_ours = any(record in self._readers for record in writer.records)
        is_readable = is_ours and self._is_readable(writer)
        with self._known:
            if is_readable:
                self._events[schema_id] = writer
            elif is_ours:
                self._incompatible.add(schema_id)
            else:
                self._ignored[schema_id] = next(iter(writer.records), "no record")
        return True

    def updates(self, records: DataFrame) -> DataFrame:
        """Returns the plan: Kafka records → one row each.

        Returns:
            Columns `offset`; `key` and the update columns, null if there is no update; and `note`, null for a plain
            update, else a list with one struct: `cause`; `record`, the name of a record of another type;
            `idempotency_key` of an update that has one; `timestamp` (ms),
            `record_key` and `value`, unless the record is ignored or its update does not need them; `schema_id` if
            unresolved; `traceparent` if requested and not ignored; and last `partition`.
        """
        columns = update_columns(self._read_model, self._stage)
        if self._read_model is None:
            return self._unconverted(records, columns)
        with self._known:
            typed = self._typed(records, [name for name in _CARRIED if name in columns])
        key = key_column(self._stage)
        keyed = {} if key is None else {"key": key}
        updates = typed.withColumns({**columns, **keyed, "cause": cause_column(self._read_model, self._stage)})
        # A separate projection: otherwise Spark inlines and repeats the computation in every column below.
        is_reserved = F.col("key") >= F.lit(bytearray(RESERVED_PREFIX))
        judged = updates.withColumn("cause", F.coalesce("frame_cause", "cause", F.when(is_reserved, "key-reserved")))
        cause = F.col("cause")
        keep_record = F.when(cause.isNull(), F.col("idempotency_key").isNotNull()).otherwise(cause != IGNORED)
        note = F.struct(
            "cause",
            F.when(cause == IGNORED, self._other(F.substring("value", 1, _HEADER_BYTES))).alias("record"),
            F.when(cause == UNRESOLVED, _schema_id(F.col("value"))).alias("schema_id"),
            F.when(keep_record, F.col("timestamp") if "timestamp" in columns else F.unix_millis("timestamp")).alias(
                "timestamp"
            ),
            F.when(keep_record, F.col("record_key")).alias("record_key"),
            F.when(keep_record, F.col("value")).alias("value"),
            F.when(cause.isNull(), F.col("idempotency_key")).alias("idempotency_key"),
            *(F.when(~cause.eqNullSafe(IGNORED), F.col(name)).alias(name) for name in self._traceparent),
        )
        is_noted = any_of(F.col(name).isNotNull() for name in ("cause", "idempotency_key", *self._traceparent))
        return judged.select(
            "offset",
            *(F.when(cause.isNull(), F.col(name)).alias(name) for name in ("key", *columns)),
            # A null list takes a fifth of the bytes of a struct of nulls, and most rows have no note.
            F.when(is_noted, F.array(note)).alias(NOTE),
            "partition",
        )

    def _other(self, header: Column) -> Column:
        names = (F.when(header == _frame_header(i), F.lit(name)) for i, name in self._ignored.items())
        return F.coalesce(F.lit(None).cast("string"), *names)

    def _unconverted(self, records: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
        """Returns the plan for records of any bytes; none is ignored or becomes a dead letter."""
        traces = {name: _kept_trace(F.col("headers")) for name in self._traceparent}
        fields = (("cause", "string"), ("record", "string"), ("schema_id", "bigint"))
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

    def _typed(self, records: DataFrame, carried: Sequence[str]) -> DataFrame:
        """Returns the records with their events as structs, and `frame_cause` for records without an event."""
        value, header, readers = F.col("value"), F.col("header"), self._readers
        # Its value may look like a frame.
        names_schema = value.isNotNull() & _first_header(F.col("headers"), SCHEMA_HEADER).isNotNull()
        cause = (
            F.when(F.lit(False) if self._takes_any_key else F.col("key").isNull(), "key-null")
            .when(names_schema, SCHEMA_IN_HEADER)
            .when(_is_one_of(header, self._events), F.lit(None))
            .when(value.isNull(), F.lit(None if self._takes_tombstones else "value-null"))
            .when(F.octet_length(value) < _HEADER_BYTES, "frame-missing")
            .when(F.substring("value", 1, 1) != F.lit(bytearray([MAGIC])), "magic-byte-unknown")
            .when(_is_one_of(header, self._ignored), IGNORED)
            .when(_is_one_of(header, self._incompatible), "schema-incompatible")
            .otherwise(UNRESOLVED)
        )
        # Each step is a projection of its own, so that Spark computes every column once, however often it is used.
        split = records.select(
            "offset",
            "timestamp",
            "key",
            "value",
            "headers",
            "partition",
            F.substring("value", 1, _HEADER_BYTES).alias("header"),
            F.expr(f"substring(value, {_HEADER_BYTES + 1})").alias("body"),
        )
        framed = split.select(
            "offset",
            "timestamp",
            "key",
            F.col("key").alias("record_key"),
            "value",
            _idempotency_key(F.col("headers")).alias("idempotency_key"),
            "partition",
            cause.alias("frame_cause"),
            *carried,
            *(_kept_trace(F.col("headers")).alias(name) for name in self._traceparent),
            *(
                F.when(header == _frame_header(i), self._decoded(F.col("body"), readers[w.records[0]], w.text)).alias(
                    f"writer_{i}"
                )
                for i, w in self._events.items()
            ),
        )
        types = {
            record: field_types(reader, [w.text for w in self._events.values() if record in w.records])
            for record, reader in readers.items()
        }
        shaped = framed.select(
            *_ENVELOPE,
            *carried,
            *self._traceparent,
            "frame_cause",
            *(
                F.coalesce(
                    F.lit(None).cast(struct_type(types[record])),
                    *(
                        F.when(
                            F.col(f"writer_{i}").isNotNull(),
                            in_shape_of(reader, types[record], framed, f"writer_{i}", writer.text),
                        )
                        for i, writer in self._events.items()
                        if record in writer.records
                    ),
                ).alias(reader["name"])
                for record, reader in readers.items()
            ),
        )
        names = [reader["name"] for reader in readers.values()]
        undecoded = ~any_of(F.col(name).isNotNull() for name in names)
        if self._takes_tombstones:
            undecoded &= F.col("value").isNotNull()
        problem = F.coalesce(
            "frame_cause",
            *(F.col(f"{name}.{PROBLEM}") for name in names),
            F.when(undecoded, "body-undecodable"),
        )
        judged = shaped.withColumn("frame_cause", problem)
        intact = F.col("frame_cause").isNull()
        return judged.select(
            *_ENVELOPE,
            *carried,
            *self._traceparent,
            "frame_cause",
            *(F.when(intact, F.col(name)).alias(name) for name in names),
        )

    def _is_readable(self, writer: WriterSchema) -> bool:
        """Whether Spark can decode a writer's records into all fields of the reader's schema."""
        if len(writer.records) > 1:
            return False
        reader = self._readers[writer.records[0]]
        empty = self._spark.createDataFrame([], "value binary")
        try:
            events = empty.select(self._decoded(F.col("value"), reader, writer.text).alias("event"))
            types = field_types(reader, [writer.text])
            _ = events.select(in_shape_of(reader, types, events, "event", writer.text)).schema
        except Exception:  # Spark's converter and analyser raise many types of errors.
            return False
        return True


def _idempotency_key(headers: Column) -> Column:
    """Returns the value of the first header of that name, unless it is empty."""
    return _first_header(headers, IDEMPOTENCY_HEADER)


def _kept_trace(headers: Column) -> Column:
    """Returns the header `traceparent` if it is valid and has the flag "sampled", its last bit."""
    traceparent = _first_header(headers, TRACEPARENT_HEADER).cast("string")
    return F.when(traceparent.rlike(_SAMPLED), traceparent)


def _first_header(headers: Column, name: str) -> Column:
    # A lambda over the headers would be simpler, but Spark generates no code for a plan with lambdas.
    first = F.get(headers["value"], F.array_position(headers["key"], name).cast("int") - 1)
    return F.when(F.octet_length(first) > 0, first)


def _frame_header(schema_id: int) -> Column:
    return F.lit(bytearray(frame_header(schema_id)))


def _is_one_of(header: Column, schema_ids: Collection[int]) -> Column:
    return header.isin([_frame_header(i) for i in sorted(schema_ids)]) if schema_ids else F.lit(False)


def _schema_id(value: Column) -> Column:
    return F.conv(F.hex(F.substring(value, 2, 4)), 16, 10).cast("bigint")
