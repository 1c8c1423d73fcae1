"""Rebuilds a read model of a stopped application: replays the source of its last stage through the same engine.

A new generation serves at once, and takes over from the others what was sent and their dead letters, as at a switch.
Their changelogs are deleted when it has caught up. An interrupted rebuild leaves a read model that lags, never a wrong
one: run it again, or start the service, which continues from there.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import structlog
from confluent_kafka import Consumer, KafkaException, TopicPartition

from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.cluster.generations import GenerationLog
from balance_service.cluster.membership import guard_config, refusal
from balance_service.engine.decisions import letters_for_a_fold
from balance_service.engine.inheritance import check_owner, last_positions
from balance_service.engine.opening import rekeyed_was_cut, was_cut, was_repartitioned
from balance_service.engine.state_directory import StateDirectory
from balance_service.engine.task import TaskState
from balance_service.errors import BalanceServiceError, ConfigurationError, FatalError, RetriableError, TaskHaltedError
from balance_service.hosting.engine import Engine, StartupRetries
from balance_service.kafka.clients import by_remedy, new_client
from balance_service.kafka.topic_specs import prepare_topics
from balance_service.kafka.topics import Topics
from balance_service.model.binding import require_registry
from balance_service.model.placing import stages_of
from balance_service.model.versions import declaration_of, fits
from balance_service.observability.metrics import Metrics
from balance_service.process.java import java_executable
from balance_service.process.runtime import thread_failures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from balance_service.engine.commit import Committed
    from balance_service.engine.tasks import Tasks
    from balance_service.kafka.topics import Topic
    from balance_service.model.generations import Declaration, Generations
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
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
    """Folds a new generation of a read model, up to the present end of its source, in place of all others.

    Args:
        progress: called with the number of source offsets replayed so far, and with their total.

    Raises:
        ConfigurationError: the model keeps no states, another member is in the group, the source was repartitioned or
            lacks its first records, or decisions about dead letters are signed with an unknown secret.
        RetriableError: a broker or the registry does not respond.
        FatalError: a thread failed, for example because Spark's JVM ended.
    """
    if not read_model.has_states():
        raise ConfigurationError(
            f"the read model '{read_model.name}' keeps no states, so there is nothing to rebuild; what it sent stays"
        )
    # What may fail for a reason of this machine comes before the former generations are given up.
    java_executable()
    with closing(StateDirectory(settings.state_dir, settings.application_id)) as directory:
        topics, stages, name = Topics(settings), stages_of(read_model, settings), read_model.name
        ours = declaration_of(read_model)
        require_registry([read_model], settings)
        with closing(OwnSchemas(SchemaRegistry.from_settings(settings))) as schemas:
            generations = GenerationLog(settings, topics, schemas)
            now = generations.of(name)
            if (declared := now.declarations.get(now.serving)) is not None:
                _refuse_other_rows(topics, stages[-1], declared, ours)
            former = [stages[-1].of_generation(number) for number in now.writable]
            serving = stages[-1].of_generation(now.serving)
            source = prepare_topics(topics, settings, [*stages[:-1], serving])[serving.source]
            _refuse_repartitioned(topics, serving, source)
            starts = topics.offsets(source.name, range(source.partitions), earliest=True)
            refuse_incomplete(settings, serving, source, starts)
            with ExclusiveGroup(settings, topics, source) as group:
                _refuse_other_owner(settings, topics, schemas, former)
                # It refuses to go on without a decision that may count.
                letters_for_a_fold(settings, topics, schemas, serving, source)
                declaration = ours.beginning_at(starts)

                def replaced(now: Generations) -> Generations:
                    # It may have taken long to get here.
                    group.check()
                    return now.replaced(declaration)

                now = generations.write(name, replaced)
                former = [stages[-1].of_generation(number) for number in now.former]
                log.warning(
                    f"generation {now.serving} of '{name}' serves from now on, and is folded; the changelogs of "
                    f"{', '.join(stage.name for stage in former)} are deleted once it has taken over what they sent"
                )
                group.check()
        metrics = Metrics()
        retries = StartupRetries(threading.Event(), lambda _reason: None)
        with thread_failures(lambda: None) as failures:
            # Earlier stages do not run: the records that they passed on are kept.
            engine = Engine(settings, directory, stages[-1:], [read_model], metrics, retries)
            try:
                tasks = engine.stages[stages[-1].of_generation(now.serving).name]
                tasks.hosted.generations.begin(tasks.hosted.stage)
                seconds = replay(engine, tasks, retries, progress, failures)
                settle(engine, now, former)
            finally:
                engine.stop()
        # Read after the stop: a commit is counted a moment after its position becomes visible.
        return Rebuilt(metrics.totals(), seconds)


def _refuse_other_rows(topics: Topics, last: Stage, declared: Declaration, ours: Declaration) -> None:
    """Refuses a model that re-keys in another way, if its re-keyed topic has the records of the former way."""
    if last.reads_rekeyed and not fits(declared, ours) and topics.find(last.source) is not None:
        raise ConfigurationError(
            f"the read model '{last.owner}', version {ours.version}, re-keys its events in another way than version "
            f"{declared.version}: what that passed on, on '{last.source}', would be folded too; give the model another "
            "`name`"
        )


def settle(engine: Engine, begun: Generations, former: Iterable[Stage]) -> None:
    """Deletes the changelogs that the serving generation needs no more, unless an instance goes on with that.

    Args:
        begun: the generations, when the serving one began to.
    """
    after = engine.generations.write(
        begun.model, lambda now: now.settled() if now.serving_since == begun.serving_since else now
    )
    for stage in former if after.serving_since == begun.serving_since else ():
        # In this order: once the topic is gone, none looks for its subjects.
        engine.registry.forget(stage.changelog)
        engine.topics.delete(stage.changelog)


def _refuse_repartitioned(topics: Topics, stage: Stage, source: Topic) -> None:
    changelog = topics.find(stage.changelog)
    if changelog is not None and changelog.partitions != source.partitions:
        raise ConfigurationError(was_repartitioned(source.name, changelog.partitions, source.partitions))


def refuse_incomplete(settings: Settings, stage: Stage, source: Topic, starts: Mapping[int, int]) -> None:
    """Refuses to fold a source that lacks first records, unless that is allowed. Raises ConfigurationError."""
    for partition, start in starts.items():
        if start > 0 and stage.reads_rekeyed:
            raise ConfigurationError(rekeyed_was_cut(source.name, partition, start))
        if start > 0 and not settings.allow_finite_retention:
            raise ConfigurationError(was_cut(source.name, partition, start))


def _refuse_other_owner(settings: Settings, topics: Topics, schemas: OwnSchemas, stages: Iterable[Stage]) -> None:
    schema = load_schema("Position")
    for stage in stages:
        codec = schemas.codec(stage.changelog, schema)
        if (changelog := topics.find(stage.changelog)) is None:
            continue
        try:
            found = last_positions(settings, topics, codec, changelog.name, range(changelog.partitions))
            for position in found.values():
                check_owner(stage, position)
        except TaskHaltedError as error:
            raise ConfigurationError(str(error)) from error


def replay(
    engine: Engine,
    tasks: Tasks,
    retries: StartupRetries,
    progress: Callable[[int, int], None],
    failures: Sequence[BaseException],
) -> float:
    """Folds all source records; returns how many seconds that took. `failures` are those of the process's threads."""
    source = tasks.hosted.source
    ends = retries.until_up(lambda: engine.topics.offsets(source.name, range(source.partitions)))
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
            if retries.until_up(engine.topics.group_members) > 1:
                raise ConfigurationError("another instance has joined the group: stop it, then rebuild again")
            continue
        positions = {task.task_id.partition: task.position for task in tasks.all()}
        for task in tasks.snapshots():
            if task.state == TaskState.HALTED.value:
                raise ConfigurationError(f"{task.task_id} is halted: {task.reason}")
        progress(sum(min(max(0, positions.get(p, 0)), end) for p, end in ends.items()), total)
        if positions.keys() == ends.keys() and all(positions[p] >= end for p, end in ends.items()):
            return time.monotonic() - began


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
