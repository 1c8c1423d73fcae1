"""Decodes records once more: dead letters that are retried, and events whose schema was not known at first.

Records are read from the source again to retry dead letters, and to fold the events of some keys one by one.

A batch of dead letters starts and ends at the task's position, because their records lie below it. The task's own
thread calls.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from balance_service.avro.codec import SCHEMA_ID_UNKNOWN
from balance_service.avro.registry import ask_together
from balance_service.engine.dead_letter import DECODER_FAILED
from balance_service.engine.records import DeadLetter
from balance_service.errors import PoisonRecordError
from balance_service.kafka.log_reader import records_at, records_from, records_left_at
from balance_service.kafka.messages import headers_of, offset_of
from balance_service.spark.combine import PartitionRows, redriven, unknown_schema
from balance_service.spark.row_query import QueryEndedError, in_short
from balance_service.spark.session import require_jvm
from balance_service.spark.trials import Trials

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from confluent_kafka import Message
    from pyspark.sql import SparkSession

    from balance_service.engine.batch import KeyedUpdate, TaskBatch
    from balance_service.engine.dead_letters import DueLetters
    from balance_service.kafka.topics import Topics
    from balance_service.settings import Settings
    from balance_service.spark.decode import Decoder

log = structlog.get_logger(__name__)

# Spark's heap holds several copies of the records that it decodes together.
_MOST_BYTES = 8 << 20
# New events wait in the meantime.
_READ_SECONDS = 1.0
# Of records that are read without a query.
_MOST_RECORDS = 1_024
# Spark decodes so many within a tenth of a second, but the first ones of a start, and those of a busy machine, take
# longer. What delays any record must delay the harmless one too.
_DECODE_SECONDS, _HARMLESS_SECONDS = 20.0, 10.0
# Of the rows of a query that are decoded again, there may be 65,536.
_AGAIN_SECONDS = 60.0
_CANCEL_EVERY_SECONDS = 1.0
# Spark's times are microseconds in 64 bits.
_MOST_TIMESTAMP_MS = (2**63 - 1) // 1000
# The schema of Spark's Kafka source.
RECORDS = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        "partition": pa.int32(),
    }
)
# It has a key and no value, which no decoder can take amiss.
_HARMLESS = {"key": b"c", "value": None, "offset": -1, "timestamp": 0, "headers": None, "partition": 0}


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

    def trials(self, path: Path) -> Trials:
        """Args:
        path: of the file that remembers at which records Spark has failed.
        """
        ended = QueryEndedError("the JVM has ended")
        return Trials(path, self._decoded, self._decode_harmless, lambda: require_jvm(self._spark, ended))

    def batch(self, partition: int, position: int, due: DueLetters, path: Path) -> TaskBatch:
        """Returns the dead letters that are due as a batch for the task.

        Args:
            path: as for `trials`.

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
        for offset, own in zip(sorted(records), ask_together(self._own, sorted(records.items())), strict=True):
            if own.problem is None:
                rows.append(own.record)
            else:
                failed.append(replace(letters[offset], cause=own.problem.cause, detail=own.problem.detail))
        unknown = self._still_unknown(due, rows)
        failed += [
            replace(letters[offset], cause=SCHEMA_ID_UNKNOWN, detail=unknown_schema(schema_id))
            for offset, schema_id in unknown.items()
        ]
        rows = [row for row in rows if row["offset"] not in unknown]
        decoded, count = None, 0
        if rows:
            trial = self.trials(path).decoded(rows)
            count = len(trial.records)
            if trial.rows is not None:
                decoded = PartitionRows(trial.rows)
            else:
                failed.append(replace(letters[rows[0]["offset"]], cause=DECODER_FAILED, detail=trial.detail))
        if behind := rows[count:]:
            # The rest is tried in the next batch.
            end = behind[0]["offset"]
            tried = [offset for offset in tried if offset < end]
            failed = [letter for letter in failed if letter.offset < end]
        batch = redriven(decoded, tried, letters, position, due, has_states=self._has_states)
        updates = replace(batch.updates, dead_letters=(*batch.updates.dead_letters, *failed))
        return replace(batch, updates=updates)

    def _still_unknown(self, due: DueLetters, records: Sequence[Mapping[str, Any]]) -> dict[int, int | None]:
        """Returns the schemas that the registry still lacks, by offset. Needs no Spark job."""
        schema_ids = {record["offset"]: self._decoder.schema_id(record["value"]) for record in records}
        known = self._decoder.resolve({schema_id for schema_id in schema_ids.values() if schema_id is not None})
        failed_so = (letter.offset for letter in due.again if letter.cause == SCHEMA_ID_UNKNOWN)
        return {at: schema_ids[at] for at in failed_so if at in schema_ids and schema_ids[at] not in known}

    def read(self, partition: int, start: int) -> list[tuple[dict[str, Any] | None, DeadLetter]]:
        """Reads some records from an offset on without Spark; returns each in Spark's form and as a dead letter.

        A record that has no such form is None, and its dead letter has the cause; the other ones have none.

        Raises:
            RetriableError: the broker or the registry does not answer.
        """
        end = self._topics.offsets(self._source, [partition], committed=True)[partition]
        read = records_from(self._settings, self._source, partition, start, end, _MOST_RECORDS, _MOST_BYTES)
        found = [self._read(message) for message in read]
        schema_ids = (self._decoder.schema_id(record["value"]) for record, _ in found if record is not None)
        # Otherwise the rows of unknown schemas would be decoded elsewhere, all at once.
        self._decoder.resolve({schema_id for schema_id in schema_ids if schema_id is not None})
        return found

    def _read(self, message: Message) -> tuple[dict[str, Any] | None, DeadLetter]:
        letter = letter_of(message)
        try:
            record = row_of(letter.offset, message)
        except PoisonRecordError as error:
            return None, replace(letter, cause=error.cause, detail=error.detail)
        # Without a schema, the plan says so itself.
        with suppress(PoisonRecordError):
            record = self._decoder.framed(record)
        return record, letter

    def rows_schema(self) -> pa.Schema:
        """Returns the columns of decoded rows. Raises as `Trials.check`."""
        return self._decode_harmless().schema

    def known(self, records: pa.Table) -> pa.Table:
        """Returns those of some unresolved records whose schema the registry knows, with their frames.

        Raises:
            RetriableError: the registry does not answer.
        """
        named = ask_together(self._framed, records.filter(pc.is_null(records["schema_id"])).to_pylist())
        found = [own.record for own in named if own.problem is None]
        framed = [{**record, "schema_id": self._decoder.schema_id(record["value"])} for record in found]
        records = records.filter(pc.is_valid(records["schema_id"]))
        records = pa.concat_tables([records, pa.Table.from_pylist(framed, records.schema)])
        schema_ids = self._decoder.resolve(sorted(pc.unique(records["schema_id"]).to_pylist()))
        return records.filter(pc.is_in(records["schema_id"], pa.array(schema_ids, pa.int64())))

    def _own(self, read: tuple[int, Message]) -> _Framed:
        try:
            return self._framed(row_of(*read))
        except PoisonRecordError as error:
            return _Framed({}, error)

    def _framed(self, record: dict[str, Any]) -> _Framed:
        try:
            return _Framed(self._decoder.framed(record))
        except PoisonRecordError as error:
            return _Framed(record, error)

    def resolved(self, partition: int, rows: pa.Table, records: pa.Table) -> pa.Table:
        """Returns the rows of a batch, with those of some of its records decoded again."""
        known = records.append_column("partition", pa.repeat(pa.scalar(partition, pa.int32()), len(records)))
        again = self._rows(known.select(RECORDS.names).cast(RECORDS), _AGAIN_SECONDS).cast(rows.schema)
        others = rows.filter(pc.invert(pc.is_in(rows["offset"], records["offset"].combine_chunks())))
        return pa.concat_tables([others, again]).sort_by("offset")

    def _decoded(self, records: Sequence[Mapping[str, Any]]) -> pa.Table:
        try:
            return self._rows(pa.Table.from_pylist(records, RECORDS), _DECODE_SECONDS).sort_by("offset")
        except QueryEndedError as error:
            # The end of the JVM is no record's fault.
            require_jvm(self._spark, error)
            raise

    def _decode_harmless(self) -> pa.Table:
        try:
            return self._rows(pa.Table.from_pylist([_HARMLESS], RECORDS), _HARMLESS_SECONDS)
        except QueryEndedError as error:
            require_jvm(self._spark, error)
            raise

    def _rows(self, records: pa.Table, seconds: float) -> pa.Table:
        try:
            frame: Any = self._spark.createDataFrame(records)
            with self._within(seconds):
                rows = self._decoder.updates(frame).toArrow()
        except Exception as error:  # Spark and py4j raise many types of errors.
            raise QueryEndedError(in_short(error)) from error
        return rows.drop_columns(["partition"])

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """Cancels the jobs of this thread after some seconds. They fail at once, even if a thread of Spark hangs."""
        context, group = self._spark.sparkContext, f"decode-{uuid4()}"
        is_late, has_ended = threading.Event(), threading.Event()

        def cancel() -> None:
            is_late.set()
            # The job may begin only after the first attempt.
            while not has_ended.is_set():
                # The sampler notices a JVM that does not answer.
                with suppress(Exception):
                    context.cancelJobGroup(group)
                has_ended.wait(_CANCEL_EVERY_SECONDS)

        context.setJobGroup(group, "records are decoded again", interruptOnCancel=True)
        timer = threading.Timer(seconds, cancel)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if is_late.is_set():
                raise QueryEndedError(f"Spark did not decode it within {seconds:.0f} s") from error
            raise
        finally:
            has_ended.set()
            timer.cancel()


def row_of(offset: int, message: Message) -> dict[str, Any]:
    """Returns a record in Spark's form. Raises PoisonRecordError if it has none."""
    headers, timestamp_ms = headers_of(message), message.timestamp()[1]
    if abs(timestamp_ms) > _MOST_TIMESTAMP_MS:
        raise PoisonRecordError("time-out-of-range", f"the record's timestamp, {timestamp_ms} ms, is beyond Spark's")
    return {
        "key": message.key(),
        "value": message.value(),
        "offset": offset,
        "timestamp": timestamp_ms * 1000,
        "headers": [{"key": name, "value": value} for name, value in headers] or None,
        "partition": message.partition(),
    }
