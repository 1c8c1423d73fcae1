"""A started instance: its engine, its entry in the directory of instances, its readiness and its status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.cluster.directory import PublishedTask
from balance_service.engine.dead_letter import Status, open_letters
from balance_service.engine.records import Role
from balance_service.engine.task import TaskState
from balance_service.hosting.causes import Cause, Known, Since, Urgency, causes_of
from balance_service.process.runtime import elapsed, iso_time, now_ms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balance_service.cluster.directory import ApplicationServer, Directory, ServerTable
    from balance_service.engine.records import TaskSnapshot
    from balance_service.engine.table_partition import TableSnapshot
    from balance_service.engine.tasks import Tasks
    from balance_service.hosting.engine import Engine
    from balance_service.hosting.rebuilds import Rebuilds
    from balance_service.http.handlers import CommandHandler

_STOP_DIRECTORY_SECONDS = 2.0
_STOP_REBUILDS_SECONDS = 1.0
# Ends are read every second; an answer may say how far it is behind ends of this age.
_RECENT_SECONDS = 3.0
# More have the same cause.
_MOST_REFUSED = 3
# A query that fails is started again, and reads then as a rule.
_HEALS_MS = 10_000
_STATUSES = frozenset(status.value for status in Status)
_QUERY_ENDED = "its query has ended and is started again; /api/status and the log say why"
_SEE_STATUS = "/api/status and the log say why, if an error is the reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An engine, the directory that publishes it, and its commands by the names of their routes.

    `unowned` has since when tasks of the stages here are at no instance.
    """

    engine: Engine
    directory: Directory
    rebuilds: Rebuilds
    commands: Mapping[str, CommandHandler]
    unowned: Since

    def start(self) -> None:
        """Publishes the instance, joins the group and starts to process. Returns at once."""
        self.directory.start()
        self.engine.start()
        self.rebuilds.start()

    def stop(self) -> None:
        """Releases everything, each part within its timeout."""
        try:
            self.rebuilds.stop(_STOP_REBUILDS_SECONDS)
            self.engine.stop()
        finally:
            self.directory.stop(_STOP_DIRECTORY_SECONDS)
            for taking in self.commands.values():
                taking.close()

    def unready(self) -> list[str]:
        """Returns why the instance should get no queries now; empty if it should."""
        engine = self.engine
        memberships = engine.memberships
        joining = memberships.joining
        reasons = [f"this instance joins the group of {', '.join(joining)}"] if joining else []
        directory = self.directory
        reasons += filter(None, (*memberships.problems, directory.problem, directory.shared_address_problem))
        # An instance that answers for one of its read models should get queries.
        owners = {tasks.hosted.stage.owner for tasks in engine.models.values()}
        if all(any(_is_unfit(tasks) for tasks in engine.stages_of(name)) for name in owners):
            reasons += self.problems()
        if unconfirmed := [topic for topic in memberships.unconfirmed if topic not in joining]:
            topics = ", ".join(unconfirmed)
            reasons.append(
                f"the group of {topics} has not confirmed this instance lately: it cannot reach Kafka, or was suspended"
            )
        # Spark's first query takes seconds; until then, the answers would fall behind the events.
        return reasons or ([] if engine.has_begun else ["Spark begins to read"])

    def problems(self) -> list[str]:
        """Returns what keeps a read model here from being folded or from answering."""
        return [problem for tasks in self.engine.serving_stages for problem in _problems(tasks)]

    def status(self) -> dict[str, Any]:
        """Returns the tasks here and the instances of the directory, as JSON."""
        engine = self.engine
        models = [tasks.hosted for tasks in engine.models.values()]
        return {
            "partitions": max(model.source.partitions for model in models),
            "models": [
                {
                    "name": model.name,
                    "model": model.stage.owner,
                    "status": self.rebuilds.status_of(model.stage),
                    "since": self.rebuilds.since_of(model.stage),
                    "readOtherwise": engine.read_otherwise(model.stage),
                    "source": model.source.name,
                    "partitions": model.source.partitions,
                    # A read model without states has no standbys.
                    "standbyReplicas": 0 if model.folds is None else engine.settings.num_standby_replicas,
                }
                for model in models
            ],
            "problems": [
                f"{tasks.name}: {problem}"
                for tasks in engine.stages.values()
                for problem in (*tasks.problems, *_lasting(tasks))
            ]
            + [problem for records in engine.control_records for problem in records.problems[:_MOST_REFUSED]],
            "leaseHolds": engine.memberships.own_some and not engine.memberships.unconfirmed,
            "tasks": [_task_status(tasks, task) for tasks in engine.stages.values() for task in tasks.snapshots()],
            "tables": [_table_status(table) for table in engine.tables.snapshots()],
            "unhosted": unhosted(engine.stages, self.directory.table),
            "endsAgeSeconds": self._ends_age(),
            "applicationServers": self._servers(),
        }

    def causes(self, status: Mapping[str, Any]) -> list[Cause]:
        """Returns what is wrong with the service, as this instance sees it.

        Args:
            status: as returned by `status`, with `applicationServer` and `reasons`.
        """
        known = Known(
            brokers=self.engine.settings.bootstrap_servers,
            now_ms=now_ms(),
            silent_ms=self._silent_since(),
            unowned=self.unowned.of,
            own=[*self._own_causes(), *(cause for tasks in self.engine.stages.values() for cause in _causes(tasks))],
        )
        return causes_of(status, known)

    def _silent_since(self) -> int | None:
        """Returns since when Kafka has answered nothing here, in ms since 1970; None while it answers."""
        now, here = elapsed(), self.directory.address
        ages = [watermarks.age_seconds for watermarks in self.engine.watermarks.values()]
        ages += [server.silent_seconds(now) for server in self.directory.table.servers() if server.address == here]
        age = min(ages)
        # Nothing was asked yet.
        return None if age <= _RECENT_SECONDS or age == float("inf") else now_ms() - int(1000 * age)

    def _own_causes(self) -> Iterator[Cause]:
        """Yields what is wrong with this instance alone."""
        engine, memberships = self.engine, self.engine.memberships
        waits: dict[str, Any] = {"urgency": Urgency.NONE, "action": "Wait: it takes seconds", "heals": True}
        if joining := memberships.joining:
            yield Cause(kind="joining", what=f"This instance joins the group of {', '.join(joining)}", **waits)
        elif not engine.has_begun:
            yield Cause(kind="joining", what="Spark begins to read at this instance", **waits)
        for problem in filter(None, (*memberships.problems, self.directory.problem)):
            yield Cause(
                kind="refused", urgency=Urgency.NOW, what=problem, action="Do what it says", section="BalanceNotReady"
            )
        if unconfirmed := [topic for topic in memberships.unconfirmed if topic not in joining]:
            yield Cause(
                kind="unconfirmed",
                urgency=Urgency.SOON,
                what=f"The group of {', '.join(unconfirmed)} has not confirmed this instance lately: it answers for no "
                "partition",
                action="Check its network to Kafka. After a suspension, it goes on by itself",
                section="BalanceNotReady",
            )
        for records in engine.control_records:
            for problem in records.problems[:_MOST_REFUSED]:
                yield Cause(
                    kind="control-record",
                    urgency=Urgency.SOON,
                    what=problem[:1].upper() + problem[1:],
                    action="If the secret was changed, name the former one. Otherwise, find who may write to the topic",
                    section="BalanceControlRecordRefused",
                )

    def _ends_age(self) -> int | None:
        """Returns the age of the oldest end offsets in whole seconds; None before all are read.

        While they are recent it is 0, so that it is no change of the status.
        """
        age = max((watermarks.age_seconds for watermarks in self.engine.watermarks.values()), default=0.0)
        return None if age == float("inf") else int(age) if age > _RECENT_SECONDS else 0

    def _servers(self) -> list[Mapping[str, Any]]:
        now, stages = elapsed(), self.engine.stages
        return [_server_status(server, stages, now) for server in self.directory.table.servers()]


def unhosted(stages: Mapping[str, Tasks], table: ServerTable) -> list[str]:
    """Returns the tasks of some stages that no instance runs: the assigned member does not host the model."""
    taken = table.taken()
    return [
        f"{tasks.name}_{partition}"
        for tasks in stages.values()
        for partition in range(tasks.hosted.source.partitions)
        if (tasks.name, partition) not in taken
    ]


def _causes(tasks: Tasks) -> Iterator[Cause]:
    """Yields what is wrong with a stage that its published tasks do not say."""
    if tasks.hosted.misplaced:
        yield Cause(
            kind="misplaced",
            urgency=Urgency.SOON,
            what=f"{tasks.name}: {tasks.hosted.misplaced}",
            action="Correct the producer, or declare its partitioner and rebuild. Discard none of their dead letters",
            section="BalanceDeadLetters",
        )
    for loss in tasks.losses:
        yield Cause(
            kind="losing-records",
            urgency=Urgency.NOW,
            what=f"{tasks.name}: {loss}",
            action="Change the configuration back before the broker deletes a segment",
            section="BalanceTopicLosesRecords",
        )
    failing: dict[str, Any] = {"kind": "not-folded", "section": "BalanceStreamFailing"}
    again = "It is started again by itself. If it stays, restore what the error names"
    for task in _running(tasks):
        if (stand := task.stand) is not None and stand.error and not stand.is_still:
            is_young = now_ms() - stand.since_ms < _HEALS_MS
            yield Cause(
                urgency=Urgency.NONE if is_young else Urgency.SOON,
                what=stand.told(task.task_id, stand.error),
                action=again,
                heals=True,
                since_ms=stand.since_ms,
                tasks=(str(task.task_id),),
                **failing,
            )
    if tasks.source_problem:
        what = f"{tasks.name} is not folded: {tasks.source_problem}"
        yield Cause(urgency=Urgency.SOON, what=what, action="Restore what it names", **failing)


def _problems(tasks: Tasks) -> list[str]:
    """Returns the problems of a stage without Spark's own texts: probes read them without a token."""
    return [
        *(f"{task.task_id} is {task.state}" + (f": {task.reason}" if task.reason else "") for task in _idle(tasks)),
        *(
            task.stand.told(task.task_id, _SEE_STATUS if task.stand.is_still else _QUERY_ENDED)
            for task in _running(tasks)
            if task.stand is not None and (task.stand.is_still or task.stand.error)
        ),
        *(f"a partition is not folded: {reason}" for reason in (tasks.source_problem,) if reason),
        *_lasting(tasks),
    ]


def _lasting(tasks: Tasks) -> list[str]:
    """Returns why events become dead letters because of their partitions, and why topics may lose records.

    Neither keeps the tasks from folding and answering. No key is named.
    """
    return [*filter(None, [tasks.hosted.misplaced]), *tasks.losses]


def _is_unfit(tasks: Tasks) -> bool:
    """Returns whether queries should go to another instance.

    A WAITING task answers, so it does not count. Neither does one that stands still, unless Spark fails at all.
    """
    running = _running(tasks)
    fails = bool(running) and all(task.stand is not None and task.stand.error for task in running)
    return fails or bool(tasks.source_problem) or any(not task.answers for task in _idle(tasks))


def _running(tasks: Tasks) -> list[TaskSnapshot]:
    return [task for task in tasks.snapshots() if task.state == TaskState.RUNNING.value]


def _idle(tasks: Tasks) -> list[TaskSnapshot]:
    """Returns the owners that do not run, and the standbys that report a problem."""
    return [
        task
        for task in tasks.snapshots()
        if task.state != TaskState.RUNNING.value and (task.role is Role.ACTIVE or task.reason)
    ]


def _server_status(server: ApplicationServer, stages: Mapping[str, Tasks], now: float) -> Mapping[str, Any]:
    silent = server.silent_seconds(now)
    return {
        "applicationServer": server.address,
        "incarnation": server.incarnation,
        "suspect": server.is_suspect(now),
        # As with the age of end offsets.
        "silentSeconds": None if silent == float("inf") else int(silent) if server.is_suspect(now) else 0,
        "shared": server.is_shared,
        "models": [model.name for model in server.models],
        "tasks": [_published_status(stages.get(task.stage), task) for task in server.tasks],
    }


def _task_status(tasks: Tasks, task: TaskSnapshot) -> Mapping[str, Any]:
    return {**_published_status(tasks, published(task)), "storeBytes": task.sizes.store_bytes}


def _published_status(tasks: Tasks | None, task: PublishedTask) -> Mapping[str, Any]:
    """Returns a task as JSON.

    Args:
        tasks: those of its stage here; None if only peers have the stage.
    """
    lag = None if tasks is None else tasks.hosted.watermarks.lag_in_time(task.partition, task.position)
    # A peer may write any text.
    letters = open_letters({name: n for name, n in task.dead_letters.items() if name.rpartition("/")[2] in _STATUSES})
    return {
        "task": f"{task.stage}_{task.partition}",
        "readModel": task.stage if tasks is None or tasks.hosted.is_last else tasks.hosted.stage.owner,
        "partition": task.partition,
        "role": task.role.lower(),
        "state": task.state,
        "epoch": task.epoch,
        "position": task.position,
        "lag": None if lag is None else lag.records,
        "lagSeconds": None if lag is None else round(lag.seconds, 1),
        "lagSecondsIsLeast": lag is not None and lag.is_least,
        "reason": task.reason,
        "since": iso_time(task.since_ms) if task.since_ms else None,
        "restored": task.restored,
        "toRestore": task.to_restore,
        "secondsLeft": task.seconds_left,
        "deadLetters": [
            {"cause": cause, "status": status, "needsDecision": Status(status).needs_decision, "count": count}
            for (cause, status), count in sorted(letters.items())
        ],
    }


def published(task: TaskSnapshot) -> PublishedTask:
    """Returns a task as the directory publishes it."""
    task_id, stand = task.task_id, task.stand
    return PublishedTask(
        task_id.stage,
        task_id.partition,
        task.role.value,
        task.state,
        task.epoch,
        task.position,
        task.reason,
        task.restored,
        task.to_restore,
        task.seconds_left,
        {f"{cause}/{status}": count for (cause, status), count in open_letters(task.letters).items()},
        task.comparison,
        task.sends_as_of,
        stand.since_ms if stand is not None and stand.is_still else task.since_ms,
    )


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
