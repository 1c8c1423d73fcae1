"""The Python client on two instances: its guide, and additions and change streams while an instance is killed."""

from __future__ import annotations

import asyncio
import re
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.client import AsyncClient, Change, Client, SnapshotBegin
from balance_service.kafka.partitioner import partition_of
from tests.support.service import PARTITIONS, application, owned, wait_until_spread
from tests.support.waiting import eventually, until

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalInstance

_GUIDE = (Path(__file__).parents[2] / "docs/how-to/client.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"^```python\n(.*?)^```$", _GUIDE, re.DOTALL | re.MULTILINE)
_CENT = Decimal("0.01")
_ADDITIONS = 400


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return application()


def test_the_examples_of_the_guide_print_what_it_shows(
    pair: tuple[LocalInstance, LocalInstance], capsys: pytest.CaptureFixture[str]
) -> None:
    code = "\n".join(_BLOCKS)
    for port, instance in zip((5051, 5052), pair, strict=True):
        code = code.replace(f"http://127.0.0.1:{port}", instance.url)

    # Without the annotations' form of this module, which a reader's need not have.
    exec(compile(code, "docs/how-to/client.md", "exec", dont_inherit=True), {})

    assert capsys.readouterr().out.splitlines() == re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(_BLOCKS) > 7


def test_both_clients_read_their_writes_through_the_other_instance(
    pair: tuple[LocalInstance, LocalInstance],
) -> None:
    run = uuid.uuid4().hex[:8]
    customers = [f"{run}-{number:02}" for number in range(10)]

    async def added_and_read(url: str) -> list[Decimal | None]:
        async with AsyncClient(url, read_your_writes=True) as client:
            await asyncio.gather(*(client.add_funds(customer, "0.20") for customer in customers))
            balances = await asyncio.gather(*(client.get_balance(customer) for customer in customers))
            return [balance.amount for balance in balances]

    with Client(pair[0].url, read_your_writes=True) as client:
        for customer in customers:
            client.add_funds(customer, Decimal("0.10"))
            assert client.get_balance(customer).amount == Decimal("0.10")
        assert asyncio.run(added_and_read(pair[1].url)) == [Decimal("0.30")] * len(customers)

        entries = [*client.entries("balance", prefix=run, page_size=3)]

    assert [(entry.key, entry.value["amount"]) for entry in entries] == [(c, Decimal("0.30")) for c in customers]
    assert {*entries[0].scan.partitions} == set(range(PARTITIONS))


@pytest.mark.shows("client")
def test_each_addition_counts_once_although_the_instance_is_killed(
    pair: tuple[LocalInstance, LocalInstance],
) -> None:
    staying, killed = pair
    customer = f"killed-{uuid.uuid4()}"
    with Client(killed.url, retry_seconds=120) as client, ThreadPoolExecutor(16) as pool:
        additions = [pool.submit(client.add_funds, customer, _CENT) for _ in range(_ADDITIONS)]
        eventually(lambda: sum(map(Future.done, additions)) > _ADDITIONS // 4, "some additions are done")
        killed.kill()
        killed.launch()
        killed.wait_ready()
        keys = {addition.result().idempotency_key for addition in additions}
    wait_until_spread(pair)

    assert len(keys) == _ADDITIONS
    with Client(staying.url, read_your_writes=True) as client:
        # Both partitions have moved; the last addition comes after all of them.
        client.add_funds(customer, _CENT)
        assert client.get_balance(customer).amount == (_ADDITIONS + 1) * _CENT


@pytest.mark.shows("listener")
def test_change_streams_report_every_balance_although_the_owner_is_killed(
    pair: tuple[LocalInstance, LocalInstance],
) -> None:
    staying, killed = pair
    run = uuid.uuid4().hex[:8]
    customers = [f"{run}-{number:02}" for number in range(20)]
    (moving,) = owned(killed)
    watched = next(c for c in customers if partition_of(c.encode(), PARTITIONS) == moving)
    of_key: list[Change[Any]] = []
    of_range: dict[str, Decimal] = {}

    async def follow_key() -> None:
        async with AsyncClient(killed.url) as client:
            async for change in client.changes("balance", key=watched):
                of_key.append(change)  # noqa: PERF401  # it is read while it grows

    async def follow_range() -> None:
        async with AsyncClient(staying.url) as client:
            async for event in client.changes("balance", prefix=run):
                match event:
                    case SnapshotBegin():
                        of_range.clear()
                    case Change(key=key, value=value):
                        of_range[key] = value["amount"]

    async def add_to_all(client: AsyncClient) -> None:
        await asyncio.gather(*(client.add_funds(customer, _CENT) for customer in customers))

    async def reported(times: int) -> None:
        amounts = dict.fromkeys(customers, times * _CENT)

        def is_reported() -> bool:
            return of_range == amounts and of_key != [] and of_key[-1].value == {"amount": times * _CENT}

        await until(is_reported, f"both streams report {times * _CENT} for each customer")

    async def story() -> None:
        async with AsyncClient(staying.url) as client, asyncio.TaskGroup() as group:
            following = [group.create_task(follow_key()), group.create_task(follow_range())]
            await add_to_all(client)
            await reported(1)
            killed.kill()
            await add_to_all(client)
            await asyncio.to_thread(killed.launch)
            await asyncio.to_thread(killed.wait_ready)
            await add_to_all(client)
            await reported(3)
            for task in following:
                task.cancel()

    asyncio.run(story())

    amounts = [Decimal(0) if change.value is None else change.value["amount"] for change in of_key]
    assert amounts == sorted(amounts)
    epochs = [change.sources[moving].epoch for change in of_key]
    assert epochs == sorted(epochs)
    assert epochs[0] < epochs[-1]
