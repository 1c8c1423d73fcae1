"""Rebuild: drop a read model of a stopped application and replay what its last stage reads, through the same engine.

Nothing is dropped but its changelog, its local stores and the directory of instances: copies of what the source says,
and of what nobody says any more. Interrupted, it leaves a read model that is further back, never a wrong one: run it
again, or let the service go on from there.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from balance_service.avro.registry import SchemaRegistry
from balance_service.engine.opening import was_purged
from balance_service.engine.store.directory import StateDirectory
from balance_service.engine.task_state import TaskState
from balance_service.errors import ConfigurationError, FatalError
from balance_service.hosting.engine import Engine, Patience
from balance_service.hosting.kept_before import KeptBefore
from balance_service.hosting.sole_member import SoleMember
from balance_service.kafka.topic_setup import prepare_changelog, prepare_topics
from balance_service.kafka.topics import Topics
from balance_service.model.placing import stages_of
from balance_service.observability.metrics import Metrics
from balance_service.process.runtime import thread_failures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from balance_service.engine.commit import Committed
    from balance_service.hosting.hosted_stage import HostedStage
    from balance_service.kafka.topics import Topic
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

_LOOK_EVERY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuild did, and how long the replay took."""

    done: Committed
    seconds: float


def rebuild(settings: Settings, read_model: ReadModel, progress: Callable[[int, int], None]) -> Rebuilt:
    """Make the changelog anew and replay the source up to its present end.

    Args:
        progress: told how many source offsets of how many are done.

    Raises:
        ConfigurationError: it keeps no states, another member is in the group, the source's keys have moved, or what
            its last stage reads has been purged.
        RetriableError: a broker or the registry does not answer.
        FatalError: a thread has failed, such as where Spark's JVM has ended.
    """
    if not read_model.has_states():
        raise ConfigurationError(
            f"the read model '{read_model.name}' keeps no states, so there is nothing to rebuild; what it sent stays"
        )
    topics, stages = Topics(settings), stages_of(read_model, settings)
    stage = stages[-1]
    source = prepare_topics(topics, settings, stages)[stage.source]
    _refuse_repartitioned(topics, stage, source)
    _refuse_purged(topics, stage, source)
    with SoleMember(settings, topics, source) as alone:
        kept = _kept_before(settings, topics, read_model, stage, source)
        topics.delete(stage.changelog)
        # Epochs begin anew with the changelog, and what killed instances last said there claims higher ones.
        topics.delete(settings.application_servers_topic)
        changelog = prepare_changelog(topics, stage, source)
        kept.keep(changelog)
        alone.check()
    metrics = Metrics()
    patience = Patience(threading.Event(), lambda _reason: None)
    with thread_failures(lambda: None) as failures:
        # What the stages before it have passed on is kept.
        directory = StateDirectory(settings.state_dir, settings.application_id)
        engine = Engine(settings, directory, [stage], [read_model], metrics, patience)
        try:
            seconds = _replay(engine, engine.stages[stage.name], patience, progress, failures)
        finally:
            engine.stop()
    # A commit counts a moment after its position can be seen.
    return Rebuilt(metrics.totals(), seconds)


def _kept_before(settings: Settings, topics: Topics, read_model: ReadModel, stage: Stage, source: Topic) -> KeptBefore:
    registry = SchemaRegistry.from_settings(settings)
    try:
        return KeptBefore(settings, topics, registry, stage, source, keeps_order=read_model.keeps_order)
    finally:
        registry.close()


def _refuse_repartitioned(topics: Topics, stage: Stage, source: Topic) -> None:
    changelog = topics.find(stage.changelog)
    if changelog is not None and changelog.partitions != source.partitions:
        raise ConfigurationError(
            f"topic '{source.name}' had {changelog.partitions} partitions and has {source.partitions}: its keys now "
            "hash elsewhere than their history lies; copy the events to a new topic with `balance-service topics copy "
            f"{source.name} NEW`, and start anew with it as BALANCE_TOPIC and another BALANCE_APPLICATION_ID"
        )


def _refuse_purged(topics: Topics, stage: Stage, source: Topic) -> None:
    starts = topics.offsets(source.name, range(source.partitions), earliest=True) if stage.reads_rekeyed else {}
    for partition, start in starts.items():
        if start > 0:
            raise ConfigurationError(was_purged(source.name, partition, start))


def _replay(
    engine: Engine,
    hosted: HostedStage,
    patience: Patience,
    progress: Callable[[int, int], None],
    failures: Sequence[BaseException],
) -> float:
    """Have everything folded; in how many seconds.

    Args:
        failures: what has ended a thread so far.
    """
    source, tasks = hosted.source, hosted.tasks
    ends = patience.until_up(lambda: engine.topics.offsets(source.name, range(source.partitions)))
    total = sum(ends.values())
    engine.start()
    began = time.monotonic()
    everything = frozenset((source.name, partition) for partition in ends)
    while True:
        time.sleep(_LOOK_EVERY_SECONDS)
        if failures:
            raise FatalError(f"the rebuild could not go on: {failures[0]}; run it again")
        if engine.membership.joined.is_set() and engine.membership.partitions != everything:
            # It may be this process that the group has lost, while the broker was away, say.
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
