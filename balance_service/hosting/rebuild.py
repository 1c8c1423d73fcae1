"""Rebuilds a read model of a stopped application: replays the source of its last stage through the same engine.

Deletes only the changelogs of the stage's generations, their local stores and the directory of instances; the source's
records replace all of them. An interrupted rebuild leaves a read model that lags, never a wrong one: run it again, or
start the service, which continues from there.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import structlog
from confluent_kafka import Consumer, KafkaException, TopicPartition

from balance_service.avro.codec import AvroCodec
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.cluster.generations import GenerationLog
from balance_service.cluster.membership import guard_config, refusal
from balance_service.engine.dead_letters import Letters, as_sender_has, letter_offset
from balance_service.engine.decisions import DecisionLog
from balance_service.engine.opening import check_owner, last_position, open_writer, was_purged, was_repartitioned
from balance_service.engine.outputs import sent_up_to
from balance_service.engine.records import MISPLACED, POSITION_KEY, SILENT, Position, TaskId
from balance_service.engine.state_directory import StateDirectory
from balance_service.engine.task import TaskState
from balance_service.errors import BalanceServiceError, ConfigurationError, FatalError, RetriableError, TaskHaltedError
from balance_service.hosting.engine import Engine, Patience
from balance_service.kafka.clients import by_remedy, new_client
from balance_service.kafka.log_reader import reader_to_end
from balance_service.kafka.signing import WRONGLY_SIGNED, ControlRecords
from balance_service.kafka.topic_specs import prepare_changelog, prepare_topics
from balance_service.kafka.topics import Topics
from balance_service.model.placing import stages_of
from balance_service.model.versions import declaration_of
from balance_service.observability.metrics import Metrics
from balance_service.process.runtime import thread_failures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from balance_service.engine.changelog_writer import ChangelogWriter
    from balance_service.engine.commit import Committed
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.dead_letters import LetterChanges
    from balance_service.engine.tasks import Tasks
    from balance_service.kafka.topics import Topic
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

_LOOK_EVERY_SECONDS = 0.2
_JOIN_SECONDS = 60.0
# The exclusive member does not poll while it reads the changelog, which may take long. librdkafka allows a day at most.
_POLL_INTERVAL_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The totals of a rebuild, and the seconds that the replay took."""

    done: Committed
    seconds: float


def rebuild(settings: Settings, read_model: ReadModel, progress: Callable[[int, int], None]) -> Rebuilt:
    """Recreates the changelog and replays the source up to its present end.

    Args:
        progress: called with the number of source offsets replayed so far, and with their total.

    Raises:
        ConfigurationError: the model keeps no states, another member is in the group, the source was repartitioned, or
            records that the last stage reads have been purged.
        RetriableError: a broker or the registry does not respond.
        FatalError: a thread failed, for example because Spark's JVM ended.
    """
    if not read_model.has_states():
        raise ConfigurationError(
            f"the read model '{read_model.name}' keeps no states, so there is nothing to rebuild; what it sent stays"
        )
    topics, stages = Topics(settings), stages_of(read_model, settings)
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        generations = GenerationLog(settings, topics, registry).of(read_model.name)
    stage = stages[-1].of_generation(generations.serving)
    others = [stage.of_generation(number) for number in generations.live if number != generations.serving]
    source = prepare_topics(topics, settings, [*stages[:-1], stage])[stage.source]
    _refuse_repartitioned(topics, stage, source)
    _refuse_purged(topics, stage, source)
    with ExclusiveGroup(settings, topics, source) as group, closing(SchemaRegistry.from_settings(settings)) as registry:
        log.warning(
            f"generation {generations.serving} of '{read_model.name}', which serves, is deleted and folded again"
            + "".join(f"; generation {other.generation}, which does not serve, is dropped" for other in others)
        )
        carryover = Carryover(settings, topics, registry, stage, source, others, keeps_order=read_model.keeps_order)
        topics.delete(stage.changelog)
        # Epochs restart with the changelog, but the directory still has the higher epochs of killed instances.
        topics.delete(settings.application_servers_topic)
        carryover.write(prepare_changelog(topics, stage, source))
        declaration = declaration_of(read_model)
        GenerationLog(settings, topics, registry).write(read_model.name, lambda now: now.replaced(declaration))
        for other in others:
            # In this order: once the topic is gone, none looks for its subjects.
            registry.forget(other.changelog)
            topics.delete(other.changelog)
        group.check()
    metrics = Metrics()
    patience = Patience(threading.Event(), lambda _reason: None)
    with thread_failures(lambda: None) as failures:
        directory = StateDirectory(settings.state_dir, settings.application_id)
        # Earlier stages do not run: the records that they passed on are kept.
        engine = Engine(settings, directory, stages[-1:], [read_model], metrics, patience)
        try:
            seconds = replay(engine, engine.stages[stage.name], patience, progress, failures)
        finally:
            engine.stop()
    # Read after the stop: a commit is counted a moment after its position becomes visible.
    return Rebuilt(metrics.totals(), seconds)


def _refuse_repartitioned(topics: Topics, stage: Stage, source: Topic) -> None:
    changelog = topics.find(stage.changelog)
    if changelog is not None and changelog.partitions != source.partitions:
        raise ConfigurationError(was_repartitioned(source.name, changelog.partitions, source.partitions))


def _refuse_purged(topics: Topics, stage: Stage, source: Topic) -> None:
    starts = topics.offsets(source.name, range(source.partitions), earliest=True) if stage.reads_rekeyed else {}
    for partition, start in starts.items():
        if start > 0:
            raise ConfigurationError(was_purged(source.name, partition, start))


def replay(
    engine: Engine,
    tasks: Tasks,
    patience: Patience,
    progress: Callable[[int, int], None],
    failures: Sequence[BaseException],
) -> float:
    """Folds all source records; returns how many seconds that took. `failures` are those of the process's threads."""
    source = tasks.hosted.source
    ends = patience.until_up(lambda: engine.topics.offsets(source.name, range(source.partitions)))
    total = sum(ends.values())
    engine.start()
    began = time.monotonic()
    membership = engine.memberships.of[source.name]
    while True:
        time.sleep(_LOOK_EVERY_SECONDS)
        if failures:
            raise FatalError(f"the rebuild could not go on: {failures[0]}; run it again")
        if membership.joined.is_set() and membership.partitions != ends.keys():
            # The group may also have expelled this process, for example while the broker was away.
            if patience.until_up(engine.topics.group_members) > 1:
                raise ConfigurationError("another instance has joined the group: stop it, then rebuild again")
            continue
        positions = {task.task_id.partition: task.position for task in tasks.all()}
        for task in tasks.snapshots():
            if task.state == TaskState.HALTED.value:
                raise ConfigurationError(f"{task.task_id} is halted: {task.reason}")
        progress(sum(min(max(0, positions.get(p, 0)), end) for p, end in ends.items()), total)
        if positions.keys() == ends.keys() and all(positions[p] >= end for p, end in ends.items()):
            return time.monotonic() - began


class Carryover:
    """The state of a stage that a rebuild keeps, because the source does not contain it.

    It consists of the offset up to which records were sent, so that they are not sent twice, and of the dead letters
    with the decisions about them, so that discarded records stay discarded and no dead letter is written twice.
    """

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        registry: SchemaRegistry,
        stage: Stage,
        source: Topic,
        others: Sequence[Stage],
        *,
        keeps_order: bool,
    ) -> None:
        """Reads it from the changelogs and the decisions. Raises RetriableError if broker or registry do not respond.

        Args:
            stage: of the generation that serves.
            others: of the other ones. One of them may have sent until now, if a switch had not ended.
        """
        self._settings = settings
        self._topics = topics
        self._stage = stage
        self._source = source
        self._others = others
        position, letter, decision = (load_schema(name) for name in ("Position", "Letter", "DeadLetterDecision"))
        self._codec = AvroCodec(registry, subject_of(stage.changelog, position), position)
        codec = AvroCodec(registry, subject_of(stage.changelog, letter), letter)
        self._letters = Letters(codec=codec, every_ms=0, keeps_order=keeps_order)
        decisions_topic = settings.dead_letter_decisions_topic
        self._decisions = DecisionLog(
            records=ControlRecords.of(settings, decisions_topic),
            codec=AvroCodec(registry, subject_of(decisions_topic, decision), decision),
            stage=stage.identity,
            source_topic_id=source.topic_id,
        )
        for one in (stage, *others):
            self._check_owner(one)
        self._abort_open_transactions()
        self._up_to: dict[int, int] = {}
        self._partitioners: dict[int, Partitioner] = {}
        self._known: dict[int, dict[int, Letter]] = defaultdict(dict)
        self._read()

    def write(self, changelog: Topic) -> None:
        """Writes it as the first records of each partition of the new changelog, one transaction per partition.

        If the rebuild is interrupted before that, the next one finds what was sent in the topics that it was sent to,
        and what was decided in the topic of decisions. It writes other dead letters once more.

        Raises:
            BalanceServiceError: a write was rejected or not confirmed.
        """
        partitions = range(self._source.partitions)
        starts = self._topics.offsets(self._source.name, partitions, earliest=True)
        for partition in partitions:
            letters = self._letters.carry_over(self._kept(partition, starts[partition]))
            position = self._first_position(partition, starts[partition], changelog, letters)
            with self._fenced(partition, self._stage) as writer:
                writer.commit(letters.records, (), self._codec.encode(position.record()), 0)

    def _kept(self, partition: int, start: int) -> Iterator[Letter]:
        """Yields the dead letters of a partition, whose source begins at `start`.

        By another partitioner, a key that was misplaced may be in its place, so its records are replayed.
        """
        is_placed_anew = self._partitioners.get(partition, self._stage.partitioner) != self._stage.partitioner
        for letter in self._known[partition].values():
            if is_placed_anew and letter.cause == MISPLACED and letter.status.is_open and letter.offset >= start:
                yield letter.to_be_replayed(self._letters.now_ms())
            else:
                yield letter

    def _abort_open_transactions(self) -> None:
        """Fences writers that were cut off: a transaction that commits later would send its records a second time."""
        for stage in (*self._others, self._stage):
            for partition in range(self._source.partitions):
                with self._fenced(partition, stage):
                    pass

    def _check_owner(self, stage: Stage) -> None:
        """Checks that a changelog is not one of another application. Raises ConfigurationError."""
        if (changelog := self._topics.find(stage.changelog)) is None:
            return
        try:
            for number in range(changelog.partitions):
                check_owner(stage, last_position(self._settings, self._topics, self._codec, changelog.name, number))
        except TaskHaltedError as error:
            raise ConfigurationError(str(error)) from error

    @contextmanager
    def _fenced(self, partition: int, stage: Stage) -> Iterator[ChangelogWriter]:
        task_id = TaskId(stage.name, partition)
        with closing(open_writer(task_id, self._settings, stage, self._topics, self._source)) as writer:
            writer.fence()
            yield writer

    def _first_position(self, partition: int, start: int, changelog: Topic, letters: LetterChanges) -> Position:
        # If finite retention is not allowed, the task starts at 0 and reports which records are gone.
        return Position(
            start if self._settings.allow_finite_retention else 0,
            0,
            self._source.topic_id,
            changelog_topic_id=changelog.topic_id,
            source=f"{self._source.name}:{partition}",
            emitted_up_to=self._up_to.get(partition, 0) if self._stage.outputs else 0,
            letters=letters.counted,
            partitioner=self._stage.partitioner,
            owner=self._stage.mark,
        )

    def _read(self) -> None:
        partitions = range(self._source.partitions)
        now_ms = self._letters.now_ms()
        # DecisionLog stay valid after their letter has expired from the changelog.
        self._known |= self._decisions.decided_letters(self._settings, self._topics, partitions, now_ms)
        records = self._decisions.records
        records.require_secret()
        if unknown := [at for at, one in sorted(records.refused.items()) if one.reason == WRONGLY_SIGNED]:
            raise ConfigurationError(records.problem(unknown[0]))
        positions, letters = self._read_changelog(self._stage)
        of_others = [self._read_changelog(other) for other in self._others]
        for partition in partitions:
            position = positions.get(partition)
            sender = None
            if position is None or position.emitted_up_to == SILENT:
                of_senders = (
                    (at[partition], found[partition])
                    for at, found in of_others
                    if partition in at and at[partition].emitted_up_to != SILENT
                )
                sender = next(of_senders, None)
            # Nothing was sent for the records of a recreated source.
            if position is not None and position.source_topic_id == self._source.topic_id:
                self._up_to[partition] = max(position.offset, position.emitted_up_to)
                self._partitioners[partition] = position.partitioner
                self._known[partition] |= letters[partition]
            # An earlier rebuild may have been interrupted after it deleted the changelog; a silent task sent nothing.
            is_unknown = position is None or position.emitted_up_to == SILENT
            if sender is not None and sender[0].source_topic_id == self._source.topic_id:
                sent, theirs = sender
                read, now_ms = 0 if position is None else position.offset, self._letters.now_ms()
                self._known[partition] = letters_after_switch(self._known[partition], theirs, read, sent.offset, now_ms)
                self._up_to[partition] = max(sent.offset, sent.emitted_up_to)
                self._partitioners.setdefault(partition, sent.partitioner)
            elif is_unknown and self._stage.outputs:
                self._up_to[partition] = sent_up_to(self._settings, self._topics, self._stage, self._source, partition)

    def _read_changelog(self, stage: Stage) -> tuple[Mapping[int, Position], Mapping[int, Mapping[int, Letter]]]:
        """Returns the position, and the letters by offset, of each partition."""
        positions: dict[int, Position] = {}
        letters: dict[int, dict[int, Letter]] = defaultdict(dict)
        changelog = self._topics.find(stage.changelog)
        if changelog is None:
            return positions, letters
        with reader_to_end(self._settings, self._topics, changelog) as reader:
            for message in reader:
                key, partition, value = message.key() or b"", message.partition(), message.value()
                if partition is None:
                    continue
                if key == POSITION_KEY and value is not None:
                    positions[partition] = Position.of(self._codec.decode(value))
                elif (offset := letter_offset(key)) is not None:
                    letters[partition].pop(offset, None)
                    if value is not None:
                        letters[partition][offset] = self._letters.decode(offset, value)
        return positions, letters


def letters_after_switch(
    ours: Mapping[int, Letter], theirs: Mapping[int, Letter], read: int, sent: int, now_ms: int
) -> dict[int, Letter]:
    """Returns the dead letters that a silent generation would have if it had begun to send.

    Args:
        theirs: those of the generation that sent.
        read: the end of the records that the silent generation has read.
        sent: the end of the records that the other one has read. What lies behind has come into no topic yet.
    """
    known = {at: letter for at, letter in ours.items() if at < sent or not letter.status.is_open}
    known |= {at: letter for at, letter in theirs.items() if at >= read}
    still_open = {at: letter for at, letter in known.items() if at < min(read, sent) and letter.status.is_open}
    return known | as_sender_has(still_open, theirs, now_ms)


class ExclusiveGroup:
    """Membership in the guard group as its only member, so that no instance runs during a rebuild.

    For one thread. Raises, when entered:
        ConfigurationError: another member is in the group, or the group rejects this one.
        RetriableError: the broker does not respond, or the group does not admit this process in time.
    """

    def __init__(self, settings: Settings, topics: Topics, source: Topic, poll_ms: int = _POLL_INTERVAL_MS) -> None:
        """Args:
        poll_ms: how long the member may go without a poll before the group expels it.
        """
        self._settings = settings
        self._topics = topics
        self._source = source
        self._is_member = self._was_revoked = False
        self._consumer = new_client(Consumer, {**guard_config(settings), "max.poll.interval.ms": poll_ms})

    def __enter__(self) -> Self:
        try:
            self._consumer.subscribe([self._source.name], on_assign=self._on_assign, on_revoke=self._on_revoke)
            deadline = time.monotonic() + _JOIN_SECONDS
            while not self._is_member:
                if self._topics.group_members() > 1 or time.monotonic() > deadline:
                    self._check_others()
                    raise RetriableError("the group did not admit this process in time; try again")
                self._poll(_LOOK_EVERY_SECONDS)
            self._was_revoked = False
            self._check_others()
        except KafkaException as error:
            self._consumer.close()
            raise by_remedy(error, "joining the group") from error
        except BalanceServiceError:
            self._consumer.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def check(self) -> None:
        """Checks that no other member is in the group now, or can have been since this one joined.

        Raises:
            ConfigurationError: another member is in the group, or the group rejects this one.
            RetriableError: the group expelled this process.
        """
        self._check_others()
        if self._was_revoked:
            raise RetriableError("the group expelled this process, so another instance may have run; try again")

    def _poll(self, seconds: float) -> bool:
        """Polls once; returns whether a message came. Raises ConfigurationError if the group rejects this process."""
        message = self._consumer.poll(seconds)
        error = None if message is None else message.error()
        refused = None if error is None else refusal(error, self._settings.application_id, self._source.name)
        if refused is not None:
            raise refused
        return message is not None

    def _check_others(self) -> None:
        while self._poll(0):
            pass
        others = self._topics.group_members() - 1
        if others > 0:
            raise ConfigurationError(
                f"{others} other instance(s) of application id '{self._settings.application_id}' are running; "
                "stop them all, then rebuild"
            )

    def _on_assign(self, consumer: Consumer, _assigned: list[TopicPartition]) -> None:
        consumer.assign([])
        self._is_member = True

    def _on_revoke(self, consumer: Consumer, _revoked: list[TopicPartition]) -> None:
        # Each change of the group's members revokes: another may have joined, or this one was expelled.
        consumer.unassign()
        self._was_revoked, self._is_member = True, False
