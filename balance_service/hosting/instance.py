"""A started instance: its engine, its entry in the directory of instances, its readiness and its status."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from balance_service.engine.dead_letter import Status, open_letters
from balance_service.engine.processor import OWN_CODE
from balance_service.engine.records import Role
from balance_service.engine.task import ANSWERING, TaskState
from balance_service.hosting.causes import Cause, Kind, Urgency, listed
from balance_service.hosting.diagnosis import HEALS_MS, Known, causes_of
from balance_service.http import operations
from balance_service.process.runtime import TimesOfDay, elapsed, iso_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from balance_service.cluster.directory import ApplicationServer, Directory, ServerTable
    from balance_service.engine.records import TaskSnapshot
    from balance_service.engine.table_partition import TableSnapshot
    from balance_service.engine.tasks import Tasks
    from balance_service.hosting.engine import Engine
    from balance_service.hosting.online_rebuilds import Rebuilds
    from balance_service.http.commands import CommandHandler

_STOP_DIRECTORY_SECONDS = 2.0
_STOP_REBUILDS_SECONDS = 1.0
# Ends are read every second; an answer may say how far it is behind ends of this age.
_RECENT_SECONDS = 3.0
# More have the same cause.
_MOST_REFUSED = 3
# The name under which it is noted that Kafka answers.
_KAFKA = "Kafka"
_ANSWERING = frozenset(state.value for state in ANSWERING)
_STATUSES = frozenset(status.value for status in Status)
_QUERY_ENDED = "its query has ended and is started again; /api/status and the log say why"
_SEE_STATUS = "/api/status and the log say why, if an error is the reason"


class Since:
    """Since when some things are so. One thread notes them, any thread reads."""

    def __init__(self, clock: Callable[[], float] = elapsed) -> None:
        self._clock = clock
        self._at: Mapping[str, float] = {}
        self.time_of = TimesOfDay().of
        """Returns a reading of `elapsed` in ms since 1970."""

    def note(self, names: Iterable[str]) -> None:
        """Notes the names of all things that are so now."""
        now = self._clock()
        self._at = {name: self._at.get(name, now) for name in names}

    @property
    def of(self) -> Mapping[str, int]:
        """By name, in ms since 1970."""
        return {name: self.time_of(at) for name, at in self._at.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An engine, the directory that publishes it, and the handlers of its commands.

    `noted` has since when what `noted_now` returns is so, `began_at` since when the instance has run, as a reading of
    `elapsed`.
    """

    engine: Engine
    directory: Directory
    rebuilds: Rebuilds
    commands: Sequence[CommandHandler]
    noted: Since
    began_at: float = field(default_factory=elapsed)

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
            for command in self.commands:
                command.close()

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
                operations.HostedModel(
                    name=model.name,
                    model=model.stage.owner,
                    status=self.rebuilds.status_of(model.stage),
                    since=self.rebuilds.since_of(model.stage),
                    read_otherwise=engine.read_otherwise(model.stage),
                    source=model.source.name,
                    partitions=model.source.partitions,
                    # A read model without states has no standbys.
                    standby_replicas=0 if model.folds is None else engine.settings.num_standby_replicas,
                )
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
        settings, noted, silent_ms, time_of = self.engine.settings, self.noted.of, self._silent_ms(), self.noted.time_of
        now = time_of(elapsed())
        # A first answer is noted within a second.
        answers_ms = noted.get(_KAFKA, now if silent_ms is None else 0)
        heard_at = {server.address: server.heard_at for server in self.directory.table.servers() if server.was_heard}
        known = Known(
            brokers=settings.bootstrap_servers,
            now_ms=now,
            session_timeout_ms=settings.session_timeout_ms,
            silent_ms=silent_ms,
            refusal=self.engine.topics.refusal,
            settled_ms=max(answers_ms, time_of(self.engine.awake.since)),
            heard_ms=noted.get(self.directory.address),
            heard={address: time_of(at) for address, at in heard_at.items()},
            unowned=noted,
        )
        return causes_of(status, replace(known, own=[*self._own_causes(known), *self._causes_of_stages(known)]))

    def _silent_ms(self) -> int | None:
        """Returns since when Kafka has answered nothing here, in ms since 1970; None while it answers."""
        here = self.directory.address
        at = [watermarks.read_at for watermarks in self.engine.watermarks.values()]
        at += [server.heard_at for server in self.directory.table.servers() if server.address == here]
        last = max(at)
        # Minus infinity: nothing was answered yet: the instance starts.
        last, most = (last, _RECENT_SECONDS) if last > float("-inf") else (self.began_at, HEALS_MS / 1000)
        return self.noted.time_of(last) if elapsed() - last > most else None

    def _own_causes(self, known: Known) -> Iterator[Cause]:
        """Yields what is wrong with this instance alone."""
        engine, memberships = self.engine, self.engine.memberships
        problems = [*filter(None, (*memberships.problems, self.directory.problem))]
        for problem in problems:
            yield Cause(Kind.REFUSED, Urgency.NOW, problem, "Do what it says")
        joining, since_ms = memberships.joining, self.noted.time_of(self.began_at)
        waits = f"This instance joins the group of {', '.join(joining)}" if joining else ""
        waits = waits or ("" if engine.has_begun else "Spark begins to read at this instance")
        if waits and not problems:
            is_young = not known.lasts(since_ms, known.moves_ms)
            action = (
                "Wait: it takes seconds" if is_young else "Look into the log of this instance for what it waits for"
            )
            urgency = Urgency.NONE if is_young else Urgency.SOON
            yield Cause(Kind.JOINING, urgency, waits, action, heals=is_young, since_ms=since_ms)
        if known.heard_ms is None and not waits and not problems:
            yield from self._unheard(known)
        if unconfirmed := [topic for topic in memberships.unconfirmed if topic not in joining]:
            what = f"The group of {', '.join(unconfirmed)} has not confirmed this instance lately"
            action = "Check its network to Kafka. After a suspension, it goes on by itself"
            urgency = Urgency.SOON if known.lasts(None) else Urgency.NONE
            yield Cause(Kind.UNCONFIRMED, urgency, f"{what}: it answers for no partition", action)
        for records in engine.control_records:
            for problem in records.problems[:_MOST_REFUSED]:
                action = "If the secret was changed, name the former one. Otherwise, find who may write to the topic"
                yield Cause(Kind.CONTROL_RECORD, Urgency.SOON, problem[:1].upper() + problem[1:], action)

    def _unheard(self, known: Known) -> Iterator[Cause]:
        """Yields the cause that this instance does not hear itself in the directory, although Kafka answers."""
        here, topic = self.directory.address, self.engine.settings.application_servers_topic
        since_ms = max(self.noted.time_of(self.began_at), known.heard.get(here, 0))
        if not known.lasts(since_ms):
            return
        what = f"This instance does not know what the others do: it receives no records of the topic {topic}"
        action = "Restore the leader of that topic's partition"
        if any(server.address != here for server in self.directory.table.running()):
            what = f"The others do not know this instance: its records do not arrive in the topic {topic}"
            action = "Look into its log for the reason"
        yield Cause(Kind.UNHEARD, Urgency.SOON, what, action, since_ms=since_ms)

    def _causes_of_stages(self, known: Known) -> Iterator[Cause]:
        """Yields what is wrong with the stages here that their published tasks do not say, each sentence once."""
        stages = [*self.engine.stages.values()]
        for loss, names in _by_sentence((loss, tasks.name) for tasks in stages for loss in tasks.losses).items():
            action = "Change the configuration back before the broker deletes a segment"
            yield Cause(Kind.LOSING_RECORDS, Urgency.NOW, f"{listed(names)}: {loss}", action)
        for misplaced, names in _by_sentence((tasks.hosted.misplaced, tasks.name) for tasks in stages).items():
            action = (
                "Correct the producer, or declare its partitioner and rebuild. Discard a dead letter of theirs only if "
                "its event was produced again"
            )
            yield Cause(Kind.MISPLACED, Urgency.SOON, f"{listed(names)}: {misplaced}", action)
        for task in (task for tasks in stages for task in _running(tasks) if task.again_up_to):
            what = (
                f"{task.task_id} is folded again from its beginning, since its compacted source may lack deletions by "
                f"now: it is at {task.position} of {task.again_up_to}, and keys that it has not reached get 404"
            )
            action = "Wait. If instances are often away for so long, raise delete.retention.ms of the source"
            yield Cause(Kind.BEGUN_AGAIN, Urgency.SOON, what, action, heals=True)
        unread = self._unread(known)
        if unread:
            yield self._ends_unknown(unread)
        failing = [(task, task.stand) for tasks in stages for task in _running(tasks) if task.stand is not None]
        failing = [(task, stand) for task, stand in failing if stand.error and not stand.is_still]
        for error, names in _by_sentence((stand.error, str(task.task_id)) for task, stand in failing).items():
            since_ms = min(stand.since_ms for _, stand in failing if stand.error == error)
            yield Cause(
                Kind.NOT_FOLDED,
                Urgency.SOON if known.lasts(since_ms) else Urgency.NONE,
                _not_folded(names, error),
                "It is started again by itself. If it stays, restore what the error names",
                heals=True,
                since_ms=since_ms,
                tasks=tuple(names),
            )
        apart = [tasks for tasks in stages if tasks.hosted.source.name not in unread]
        since = self.noted.of
        for problem, names in _by_sentence((tasks.source_problem, tasks.name) for tasks in apart).items():
            # After an outage, the source is looked at again within seconds.
            since_ms = min(since.get(_source_of(name), known.now_ms) for name in names)
            if known.lasts(since_ms):
                action = "Restore what it names"
                yield Cause(Kind.NOT_FOLDED, Urgency.SOON, _not_folded(names, problem), action, since_ms=since_ms)

    def _unread(self, known: Known) -> dict[str, int]:
        """Returns since when the ends of topics are not read, in ms since 1970, by topic; not within seconds."""
        read = {topic: watermarks.read_at for topic, watermarks in self.engine.watermarks.items()}
        since = {topic: self.noted.time_of(max(at, self.began_at)) for topic, at in read.items()}
        return {topic: since_ms for topic, since_ms in since.items() if known.lasts(since_ms)}

    def _ends_unknown(self, unread: Mapping[str, int]) -> Cause:
        """Returns the cause of topics whose ends are not read, with what follows for their stages."""
        stages = [tasks for tasks in self.engine.stages.values() if tasks.hosted.source.name in unread]
        errors = [self.engine.watermarks[topic].problem for topic in unread]
        follows = tuple(_by_sentence((error, "") for error in (*errors, *(one.source_problem for one in stages))))
        topics = listed([*unread])
        return Cause(
            Kind.ENDS_UNKNOWN,
            Urgency.SOON,
            f"The ends of {topics} cannot be read: lags are not known, and no query with `maxLag` is answered",
            "Restore the leaders of the partitions" + (", or what an error below names" if follows else ""),
            since_ms=min(unread.values()),
            tasks=tuple(f"{tasks.name}_{p}" for tasks in stages for p in range(tasks.hosted.source.partitions)),
            follows=follows,
        )

    def _ends_age(self) -> int | None:
        """Returns the age of the oldest end offsets in whole seconds; None before all are read.

        While they are recent it is 0, so that it is no change of the status.
        """
        age = max((watermarks.age_seconds for watermarks in self.engine.watermarks.values()), default=0.0)
        return None if age == float("inf") else int(age) if age > _RECENT_SECONDS else 0

    def _servers(self) -> list[operations.ApplicationServer]:
        now, stages = elapsed(), self.engine.stages
        return [_server_status(server, stages, now) for server in self.directory.table.servers()]


def unhosted(stages: Mapping[str, Tasks], table: ServerTable) -> list[str]:
    """Returns the tasks of some stages that no instance runs: the assigned member does not host the model."""
    return _names(_wanted(stages) - table.taken())


def noted_now(stages: Mapping[str, Tasks], table: ServerTable, address: str) -> list[str]:
    """Returns what an instance notes: whether Kafka answers, the problems of sources, its address while it hears
    itself, and the tasks that no instance runs.

    The latter also of stages that only silent instances have. While an instance does not hear itself, it hears no
    owner either.
    """
    # A slow answer is no outage.
    answers = any(1000 * tasks.hosted.watermarks.age_seconds < HEALS_MS for tasks in stages.values())
    problems = [_source_of(name) for name, tasks in stages.items() if tasks.source_problem]
    if all(server.address != address for server in table.running()):
        return [*[_KAFKA] * answers, *problems]
    published = {(task.stage, task.partition) for server in table.servers() for task in server.tasks}
    return [_KAFKA, *problems, address, *_names((_wanted(stages) | published) - table.taken())]


def forget_left(stages: Mapping[str, Tasks], table: ServerTable, address: str) -> None:
    """Has tasks give up what they have left of partitions for which another instance than that at `address` answers."""
    for name, tasks in stages.items():
        tasks.forget_left(partial(_is_answered, table, address, name))


def _is_answered(table: ServerTable, address: str, stage: str, partition: int) -> bool:
    # The last record of this instance may be from before it lost the partition.
    return any(server.address != address for server in table.owners(stage, partition, _ANSWERING))


def _source_of(stage: str) -> str:
    """Returns under which name the problem of a stage's source is noted. No task has it."""
    return f"source/{stage}"


def _wanted(stages: Mapping[str, Tasks]) -> set[tuple[str, int]]:
    return {(tasks.name, partition) for tasks in stages.values() for partition in range(tasks.hosted.source.partitions)}


def _names(tasks: set[tuple[str, int]]) -> list[str]:
    return [f"{stage}_{partition}" for stage, partition in sorted(tasks)]


def _by_sentence(said: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns the names that each sentence is about. An empty sentence is none."""
    found: dict[str, list[str]] = {}
    for sentence, name in said:
        if sentence:
            found.setdefault(sentence, []).append(name)
    return found


def _not_folded(names: Sequence[str], why: str) -> str:
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'} not folded: {why}"


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


def _server_status(server: ApplicationServer, stages: Mapping[str, Tasks], now: float) -> operations.ApplicationServer:
    silent = server.silent_seconds(now)
    return operations.ApplicationServer(
        application_server=server.address,
        incarnation=server.incarnation,
        suspect=server.is_suspect(now),
        # As with the age of end offsets.
        silent_seconds=None if silent == float("inf") else int(silent) if server.is_suspect(now) else 0,
        shared=server.is_shared,
        models=[model.name for model in server.models],
        tasks=[_published_status(stages.get(task.stage), task) for task in server.tasks],
    )


def _answers(tasks: Tasks | None, task: TaskSnapshot) -> bool:
    """Returns whether an owner answers queries that do not say how old the answer may be, if its lease holds."""
    if task.state != TaskState.HALTED.value:
        return task.state in _ANSWERING
    # One that halted while it was opened has no epoch.
    may = tasks is not None and tasks.hosted.answers_when_halted and task.epoch > 0
    return may and task.reason.startswith(OWN_CODE)


def _task_status(tasks: Tasks, task: TaskSnapshot) -> operations.Task:
    status = _published_status(tasks, task)
    answers = status.answers and tasks.hosted.lease.holds
    return operations.Task.showing(status, answers=answers, store_bytes=task.sizes.store_bytes)


def _published_status(tasks: Tasks | None, task: TaskSnapshot) -> operations.PublishedTask:
    """Returns a task as clients see it.

    Args:
        tasks: those of its stage here; None if only peers have the stage.
    """
    lag = None if tasks is None else tasks.hosted.watermarks.lag_in_time(task.partition, task.position)
    # A peer may write any text.
    letters = open_letters({name: n for name, n in task.dead_letters.items() if name.rpartition("/")[2] in _STATUSES})
    return operations.PublishedTask.showing(
        task,
        task=str(task.task_id),
        read_model=task.stage if tasks is None or tasks.hosted.is_last else tasks.hosted.stage.owner,
        role=task.role.value.lower(),
        answers=task.role is Role.ACTIVE and _answers(tasks, task),
        lag=None if lag is None else lag.records,
        lag_seconds=None if lag is None else round(lag.seconds, 1),
        lag_seconds_is_least=lag is not None and lag.is_least,
        since=iso_time(task.since_ms) if task.since_ms else None,
        dead_letters=[
            operations.OpenDeadLetters(
                cause=cause, status=status, needs_decision=Status(status).needs_decision, count=count
            )
            for (cause, status), count in sorted(letters.items())
        ],
    )


def _table_status(table: TableSnapshot) -> operations.TablePartition:
    return operations.TablePartition.showing(
        table, table=table.topic, whole=table.is_whole, store_bytes=table.sizes.store_bytes
    )
