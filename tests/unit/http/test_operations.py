"""Metrics and the followed status are made at most once a second, however many clients ask."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from aiohttp import ClientSession, ClientTimeout, StreamReader

from balance_service.http.app import make_app, serve
from balance_service.http.operations import Operations
from balance_service.http.route import Handlers
from balance_service.http.server.limits import Limits
from balance_service.http.server.listening import bind
from balance_service.http.streams.event_stream import Streams
from tests.support.fakes import IdleInstance
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

VIEWERS = 3
WATCHED_SECONDS = 3.5


class Counted(IdleInstance):
    """An instance whose metrics and status are the number of times that they were made, until `most`."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__({})
        self.made = 0
        self.most = most

    def metrics(self) -> bytes:
        self.made += 1
        return str(self.made).encode()

    def status(self) -> dict[str, object]:
        self.made += 1
        return {"made": min(self.made, self.most)}


def test_metrics_are_collected_at_most_once_a_second() -> None:
    now = [100.0]
    operations, nothing = Operations(Counted(), Streams(1), lambda: now[0]), None

    def scraped(at: float) -> Any:
        now[0] = at
        return asyncio.run(operations.metrics(nothing)).body  # type: ignore[arg-type]  # the handler ignores the request

    assert [scraped(at) for at in (100.0, 100.5, 100.999, 101.0, 101.5, 109.0)] == [b"1", b"1", b"1", b"2", b"2", b"3"]


def viewed(instance: Counted, viewers: int) -> list[list[int]]:
    """Returns the statuses that each viewer got of a stream within the time."""

    async def view(session: ClientSession) -> list[int]:
        found: list[int] = []
        async with session.get("/api/status", headers={"Accept": "text/event-stream"}) as response:
            assert response.content_type == "text/event-stream"
            try:
                async with asyncio.timeout(WATCHED_SECONDS):
                    async for event in events(response.content):
                        found.append(event["made"])  # noqa: PERF401  # the time ends the loop
            except TimeoutError:
                return found
        raise AssertionError(f"the stream ended after {found}")

    async def events(lines: StreamReader) -> AsyncIterator[dict[str, int]]:
        async for line in lines:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))

    async def run() -> list[list[int]]:
        listener = bind("127.0.0.1", 0)
        site = await serve(make_app(Handlers(Operations(instance, Streams(VIEWERS))), ROUTES), listener, Limits())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with ClientSession(url, timeout=ClientTimeout(total=30)) as session:
                return await asyncio.gather(*(view(session) for _ in range(viewers)))
        finally:
            await site.cleanup()

    return asyncio.run(run())


def test_a_status_is_made_once_a_second_for_all_its_viewers() -> None:
    instance = Counted()

    of_viewers = viewed(instance, VIEWERS)

    # A busy machine may make one less.
    assert 3 <= instance.made <= 4
    for found in of_viewers:
        assert found == sorted(set(found))
        assert 2 <= len(found) <= 4


def test_a_status_without_a_change_is_not_sent_again() -> None:
    assert viewed(Counted(most=1), 1) == [[1]]


def test_no_status_is_made_without_a_viewer() -> None:
    instance = Counted()

    viewed(instance, 0)

    assert instance.made == 0
