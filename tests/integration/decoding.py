"""Spark's decoding of records that a test writes, without a broker."""

from __future__ import annotations

import copy
import io
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import fastavro

from balance_service.avro.frames import frame_header
from balance_service.avro.schemas import load_schema
from balance_service.avro.writer_schema import WriterSchema
from balance_service.spark.combine import PartitionRows
from balance_service.spark.decode import Decoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from balance_service.avro.schemas import Schema
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage


AT = datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC)
SCORED = {
    "id": "g",
    "score": 1.5,
    "level": None,
    "paid": Decimal("-12.34"),
    "at": AT.replace(microsecond=678_901),
    "day": AT.date(),
    "place": {"city": "Zürich", "since": AT},
    "kind": "LARGE",
    "tags": ["a", "é"],
    "counts": {"x": 1, "y": -(2**62)},
    "photo": b"\x00\xff",
    "ratio": 0.25,
    "ref": "00000000-0000-0000-0000-000000000001",
    "serial": "00010203-0405-0607-0809-0a0b0c0d0e0f",
}


class Writers:
    """A registry with some writer schemas, numbered from 1."""

    has_fingerprints = False

    def __init__(self, *schemas: Schema | WriterSchema) -> None:
        self.schemas = schemas

    @property
    def of_producers(self) -> Writers:
        return self

    def writer_schema(self, schema_id: int) -> WriterSchema:
        schema = self.schemas[schema_id - 1]
        return schema if isinstance(schema, WriterSchema) else WriterSchema.from_schema(schema)


def decoded(
    spark: SparkSession,
    read_model: ReadModel,
    schemas: Sequence[Schema | WriterSchema],
    records: Sequence[tuple[bytes | None, int | None, bytes | None]],
    stage: Stage | None = None,
) -> PartitionRows:
    """Decodes records, each given as key, schema number and body.

    A body of None is a record without a value. Without a schema number, the body is the value.
    """
    decoder = Decoder(spark, read_model, stage or read_model.stages[-1], Writers(*schemas))  # type: ignore[arg-type]
    decoder.resolve(range(1, len(schemas) + 1))
    # Uses SQL, because a DataFrame of Python objects would need a Python worker.
    values = [
        (key, body if body is None or schema_id is None else frame_header(schema_id) + body)
        for key, schema_id, body in records
    ]
    literals = [f"({offset}L, {_hex(key)}, {_hex(value)})" for offset, (key, value) in enumerate(values)]
    frames = spark.sql(
        "select 0 as partition, offset, timestamp_millis(0) as timestamp, key, value, cast(null as "
        "array<struct<key:string,value:binary>>) as headers "
        f"from values {', '.join(literals)} as t(offset, key, value)"
    )
    return PartitionRows(decoder.updates(frames).toArrow().drop_columns(["partition"]))


def evolved(**changed: Any) -> Schema:
    """Returns another version of `Scored`; a field with type None is left out."""
    schema = copy.deepcopy(load_schema("Scored"))
    fields = {field["name"]: field["type"] for field in schema["fields"]} | changed
    return {**schema, "fields": [{"name": name, "type": kind} for name, kind in fields.items() if kind is not None]}


def _hex(value: bytes | None) -> str:
    return "cast(null as binary)" if value is None else f"X'{value.hex()}'"


def written(schema: Any, fields: Any) -> bytes:
    body = io.BytesIO()
    fastavro.schemaless_writer(body, schema, fields)
    return body.getvalue()


def update(rows: PartitionRows) -> Any:
    """Returns the only update."""
    (single,) = rows.single_updates(rows.updates)
    return single.update


def causes(rows: PartitionRows) -> list[str]:
    return rows.notes["cause"].to_pylist()  # type: ignore[no-any-return]
