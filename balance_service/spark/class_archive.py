"""Archives the classes that Spark's JVM needs: `python -m balance_service.spark.class_archive`.

This module starts a JVM, runs the code that an instance runs at its start, and lets the JVM write an archive of the
loaded classes as it ends. Other JVMs map the archive into memory instead of parsing the classes; without one, they
start some seconds slower. Source: JEP 350, "Dynamic CDS Archives".
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.writer_schema import WriterSchema
from balance_service.model.folds import RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.schemas import Schemas
from balance_service.model.stream import Stream
from balance_service.process.jars import locked
from balance_service.process.scratch import temporary_scratch
from balance_service.settings import load_settings
from balance_service.spark.decode import Decoder
from balance_service.spark.jvm import QUIET, archive_of, base_archive_of, class_path, is_stale, spark_java
from balance_service.spark.row_query import RowQuery
from balance_service.spark.session import one_record, start_spark

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from balance_service.avro.schemas import Schema
    from balance_service.process.scratch import Scratch

_BASE_SECONDS, _END_SECONDS = 60, 240
_ROW_SECONDS = 30.0
# Opening clients loads their classes, and needs no broker.
_CLIENTS = {
    "bootstrap.servers": "127.0.0.1:1",
    "key.deserializer": "org.apache.kafka.common.serialization.ByteArrayDeserializer",
    "value.deserializer": "org.apache.kafka.common.serialization.ByteArrayDeserializer",
}
_CONNECTOR = (
    "org.apache.spark.sql.kafka010.KafkaSourceProvider",
    "org.apache.spark.sql.kafka010.KafkaMicroBatchStream",
    "org.apache.spark.sql.kafka010.KafkaBatchReaderFactory",
    "org.apache.spark.sql.kafka010.KafkaBatchPartitionReader",
    "org.apache.spark.sql.kafka010.KafkaOffsetReaderAdmin",
    "org.apache.spark.sql.kafka010.consumer.KafkaDataConsumer",
)
_MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}
_TIME = {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}


def make_archive() -> Path:
    """Makes the archive for this machine's JVM and class path, unless there is a current one; returns its path.

    Raises:
        ConfigurationError: there is no suitable Java, or the connector jars cannot be obtained.
    """
    settings = load_settings()
    jars, java = class_path(settings), spark_java()
    archive, base = archive_of(java, jars), base_archive_of(java)
    with locked(archive):
        if is_stale(archive, jars) or not (base is None or base.is_file()):
            fresh = archive.with_name(archive.name + ".partial")
            above = [] if base is None else [f"-XX:SharedArchiveFile={_made_base(java, base)}"]
            with temporary_scratch() as scratch:
                spark = start_spark(settings, scratch, 1, [*above, f"-XX:ArchiveClassesAtExit={fresh}", *QUIET])
                _exercise(spark, scratch)
                _end(spark)
            if fresh.is_file():
                fresh.replace(archive)
    return archive


def _made_base(java: Path, base: Path) -> Path:
    """Makes the archive of the runtime's own classes, unless there is one. If Java cannot, the other fails too."""
    if not base.is_file():
        partial = base.with_name(base.name + ".partial")
        command = [str(java), "-Xshare:dump", f"-XX:SharedArchiveFile={partial}"]
        subprocess.run(command, capture_output=True, timeout=_BASE_SECONDS, check=False)
        if partial.is_file():
            partial.replace(base)
    return base


def _exercise(spark: SparkSession, scratch: Scratch) -> None:
    read_model = _Sums(_Own(()))
    (stage,) = read_model.stages
    decoder = Decoder(spark, read_model, stage, _Registered(stage.event_schemas))
    decoder.resolve(range(1, len(stage.event_schemas) + 1))
    with RowQuery(spark, scratch, lambda _: decoder.updates(one_record(spark)), {0: 0}) as query:
        query.rows[0].pull(_ROW_SECONDS)
    jvm: Any = spark._jvm
    for name in _CONNECTOR:
        jvm.java.lang.Class.forName(name)
    properties = jvm.java.util.Properties()
    for name, value in _CLIENTS.items():
        properties.setProperty(name, value)
    jvm.org.apache.kafka.clients.consumer.KafkaConsumer(properties).close()
    jvm.org.apache.kafka.clients.admin.AdminClient.create(properties).close()


def _end(spark: SparkSession) -> None:
    """Lets the JVM end by itself: it writes the archive then."""
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(_END_SECONDS)


class _Sums(ReadModel):
    """Stands for any read model: a sum per key."""

    name = "sums"
    source = Stream("events", "Event")
    key = "key"
    state = "State"

    amount = RunningSum("Event.amount")


class _Own(Schemas):
    def find(self, name: str, topic: str | None = None) -> Schema:  # noqa: ARG002
        fields = [{"name": "key", "type": "string"}, {"name": "amount", "type": _MONEY}]
        return {"type": "record", "name": name, "fields": [*fields, *([_TIME] if name == "Event" else [])]}


class _Registered(SchemaRegistry):
    """Knows schemas by number. Replaces the registry, which a machine that is being set up may lack."""

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self._schemas = list(schemas.values())

    def writer_schema(self, schema_id: int) -> WriterSchema | None:
        if not 1 <= schema_id <= len(self._schemas):
            return None
        return WriterSchema.from_schema(self._schemas[schema_id - 1])


if __name__ == "__main__":
    sys.stdout.write(f"classes archived in {make_archive()}\n")
