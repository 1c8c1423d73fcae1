"""What runs once an instance is up: its engine, its place in the directory, what appends events."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.cluster.directory import Directory
from balance_service.cluster.record_signatures import RecordSignatures
from balance_service.cluster.server_table import PublishedModel, PublishedTask, ServerTable
from balance_service.cluster.standbys import StandbyChooser
from balance_service.engine.records import Role
from balance_service.engine.task_state import TaskState
from balance_service.http.commands import Writing
from balance_service.kafka.clients import producer_config, reader_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from opentelemetry.trace import Tracer

    from balance_service.engine.records import TaskSnapshot
    from balance_service.engine.tables.partition import TableSnapshot
    from balance_service.hosting.engine import Engine, Patience
    from balance_service.hosting.hosted_stage import HostedStage
    from balance_service.http.commands import Command, Taking
    from balance_service.http.peers.trust import PeerTrust
    from balance_service.settings import Settings

_STOP_DIRECTORY_SECONDS = 2.0
_QUERY_ENDED = "its query has ended and is started again; /api/status and the log say why"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An engine that folds, and its instance's place among the others."""

    engine: Engine
    directory: Directory
    commands: Mapping[str, Taking]
    """What takes commands, by the names of their routes."""

    @staticmethod
    def of(
        engine: Engine,
        settings: Settings,
        patience: Patience,
        trust: PeerTrust,
        tracer: Tracer,
        commands: Iterable[Command],
    ) -> Running:
        """Put together what an engine needs around it; nothing of it runs yet.

        Args:
            commands: that it takes.
            trust: by which this run of the instance is known to its peers.

        Raises:
            ConfigurationError: broker or registry refuse what is asked of them.
            RetriableError: told to stop while waiting for them.
        """
        topic, schema = settings.application_servers_topic, load_schema("ApplicationServer")
        codec = patience.until_up(partial(AvroCodec, engine.registry, subject_of(topic, schema), schema))
        writing = Writing(settings=settings, registry=engine.registry, metrics=engine.metrics, tracer=tracer)
        taking = {command.route.name: patience.until_up(partial(command.taking, writing)) for command in commands}
        models, stages, table = engine.models.values(), engine.stages.values(), ServerTable()
        # A copy of a stage without states would hold its position alone, which an owner reads at once.
        with_states = (hosted for hosted in models if hosted.folds is not None)
        choosers = [(hosted.tasks, _chooser(table, hosted, settings)) for hosted in with_states]

        def stand_by() -> None:
            for tasks, chooser in choosers:
                tasks.stand_by(chooser.partitions())

        directory = Directory(
            consumer_config=reader_config(settings),
            producer_config=producer_config(settings),
            topic=topic,
            address=settings.application_server,
            incarnation=trust.incarnation,
            codec=codec,
            signatures=RecordSignatures(trust.secret, topic),
            models=[PublishedModel(hosted.name, hosted.source.partitions) for hosted in models],
            tasks=lambda: [_published(task) for hosted in stages for task in hosted.tasks.snapshots()],
            table=table,
            on_round=stand_by,
            on_refused=engine.metrics.directory_record_refused,
        )
        return Running(engine=engine, directory=directory, commands=taking)

    def start(self) -> None:
        """Be found by others, join the group, begin to fold; returns at once."""
        self.directory.start()
        self.engine.start()

    def stop(self) -> None:
        """Let go of everything, within bounds."""
        try:
            self.engine.stop()
        finally:
            self.directory.stop(_STOP_DIRECTORY_SECONDS)
            for taking in self.commands.values():
                taking.close()

    def unready(self) -> list[str]:
        """Why the instance should get no queries now."""
        engine = self.engine
        membership = engine.membership
        reasons = [] if membership.joined.is_set() else ["this instance has not joined its group yet"]
        directory = self.directory
        reasons += filter(None, (membership.problem, directory.problem, directory.shared_address_problem))
        # One that can answer for some read model should get queries.
        if all(any(_is_unfit(hosted) for hosted in engine.stages_of(name)) for name in engine.models):
            reasons += self.problems()
        if membership.partitions and not membership.lease.holds:
            reasons.append("the group has not confirmed this instance lately")
        return reasons

    def problems(self) -> list[str]:
        """What keeps some read model here from folding, or from being answered for."""
        return [problem for hosted in self.engine.stages.values() for problem in _problems(hosted)]

    def status(self) -> dict[str, Any]:
        """What there is to say of the tasks here, and of the other instances, as JSON."""
        engine = self.engine
        models = engine.models.values()
        return {
            "partitions": max(hosted.source.partitions for hosted in models),
            "models": [
                {"name": hosted.name, "source": hosted.source.name, "partitions": hosted.source.partitions}
                for hosted in models
            ],
            "problems": [
                f"{hosted.name}: {problem}" for hosted in engine.stages.values() for problem in hosted.problems
            ],
            "leaseHolds": engine.membership.lease.holds,
            "tasks": [_status(hosted, task) for hosted in engine.stages.values() for task in hosted.tasks.snapshots()],
            "tables": [_table_status(table) for table in engine.tables.snapshots()],
            "unhosted": self._unhosted(),
            "applicationServers": self.directory.status(),
        }

    def _unhosted(self) -> Sequence[str]:
        """The partitions of our stages that no instance works on: their group's member does not host them."""
        table = self.directory.table
        return [
            f"{hosted.name}_{partition}"
            for hosted in self.engine.stages.values()
            for partition in range(hosted.source.partitions)
            if table.assigned(hosted.name, partition) is None
        ]


def _problems(hosted: HostedStage) -> list[str]:
    """What is wrong with a stage here, as strangers may read it: what Spark says is in the status and the log."""
    tasks = [f"{task.task_id} is {task.state}" + (f": {task.reason}" if task.reason else "") for task in _idle(hosted)]
    reasons = (_QUERY_ENDED if hosted.feed.problem else "", hosted.source_check.problem)
    return tasks + [f"a partition is not folded: {reason}" for reason in reasons if reason]


def _is_unfit(hosted: HostedStage) -> bool:
    """Whether queries had better go to another instance. A task that waits, such as for room on the disk, answers."""
    return bool(hosted.problems) or any(not task.answers for task in _idle(hosted))


def _idle(hosted: HostedStage) -> list[TaskSnapshot]:
    """The tasks that should fold, or that say what is wrong, and do not run."""
    return [
        task
        for task in hosted.tasks.snapshots()
        if task.state != TaskState.RUNNING.value and (task.role is Role.ACTIVE or task.reason)
    ]


def _chooser(table: ServerTable, hosted: HostedStage, settings: Settings) -> StandbyChooser:
    return StandbyChooser(
        table=table,
        read_model=hosted.name,
        partitions=hosted.source.partitions,
        address=settings.application_server,
        replicas=settings.num_standby_replicas,
    )


def _published(task: TaskSnapshot) -> PublishedTask:
    task_id = task.task_id
    return PublishedTask(task_id.stage, task_id.partition, task.role.value, task.state, task.epoch, task.position)


def _status(hosted: HostedStage, task: TaskSnapshot) -> Mapping[str, Any]:
    partition = task.task_id.partition
    return {
        "task": str(task.task_id),
        "readModel": hosted.stage.owner,
        "partition": partition,
        "role": task.role.value.lower(),
        "state": task.state,
        "epoch": task.epoch,
        "position": task.position,
        "lag": hosted.watermarks.lag(partition, task.position),
        "reason": task.reason,
        "restored": task.restored,
        "toRestore": task.to_restore,
        "secondsLeft": task.seconds_left,
        "storeBytes": task.sizes.store_bytes,
    }


def _table_status(table: TableSnapshot) -> Mapping[str, Any]:
    return {
        "table": table.topic,
        "partition": table.partition,
        "position": table.position,
        "whole": table.is_whole,
        "reason": table.reason,
        "skipped": table.skipped,
        "late": table.late,
        "storeBytes": table.sizes.store_bytes,
    }
