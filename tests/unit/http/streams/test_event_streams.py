"""The life of an event stream: its limits, its rights, its signs of life, and its end."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, cast

import pytest
from aiohttp import ClientSession

from balance_service import api
from balance_service.http.access.authentication import Authenticator, load_tokens
from balance_service.http.access.authorization import Access
from balance_service.http.server.limits import Limits
from balance_service.http.server.reloading import Reloaded
from balance_service.http.streams import event_stream, part
from tests.unit.http.streaming import (
    BUSY_SECONDS,
    CHANGES,
    KEY,
    Owner,
    Stage,
    stage,
    until,
    write_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from aiohttp import web

    from balance_service.http.routing import LocalCopy
    from balance_service.http.server.tls import Tls


def test_streams_beyond_the_limit_are_refused_and_others_go_on(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "store", most_streams=2)

    async def run() -> None:
        async with (
            stage(owner) as on,
            on.listening(owner) as one,
            on.listening(owner) as two,
            ClientSession() as session,
        ):
            await one.next()
            await two.next()
            async with session.get(f"http://{owner.address}{CHANGES}") as refused:
                assert refused.status == 503
                assert "BALANCE_MAX_STREAMS" in (await refused.json())["detail"]
                assert refused.headers["Retry-After"] == "1"
            async with session.head(f"http://{owner.address}{CHANGES}") as head:
                assert head.status == 503
            owner.commit({"c1": "1.00"})
            assert (await one.next()).entry == (await two.next()).entry == ("c1", "1.00")

    asyncio.run(run())


def test_a_stream_has_no_slot_of_a_connection_and_gives_its_place_back(owner: Owner) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            site = await stack.enter_async_context(owner.serving())
            session = await stack.enter_async_context(ClientSession())
            on = Stage(session)
            async with on.listening(owner) as listener:
                await listener.next()
                assert site.connections == 0
                assert len(owner.streams) == 1
            await until(lambda: not owner.streams)

    asyncio.run(run())


def test_a_stream_over_tls_sends_each_change_and_shows_that_it_is_alive(
    tmp_path: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "ALIVE_SECONDS", 0.2)
    monkeypatch.setattr(event_stream, "_SWEEP_SECONDS", 0.1)
    owner = Owner(tmp_path / "store", tls=tls)

    async def run() -> None:
        async with stage(owner) as on, on.listening(owner) as listener:
            await listener.next()
            for number in range(7):
                owner.commit({"c1": f"{number}.00"})
                assert (await listener.next()).entry == ("c1", f"{number}.00")
                comments = len(listener.comments)
                assert await listener.silent(0.6)
                assert "alive" in listener.comments[comments:]

    asyncio.run(run())


def test_a_stream_ends_when_its_token_is_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_RECHECK_SECONDS", 0.1)
    monkeypatch.setattr(event_stream, "_SWEEP_SECONDS", 0.1)
    file = tmp_path / "tokens.json"
    token = "a-token-of-at-least-thirty-two-characters"
    write_tokens(file, token)
    tokens = Reloaded([file], lambda: load_tokens(file))
    owner = Owner(tmp_path / "store", access=Access(Authenticator(tokens)))

    async def run() -> None:
        async with stage(owner) as on, on.listening(owner, token=token) as listener:
            await listener.next()
            assert await listener.silent()
            write_tokens(file, "another-token-of-at-least-32-characters")
            assert tokens.refresh()
            event = await listener.next()
            assert event.name == "end"
            assert "token" in json.loads(event.data)["detail"]
            with pytest.raises(AssertionError, match="the stream ended"):
                await listener.next()

    asyncio.run(run())


def test_an_idle_stream_shows_that_it_is_alive(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "ALIVE_SECONDS", 0.2)
    monkeypatch.setattr(event_stream, "_SWEEP_SECONDS", 0.1)

    async def run() -> None:
        async with stage(owner) as on, on.listening(owner) as listener:
            await listener.next()
            assert await listener.silent(1.0)
            assert listener.comments.count("alive") >= 3

    asyncio.run(run())


@pytest.mark.shows("listener")
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
def test_a_client_that_does_not_read_is_cut_off_and_a_slow_one_is_not(tmp_path: Path, tls: Tls, is_tls: bool) -> None:
    owner = Owner(tmp_path / "store", limits=Limits(unsent_seconds=1.0), tls=tls if is_tls else None)
    keys = [f"{number:0200}" for number in range(3_000)]

    async def run() -> None:
        owner.show(dict.fromkeys(keys, "1.00"))
        async with stage(owner):
            host, port = owner.address.split(":")
            client_tls = tls.client if is_tls else None
            stuck = await asyncio.open_connection(host, int(port), limit=1, ssl=client_tls)
            slow = await asyncio.open_connection(host, int(port), limit=1, ssl=client_tls)
            for _, writer in (stuck, slow):
                writer.write(f"GET {CHANGES} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            began = asyncio.get_running_loop().time()
            read = b""
            async with asyncio.timeout(3 * BUSY_SECONDS):
                while b"snapshot-end" not in read:
                    read += await slow[0].read(60_000)
                    await asyncio.sleep(0.15)
            assert asyncio.get_running_loop().time() - began > 2.0
            await until(lambda: len(owner.streams) == 1)
            for _, writer in (stuck, slow):
                writer.transport.abort()
            await asyncio.sleep(0)

    asyncio.run(run())


def test_bad_requests_are_refused_before_the_stream_begins(owner: Owner) -> None:
    bad = {
        f"{KEY}?minPosition=0:1": (400, "minPosition"),
        "/api/models/balance/keys/%00": (400, "key"),
        "/api/models/nope/keys/c1": (404, "nope"),
        "/api/models/nope/changes": (404, "nope"),
        "/api/changes": (403, "only instances"),
    }

    async def run() -> None:
        async with stage(owner), ClientSession() as session:
            for path, (status, word) in bad.items():
                headers = {"Accept": "text/event-stream"}
                async with session.get(f"http://{owner.address}{path}", headers=headers) as answer:
                    assert answer.status == status, path
                    assert word in (await answer.json())["detail"]
            headers = {"Accept": "text/event-stream", "Last-Event-ID": "yesterday"}
            async with session.get(f"http://{owner.address}{CHANGES}", headers=headers) as answer:
                assert answer.status == 400
                assert "Last-Event-ID must be the id of an event" in (await answer.json())["detail"]
            async with session.head(f"http://{owner.address}{CHANGES}") as answer:
                assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")

    asyncio.run(run())


def test_a_stream_that_ends_may_be_ended_again() -> None:
    async def run() -> None:
        deadline = asyncio.timeout(None)
        stream = event_stream.EventStream(cast("web.Request", None), cast("web.StreamResponse", None), deadline)
        with suppress(TimeoutError):
            async with deadline:
                stream.end()
                stream.end()
                await asyncio.sleep(BUSY_SECONDS)
        assert deadline.expired()
        stream.end()

    asyncio.run(run())


def test_snapshots_leave_a_client_its_share_of_scans(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    scan, is_over = part.LocalPart._scan, threading.Event()

    def slow(reading: part.LocalPart, copy: LocalCopy) -> Generator[None, None, tuple[list[tuple[bytes, str]], bool]]:
        while not is_over.is_set():
            time.sleep(0.001)
            yield
        return (yield from scan(reading, copy))

    monkeypatch.setattr(part.LocalPart, "_scan", slow)

    async def run() -> None:
        async with stage(owner) as on, AsyncExitStack() as stack, ClientSession() as session:
            answers = owner.model_queries.hosted["balance"]
            answers.scatter.scheduler = answers.changes._reader.scheduler
            for _ in range(40):
                await stack.enter_async_context(on.listening(owner, CHANGES))
            try:
                async with session.get(f"http://{owner.address}/api/models/balance/count") as answer:
                    assert answer.status == 200, await answer.text()
            finally:
                is_over.set()

    asyncio.run(run())


def test_a_state_that_cannot_be_shown_ends_the_stream(owner: Owner) -> None:
    async def run() -> None:
        owner.show({"c1": "1.00"})
        async with stage(owner), ClientSession() as session:
            answers = owner.model_queries.hosted["balance"].changes
            answers._reader.routing.view = lambda _frame: 1 / 0
            async with session.get(f"http://{owner.address}{CHANGES}") as answer:
                assert answer.status == 200
                assert (await answer.content.read()).endswith(b'data: {"generation":1}\n\n')

    asyncio.run(run())
