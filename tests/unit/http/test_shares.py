"""Shares of places: how many one client may hold, which clients wait or are refused, and the operators' reserve."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.http.answer import Problem
from balance_service.http.shares import Shares
from tests.support.querying import BUSY_SECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable


def few() -> Shares:
    return Shares("scans", 2, of_each=1, waiting=2, waiting_of_all=3)


class Asked:
    """Scans that end when the test says so."""

    def __init__(self, shares: Shares | None = None, seconds: float | None = BUSY_SECONDS) -> None:
        self.shares = few() if shares is None else shares
        self.admitted: list[str] = []
        self._answered: dict[str, asyncio.Event] = {}
        self._seconds = seconds

    def ask(self, name: str) -> asyncio.Task[None]:
        """A scan; its name begins with its asker."""
        self._answered[name] = asyncio.Event()
        return asyncio.create_task(self._ask(name))

    async def _ask(self, name: str) -> None:
        async with self.shares.place(name[0], self._seconds):
            self.admitted.append(name)
            await self._answered[name].wait()

    async def answer(self, name: str, task: Awaitable[None]) -> None:
        self._answered[name].set()
        await task


def taken(shares: Shares, client: str, wanted: int, *, is_operator: bool = False) -> int:
    """Takes up to so many places; returns how many it got."""
    return sum(shares.take(client, is_operator=is_operator) for _ in range(wanted))


def test_one_client_alone_holds_at_most_three_quarters() -> None:
    shares = Shares("requests", 1_000)
    assert taken(shares, "a", 1_100) == 750
    assert len(shares) == 750


def test_the_shares_of_all_that_want_more_become_the_same_and_the_next_client_finds_places() -> None:
    shares = Shares("requests", 1_000)
    held = {f"client {number}": taken(shares, f"client {number}", 1_000) for number in range(20)}
    assert list(held.values())[:5] == [750, 188, 47, 12, 3]
    # Each gives one back, and tries to take three.
    for _ in range(1_000):
        for client in held:
            if held[client]:
                shares.release(client)
                held[client] -= 1
            held[client] += taken(shares, client, 3)
    assert max(held.values()) <= min(held.values()) + 10
    assert taken(shares, "another", 100) >= 3


def test_a_share_shrinks_as_others_come_and_places_that_are_given_back_go_to_them() -> None:
    shares = Shares("requests", 1_000)
    taken(shares, "a", 1_000)
    for _ in range(750):
        shares.release("a")
        taken(shares, "b", 1_000)
        taken(shares, "a", 1_000)
    held = taken(shares, "a", 0), len(shares)
    assert held[1] <= 1_000
    assert taken(shares, "c", 1_000) >= 100


def test_one_place_in_sixteen_is_for_operators_alone() -> None:
    shares = Shares("requests", 1_000, has_reserve=True)
    for number in range(1_000):
        taken(shares, f"client {number}", 1_000)
    assert len(shares) == 1_000 - 1_000 // 16
    assert taken(shares, "an operator", 10, is_operator=True) == 10


def test_places_beyond_a_lowered_number_are_kept_and_none_is_given() -> None:
    shares = Shares("streams", 10)
    assert taken(shares, "a", 5) == 5
    shares.resize(4)
    assert taken(shares, "b", 1) == 0
    for _ in range(3):
        shares.release("a")
    assert taken(shares, "b", 1) == 1


def test_a_refusal_names_the_setting_and_whose_places_are_taken() -> None:
    shares = Shares("streams", 2, setting="BALANCE_MAX_STREAMS")
    taken(shares, "a", 2)
    assert "this client's share of streams is used up: 2 " in shares.refusal("a").detail
    assert "too many streams of other clients" in shares.refusal("b").detail
    assert all("BALANCE_MAX_STREAMS is 2" in shares.refusal(client).detail for client in "ab")


def test_those_who_may_wait_without_limit_are_not_refused() -> None:
    async def run() -> None:
        asked = Asked(Shares("snapshots", 1), seconds=None)
        tasks = {name: asked.ask(name) for name in (f"a{number}" for number in range(1_000))}
        tasks["b"] = asked.ask("b")
        await begun()
        assert asked.admitted == ["a0"]
        await asked.answer("a0", tasks.pop("a0"))
        await begun()
        # The other client does not wait for all of the first one's.
        assert asked.admitted == ["a0", "b"]
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert len(asked.shares) == 0
        assert taken(asked.shares, "c", 1) == 1

    asyncio.run(run())


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
        asked = Asked(Shares("scans", 2, waiting=9, waiting_of_all=99))
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
        asked = Asked(Shares("scans", 1, waiting=3, waiting_of_all=3))
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
        async with asked.shares.place("a", BUSY_SECONDS):
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
