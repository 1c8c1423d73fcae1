"""Streams of changes that one instance passes on from another: proofs, bounds, and connections that end."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import structlog
from aiohttp import ClientSession, TCPConnector

from balance_service.http.peers.proxy import Proxy
from balance_service.http.server.limits import Limits
from balance_service.http.streams import part
from balance_service.http.streams.link import RemotePart
from balance_service.model.keys import ColumnKey
from tests.unit.http.streaming import (
    BUSY_SECONDS,
    CHANGES,
    Owner,
    stage,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@pytest.mark.parametrize("secret", [None, "a secret of all instances"])
def test_any_instance_passes_on_the_stream_of_the_owner(tmp_path: Path, secret: str | None) -> None:
    owner = Owner(tmp_path / "owner", secret=secret)
    other = Owner(tmp_path / "other", owns=False, secret=secret)

    async def run() -> None:
        owner.show({"c1": "1.00"})
        async with (
            stage(owner, other) as on,
            on.listening(other) as of_key,
            on.listening(other, CHANGES) as of_range,
        ):
            assert (await of_key.next()).entry == ("c1", "1.00")
            assert of_key.comments == [f"partition 0 epoch 4 at {owner.address}"]
            assert [event.name for event in await of_range.some(3)] == ["snapshot-begin", "state", "snapshot-end"]
            for number in range(2, 6):
                owner.commit({"c1": f"{number}.00"})
                assert (await of_key.next()).entry == ("c1", f"{number}.00")
                assert (await of_range.next()).entry == ("c1", f"{number}.00")
            # One connection serves both.
            assert len(owner.peer_streams._sockets) == 1

    asyncio.run(run())


def test_a_message_that_the_peer_did_not_prove_ends_the_connection(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner", secret="one secret of all")
    stranger = Owner(tmp_path / "other", owns=False, secret="one secret of all")

    async def run() -> None:
        async with stage(owner, stranger):
            proxy = Proxy(stranger.trust)
            peer = stranger.routing.candidates(0, takes_standbys=False)[0]
            messages = await proxy.connect(peer, "/api/changes", stranger.address)
            await messages.send({"open": 1, "model": "balance", "partition": 0, "since": None, "key": "c1"})
            received = messages.received()
            assert (await anext(received))["kind"] == "changes"
            # A repeated message has the proof of the one before.
            sent = messages._outgoing.sent('{"next":1}')
            await messages._socket.send_str(sent)
            await messages._socket.send_str(sent)
            owner.commit({"c1": "1.00"})
            async with asyncio.timeout(BUSY_SECONDS):
                async for message in received:
                    assert message["kind"] == "changes"
            await proxy.close()

    asyncio.run(run())


def test_a_key_that_only_the_owner_refuses_does_not_disturb_other_streams(tmp_path: Path) -> None:
    """An instance without the declaration of a read model takes any text for a key."""
    owner, other = Owner(tmp_path / "owner"), Owner(tmp_path / "other", owns=False)

    async def run() -> None:
        async with stage(owner, other) as on:
            answers = owner.model_queries.hosted["balance"].changes
            answers._reader = replace(answers._reader, key_type=ColumnKey("customerId", is_number=True))
            number = int.from_bytes(b"AAAAAAAA") - (1 << 63)
            async with (
                on.listening(other, f"/api/models/balance/keys/{number}") as good,
                on.listening(other, "/api/models/balance/keys/abc"),
            ):
                assert (await good.next()).entry == (str(number), None)
                before = set(owner.peer_streams._sockets)
                await asyncio.sleep(0.5)
                assert owner.peer_streams._sockets == before

    asyncio.run(run())


def test_a_part_that_is_opened_again_at_once_ends_with_the_connection(owner: Owner) -> None:
    async def run() -> None:
        async with stage(owner), ClientSession() as session:
            headers = {"Balance-Forwarded": "a peer"}
            opening = {"open": 1, "model": "balance", "partition": 0, "since": None, "key": "c1"}
            async with session.ws_connect(f"http://{owner.address}/api/changes", headers=headers) as connection:
                await connection.send_json(opening)
                await connection.receive_json()
                for _ in range(3):
                    await connection.send_json({"close": 1})
                    await connection.send_json(opening)
                await connection.receive_json()
            (of_partition,) = owner.model_queries.hosted["balance"].changes._feeds.values()
            await until(lambda: not of_partition.is_followed)

    asyncio.run(run())


def test_a_peer_that_dies_while_it_is_answered_is_no_failure_of_the_owner(owner: Owner) -> None:
    """Nothing can be sent to it, which the owner does not log as a failed request."""

    async def run() -> None:
        async with stage(owner), ClientSession() as session:
            headers = {"Balance-Forwarded": "a peer"}
            async with session.ws_connect(f"http://{owner.address}/api/changes", headers=headers) as connection:
                for _ in range(20):
                    await connection.send_json({"open": 1, "model": "balance", "partition": 99, "since": None})
                transport = connection.get_extra_info("socket")
                transport.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                response: Any = connection._response
                response.connection.transport.abort()
            await until(lambda: not owner.peer_streams._sockets)

    with structlog.testing.capture_logs() as logs:
        asyncio.run(run())

    assert [entry for entry in logs if entry["log_level"] in ("warning", "error")] == []


def small_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket that takes little at once, as over a slow network."""
    taking = socket.socket(address[0])
    taking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return taking


def test_a_peer_that_reads_slowly_is_not_cut_off(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "store", limits=Limits(unsent_seconds=1.0))

    async def run() -> None:
        owner.show({f"{number:0200}": "1.00" for number in range(2_000)})
        async with stage(owner), ClientSession(connector=TCPConnector(socket_factory=small_socket)) as session:
            headers = {"Balance-Forwarded": "a peer"}
            async with session.ws_connect(f"http://{owner.address}/api/changes", headers=headers) as connection:
                for number in range(40):
                    await connection.send_json({"open": number, "model": "balance", "partition": 0, "since": None})
                began = asyncio.get_running_loop().time()
                while asyncio.get_running_loop().time() - began < 3.0:
                    message = await connection.receive_json()
                    await connection.send_json({"next": message["part"]})
                    await asyncio.sleep(0.05)

    asyncio.run(run())


@pytest.mark.shows("listener")
def test_a_batch_that_was_not_asked_for_ends_the_connection() -> None:
    sent: list[Mapping[str, Any]] = []

    async def run() -> None:
        link = SimpleNamespace(send=sent.append)
        remote = RemotePart(cast("Any", link), 7, "a peer")
        batch = part.Batch(part.Kind.CHANGES, ["{}"], 1, 1, "c")
        remote.arrived(batch)
        with pytest.raises(ValueError, match="not asked for"):
            remote.arrived(batch)
        assert await remote.take() == batch
        assert sent == []
        taking = asyncio.create_task(remote.take())
        await asyncio.sleep(0)
        assert sent == [{"next": 7}]
        remote.arrived(batch)
        assert await taking == batch

    asyncio.run(run())


def test_the_instance_stops_while_a_peer_reads_nothing(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner")

    async def run() -> None:
        owner.show({f"{number:0200}": "1.00" for number in range(2_000)})
        async with stage(owner), ClientSession(connector=TCPConnector(socket_factory=small_socket)) as session:
            url, headers = f"http://{owner.address}/api/changes", {"Balance-Forwarded": "a peer"}
            connection = await session.ws_connect(url, headers=headers)
            for number in range(40):
                await connection.send_json({"open": number, "model": "balance", "partition": 0, "since": None})
            await asyncio.sleep(1.0)
            began = asyncio.get_running_loop().time()
            await owner.end_streams()
            assert asyncio.get_running_loop().time() - began < 5.0
            async with session.get(url, headers=headers) as answer:
                assert answer.status == 503

    asyncio.run(run())
