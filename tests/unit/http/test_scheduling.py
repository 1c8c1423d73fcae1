"""Fair scheduling of scans: round robin, time slices, and cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.errors import RetriableError
from balance_service.http.scheduling import FairScheduler, in_one_step
from balance_service.http.shares import Asker
from tests.support.collector import no_collector
from tests.support.querying import BUSY_SECONDS
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Generator

CLIENT, OTHER, PEER = Asker("a"), Asker("b"), Asker("b", is_peer=True)


@pytest.fixture
def one_step_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each slice of 1.5 seconds one step long."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(time, "thread_time", clock)


async def begun(*tasks: asyncio.Task[Any]) -> None:
    for _ in tasks:
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def counting(name: str, steps: int, read: list[str]) -> Generator[None, None, str]:
    for _ in range(steps):
        read.append(name)
        yield
    return f"{name} of {steps}"


@pytest.mark.shows("scans")
@pytest.mark.usefixtures("one_step_a_slice")
def test_a_short_scan_is_answered_between_the_slices_of_long_ones() -> None:
    async def run() -> tuple[list[str], list[str]]:
        read: list[str] = []
        reading = FairScheduler("test", slice_seconds=1.5)
        long = [asyncio.create_task(reading.run(CLIENT, counting("long", 50, read))) for _ in range(2)]
        await begun()
        short = await reading.run(OTHER, counting("short", 2, read))
        until_then = list(read)
        return [short, *await asyncio.gather(*long)], until_then

    answers, until_then = asyncio.run(run())

    assert answers == ["short of 2", "long of 50", "long of 50"]
    assert until_then.count("long") < 12


@pytest.mark.usefixtures("one_step_a_slice")
def test_clients_and_peers_alternate_regardless_of_their_number_of_scans() -> None:
    async def run() -> list[str]:
        read: list[str] = []
        reading = FairScheduler("test", slice_seconds=1.5)
        clients = [reading.run(CLIENT, counting("client", 9, read)) for _ in range(9)]
        await asyncio.gather(*clients, reading.run(PEER, counting("peer", 9, read)))
        return read

    read = asyncio.run(run())

    assert read[:18].count("peer") >= 8


def test_a_cancelled_scan_ends_after_its_current_step() -> None:
    steps, closed = [0], threading.Event()

    def endless() -> Generator[None, None, str]:
        try:
            while True:
                steps[0] += 1
                time.sleep(0.001)
                yield
        finally:
            closed.set()

    async def run() -> None:
        reading = FairScheduler("test", slice_seconds=float("inf"))
        question = asyncio.create_task(reading.run(CLIENT, endless()))
        await until(lambda: steps[0] > 3, "it is read")
        question.cancel()
        await until(closed.is_set, "the reading ends")
        assert await reading.run(CLIENT, in_one_step(str, 7)) == "7"
        assert question.cancelled()

    asyncio.run(run())


def test_a_scan_cancelled_before_its_first_slice_is_not_begun() -> None:
    async def run() -> None:
        reading, go_on, read = FairScheduler("test"), threading.Event(), list[str]()
        blocking = asyncio.create_task(reading.run(CLIENT, in_one_step(go_on.wait, BUSY_SECONDS)))
        waiting = asyncio.create_task(reading.run(OTHER, counting("waiting", 1, read)))
        await begun(blocking, waiting)
        waiting.cancel()
        await begun(waiting)
        go_on.set()
        assert await blocking
        assert not read

    asyncio.run(run())


def test_an_exception_of_a_scan_is_raised_and_the_next_scan_runs() -> None:
    async def run() -> None:
        reading = FairScheduler("test")
        with pytest.raises(ValueError, match="no number"):
            await reading.run(CLIENT, in_one_step(refuse))
        assert await reading.run(CLIENT, in_one_step(str, 7)) == "7"

    asyncio.run(run())


def refuse() -> str:
    raise ValueError("no number")


def test_the_error_of_a_scan_keeps_nothing_that_the_scan_has_read() -> None:
    class View:
        pass

    def failing(views: list[weakref.ref[View]]) -> Generator[None, None, None]:
        view = View()
        views.append(weakref.ref(view))
        yield
        raise RetriableError("the partitions could not be read to their end")

    async def run() -> list[weakref.ref[View]]:
        views: list[weakref.ref[View]] = []
        for _ in range(2):
            with suppress(RetriableError):
                await FairScheduler("test").run(CLIENT, failing(views))
        await asyncio.sleep(0)
        return views

    with no_collector():
        assert [view() for view in asyncio.run(run())] == [None, None]


def test_the_event_loop_runs_between_two_slices() -> None:
    async def run() -> None:
        reading, read = FairScheduler("test"), list[str]()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(reading.admitted(CLIENT, BUSY_SECONDS))
            question = asyncio.create_task(reading.run(CLIENT, counting("c", 1_000_000, read)))
            await until(lambda: bool(read), "it is read")
            assert not question.done()
            question.cancel()

    asyncio.run(run())
