"""Kafka frames → typed columns, and what could not be decoded; all of it on Spark.

Every record of a micro-batch becomes one row of an Arrow table. `cause` says what it is:
null, an update to fold · `IGNORED`, of another type · `UNRESOLVED`, its schema is not known here yet ·
anything else, why it is a dead letter.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.avro.functions import from_avro

from balance_service.avro.codec import MAGIC

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from balance_service.avro.registry import SchemaRegistry, WriterSchema
    from balance_service.avro.schemas import Schema
    from balance_service.read_models.read_model import ReadModel

IGNORED = "ignored"
UNRESOLVED = "unresolved"

_HEADER_BYTES = 5
_MAX_PRECISION = 38
_ENVELOPE = ("partition", "offset", "timestamp", "record_key", "value", "cause", "schema_id")


class Decoder:
    """Decodes by the writer's schema, found by id. Belongs to the stream's thread.

    A schema id is resolved the first time it is seen and never again: what an id means does not change. An id that a
    registry does not know is asked for anew in each batch, for it may be registered meanwhile.
    """

    def __init__(self, spark: SparkSession, read_model: ReadModel, registry: SchemaRegistry) -> None:
        self._spark = spark
        self._read_model = read_model
        self._registry = registry
        self._events: dict[int, WriterSchema] = {}
        self._ignored: set[int] = set()
        self._incompatible: set[int] = set()

    def resolve(self, schema_ids: Iterable[int]) -> set[int]:
        """Ask the registry for these ids, and return those it does not know.

        Raises:
            RetriableError: the registry does not answer; what was learned until then is kept.
        """
        unknown = set()
        for schema_id in schema_ids:
            writer = self._registry.writer_schema(schema_id)
            if writer is None:
                unknown.add(schema_id)
            elif writer.record not in self._read_model.event_schemas:
                self._ignored.add(schema_id)
            elif self._is_readable(writer):
                self._events[schema_id] = writer
            else:
                self._incompatible.add(schema_id)
        return unknown

    def warm_up(self) -> None:
        """Decode a made-up record, so that the JVM has loaded what the first micro-batch needs before it comes."""
        frames = [F.lit(bytearray(struct.pack(">bI", MAGIC, i))) for i in (*self._events, 0)]
        records = self._spark.range(1).select(
            F.lit(bytearray(b"key")).alias("key"),
            F.explode(F.array(*frames)).alias("value"),
            F.lit(0).alias("partition"),
            F.col("id").alias("offset"),
            F.current_timestamp().alias("timestamp"),
        )
        self.decode(records, ())

    def decode(self, records: DataFrame, unknown_ids: Collection[int]) -> pa.Table:
        """One pass over the records.

        Returns:
            Columns `partition`, `offset`, `cause`, `key` and the update columns; for dead letters also `timestamp`
            (ms), `record_key` and `value`; for unresolved records `schema_id`.
        """
        return self._updates(records, unknown_ids, keep_records=False).toArrow()

    def decode_keys(self, records: DataFrame, partition: int, keys: Collection[bytes]) -> pa.Table:
        """The same for the records of some keys on one partition, each with its record's bytes, in offset order."""
        wanted = F.col("key").isin([F.lit(bytearray(key)) for key in keys])
        some = records.where((F.col("partition") == partition))
        rows = self._updates(some, (), keep_records=True).where(wanted & F.col("cause").isNull())
        return rows.orderBy("offset").toArrow()

    def _updates(self, records: DataFrame, unknown_ids: Collection[int], *, keep_records: bool) -> DataFrame:
        events = self._read_model.updates(self._typed(records, unknown_ids))
        cause = F.coalesce("frame_cause", "cause")
        rejected = cause.isNotNull() & ~cause.isin(IGNORED, UNRESOLVED)
        kept = F.lit(True) if keep_records else rejected
        envelope = {
            "cause": cause,
            "schema_id": F.when(cause == UNRESOLVED, _schema_id(F.col("value"))),
            "timestamp": F.when(kept, F.unix_millis("timestamp")),
            "record_key": F.when(kept, F.col("record_key")),
            "value": F.when(kept, F.col("value")),
        }
        folded = {name: F.when(cause.isNull(), F.col(name)) for name in ("key", *self._update_columns(events))}
        columns = {"partition": F.col("partition"), "offset": F.col("offset"), **envelope, **folded}
        return events.select(*(column.alias(name) for name, column in columns.items()))

    def _update_columns(self, events: DataFrame) -> list[str]:
        types = {schema["name"] for schema in self._read_model.event_schemas.values()}
        return [c for c in events.columns if c not in {*_ENVELOPE, *types, "key", "event_type", "frame_cause"}]

    def _typed(self, records: DataFrame, unknown_ids: Collection[int]) -> DataFrame:
        """Records with their events as structs, and `frame_cause` where there is none."""
        value, header = F.col("value"), F.substring("value", 1, _HEADER_BYTES)
        body = F.expr(f"substring(value, {_HEADER_BYTES + 1})")
        cause = (
            F.when(F.col("key").isNull(), "key-null")
            .when(value.isNull(), "value-null")
            .when(F.octet_length(value) < _HEADER_BYTES, "frame-missing")
            .when(F.substring("value", 1, 1) != F.lit(bytearray([MAGIC])), "magic-byte-unknown")
            .when(_is_one_of(header, self._ignored), IGNORED)
            .when(_is_one_of(header, self._incompatible), "schema-incompatible")
            .when(_is_one_of(header, unknown_ids), "schema-id-unknown")
            .when(~_is_one_of(header, self._events), UNRESOLVED)
        )
        # The writers' structs stand in a projection of their own, so that each body is decoded once however many
        # of its fields are used.
        framed = records.select(
            "partition",
            "offset",
            "timestamp",
            "key",
            F.col("key").alias("record_key"),
            "value",
            cause.alias("frame_cause"),
            *(
                F.when(header == _frame_header(i), from_avro(body, w.text, {"mode": "PERMISSIVE"})).alias(f"writer_{i}")
                for i, w in self._events.items()
            ),
        )
        event_type: Column = F.lit(None).cast("string")
        structs: dict[str, Column] = {}
        decode_cause: Column = F.lit(None).cast("string")
        for name, reader in self._read_model.event_schemas.items():
            event: Column = F.lit(None).cast(_struct_type(reader))
            for schema_id, writer in self._events.items():
                if writer.record != name:
                    continue
                raw = f"writer_{schema_id}"
                mine = F.col("frame_cause").isNull() & F.col(raw).isNotNull()
                fields, problem = _in_shape_of(reader, framed, raw)
                event_type = F.when(mine, F.lit(name)).otherwise(event_type)
                decode_cause = F.when(mine, problem).otherwise(decode_cause)
                event = F.when(mine & problem.isNull(), fields).otherwise(event)
            structs[reader["name"]] = event
        never_decoded = F.when(F.coalesce(F.col("frame_cause"), event_type).isNull(), F.lit("body-undecodable"))
        return framed.withColumns(
            {
                **structs,
                "event_type": event_type,
                "frame_cause": F.coalesce(F.col("frame_cause"), decode_cause, never_decoded),
            }
        )

    def _is_readable(self, writer: WriterSchema) -> bool:
        """Whether Spark can decode it and it has all the fields that our schema needs."""
        reader = self._read_model.event_schemas[writer.record]
        empty = self._spark.createDataFrame([], "value binary")
        try:
            decoded = empty.select(from_avro("value", writer.text, {"mode": "PERMISSIVE"}).alias("event"))
            fields, problem = _in_shape_of(reader, decoded, "event")
            _ = decoded.select(fields, problem).schema
        except Exception:  # Spark raises whatever its converter and analyser trip over
            return False
        return True


def _in_shape_of(reader: Schema, records: DataFrame, column: str) -> tuple[Column, Column]:
    """A writer's struct with our fields in our types, and why that is not possible for a row.

    Decimals keep the reader's scale and get all the precision there is; a row that would lose a digit is refused.

    Raises:
        KeyError: the writer lacks a field that has no default.
    """
    written = {field.name: field.dataType for field in records.schema[column].dataType.fields}
    shaped: list[Column] = []
    nothing: Column = F.lit(True)
    missing: Column = F.lit(False)
    lossy: Column = F.lit(False)
    for name in written:
        nothing = nothing & F.col(f"{column}.`{name}`").isNull()
    for field in reader["fields"]:
        name, wanted = field["name"], _spark_type(field["type"])
        if name not in written:
            shaped.append(F.lit(field["default"]).cast(wanted).alias(name))
            continue
        source = F.col(f"{column}.`{name}`")
        target = source if written[name].simpleString() == wanted else source.try_cast(wanted)
        missing = missing | source.isNull()
        if wanted.startswith("decimal") and written[name].simpleString() != wanted:
            lossy = lossy | ~target.eqNullSafe(source)
        shaped.append(target.alias(name))
    problem = (
        F.when(nothing, F.lit("body-undecodable"))
        .when(missing, F.lit("field-null"))
        .when(lossy, F.lit("decimal-loses-digits"))
    )
    return F.struct(*shaped), problem


def _struct_type(reader: Schema) -> str:
    fields = ",".join(f"`{field['name']}`:{_spark_type(field['type'])}" for field in reader["fields"])
    return f"struct<{fields}>"


_SPARK_TYPES: Mapping[str, str] = {
    "timestamp-millis": "timestamp",
    "string": "string",
    "long": "bigint",
    "int": "int",
    "boolean": "boolean",
    "bytes": "binary",
}


def _spark_type(avro: Any) -> str:
    """The Spark type in which the engine hands over an Avro type. Raises KeyError for one it has no use for yet."""
    logical = avro.get("logicalType", avro["type"]) if isinstance(avro, dict) else avro
    if logical == "decimal":
        return f"decimal({_MAX_PRECISION},{avro.get('scale', 0)})"
    return _SPARK_TYPES[logical]


def _frame_header(schema_id: int) -> Column:
    return F.lit(bytearray(struct.pack(">bI", MAGIC, schema_id)))


def _is_one_of(header: Column, schema_ids: Collection[int]) -> Column:
    return header.isin([_frame_header(i) for i in sorted(schema_ids)]) if schema_ids else F.lit(False)


def _schema_id(value: Column) -> Column:
    return F.conv(F.hex(F.substring(value, 2, 4)), 16, 10).cast("bigint")
