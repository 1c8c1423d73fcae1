"""Events that keep coming while something happens to an engine, and whether each of them counted once."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from balance_service.kafka.partitioner import partition_of
from tests.integration.engines import balance, catch_up, counted, hosted, tasks_of
from tests.support.recount import recount

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.task import TaskState
    from balance_service.hosting.engine import Engine
    from tests.support.kafka import Writer

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
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self.events = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        assert self._writer.producer.flush(20) == 0

    def _run(self) -> None:
        due = time.monotonic()
        for customer in itertools.cycle(self._frames):
            due += self._every_seconds
            if self._stopping.wait(max(0.0, due - time.monotonic())):
                return
            self._writer.send(customer, self._frames[customer])
            self.events += 1


class Progress:
    """Observes the task of a partition from a thread; records its longest pause and its states."""

    def __init__(self, engine: Engine, partition: int) -> None:
        self._engine = engine
        self._partition = partition
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress")
        self._moved = time.monotonic()
        self.longest_pause = 0.0
        self.states: set[TaskState] = set()

    def __enter__(self) -> Self:
        self._moved = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        position: Any = None
        while not self._stopping.wait(_LOOK_EVERY_SECONDS):
            task, now = tasks_of(self._engine).task(self._partition), time.monotonic()
            assert task is not None
            self.states.add(task.state)
            self.longest_pause = max(self.longest_pause, now - self._moved)
            if task.position != position:
                position, self._moved = task.position, now
