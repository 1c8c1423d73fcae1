"""Processes are killed during a load; afterwards every balance equals an independent recount."""

from __future__ import annotations

import random
import struct
import threading
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from balance_service.devtools.local.stack import LocalStack
from balance_service.kafka.partitioner import partition_of
from tests.support.commands import started
from tests.support.kafka import Writer, ends_of, in_changelog, recounted
from tests.support.service import PARTITIONS, all_balances, application, ask, new_instance, on, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance

_KILLS = 2
_FOLDED = 500
_LOADED = 3_000
"""More events than there is garbage."""
_CUSTOMERS = 500
_GARBAGE_EVERY_SECONDS = 0.2
_UNKNOWN = ("nobody", "misplaced", "other", "customer-500")


@pytest.fixture
def fragile_stack(tmp_path: Path) -> Iterator[LocalStack]:
    """A stack of its own, because the test kills its broker."""
    with LocalStack(tmp_path / "stack") as stack:
        yield stack


@pytest.mark.shows("exactly-once")
def test_balances_equal_a_recount_after_kills_of_one_and_of_all_instances(
    stack: LocalStack,
) -> None:
    settings = application()
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    chooser = random.Random(seed)
    load = ["load", "--events", "35000", "--customers", str(_CUSTOMERS), "--rate", "2000"]
    instances = [new_instance(stack, settings) for _ in range(2)]
    with running(*instances):
        with started(on(stack, settings), *load) as loading, Garbage(stack, settings):
            for victims in [*([chooser.choice(instances)] for _ in range(_KILLS)), instances]:
                _wait_until_folding(stack, settings)
                time.sleep(chooser.uniform(0.0, 1.5))
                print(f"killing {', '.join(victim.name for victim in victims)}")
                for victim in victims:
                    victim.kill()
                for victim in victims:
                    victim.launch()
            loaded = loading.wait(90)
        assert loaded.code == 0, loaded.stderr
        for instance in instances:
            instance.wait_ready()

        _assert_as_recounted(stack, settings, instances)


@pytest.mark.shows("exactly-once")
def test_balances_equal_a_recount_after_a_kill_of_the_broker(fragile_stack: LocalStack) -> None:
    stack, settings = fragile_stack, application()
    load = ["load", "--events", "15000", "--customers", str(_CUSTOMERS), "--rate", "1500"]
    with running(new_instance(stack, settings)) as instances:
        with started(on(stack, settings), *load) as loading, Garbage(stack, settings):
            eventually(lambda: _length(stack, settings["BALANCE_TOPIC"]) > _LOADED, "the load has begun")
            _wait_until_folding(stack, settings)
            stack.broker.kill()
            time.sleep(1.0)
            assert httpx.get(f"{instances[0].url}/health/live").status_code == 200
            stack.broker.start()
            loaded = loading.wait(90)
        assert loaded.code == 0, loaded.stderr
        assert all(instance.running for instance in instances)

        _assert_as_recounted(stack, settings, instances)


class Garbage:
    """Produces invalid records from a thread, among the valid ones of a load."""

    def __init__(self, stack: LocalStack, settings: Mapping[str, str]) -> None:
        self._stack = stack
        self._topic = settings["BALANCE_TOPIC"]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with Writer(self._stack, self._topic) as writer:
            good = writer.frame("customer-1", "1.00")
            elsewhere = 1 - partition_of(b"misplaced", PARTITIONS)
            while not self._stopping.wait(_GARBAGE_EVERY_SECONDS):
                writer.send("customer-1", None)
                writer.send("customer-2", b"no frame")
                writer.send("customer-3", struct.pack(">bI", 0, 999_999) + good[5:])
                writer.send("other", good)
                writer.send(None, good)
                writer.send("misplaced", writer.frame("misplaced", "1.00"), partition=elsewhere)


def _wait_until_folding(stack: LocalStack, settings: Mapping[str, str]) -> None:
    """Waits until the changelog grows, so that the next kill interrupts a fold."""
    changelog = f"{settings['BALANCE_APPLICATION_ID']}-balance-changelog"
    began = _length(stack, changelog)

    eventually(lambda: _length(stack, changelog) > began + _FOLDED, "an instance folds")


def _length(stack: LocalStack, topic: str) -> int:
    return sum(ends_of(stack, topic).values())


def _assert_as_recounted(stack: LocalStack, settings: Mapping[str, str], instances: Sequence[LocalInstance]) -> None:
    expected = recounted(stack, settings)
    # No partitioner would place it in that partition; only the service checks this.
    expected.pop("misplaced")
    assert len(expected) == _CUSTOMERS
    ends = ends_of(stack, settings["BALANCE_TOPIC"])
    for instance in instances:
        assert all_balances(instance, expected, ends) == expected, instance.name
        assert {name: ask(instance.url, name).status_code for name in _UNKNOWN} == dict.fromkeys(_UNKNOWN, 404)
    assert in_changelog(stack, settings) == expected
