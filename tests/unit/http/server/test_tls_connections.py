"""Connections over TLS: what asyncio keeps for each, when it is freed, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import time
import tracemalloc
from asyncio.sslproto import SSLProtocol
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest
import structlog
from aiohttp import web

from balance_service.http.server.limits import Connection, Limits
from balance_service.http.server.tls import Tls, TlsFiles, load_tls
from tests.support.collector import no_collector
from tests.support.credentials import Authority
from tests.support.waiting import until
from tests.unit.http.raw_http import COMMAND, QUESTION, QUICK, serving

if TYPE_CHECKING:
    from pathlib import Path

HOST = "127.0.0.1"
both = pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])


def connected(port: int, context: ssl.SSLContext | None, received: int | None = None) -> socket.socket:
    """A blocking client, after its handshake.

    Args:
        received: bytes of its receive buffer, which the kernel doubles.
    """
    plain = socket.socket()
    if received is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
    plain.settimeout(10)
    plain.connect((HOST, port))
    return plain if context is None else context.wrap_socket(plain, server_hostname=HOST)


@both
def test_a_client_that_sends_nothing_costs_kilobytes(tls: Tls, is_tls: bool) -> None:
    clients = 50

    async def run() -> int:
        async with serving(Limits(), tls=tls.server if is_tls else None) as server:
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                with ExitStack() as silent:
                    for _ in range(clients):
                        silent.enter_context(connected(server.port, None))
                    await until(lambda: server.connections == clients, "they are accepted")
                    return tracemalloc.get_traced_memory()[0] - before
            finally:
                tracemalloc.stop()

    assert asyncio.run(run()) / clients < 64 << 10


def test_buffers_of_a_connection_that_the_server_closes_are_freed_without_the_garbage_collector(tls: Tls) -> None:
    async def run() -> int:
        async with serving(Limits(idle_seconds=0.2), tls=tls.server) as server:
            client = await asyncio.to_thread(connected, server.port, tls.client)
            with client:
                client.sendall(QUESTION)
                await asyncio.to_thread(_read_all, client)
            await until(lambda: server.connections == 0, "its slot is free")
            return sum(isinstance(kept, SSLProtocol) for kept in gc.get_objects())

    with no_collector():
        assert asyncio.run(run()) == 0


def _read_all(client: socket.socket, pause_seconds: float = 0.0) -> int:
    read = 0
    while data := client.recv(60_000):
        read += len(data)
        time.sleep(pause_seconds)
    return read


@both
def test_a_slow_client_gets_all_of_an_answer_after_which_the_server_closes(tls: Tls, is_tls: bool) -> None:
    size = 1 << 20

    async def answer(_request: web.Request) -> web.Response:
        response = web.Response(body=b"x" * size)
        response.force_close()
        return response

    async def run() -> tuple[int, float]:
        async with serving(Limits(), answer, tls=tls.server if is_tls else None) as server:
            context = tls.client if is_tls else None
            with await asyncio.to_thread(connected, server.port, context, 16 << 10) as client:
                client.sendall(QUESTION)
                began = time.monotonic()
                return await asyncio.to_thread(_read_all, client, 0.03), time.monotonic() - began

    read, seconds = asyncio.run(run())

    assert read > size
    assert seconds > 1.5


@both
def test_a_connection_that_was_closed_twice_is_reset_in_time(tls: Tls, is_tls: bool) -> None:
    """As when the client closes TLS, but not TCP, while a stream is written."""

    async def answer(request: web.Request) -> web.Response:
        transport = request.transport
        assert transport is not None
        transport.write(b"x" * (4 << 20))
        transport.close()
        transport.close()
        return web.Response()

    async def run() -> float:
        async with serving(QUICK, answer, tls=tls.server if is_tls else None) as server:
            context = tls.client if is_tls else None
            with await asyncio.to_thread(connected, server.port, context, 4096) as client:
                client.sendall(QUESTION)
                began = time.monotonic()
                await until(lambda: server.connections == 0, "its slot is free")
                return time.monotonic() - began

    assert asyncio.run(run()) < 5


class Streaming:
    """Answers with a stream."""

    def __init__(self) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        response, connection = web.StreamResponse(), request.protocol
        assert isinstance(connection, Connection)
        response.force_close()
        await response.prepare(request)
        connection.becomes_stream()
        self.began.set()
        try:
            with suppress(ConnectionError):
                while True:
                    await response.write(b"x")
                    await connection.drained()
                    await asyncio.sleep(0.02)
        finally:
            self.ended.set()
        return response  # type: ignore[return-value]


@both
@pytest.mark.parametrize("sends", [0, 1, 40])
def test_a_stream_ends_with_its_client_also_after_further_requests(tls: Tls, is_tls: bool, sends: int) -> None:
    async def run() -> None:
        stream = Streaming()
        async with serving(Limits(), stream.answer, tls=tls.server if is_tls else None) as server:
            with await asyncio.to_thread(connected, server.port, tls.client if is_tls else None) as client:
                client.sendall(QUESTION * (1 + sends))
                await stream.began.wait()
                socket.socket.shutdown(client, socket.SHUT_WR)
                await asyncio.wait_for(stream.ended.wait(), 5)

    asyncio.run(run())


def test_what_follows_on_the_connection_of_a_stream_ends_it() -> None:
    async def run() -> None:
        stream = Streaming()
        async with serving(Limits(), stream.answer) as server, server.client() as client:
            await client.send(QUESTION)
            await stream.began.wait()
            await client.send(QUESTION)
            await asyncio.wait_for(stream.ended.wait(), 5)

    asyncio.run(run())


@pytest.fixture
def mutual(tmp_path: Path) -> Tls:
    """Contexts of a server that demands certificates, and of a client without one."""
    authority = Authority(tmp_path)
    files = TlsFiles(*authority.issue("server"), ca=authority.certificate, client_ca=authority.certificate)
    client = ssl.create_default_context(cafile=authority.certificate)
    return Tls(load_tls(files).server, client)


def test_a_client_that_is_refused_for_its_certificate_is_logged_once_a_minute(mutual: Tls) -> None:
    async def run() -> None:
        async with serving(QUICK, tls=mutual.server) as server:
            for _ in range(3):
                with await asyncio.to_thread(connected, server.port, mutual.client) as client, suppress(OSError):
                    client.sendall(QUESTION)
                    assert await asyncio.to_thread(client.recv, 1) == b""
                await until(lambda: server.connections == 0, "its slot is free")

    with structlog.testing.capture_logs() as logs:
        asyncio.run(run())

    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["client"] for entry in warnings] == [f"address:{HOST}"]
    assert "BALANCE_TLS_CLIENT_CA" in warnings[0]["event"]


def test_a_broken_record_within_a_body_is_no_error_of_the_service(tls: Tls) -> None:
    async def run() -> None:
        async with serving(Limits(), tls=tls.server) as server:
            with await asyncio.to_thread(connected, server.port, tls.client) as client:
                client.sendall(COMMAND % 100 + b"{")
                await asyncio.sleep(0.3)
                socket.socket.send(client, b"\x17\x03\x03\x00\x20" + b"x" * 32)
                await until(lambda: server.connections == 0, "its slot is free")

    with structlog.testing.capture_logs() as logs:
        asyncio.run(run())

    assert [entry for entry in logs if entry["log_level"] in ("error", "warning")] == []
