"""Decodes records once more: dead letters that are retried, and events whose schema was not known at first.

Records are read from the source again to retry dead letters, and to fold the events of some keys one by one.

A batch of dead letters starts and ends at the task's position, because their records lie below it. The task's own
thread calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from balance_service.avro.codec import schema_id_of
from balance_service.avro.registry import ask_together
from balance_service.engine.dead_letter import GONE, SPARK_FAILED
from balance_service.engine.records import DeadLetter, TaskBatch
from balance_service.errors import PoisonRecordError
from balance_service.kafka.log_reader import records_at, records_left_at
from balance_service.kafka.messages import headers_of, offset_of
from balance_service.spark.combine import SCHEMA_ID_UNKNOWN, PartitionRows, PartitionUpdates
from balance_service.spark.row_query import QueryEndedError, in_short
from balance_service.spark.session import require_jvm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from confluent_kafka import Message
    from pyspark.sql import SparkSession

    from balance_service.engine.dead_letters import DueLetters
    from balance_service.engine.records import KeyedUpdate
    from balance_service.kafka.topics import Topics
    from balance_service.settings import Settings
    from balance_service.spark.decode import Decoder

log = structlog.get_logger(__name__)

# Spark's heap holds several copies of the records that it decodes together.
_MOST_BYTES = 8 << 20
# New events wait in the meantime.
_READ_SECONDS = 1.0
# The schema of Spark's Kafka source.
_RECORDS = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        "partition": pa.int32(),
    }
)


def read_singles(
    settings: Settings, topic: str, partition: int, rows: PartitionRows, keys: Sequence[bytes]
) -> Sequence[KeyedUpdate]:
    """Returns the updates of some keys in a batch, in offset order, each with its record, read from the source again.

    If a combined update cannot be applied, only its single events show which of them is the cause.

    Raises:
        RetriableError: the broker does not answer.
    """
    found = rows.updates_of(keys)
    offsets = found["offset"].to_pylist()
    if not offsets:
        return []
    _, records = records_at(settings, topic, partition, sorted(offsets))
    return rows.single_updates(found, {at: letter_of(message) for at, message in records.items()})


def letter_of(message: Message) -> DeadLetter:
    """Returns a record that was read again as a dead letter without a cause."""
    return DeadLetter(offset_of(message), message.timestamp()[1], message.key(), message.value(), "")


class _Framed(NamedTuple):
    """A record with its frame, or why it has none."""

    record: dict[str, Any]
    problem: PoisonRecordError | None = None


class Redrive:
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
        has_states: whether decoded events are folded, and so handed over one by one.
        """
        self._spark = spark
        self._settings = settings
        self._topics = topics
        self._source = source
        self._decoder = decoder
        self._has_states = has_states

    def batch(self, partition: int, position: int, due: DueLetters) -> TaskBatch:
        """Returns the dead letters that are due as a batch for the task.

        Raises:
            RetriableError: the broker or the registry does not answer.
            FatalError: Spark's JVM has ended.
        """
        offsets = [letter.offset for letter in due.again]
        tried, records = records_left_at(
            self._settings, self._topics, self._source, partition, offsets, _READ_SECONDS, _MOST_BYTES
        )
        letters = {offset: letter_of(message) for offset, message in records.items()}
        rows: list[dict[str, Any]] = []
        failed: list[DeadLetter] = []
        self._decoder.ask_anew()
        for own in ask_together(self._framed, [_row(*one) for one in sorted(records.items())]):
            if own.problem is None:
                rows.append(own.record)
            else:
                letter = letters[own.record["offset"]]
                failed.append(replace(letter, cause=own.problem.cause, detail=str(own.problem)))
        unknown = self._still_unknown(due, rows)
        failed += [replace(letters[offset], cause=SCHEMA_ID_UNKNOWN) for offset in unknown]
        rows = [row for row in rows if row["offset"] not in unknown]
        decoded, count = self._first_decoded(rows)
        if rows and not count:
            failed.append(replace(letters[rows[0]["offset"]], cause=SPARK_FAILED))
        if behind := rows[max(count, 1) :]:
            # The rest is tried in the next batch, when the record that Spark fails at is no longer due.
            end = behind[0]["offset"]
            tried = [offset for offset in tried if offset < end]
            failed = [letter for letter in failed if letter.offset < end]
        batch = redriven(decoded, tried, letters, position, due, has_states=self._has_states)
        return replace(batch, dead_letters=(*batch.dead_letters, *failed))

    def _still_unknown(self, due: DueLetters, records: Sequence[Mapping[str, Any]]) -> set[int]:
        """Returns the offsets whose schema the registry still lacks. Needs no Spark job."""
        schema_ids = {record["offset"]: schema_id_of(record["value"]) for record in records}
        known = self._decoder.resolve({schema_id for schema_id in schema_ids.values() if schema_id is not None})
        failed_so = (letter.offset for letter in due.again if letter.cause == SCHEMA_ID_UNKNOWN)
        return {offset for offset in failed_so if offset in schema_ids and schema_ids[offset] not in known}

    def _first_decoded(self, records: Sequence[Mapping[str, Any]]) -> tuple[PartitionRows | None, int]:
        """Decodes the first records; returns how many: all, unless Spark fails at one, and 0 if that is the first."""
        count = len(records)
        while count:
            try:
                return self._decoded(records[:count]), count
            except QueryEndedError as error:
                # The end of the JVM is no record's fault.
                require_jvm(self._spark, error)
                if count == 1:
                    log.warning("Spark fails at a dead letter", offset=records[0]["offset"], error=str(error))
                count //= 2
        return None, 0

    def known(self, records: pa.Table) -> pa.Table:
        """Returns those of some unresolved records whose schema the registry knows, with their frames.

        Raises:
            RetriableError: the registry does not answer.
        """
        named = ask_together(self._framed, records.filter(pc.is_null(records["schema_id"])).to_pylist())
        found = [own.record for own in named if own.problem is None]
        framed = [{**record, "schema_id": schema_id_of(record["value"])} for record in found]
        records = records.filter(pc.is_valid(records["schema_id"]))
        records = pa.concat_tables([records, pa.Table.from_pylist(framed, records.schema)])
        schema_ids = self._decoder.resolve(sorted(pc.unique(records["schema_id"]).to_pylist()))
        return records.filter(pc.is_in(records["schema_id"], pa.array(schema_ids, pa.int64())))

    def _framed(self, record: dict[str, Any]) -> _Framed:
        try:
            return _Framed(self._decoder.framed(record))
        except PoisonRecordError as error:
            return _Framed(record, error)

    def resolved(self, partition: int, rows: pa.Table, records: pa.Table) -> pa.Table:
        """Returns the rows of a batch, with those of some of its records decoded again."""
        known = records.append_column("partition", pa.repeat(pa.scalar(partition, pa.int32()), len(records)))
        again = self._rows(known.select(_RECORDS.names).cast(_RECORDS)).cast(rows.schema)
        others = rows.filter(pc.invert(pc.is_in(rows["offset"], records["offset"].combine_chunks())))
        return pa.concat_tables([others, again]).sort_by("offset")

    def _decoded(self, records: Sequence[Mapping[str, Any]]) -> PartitionRows:
        return PartitionRows(self._rows(pa.Table.from_pylist(records, _RECORDS)).sort_by("offset"))

    def _rows(self, records: pa.Table) -> pa.Table:
        try:
            frame: Any = self._spark.createDataFrame(records)
            rows = self._decoder.updates(frame).toArrow()
        except Exception as error:  # Spark and py4j raise many types of errors.
            raise QueryEndedError(in_short(error)) from error
        return rows.drop_columns(["partition"])


def redriven(
    rows: PartitionRows | None,
    tried: Sequence[int],
    letters: Mapping[int, DeadLetter],
    position: int,
    due: DueLetters,
    *,
    has_states: bool,
) -> TaskBatch:
    """Returns the batch for dead letters that are retried.

    Args:
        rows: the decoded records; None if no record is left.
        tried: the offsets of the dead letters. If one has no entry in `letters`, its record is gone.
        letters: the records by offset, without causes.
        has_states: whether decoded events are folded, and so handed over one by one.
    """
    part = PartitionUpdates() if rows is None else rows.uncombined()
    events: Sequence[KeyedUpdate] = ()
    if has_states and rows is not None:
        events = rows.single_updates(rows.updates, letters)

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
        "partition": message.partition(),
    }
