"""A client that its program closes while others use it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.client import AsyncClient, Client, ClientError, ClosedError
from tests.support.scripted_server import Drop, problem, scripted, stream
from tests.support.waiting import SHARED, eventually
from tests.unit.client.test_changes import HANGS, state

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.scripted_server import Received, Reply

_SECONDS = 20.0
_AT_ONCE_SECONDS = 2.0 * SHARED
FOLLOWS = stream(state("1", "1/1:1"), *HANGS)


def _follow(client: Client) -> None:
    for _ in client.changes("balance", key="c1"):
        pass


def _ask(client: Client) -> None:
    client.get("balance", "c1")


async def _follow_too(client: AsyncClient) -> None:
    async for _ in client.changes("balance", key="c1"):
        pass


async def _ask_too(client: AsyncClient) -> None:
    await client.get("balance", "c1")


BUSY = problem(503, "starting", Retry_After="60")
# What the server replies to the first request, and whether it asks for changes.
WAITS = [(FOLLOWS, True), (BUSY, True), (BUSY, False)]
PATIENT: Any = {"timeout_seconds": 50.0, "retry_seconds": 300.0}


@pytest.mark.parametrize(("reply", "is_following"), WAITS)
def test_a_thread_that_waits_ends_at_once(reply: Reply, is_following: bool) -> None:
    ended: list[BaseException | None] = []

    def use(client: Client) -> None:
        try:
            (_follow if is_following else _ask)(client)
        except BaseException as error:
            ended.append(error)

    with scripted(reply) as (url, received):
        client = Client(url, **PATIENT)
        thread = threading.Thread(target=use, args=(client,))
        thread.start()
        eventually(lambda: len(received) == 1, "the request has arrived", _SECONDS)
        time.sleep(0.2)
        began = time.monotonic()
        client.close()
        thread.join(_SECONDS)
        assert time.monotonic() - began < _AT_ONCE_SECONDS
    assert [type(error) for error in ended] == [ClosedError]


@pytest.mark.parametrize(("reply", "is_following"), WAITS)
def test_a_task_that_waits_ends_at_once(reply: Reply, is_following: bool) -> None:
    async def run(url: str, received: list[Received]) -> None:
        client = AsyncClient(url, **PATIENT)
        using = asyncio.create_task((_follow_too if is_following else _ask_too)(client))
        async with asyncio.timeout(_SECONDS):
            while len(received) < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        await client.aclose()
        async with asyncio.timeout(2.0):
            with pytest.raises(ClosedError):
                await using

    with scripted(reply) as (url, received):
        asyncio.run(run(url, received))


def test_a_stream_that_its_own_thread_closes_ends() -> None:
    with scripted(FOLLOWS) as (url, _), Client(url) as client:
        changes = client.changes("balance", key="c1")
        next(changes)
        client.close()
        with pytest.raises(ClosedError, match="the client is closed"):
            next(changes)


@pytest.mark.parametrize("call", [_follow, _ask])
def test_a_closed_client_says_so(call: Callable[[Client], None]) -> None:
    with scripted(Drop()) as (url, received):
        client = Client(url)
        client.close()
        client.close()
        with pytest.raises(ClientError, match="the client is closed; create another one"):
            call(client)
    assert received == []


def test_an_addition_that_a_closed_client_gives_up_has_its_key() -> None:
    with scripted(BUSY) as (url, received):
        client = Client(url, **PATIENT)

        def close() -> None:
            eventually(lambda: len(received) == 1, "the request has arrived", _SECONDS)
            client.close()

        threading.Thread(target=close).start()
        with pytest.raises(ClosedError) as failed:
            client.add_funds("c1", 1)
    assert failed.value.idempotency_key == received[0].headers["idempotency-key"]
