"""Fair scheduling of scans: shares, round robin, time slices, and cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.http.answer import Problem
from balance_service.http.scheduling import Admission, Asker, Bounds, FairScheduler, in_one_step
from tests.support.querying import BUSY_SECONDS
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator

FEW = Bounds(running=1, running_of_all=2, waiting=2, waiting_of_all=3)
CLIENT, OTHER, PEER = Asker("a"), Asker("b"), Asker("b", is_peer=True)


@pytest.fixture
def one_step_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each slice of 1.5 seconds one step long."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(time, "thread_time", clock)


class Asked:
    """Scans that end when the test says so."""

    def __init__(self, bounds: Bounds = FEW, seconds: float = BUSY_SECONDS) -> None:
        self.admission = Admission(bounds)
        self.admitted: list[str] = []
        self._answered: dict[str, asyncio.Event] = {}
        self._seconds = seconds

    def ask(self, name: str) -> asyncio.Task[None]:
        """A scan; its name begins with its asker."""
        self._answered[name] = asyncio.Event()
        return asyncio.create_task(self._ask(name))

    async def _ask(self, name: str) -> None:
        async with self.admission.admitted(name[0], self._seconds):
            self.admitted.append(name)
            await self._answered[name].wait()

    async def answer(self, name: str, task: Awaitable[None]) -> None:
        self._answered[name].set()
        await task


async def begun(*tasks: asyncio.Task[Any]) -> None:
    for _ in tasks:
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_an_asker_beyond_its_share_waits_and_others_are_admitted_at_once() -> None:
    async def run() -> None:
        asked = Asked()
        first, second, other = asked.ask("a1"), asked.ask("a2"), asked.ask("b1")
        await begun(first, second, other)
        assert asked.admitted == ["a1", "b1"]
        await asked.answer("a1", first)
        await begun(second)
        assert asked.admitted == ["a1", "b1", "a2"]
        await asked.answer("b1", other)
        await asked.answer("a2", second)

    asyncio.run(run())


def test_a_scan_beyond_the_share_is_refused_with_the_client_s_own_figures() -> None:
    async def run() -> None:
        asked = Asked()
        tasks = {name: asked.ask(name) for name in ("a1", "a2", "a3", "a4", "b1")}
        await begun(*tasks.values())
        with pytest.raises(
            Problem, match=r"this client's share of scans is used up: 1 .* in progress here and 2 wait"
        ) as e:
            await tasks.pop("a4")
        assert (e.value.status, e.value.headers["Retry-After"]) == (503, "1")
        assert asked.admitted == ["a1", "b1"]
        for name, task in tasks.items():
            await asked.answer(name, task)

    asyncio.run(run())


def test_waiting_scans_are_admitted_from_each_asker_in_turn() -> None:
    async def run() -> None:
        asked = Asked(Bounds(running=2, running_of_all=2, waiting=9, waiting_of_all=99))
        names = ["a1", "a2", "a3", "a4", "a5", "b1", "b2"]
        tasks = {name: asked.ask(name) for name in names}
        await begun(*tasks.values())
        for name in ("a1", "a2", "b1", "a3"):
            await asked.answer(name, tasks.pop(name))
            await begun()
        assert asked.admitted == ["a1", "a2", "b1", "a3", "b2", "a4"]
        for name, task in tasks.items():
            await asked.answer(name, task)

    asyncio.run(run())


def test_if_too_many_scans_wait_the_newest_of_the_busiest_asker_is_refused() -> None:
    async def run() -> None:
        asked = Asked(Bounds(running=1, running_of_all=1, waiting=3, waiting_of_all=3))
        tasks = {name: asked.ask(name) for name in ("a1", "a2", "a3", "a4", "b1")}
        await begun(*tasks.values())
        with pytest.raises(Problem, match="this client's share"):
            await tasks.pop("a4")
        await asked.answer("a1", tasks.pop("a1"))
        await asked.answer("b1", tasks.pop("b1"))
        for name, task in tasks.items():
            await asked.answer(name, task)

    asyncio.run(run())


def test_a_scan_that_waited_too_long_is_refused_and_the_next_is_admitted() -> None:
    async def run() -> None:
        asked = Asked(seconds=0.05)
        first, second = asked.ask("a1"), asked.ask("a2")
        with pytest.raises(Problem, match="this client's share"):
            await second
        third = asked.ask("a3")
        await begun(third)
        await asked.answer("a1", first)
        await begun(third)
        assert asked.admitted == ["a1", "a3"]
        await asked.answer("a3", third)

    asyncio.run(run())


def test_the_place_of_a_scan_cancelled_at_its_admission_is_free() -> None:
    async def run() -> None:
        asked = Asked()
        async with asked.admission.admitted("a", BUSY_SECONDS):
            second = asked.ask("a2")
            await begun(second)
        # It is admitted but has not resumed yet.
        second.cancel()
        await begun(second)
        third = asked.ask("a3")
        await begun(third)
        assert asked.admitted == ["a3"]
        await asked.answer("a3", third)

    asyncio.run(run())


@pytest.mark.parametrize("given_up", ["while it waits", "while it is under way"])
def test_the_place_of_a_cancelled_scan_is_free(given_up: str) -> None:
    async def run() -> None:
        asked = Asked()
        first, second = asked.ask("a1"), asked.ask("a2")
        await begun(first, second)
        if given_up == "while it waits":
            second.cancel()
        await asked.answer("a1", first)
        await begun(second)
        second.cancel()
        third = asked.ask("a3")
        await begun(second, third)
        assert asked.admitted[-1] == "a3"
        await asked.answer("a3", third)
        assert second.cancelled()

    asyncio.run(run())


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
