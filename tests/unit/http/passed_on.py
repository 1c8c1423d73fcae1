"""Plain queries that an instance passes on, and what comes of them with aiohttp and without."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp.test_utils import TestServer

from tests.support.querying import PARTITION, Instance, Peer
from tests.unit.http.plain_queries import serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from balance_service.http.server.limits import Limits


ACTIVE = {
    "Balance-Position": f"{PARTITION}:7",
    "Balance-Epoch": "3",
    "Balance-Lag": "0",
    "X-Of-The-Owner": "secret",
}


def slow(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], seconds: float = 0.1
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await answer(request)

    return handle


def exchange(
    instance: Instance,
    peer: Peer | None,
    *segments: bytes,
    answers: int = 1,
    is_plain: bool = True,
    limits: Limits | None = None,
) -> tuple[list[bytes], int]:
    """What is answered by an instance that takes this peer for the owner; and how often without aiohttp."""

    async def run() -> tuple[list[bytes], int]:
        async with serving(instance, limits, is_plain=is_plain) as server:
            if peer is None:
                return await server.exchange(*segments, answers=answers), len(server.later)
            async with TestServer(peer.app()) as owner:
                instance.hear_of_owner(f"127.0.0.1:{owner.port}")
                found = await server.exchange(*segments, answers=answers)
                instance.servers.hear(f"127.0.0.1:{owner.port}", None, live=True)
                its_own = f"Balance-Application-Server: 127.0.0.1:{owner.port}".encode()
                return [a.replace(its_own, b"Balance-Application-Server: owner:1") for a in found], len(server.later)

    return asyncio.run(run())


def both_ways(
    instance: Instance,
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None,
    *segments: bytes,
    answers: int = 1,
) -> tuple[list[bytes], int]:
    """The same, with plain queries and without."""
    peers = [None if answer is None else Peer(answer) for _ in range(2)]
    with_plain, later = exchange(instance, peers[0], *segments, answers=answers)
    without, _ = exchange(instance, peers[1], *segments, answers=answers, is_plain=False)
    assert with_plain == without
    return with_plain, later
