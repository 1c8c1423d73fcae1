"""Engines in this process on the real stack, loads for them, and observers of their state."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from balance_service.engine.records import Role, TaskId
from balance_service.engine.state_directory import StateDirectory
from balance_service.engine.task import Task, TaskState
from balance_service.errors import RetriableError, TaskMigratedError
from balance_service.hosting.engine import Engine, StartupRetries
from balance_service.kafka.partitioner import partition_of
from balance_service.kafka.topic_specs import prepare_changelog, prepare_topics
from balance_service.model.placing import stages_of
from balance_service.observability.metrics import Metrics
from balance_service.settings import Settings, load_settings
from balance_service.spark.jvm import launch_jvm
from tests.support.background import Background
from tests.support.recount import recount
from tests.support.shipped import KNOWN, jvm_scratch, stages_in
from tests.support.shipped import hosted as hosted_models
from tests.support.waiting import PATIENCE_SECONDS, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from decimal import Decimal
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.store import StoreView
    from balance_service.engine.tasks import Tasks
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from tests.support.kafka import Writer

SESSION_TIMEOUT_MS = 6_000


def settings_for(stack: LocalStack, names: dict[str, str], state_dir: Path, **overrides: Any) -> Settings:
    """Returns the settings of an instance on the stack."""
    return load_settings(
        bootstrap_servers=stack.bootstrap_servers,
        schema_registry_url=stack.schema_registry_url,
        state_dir=state_dir,
        session_timeout_ms=SESSION_TIMEOUT_MS,
        **names,
        **overrides,
    )


@contextmanager
def running_engine(settings: Settings) -> Iterator[Engine]:
    """Runs an engine and stops it at the end."""
    directory = state_directory(settings)
    with ExitStack() as on_failure:
        on_failure.callback(directory.close)
        engine = Engine(settings, directory, stages_in(settings), hosted_models(settings), Metrics(), startup_retries())
        on_failure.pop_all()
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def state_directory(settings: Settings) -> StateDirectory:
    """Takes the state directory of the settings. The engine closes it when it stops."""
    launch_jvm(settings, jvm_scratch())
    return StateDirectory(settings.state_dir, settings.application_id)


def recreate_changelog(engine: Engine, settings: Settings) -> None:
    """Deletes the changelog and creates an empty one with the same name while its owner runs."""
    engine.topics.delete(balance_stage(settings).changelog)
    prepare_changelog(engine.topics, hosted(engine).stage, hosted(engine).source)


@contextmanager
def opened_standby(engine: Engine, path: Path, partition: int = 0) -> Iterator[Task]:
    """Opens a standby of the engine's partition, as another instance would; it does not tail yet."""
    with closing(StateDirectory(path, engine.settings.application_id)) as directory:
        context = replace(hosted(engine), state_directory=directory)
        task = Task(TaskId("balance", partition), context, Role.STANDBY)
        task.open()
        try:
            yield task
        finally:
            task.close(5)


@contextmanager
def standing_by(engine: Engine, path: Path, partition: int = 0) -> Iterator[Task]:
    """Runs a tailing standby of the engine's partition."""
    with opened_standby(engine, path, partition) as task:

        def tail(ending: threading.Event) -> None:
            with suppress(TaskMigratedError):
                while task.role is Role.STANDBY and not ending.is_set():
                    task.tail()

        with Background(tail, "tailing"):
            try:
                yield task
            finally:
                task.close(5)


@contextmanager
def observed(engine: Engine, customers: Sequence[str], view_of: Callable[[], StoreView | None]) -> Iterator[set[int]]:
    """Reads a view continuously and checks that it shows whole commits: with events of 1.00, the sum is the position.

    Yields:
        The positions seen so far.
    """
    torn: list[tuple[int, int]] = []
    seen: set[int] = set()
    decode = hosted(engine).state

    def look(ending: threading.Event) -> None:
        while not ending.is_set():
            view = view_of()
            if view is None or view.position is None:
                continue
            frames = [view.get(customer.encode()) for customer in customers]
            total = sum(int(decode(frame)["amount"]) for frame in frames if frame is not None)
            seen.add(view.position.offset)
            if total != view.position.offset:
                torn.append((total, view.position.offset))

    with Background(look, "looking"):
        yield seen
    assert torn == [], torn[:5]


def startup_retries() -> StartupRetries:
    """Returns retries that wait indefinitely for servers that are down."""
    return StartupRetries(threading.Event(), lambda _reason: None)


def tasks_of(engine: Engine) -> Tasks:
    """The tasks of the engine's only read model."""
    (only,) = engine.models.values()
    return only


def hosted(engine: Engine) -> HostedStage:
    """The last stage of the engine's only read model."""
    return tasks_of(engine).hosted


def balance_stage(settings: Settings) -> Stage:
    """Returns the stage of the balance model."""
    (stage,) = stages_of(KNOWN["balance"], settings)
    return stage


def prepare(topics: Topics, settings: Settings) -> Topic:
    """Creates and checks the topics of the balance model; returns its source."""
    stage = balance_stage(settings)
    return prepare_topics(topics, settings, [stage])[stage.source]


def problems(engine: Engine) -> list[str]:
    """Returns the problems that the engine reports with its source and queries."""
    return engine.problems


def is_running(engine: Engine, *partitions: int) -> bool:
    """Whether the tasks of these partitions run; of all partitions if none is given."""
    wanted = partitions or range(hosted(engine).source.partitions)
    tasks = [tasks_of(engine).task(partition) for partition in wanted]
    return all(task is not None and task.state is TaskState.RUNNING for task in tasks)


def catch_up(engine: Engine, seconds: float = PATIENCE_SECONDS, is_over: Callable[[], bool] = lambda: False) -> None:
    """Waits until every partition of the source is applied to its end, or the wait is over for another reason."""
    partitions = range(hosted(engine).source.partitions)

    def caught_up() -> bool:
        if is_over():
            return True
        try:
            ends = engine.topics.offsets(hosted(engine).source.name, partitions)
        except RetriableError:
            return False
        tasks = {p: tasks_of(engine).task(p) for p in partitions}
        return all(
            (task := tasks[p]) is not None and task.view is not None and task.position >= ends[p] for p in partitions
        )

    eventually(caught_up, lambda: f"caught up; {tasks_of(engine).snapshots()} {problems(engine)}", seconds)


def balance(engine: Engine, customer: str) -> Decimal | None:
    """Returns a customer's balance in the stores of the engine."""
    for task in tasks_of(engine).all():
        view = task.view
        frame = view.get(customer.encode()) if view is not None else None
        if frame is not None:
            amount: Decimal = hosted(engine).state(frame)["amount"]
            return amount
    return None


def counted(engine: Engine, name: str) -> int:
    """Returns a counter of the engine, summed over partitions."""
    text = engine.metrics.text().decode()
    lines = [line for line in text.splitlines() if line.startswith(f"balance_events_{name}_total")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


_LOOK_EVERY_SECONDS = 0.01


def customers_in(partition: int, partitions: int = 2, count: int = 3) -> list[str]:
    """Returns customers whose events lie in a partition."""
    names = (f"customer-{n}" for n in itertools.count())
    return list(itertools.islice((n for n in names if partition_of(n.encode(), partitions) == partition), count))


def assert_counted_once(stack: LocalStack, engine: Engine, events: int | None = None) -> None:
    """Waits until everything is applied, and compares balances with a recount of the topic.

    Args:
        events: the number of events, if this engine has applied all of them.
    """
    catch_up(engine)
    expected = recount(stack.bootstrap_servers, stack.schema_registry_url, hosted(engine).source.name)
    found = {customer: balance(engine, customer) for customer in expected}
    assert expected, "the topic has no events"
    assert found == expected, f"recounted: {expected}; found: {found}"
    applied = counted(engine, "applied")
    assert events in (None, applied), f"{applied} of {events} events were applied"


def queries(engine: Engine, partition: int, reason: str) -> int:
    """Returns the number of Spark queries started for a partition with a reason."""
    labels = {"read_model": "balance", "partition": str(partition), "reason": reason}
    return int(engine.metrics.registry.get_sample_value("balance_stream_queries_total", labels) or 0)


class Load:
    """Appends events of 1.00 from a thread at a fixed rate. Encodes them beforehand."""

    def __init__(self, writer: Writer, customers: list[str], per_second: float) -> None:
        self._writer = writer
        self._frames: Mapping[str, bytes] = {customer: writer.frame(customer, "1.00") for customer in customers}
        self._every_seconds = 1 / per_second
        self._thread = Background(self._run, "load")
        self.events = 0

    def __enter__(self) -> Self:
        self._thread.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.__exit__(*raised)
        assert self._writer.producer.flush(20) == 0

    def _run(self, ending: threading.Event) -> None:
        due = time.monotonic()
        for customer in itertools.cycle(self._frames):
            due += self._every_seconds
            if ending.wait(max(0.0, due - time.monotonic())):
                return
            self._writer.send(customer, self._frames[customer])
            self.events += 1


class Progress:
    """Observes the task of a partition from a thread; records its longest pause and its states."""

    def __init__(self, engine: Engine, partition: int) -> None:
        self._engine = engine
        self._partition = partition
        self._thread = Background(self._run, "progress")
        self._moved = time.monotonic()
        self.longest_pause = 0.0
        self.states: set[TaskState] = set()

    def __enter__(self) -> Self:
        self._moved = time.monotonic()
        self._thread.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.__exit__(*raised)

    def _run(self, ending: threading.Event) -> None:
        position: Any = None
        while not ending.wait(_LOOK_EVERY_SECONDS):
            task, now = tasks_of(self._engine).task(self._partition), time.monotonic()
            self.longest_pause = max(self.longest_pause, now - self._moved)
            if task is None:
                # The group has taken the partition away for a moment: that is a pause.
                continue
            self.states.add(task.state)
            if task.position != position:
                position, self._moved = task.position, now
