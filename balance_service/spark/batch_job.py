"""A batch job that folds a source from its first records into files for one generation of a read model.

 1. Spark's Kafka source reads `[begins, ends)` of each partition in splits, and the service's plan decodes them. A task
    deals the rows of its split out by shares of keys (`spark.batch_split`), and marks the split as read.
 2. The rows of each share come together, split after split, and a task folds them as an owner would, into files
    (`spark.batch_share`).
 3. The driver checks that each record that was read was folded once, and writes the manifest, last.

Nothing is written but the folder: a job that is killed leaves one without a manifest, and the next one begins anew.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import structlog
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import SchemaRegistry
from balance_service.bulk.accepting import made_here
from balance_service.bulk.folder import RECORDS, Folder, stream_time_of
from balance_service.bulk.manifest import Manifest, PartitionFiles
from balance_service.engine.assembly import processor_of
from balance_service.engine.dead_letter import DECODER_FAILED
from balance_service.engine.inheritance import last_frames
from balance_service.errors import ConfigurationError, FatalError, PoisonRecordError, RetriableError
from balance_service.kafka.clients import producer_config
from balance_service.kafka.log_reader import records_at
from balance_service.kafka.topics import Topics
from balance_service.model.events import OnFailure
from balance_service.model.versions import declaration_of
from balance_service.spark.batch_plan import Answers, Asked, Plan, UnresolvedError, code_of, id_named, told
from balance_service.spark.batch_session import check_cluster, map_in_arrow, start_batch_spark
from balance_service.spark.batch_share import FOLDED, FoldedShare, folded
from balance_service.spark.batch_split import DEALT, SHARE, dealt
from balance_service.spark.columns import stored_key
from balance_service.spark.combine import NOTE
from balance_service.spark.decode import Decoder
from balance_service.spark.redrive import letter_of, row_of
from balance_service.spark.row_query import in_short
from balance_service.spark.session import source_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession

    from balance_service.bulk.folder import Split
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.records import DeadLetter
    from balance_service.kafka.topics import Topic
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.process.scratch import Scratch
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

# A worker has the rows of a split in memory.
_SPLIT_RECORDS = 100_000
# A worker has the markers and the index of one share in memory, and its states in a store.
_SHARE_EVENTS = 1_000_000
_MOST_SHARES = 100_000
_MOST_FAILING = 100
_MOST_RUNS = 100
_LOOK_SECONDS, _IDLE_SECONDS = 0.5, 60.0
# As `engine.processor.Tolerance` counts the failures of a partition.
_MOST_FAILURES, _OF_EVENTS = 20, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """Attributes:
    stage: the last stage of the read model, in the generation that is built.
    source: its source, and `former_changelog` the changelog of the generation that serves, with whose configuration
        that of the new one is created.
    begins, ends: the offsets to read, by partition.
    letters: by partition and offset, the dead letters to take over: see `spark.batch_start`.
    master, conf: as `check_cluster` takes them.
    split_records: the most records that one task reads.
    """

    settings: Settings
    read_model: ReadModel
    stage: Stage
    source: Topic
    former_changelog: str
    begins: Mapping[int, int]
    ends: Mapping[int, int]
    letters: Mapping[int, Mapping[int, Letter]]
    master: str
    files: str
    conf: Mapping[str, str] = field(default_factory=dict)
    split_records: int = _SPLIT_RECORDS

    @property
    def folder(self) -> Folder:
        return Folder.of(self.files, self.settings.application_id, self.stage.owner, self.stage.generation)

    @property
    def offsets(self) -> int:
        """How many offsets are read."""
        return sum(end - self.begins[p] for p, end in self.ends.items())


def run(job: BatchJob, scratch: Scratch, progress: Callable[[int, int], None]) -> Manifest:
    """Runs a job, and returns the manifest that it has written.

    Args:
        scratch: for temporary files of the driver.
        progress: called from another thread with the offsets that are done, and with their number; a share of the
            tasks that have ended, as Spark counts them.

    Raises:
        ConfigurationError: a setting, the master or the folder cannot be used, or the read model's own code fails.
        RetriableError: the broker, the registry or the file system does not respond.
        FatalError: Spark fails; the message says at what.
    """
    check_cluster(job.master, job.conf)
    if job.stage.compacted:
        raise ConfigurationError(
            f"the source of '{job.stage.owner}' is compacted, and a batch job does not know until when it has seen its "
            "deletions; run the rebuild without --master"
        )
    folder = job.folder
    folder.delete()
    folder.check()
    with closing(OwnSchemas(SchemaRegistry.from_settings(job.settings))) as registry:
        spark = start_batch_spark(job.settings, scratch, job.master, job.conf)
        try:
            return _Driver(job, spark, registry, progress).run()
        finally:
            spark.stop()


class _Driver:
    def __init__(
        self, job: BatchJob, spark: SparkSession, schemas: OwnSchemas, progress: Callable[[int, int], None]
    ) -> None:
        self._job = job
        self._spark = spark
        self._schemas = schemas
        self._progress = progress
        self._topics = Topics(job.settings)
        self._settle()
        self._decoder = Decoder(spark, job.read_model, job.stage, schemas)
        self._frames: dict[bytes, bytes] = {}
        self._texts: Mapping[bytes, bytes] = {}

    def run(self) -> Manifest:
        job = self._job
        plan = self._plan()
        self._decoder.resolve_all()
        for _ in range(_MOST_RUNS):
            try:
                return self._completed(plan, self._folded(plan))
            except UnresolvedError as error:
                plan = replace(plan, unknown=plan.unknown | self._resolved(error.names))
            except _SparkFailedError as error:
                failing = self._found_failing(plan, str(error))
                plan = replace(plan, failing=failing)
            job.folder.delete()
        raise FatalError(f"Spark has failed {_MOST_RUNS} times at records of {job.source.name}")

    def _settle(self) -> None:
        """Keeps to the form in which the application's records name their schemas."""
        job = self._job
        frames = last_frames(job.settings, self._topics, job.former_changelog, [*job.ends])
        any(self._schemas.settle(frame, job.former_changelog) for frame in frames.values())
        if self._schemas.has_fingerprints and job.stage.reads_rekeyed:
            raise ConfigurationError(
                f"the read model '{job.stage.owner}' reads re-keyed records, and without a schema registry a batch job "
                "cannot read these; run the rebuild without --master"
            )

    def _plan(self) -> Plan:
        job, settings = self._job, self._job.settings
        stage, registry = job.stage, self._schemas.of_producers

        def config(name: str) -> Mapping[str, str]:
            return self._topics.config(job.former_changelog if name == stage.changelog else name)

        def found(name: str) -> Topic:
            topic = job.source if name == job.source.name else self._topics.find(name)
            if topic is None:
                raise ConfigurationError(f"topic '{name}' does not exist: start an instance with the model first")
            return topic

        asked = Asked(registry, lambda name: found(name).partitions, lambda name: found(name).topic_id, config)
        answers = Answers(
            largest_bytes=int(str(producer_config(settings)["message.max.bytes"])),
            retry_every_ms=int(settings.retry_every_seconds * 1000),
            idempotency_window_ms=int(settings.idempotency_window_seconds * 1000),
            asked=asked,
            is_set=registry.is_set,
            has_fingerprints=self._schemas.has_fingerprints,
        )
        services = answers.services()
        processor_of(stage, job.read_model, services)
        self._texts = services.schemas.records(stage.changelog)
        return Plan(
            stage=stage,
            read_model=job.read_model,
            code=code_of(job.read_model),
            answers=replace(answers, asked=None),
            folder=job.folder,
            source_topic_id=job.source.topic_id,
            partitioner=stage.partitioner,
            begins=job.begins,
            ends=job.ends,
            letters=job.letters,
            shares=self._shares(),
        )

    def _shares(self) -> int:
        """Returns how many shares each partition has: so many that they fit into memory and occupy all cores."""
        job, partitions = self._job, max(1, len(self._job.ends))
        largest = max((end - job.begins[p] for p, end in job.ends.items()), default=0)
        cores = int(self._spark.sparkContext.defaultParallelism)
        wanted = max(-(-largest // _SHARE_EVENTS), -(-2 * cores // partitions))
        return max(1, min(wanted, _MOST_SHARES // partitions))

    def _rows(self, plan: Plan, begins: Mapping[int, int], ends: Mapping[int, int]) -> DataFrame | None:
        """Returns `Decoder.updates` of the records in these ranges; None if the plan reads none of them.

        Spark's Kafka source reads one range of a partition, so the ranges between records at which Spark fails are read
        by further sources. A condition would not leave these records out: the source fails before Spark evaluates one.
        """
        ranges = {partition: plan.readable(partition, begin, ends[partition]) for partition, begin in begins.items()}
        sources = [
            self._read({p: of[number] for p, of in ranges.items() if number < len(of)})
            for number in range(max(map(len, ranges.values()), default=0))
        ]
        if not sources:
            return None
        records = reduce(lambda some, more: some.union(more), sources)
        # Records that name their schema in a header get their frames.
        return self._decoder.updates(self._decoder.framed_records(records, self._frames))

    def _read(self, ranges: Mapping[int, tuple[int, int]]) -> DataFrame:
        """Returns one range of each partition, as Kafka's source gives the records."""
        job = self._job
        topic = job.source.name
        options = {
            **source_options(job.settings, topic, {partition: begin for partition, (begin, _) in ranges.items()}),
            "endingOffsets": json.dumps({topic: {str(partition): end for partition, (_, end) in ranges.items()}}),
            "maxRecordsPerPartition": str(job.split_records),
        }
        return self._spark.read.format("kafka").options(**options).load()

    def _folded(self, plan: Plan) -> dict[int, FoldedShare]:
        job = self._job
        read = {p: end for p, end in job.ends.items() if end > job.begins[p]}
        shares = len(job.ends) * plan.shares
        # A share without events has a result too.
        begun = self._spark.range(shares).select(
            F.col("id").cast("int").alias("share"),
            F.lit(-1).cast("bigint").alias("first"),
            F.lit(None).cast("binary").alias("rows"),
        )
        all_rows = begun
        if (rows := self._rows(plan, {p: job.begins[p] for p in read}, read)) is not None:
            rows = rows.withColumn(SHARE, self._share(plan))
            all_rows = begun.unionByName(map_in_arrow(rows, partial(dealt, plan), DEALT))
        together = all_rows.repartitionById(shares, F.col("share")).sortWithinPartitions("first")
        results = self._collected(map_in_arrow(together, partial(folded, plan), FOLDED))
        found = {share: FoldedShare.of(json.loads(done)) for share, done in results}
        if sorted(found) != [*range(shares)] or len(results) != shares:
            raise FatalError(f"Spark returned {len(results)} results of {shares} shares")
        return found

    def _share(self, plan: Plan) -> Any:
        """Returns the share of a row's key, as `Plan.share_of`."""
        record_key = F.get(F.col(NOTE), F.lit(0))["record_key"]
        nothing = F.lit(None).cast("binary")
        key = F.coalesce(F.col("key"), stored_key(plan.stage, record_key, nothing, nothing), F.lit(bytearray()))
        return F.shiftright(F.crc32(key) * F.lit(plan.shares).cast("bigint"), 32).cast("int")

    def _collected(self, frame: DataFrame) -> list[tuple[int, str]]:
        with self._watched():
            try:
                return [(row[0], row[1]) for row in frame.collect()]
            except Exception as error:  # Spark and py4j raise many types of errors.
                if (said := told(error)) is not None:
                    raise said from error
                raise _SparkFailedError(in_short(error)) from error

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Tells the progress of the jobs that this thread runs in its block."""
        context, group, has_ended = self._spark.sparkContext, f"rebuild-{uuid4()}", threading.Event()
        total = self._job.offsets

        def look() -> None:
            tracker, most, worked_at = context.statusTracker(), 0, time.monotonic()
            while not has_ended.wait(_LOOK_SECONDS):
                jobs = filter(None, map(tracker.getJobInfo, tracker.getJobIdsForGroup(group)))
                stages = [*filter(None, (tracker.getStageInfo(number) for one in jobs for number in one.stageIds))]
                tasks, done = sum(one.numTasks for one in stages), sum(one.numCompletedTasks for one in stages)
                most = max(most, total * done // tasks if tasks else 0)
                self._progress(most, total)
                now = time.monotonic()
                if done == tasks or any(one.numActiveTasks for one in stages):
                    worked_at = now
                elif now - worked_at > _IDLE_SECONDS:
                    worked_at = now
                    # Spark says so on a level that is off.
                    log.warning(
                        "Spark runs no task of the job: the cluster has no executor for it; make room, or ask for less "
                        "by --conf spark.executor.memory, spark.executor.cores",
                        seconds=round(_IDLE_SECONDS),
                    )

        context.setJobGroup(group, f"{self._job.stage.name} is rebuilt", interruptOnCancel=True)
        looking = threading.Thread(target=look, name="batch-progress", daemon=True)
        looking.start()
        try:
            yield
        finally:
            has_ended.set()
            looking.join()

    def _resolved(self, names: list[str]) -> frozenset[str]:
        """Looks schemas up; returns the names of those that the registry does not know."""
        self._decoder.ask_anew()
        ids = {name: schema_id for name in names if (schema_id := id_named(name)) is not None}
        known = self._decoder.resolve(ids.values())
        unknown = {name for name, schema_id in ids.items() if schema_id not in known}
        for name in names:
            header = b"" if name in ids else bytes.fromhex(name)
            if header and (frame := self._decoder.frame_header_of(header)) is not None:
                self._frames[header] = frame
            elif header:
                unknown.add(name)
        return frozenset(unknown)

    def _found_failing(self, plan: Plan, said: str) -> Mapping[int, Mapping[int, DeadLetter]]:
        """Returns the records at which Spark fails, with those that are known: halves ranges that fail.

        Raises FatalError: Spark fails at none of them, or at too many.
        """
        job = self._job
        log.warning("Spark failed; the records at which it does are looked for", error=said)
        found = {p: dict(of) for p, of in plan.failing.items()}
        known = sum(map(len, found.values()))
        ranges = [(p, job.begins[p], end) for p, end in job.ends.items() if end > job.begins[p]]
        while ranges:
            partition, begin, end = ranges.pop()
            error = self._error_in(plan, partition, begin, end)
            if error is None:
                continue
            if end - begin > 1:
                middle = (begin + end) // 2
                ranges += [(partition, middle, end), (partition, begin, middle)]
                continue
            # The loss of an executor is no record's fault, and does not happen twice at one record.
            if (error := self._error_in(plan, partition, begin, end)) is None:
                continue
            _, records = records_at(job.settings, job.source.name, partition, [begin])
            if begin in records:
                found.setdefault(partition, {})[begin] = _failed(records[begin], error)
            if sum(map(len, found.values())) > _MOST_FAILING:
                raise FatalError(f"Spark fails at more than {_MOST_FAILING} records of {job.source.name}: {error}")
        if sum(map(len, found.values())) == known:
            raise FatalError(f"Spark failed, and at no single record: {said}")
        return found

    def _error_in(self, plan: Plan, partition: int, begin: int, end: int) -> str | None:
        """Returns what Spark says when it decodes a range of records; None if it can."""
        try:
            rows = self._rows(plan, {partition: begin}, {partition: end})
            if rows is not None:
                rows.write.format("noop").mode("overwrite").save()
        except Exception as error:  # Spark and py4j raise many types of errors.
            return in_short(error)
        return None

    def _completed(self, plan: Plan, results: Mapping[int, FoldedShare]) -> Manifest:
        """Checks the results, and writes the manifest."""
        job, stage = self._job, self._job.stage
        declared = declaration_of(job.read_model)
        processor = plan.processor()
        partitions = []
        for partition, end in sorted(job.ends.items()):
            shares = [results[partition * plan.shares + share] for share in range(plan.shares)]
            splits = job.folder.splits(partition)
            self._check(plan, partition, splits, shares)
            letters = Counter[str]()
            for one in shares:
                letters.update(one.letters)
            files = [file for one in shares for file in one.files]
            replayed = {offset for one in shares for offset in one.replayed}
            rest = [letter for offset, letter in plan.applied(partition).items() if offset not in replayed]
            changes = processor.letters.carry_over(rest)
            letters.update(changes.counted)
            # Without a registry, each partition has the texts of its schemas.
            records = sorted([*self._texts.items(), *((key, of) for key, of in changes.records if of is not None)])
            if records:
                keys, values = zip(*records, strict=True)
                table = pa.table([pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=RECORDS)
                files += job.folder.write(partition, f"letters-{uuid4().hex}", [table])
            partitions.append(
                PartitionFiles(
                    partition=partition,
                    begins=job.begins[partition],
                    position=end,
                    events=sum(split.records for split in splits) + len(plan.failing.get(partition, ())),
                    stream_time_ms=stream_time_of(splits),
                    keys=sum(one.keys for one in shares),
                    letters=dict(letters),
                    files=tuple(files),
                )
            )
        manifest = Manifest(
            application_id=job.settings.application_id,
            model=stage.owner,
            generation=stage.generation,
            version=declared.version,
            fingerprint=declared.fingerprint,
            owner=stage.mark,
            source=stage.source,
            source_topic_id=job.source.topic_id,
            partitioner=plan.partitioner,
            state_schema_id=processor.frames.codec.schema_id,
            made_with=made_here(job.settings),
            partitions=tuple(partitions),
        )
        job.folder.write_manifest(manifest)
        return manifest

    def _check(self, plan: Plan, partition: int, splits: list[Split], shares: list[FoldedShare]) -> None:
        """Checks that each row that was dealt out was folded once, and the failures of the read model's own code."""
        found = len(splits), stream_time_of(splits)
        if any((one.splits, one.stream_time_ms) != found for one in shares):
            raise FatalError(
                f"not all executors have found the {len(splits)} splits of partition {partition}: the folder must show "
                "each file once it is written, to all of them"
            )
        dealt_out = sum(split.kept for split in splits)
        if (done := sum(one.rows for one in shares)) != dealt_out:
            raise FatalError(f"of partition {partition}, {dealt_out} records were read, and {done} were folded")
        if plan.read_model.on_failure is not OnFailure.DEAD_LETTER:
            return
        failed = sorted(offset for one in shares for offset in one.own_code_failed)
        for first, last in zip(failed, failed[_MOST_FAILURES:], strict=False):
            if last - first < _OF_EVENTS:
                raise ConfigurationError(
                    f"the code of the read model {plan.read_model.name} fails at offset {last} of "
                    f"{plan.stage.source}:{partition}, as at {_MOST_FAILURES} of the {_OF_EVENTS:,} records before; "
                    "correct it, and run the rebuild again"
                )


def _failed(message: Message, error: str) -> DeadLetter:
    """Returns a record at which Spark fails as the dead letter that an owner would make of it."""
    letter = letter_of(message)
    try:
        row_of(letter.offset, message)
    except PoisonRecordError as poison:
        return replace(letter, cause=poison.cause, detail=poison.detail)
    return replace(letter, cause=DECODER_FAILED, detail=error)


class _SparkFailedError(RetriableError):
    """Spark failed, for a reason that no worker told."""
