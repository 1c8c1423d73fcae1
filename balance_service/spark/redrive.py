"""Has dead letters tried again: their records, read from the source once more, decoded and committed by the same code.

A batch of them starts and ends at the task's position: they lie below it. Called by the task's own thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import structlog

from balance_service.avro.codec import schema_id_of
from balance_service.engine.dead_letter import GONE, SPARK_FAILED
from balance_service.engine.records import DeadLetter, TaskBatch
from balance_service.errors import PoisonRecordError
from balance_service.kafka.log_reader import records_left_at
from balance_service.kafka.messages import headers_of
from balance_service.spark.combine import SCHEMA_ID_UNKNOWN, PartitionRows, PartitionUpdates
from balance_service.spark.row_query import QueryEndedError, in_short
from balance_service.spark.session import require_jvm
from balance_service.spark.singles import letter_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from confluent_kafka import Message
    from pyspark.sql import SparkSession

    from balance_service.engine.dead_letter import DueLetters
    from balance_service.engine.records import KeyedUpdate
    from balance_service.kafka.topics import Topics
    from balance_service.settings import Settings
    from balance_service.spark.decode import Decoder

log = structlog.get_logger(__name__)

# Spark's heap holds several copies of what it decodes together.
_MOST_BYTES = 8 << 20
# The events that come meanwhile wait.
_READ_SECONDS = 1.0
# As Spark's source of Kafka has them.
_RECORDS = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    }
)


class Redrive:
    """Makes batches of the dead letters of one stage that are due."""

    def __init__(
        self,
        *,
        spark: SparkSession,
        settings: Settings,
        topics: Topics,
        source: str,
        decoder: Decoder,
        has_states: bool,
    ) -> None:
        """Args:
        source: the topic.
        has_states: whether what is decoded is folded, and so handed over event by event.
        """
        self._spark = spark
        self._settings = settings
        self._topics = topics
        self._source = source
        self._decoder = decoder
        self._has_states = has_states

    def batch(self, partition: int, position: int, due: DueLetters) -> TaskBatch:
        """Letters that are due, as a task commits them.

        Raises:
            RetriableError: broker or registry do not answer.
            FatalError: Spark's JVM has ended.
        """
        offsets = [letter.offset for letter in due.again]
        tried, records = records_left_at(
            self._settings, self._topics, self._source, partition, offsets, _READ_SECONDS, _MOST_BYTES
        )
        letters = {offset: letter_of(message) for offset, message in records.items()}
        unknown = self._still_unknown(due, records)
        rows: list[dict[str, Any]] = []
        failed: list[DeadLetter] = []
        for offset, message in sorted(records.items()):
            try:
                row = _row(offset, message)
            except PoisonRecordError as error:
                failed.append(replace(letters[offset], cause=error.cause))
            else:
                if offset in unknown:
                    failed.append(replace(letters[offset], cause=SCHEMA_ID_UNKNOWN))
                else:
                    rows.append(row)
        decoded, count = self._first_decoded(rows)
        if rows and not count:
            failed.append(replace(letters[rows[0]["offset"]], cause=SPARK_FAILED))
        if behind := rows[max(count, 1) :]:
            # They are tried next: what Spark fails at is not due then.
            end = behind[0]["offset"]
            tried = [offset for offset in tried if offset < end]
            failed = [letter for letter in failed if letter.offset < end]
        batch = redriven(decoded, tried, letters, position, due, has_states=self._has_states)
        return replace(batch, dead_letters=(*batch.dead_letters, *failed))

    def _still_unknown(self, due: DueLetters, records: Mapping[int, Message]) -> set[int]:
        """The letters for which the registry still lacks the schema. To know that takes no job of Spark's."""
        schema_ids = {offset: schema_id_of(message.value()) for offset, message in records.items()}
        known = self._decoder.resolve({schema_id for schema_id in schema_ids.values() if schema_id is not None})
        failed_so = (letter.offset for letter in due.again if letter.cause == SCHEMA_ID_UNKNOWN)
        return {offset for offset in failed_so if offset in records and schema_ids[offset] not in known}

    def _first_decoded(self, records: Sequence[Mapping[str, Any]]) -> tuple[PartitionRows | None, int]:
        """The first ones of some records, and how many: all, unless Spark fails at one; none if that is the first."""
        count = len(records)
        while count:
            try:
                return self._decoded(records[:count]), count
            except QueryEndedError as error:
                # No record is to blame for that.
                require_jvm(self._spark, error)
                if count == 1:
                    log.warning("Spark fails at a dead letter", offset=records[0]["offset"], error=str(error))
                count //= 2
        return None, 0

    def _decoded(self, records: Sequence[Mapping[str, Any]]) -> PartitionRows:
        table = pa.Table.from_pylist(records, _RECORDS)
        try:
            frame: Any = self._spark.createDataFrame(table)
            rows = self._decoder.updates(frame).toArrow()
        except Exception as error:  # Spark and py4j raise many things
            raise QueryEndedError(in_short(error)) from error
        return PartitionRows(rows.sort_by("offset"))


def redriven(
    rows: PartitionRows | None,
    tried: Sequence[int],
    letters: Mapping[int, DeadLetter],
    position: int,
    due: DueLetters,
    *,
    has_states: bool,
) -> TaskBatch:
    """A batch of dead letters that are tried again.

    Args:
        rows: what their records are decoded to; None if there are none any more.
        tried: the offsets of the letters; of those without a record, that is gone.
        letters: the records by offset, without causes.
        has_states: whether what is decoded is folded, and so handed over event by event.
    """
    part = PartitionUpdates() if rows is None else rows.as_they_came()
    events: Sequence[KeyedUpdate] = ()
    if has_states and rows is not None:
        events = rows.singly(rows.updates, letters)

    def singles(keys: Sequence[bytes]) -> Sequence[KeyedUpdate]:
        return [event for event in events if event.key in keys]

    gone = [DeadLetter(at, -1, None, None, GONE) for at in tried if at not in letters]
    return TaskBatch(
        position,
        position,
        () if has_states else part.updates,
        events,
        part.applied,
        part.ignored,
        (*part.dead_letters, *gone),
        singles,
        retried=frozenset(tried),
        forgotten=due.forgotten,
    )


def _row(offset: int, message: Message) -> dict[str, Any]:
    headers = headers_of(message)
    return {
        "key": message.key(),
        "value": message.value(),
        "offset": offset,
        "timestamp": message.timestamp()[1] * 1000,
        "headers": [{"key": name, "value": value} for name, value in headers] or None,
    }
