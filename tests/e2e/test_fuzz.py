"""Fuzz tests of HTTP and Kafka: the process survives, and every record is accounted for.

`FUZZ_SEED` reproduces a run; `FUZZ_REQUESTS` and `FUZZ_RECORDS` set its size.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.fuzzing import CUSTOMERS, Records, ask_raw, ask_structured
from tests.support.kafka import Writer, ends_of, in_changelog, read_topic, recounted
from tests.support.service import PARTITIONS, all_balances, application, new_instance, process_of, running, warm_up
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

_REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "3000"))
_RECORDS = int(os.environ.get("FUZZ_RECORDS", "20000"))
_SEED = int(os.environ.get("FUZZ_SEED", "20250"))
_AT_ONCE = 32
_MAX_GROWTH_BYTES = 256 << 20

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return application(BALANCE_READ_TIMEOUT="0.2")


@pytest.fixture(scope="module")
def instance(stack: LocalStack, settings: dict[str, str]) -> Iterator[LocalInstance]:
    """One instance for both tests: the second also accounts for the records that the first wrote."""
    with running(new_instance(stack, settings)) as (started,):
        warm_up(started.url)
        yield started


def _in_threads(work: Sequence[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=asyncio.run, args=(make(),)) for make in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.shows("no-500")
def test_no_request_is_answered_500_or_ends_the_process(instance: LocalInstance) -> None:
    print(f"\nFUZZ_SEED={_SEED} FUZZ_REQUESTS={_REQUESTS}")
    statuses: Counter[str] = Counter()
    wrong: list[str] = []
    process = process_of(instance)
    before = process.memory_info().rss
    share = max(_REQUESTS // _AT_ONCE, 1)

    quarter = _AT_ONCE // 4

    async def raw(first: int) -> None:
        seeds = range(_SEED + first, _SEED + first + quarter)
        await asyncio.gather(*(ask_raw(instance.port, share, seed, statuses, wrong) for seed in seeds))

    async def structured(first: int) -> None:
        seeds = range(_SEED + first, _SEED + first + quarter)
        await asyncio.gather(*(ask_structured(instance.url, share, seed, statuses, wrong) for seed in seeds))

    began = time.monotonic()
    _in_threads(
        [
            lambda: raw(0),
            lambda: raw(quarter),
            lambda: structured(2 * quarter),
            lambda: structured(3 * quarter),
        ]
    )
    growth = process.memory_info().rss - before
    print(f"{time.monotonic() - began:.1f} s, {growth >> 20} MiB more, {dict(sorted(statuses.items()))}")

    assert not wrong, wrong[:5]
    assert process_of(instance).pid == process.pid
    assert httpx.get(f"{instance.url}/health/live").status_code == 200
    eventually(lambda: httpx.get(f"{instance.url}/health/ready").status_code == 200, "ready again")
    assert growth < _MAX_GROWTH_BYTES
    for complaint in ("a request failed", "Unhandled exception", "Error handling request", "Task exception"):
        assert complaint not in instance.log.read_text(), complaint


def _accounted(counted: Mapping[str, int]) -> int:
    return sum(counted.get(name, 0) for name in ("applied", "ignored", "duplicates", "dead_lettered"))


def _counters(instance: LocalInstance) -> dict[str, int]:
    """Returns the event counters, summed over partitions, and the positions."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{instance.url}/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("balance_events_") and sample.name.endswith("_total"):
                found[sample.name.removeprefix("balance_events_").removesuffix("_total")] += int(sample.value)
            elif sample.name == "balance_position":
                found[f"position {sample.labels['partition']}"] = int(sample.value)
    return dict(found)


@pytest.mark.shows("dead-letter")
def test_every_record_is_accounted_for(stack: LocalStack, settings: dict[str, str], instance: LocalInstance) -> None:
    print(f"\nFUZZ_SEED={_SEED} FUZZ_RECORDS={_RECORDS}")
    topic = settings["BALANCE_TOPIC"]
    process = process_of(instance)
    began = time.monotonic()
    with Writer(stack, topic, **{"queue.buffering.max.messages": 1_000_000}) as writer:
        records = Records(_SEED, writer)
        for _ in range(_RECORDS):
            key, value, headers = records.next()
            writer.send(key, value, headers=headers)
        writer.producer.flush(60)
    ends = ends_of(stack, topic)

    def is_at_the_end() -> bool:
        counted = _counters(instance)
        # A commit is counted shortly after the position has moved.
        is_counted = _accounted(counted) == sum(ends.values())
        return is_counted and all(counted[f"position {p}"] == ends[p] for p in range(PARTITIONS))

    eventually(is_at_the_end, f"the positions are at the ends {ends}", 120 + _RECORDS / 500)
    counted = _counters(instance)
    print(f"{time.monotonic() - began:.1f} s, {counted}")
    letters = read_topic(stack, f"{topic}-dead-letters")
    told = [dict(letter.headers()) for letter in letters]
    origins = {(h["dead-letter-partition"], h["dead-letter-offset"]) for h in told}
    causes = Counter(h["dead-letter-cause"].decode() for h in told)
    print(dict(causes.most_common()))
    right = recounted(stack, settings)
    held = in_changelog(stack, settings)

    assert process_of(instance).pid == process.pid
    assert sum(ends.values()) >= _RECORDS
    assert _accounted(counted) == sum(ends.values())
    assert len(letters) == len(origins) == counted["dead_lettered"]
    assert {c: (held.get(c), right.get(c)) for c in held.keys() | right.keys() if held.get(c) != right.get(c)} == {}
    assert all_balances(instance, right, ends) == right
    assert len(right) >= len(CUSTOMERS)
