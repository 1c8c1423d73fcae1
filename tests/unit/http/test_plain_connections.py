"""Connections on which plain queries are asked: how long they last, and how often one client may ask."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.http.handlers import Handlers
from balance_service.http.operations import Operations
from balance_service.http.server.limits import Limits
from balance_service.http.wiring import Front
from balance_service.settings import Settings
from tests.support.fakes import Nobody
from tests.support.querying import Instance
from tests.support.shipped import MODELS
from tests.support.waiting import until
from tests.unit.http.plain_queries import (
    CUSTOMER,
    SECRET,
    Server,
    next_answer,
    question,
    serving,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    made = Instance(tmp_path / "store")
    made.put("12.34", CUSTOMER)
    return made


def test_a_connection_that_is_used_outlasts_the_idle_time_and_is_closed_after_it(instance: Instance) -> None:
    async def run() -> tuple[int, float]:
        async with serving(instance, Limits(idle_seconds=2.0)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(8):
                writer.write(question())
                assert (await next_answer(reader)).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.3)
            began = asyncio.get_running_loop().time()
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.transport.abort()
            await asyncio.sleep(0)
            return len(server.at_once), asyncio.get_running_loop().time() - began

    at_once, seconds = asyncio.run(run())

    assert at_once == 8
    assert seconds > 0.3


def test_a_client_that_reads_no_plain_answers_is_cut_off(instance: Instance) -> None:
    async def run() -> int:
        loop = asyncio.get_running_loop()
        async with serving(instance, Limits(unsent_seconds=0.5)) as server:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", server.port))

                async def flood() -> None:
                    while True:
                        await loop.sock_sendall(client, question())
                        await asyncio.sleep(0)

                await loop.sock_sendall(client, question())
                await until(lambda: server.at_once, "the first is answered")
                with pytest.raises(ConnectionError):
                    await asyncio.wait_for(flood(), 30)
            return len(server.at_once)

    assert asyncio.run(run()) >= 1


@pytest.mark.parametrize(
    "variables", [{}, {"rate_limit": 0.001, "rate_limit_burst": 1, "peer_secret": SECRET}], ids=["free", "limited"]
)
def test_clients_that_are_counted_are_counted_for_plain_queries_too(
    instance: Instance, variables: dict[str, Any]
) -> None:
    async def run() -> list[bytes]:
        handlers = Handlers(Operations(Nobody()))
        front = Front(Settings(http_port=0, allowed_hosts=("x",), **variables), handlers, MODELS)
        handlers.models = instance.models(await front.open())
        try:
            answers = await Server(front.port).exchange(question(), question(), answers=2)
        finally:
            await front.close()
        return [answer[:12] for answer in answers]

    assert asyncio.run(run()) == [b"HTTP/1.1 200", b"HTTP/1.1 429" if variables else b"HTTP/1.1 200"]
