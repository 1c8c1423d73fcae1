"""What one client leaves to the others: requests, waiting queries, streams, snapshots, and connections for changes."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientSession, WSServerHandshakeError
from structlog.testing import capture_logs

from balance_service.engine.records import Role
from balance_service.errors import RetriableError
from balance_service.http import arrivals
from balance_service.http.access.authentication import Authenticator, load_tokens
from balance_service.http.access.authorization import Access
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import Peer, PeerTrust, digest_of
from balance_service.http.server.limits import Limits
from balance_service.http.server.reloading import Reloaded
from balance_service.http.shares import Asker
from balance_service.http.streams import part
from balance_service.http.streams.event_stream import EventStream
from balance_service.http.streams.feed import Feed, Pace
from balance_service.http.streams.link import Links, RemotePart
from balance_service.http.streams.part import PartEndedError, Selection
from balance_service.kafka.partitioner import Partitioning
from tests.support.querying import OneTask
from tests.unit.http.streaming import BUSY_SECONDS, CHANGES, KEY, Owner, stage, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from balance_service.http.routing import LocalCopy, Routing

GREEDY, OTHER, OPERATOR = (f"a-token-of-at-least-thirty-two-characters-{n}" for n in range(3))
SCOPES = {GREEDY: "balance:read", OTHER: "balance:read", OPERATOR: "balance:operations"}
SECRET = "a secret that instances share"
FAR = "?minPosition=0:999999"
MOST = 16


@pytest.fixture
def access(tmp_path: Path) -> Access:
    file = tmp_path / "tokens.json"
    tokens = [
        {"name": token[-1], "sha256": sha256(token.encode()).hexdigest(), "scopes": [scope]}
        for token, scope in SCOPES.items()
    ]
    file.write_text(json.dumps({"tokens": tokens}))
    return Access(Authenticator(Reloaded([file], lambda: load_tokens(file))))


class Clients:
    """Requests to one instance, each by one of the tokens."""

    def __init__(self, owner: Owner, session: ClientSession) -> None:
        self._owner = owner
        self._session = session

    async def status(self, token: str, path: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        async with self._session.get(f"http://{self._owner.address}{path}", headers=headers) as answer:
            await answer.read()
            return answer.status

    @asynccontextmanager
    async def stream(self, token: str, path: str) -> AsyncIterator[int]:
        headers = {"Authorization": f"Bearer {token}", "Accept": "text/event-stream"}
        async with self._session.get(f"http://{self._owner.address}{path}", headers=headers) as answer:
            yield answer.status


@asynccontextmanager
async def clients(owner: Owner) -> AsyncIterator[Clients]:
    async with stage(owner), ClientSession() as session:
        yield Clients(owner, session)


@pytest.mark.shows("shares")
def test_queries_that_wait_leave_others_commands_and_operators_their_places(tmp_path: Path, access: Access) -> None:
    owner = Owner(tmp_path / "store", access=access, limits=Limits(max_concurrent_requests=MOST))
    owner.timeout_seconds = 5.0

    async def run() -> None:
        async with clients(owner) as on:
            waiting = [asyncio.create_task(on.status(GREEDY, KEY + FAR)) for _ in range(3 * MOST)]
            # Those beyond the share are refused at once.
            await until(lambda: sum(task.done() for task in waiting) == 3 * MOST - MOST * 3 // 4)
            assert {task.result() for task in waiting if task.done()} == {503}
            assert await on.status(GREEDY, KEY) == 404
            assert await on.status(OTHER, "/api/models/balance/count") == 200
            assert await on.status(OPERATOR, "/api/status") == 200
            waits = asyncio.create_task(on.status(OTHER, KEY + "?minPosition=0:11"))
            await asyncio.sleep(0.1)
            owner.commit({"c1": "1.00"})
            assert await waits == 200
            for task in waiting:
                task.cancel()

    asyncio.run(run())


@pytest.mark.shows("shares")
def test_one_look_serves_all_queries_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(tmp_path / "store", limits=Limits(max_concurrent_requests=1_000))
    looks: list[int] = []
    copy = arrivals.Arrivals._copy

    def counted(waiting: arrivals.Arrivals, partition: int) -> Any:
        looks.append(partition)
        return copy(waiting, partition)

    monkeypatch.setattr(arrivals.Arrivals, "_copy", counted)

    async def run() -> None:
        async with stage(owner), ClientSession() as session:

            async def wait() -> int:
                async with session.get(f"http://{owner.address}{KEY}?minPosition=0:11") as answer:
                    return answer.status

            waiting = [asyncio.create_task(wait()) for _ in range(90)]
            await asyncio.sleep(1.0)
            # One as each begins to wait, and a hundred in the second; nine thousand if each looked for itself.
            assert len(looks) <= 210
            owner.commit({"c1": "1.00"})
            assert await asyncio.gather(*waiting) == [200] * 90
            seen = len(looks)
            await asyncio.sleep(0.1)
            assert len(looks) <= seen + 2

    asyncio.run(run())


@pytest.mark.shows("shares")
def test_the_streams_of_one_client_leave_places_to_others_and_to_operators(tmp_path: Path, access: Access) -> None:
    owner = Owner(tmp_path / "store", access=access, most_streams=MOST)

    async def run() -> None:
        async with clients(owner) as on, AsyncExitStack() as stack:
            open_now = [await stack.enter_async_context(on.stream(GREEDY, CHANGES)) for _ in range(MOST)]
            assert open_now.count(200) <= MOST * 3 // 4
            others = [await stack.enter_async_context(on.stream(OTHER, CHANGES)) for _ in range(MOST)]
            assert others[0] == 200
            assert await stack.enter_async_context(on.stream(OPERATOR, "/api/status")) == 200

    asyncio.run(run())


@dataclass
class Wide(Owner):
    """An owner of 16 partitions, each with the same states."""

    def task(self, partition: int) -> OneTask | None:
        return self.one if partition < MOST else None

    @property
    def routing(self) -> Routing:
        routing = super().routing
        routing.partitioning = Partitioning(MOST, "murmur2")
        return routing


@pytest.mark.shows("shares")
def test_a_stream_that_is_not_read_reads_few_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, read = Wide(tmp_path / "store"), list[int]()
    scan = part.LocalPart._scan

    def counted(reading: part.LocalPart, copy: LocalCopy) -> Any:
        read.append(copy.partition)
        return scan(reading, copy)

    async def unread(_stream: EventStream, events: bytes) -> None:
        if b"event: state" in events:
            await asyncio.Event().wait()

    monkeypatch.setattr(part.LocalPart, "_scan", counted)
    monkeypatch.setattr(EventStream, "send", unread)

    async def run() -> None:
        owner.show({"c1": "1.00"})
        async with stage(owner) as on, on.listening(owner, CHANGES):
            await until(lambda: bool(read))
            await asyncio.sleep(0.5)
            assert len(read) <= 4

    asyncio.run(run())


def test_a_partition_without_an_owner_delays_no_other_in_a_snapshot(tmp_path: Path) -> None:
    class Lacking(Wide):
        def task(self, partition: int) -> OneTask | None:
            return self.one if partition >= 3 else None

    owner = Lacking(tmp_path / "store")

    async def run() -> None:
        owner.show({"c1": "1.00"})
        async with stage(owner) as on, on.listening(owner, CHANGES) as listener:
            assert (await listener.next()).name == "snapshot-begin"
            assert [event.name for event in await listener.some(MOST - 3)] == ["state"] * (MOST - 3)
            assert await listener.silent()

    asyncio.run(run())


@pytest.mark.shows("shares")
def test_a_snapshot_that_finds_its_share_in_use_waits_in_line(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "store")

    async def run() -> None:
        async with stage(owner) as on:
            scheduler = owner.model_queries.hosted["balance"].changes._reader.scheduler
            async with AsyncExitStack() as stack:
                name = "streams of address:127.0.0.1"
                for _ in range(2):
                    await stack.enter_async_context(scheduler.in_line(Asker(name)))
                listener = await stack.enter_async_context(on.listening(owner, CHANGES))
                assert (await listener.next()).name == "snapshot-begin"
                assert await listener.silent()
                # Another client's does not wait for it.
                async with asyncio.timeout(BUSY_SECONDS), scheduler.in_line(Asker("streams of another")):
                    pass
                await stack.enter_async_context(scheduler.in_line(Asker("streams of a third")))

    asyncio.run(run())


class Counting:
    start, stop, is_of_key = b"c1", b"c1\0", True

    def __init__(self) -> None:
        self.turns = 0

    def changed(self, before: int) -> None:
        del before

    def go(self) -> None:
        self.turns += 1


@pytest.mark.shows("shares")
def test_a_round_wakes_few_of_very_many_followers_and_the_next_ones_all_others() -> None:
    async def run() -> None:
        pace, many = Pace(), [Counting() for _ in range(1_000)]
        feed = Feed(OneTask(None, Role.ACTIVE), pace)
        for one in many:
            feed.add(one)
        feed.note_commit(0, 1, [b"c1"])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert 0 < sum(one.turns for one in many) <= 200
        await until(lambda: all(one.turns == 1 for one in many))

    asyncio.run(run())


OPENING: Mapping[str, Any] = {"model": "balance", "partition": 0, "since": None, "key": "c1"}
FORWARDED = {"Balance-Forwarded": "a peer"}


@pytest.mark.shows("shares")
def test_without_a_secret_an_address_has_four_connections_for_changes_and_they_count_as_streams(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "store", most_streams=100)

    async def run() -> None:
        async with stage(owner), ClientSession() as session, AsyncExitStack() as stack:
            url = f"http://{owner.address}/api/changes"
            for _ in range(4):
                await stack.enter_async_context(session.ws_connect(url, headers=FORWARDED))
            assert len(owner.streams.shares) == 4
            with pytest.raises(WSServerHandshakeError) as refused:
                await session.ws_connect(url, headers=FORWARDED)
            assert refused.value.status == 503
            await stack.aclose()
            await until(lambda: not owner.streams.shares)
            await stack.enter_async_context(session.ws_connect(url, headers=FORWARDED))

    asyncio.run(run())


@pytest.mark.shows("shares")
def test_without_a_secret_a_connection_for_changes_has_a_thousand_parts(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "store")

    async def run() -> None:
        async with stage(owner), ClientSession() as session:
            url = f"http://{owner.address}/api/changes"
            async with session.ws_connect(url, headers=FORWARDED) as connection:
                for number in range(1_001):
                    await connection.send_json({"open": number, **OPENING})
                async with asyncio.timeout(BUSY_SECONDS):
                    parts = {json.loads(message.data)["part"] async for message in connection}
            assert 1_000 not in parts
            assert connection.closed

    asyncio.run(run())


class NeverConnects(Proxy):
    async def connect(self, *_: object) -> Any:
        await asyncio.Event().wait()


def test_without_a_secret_an_instance_follows_a_peer_over_four_connections_of_a_thousand_parts() -> None:
    async def run() -> None:
        links, peer = Links(NeverConnects(), "here:1"), Peer("there:1", "a run")

        def follow() -> RemotePart:
            return links.open(peer, "balance", 0, Selection(key="c1"), None, Asker("a client"))

        parts = [follow() for _ in range(4_000)]
        assert len({one._link for one in parts}) == 4
        with pytest.raises(PartEndedError):
            follow()
        parts[0].close()
        parts[0] = follow()
        await asyncio.sleep(0)
        for one in {one._link for one in parts}:
            one._running.cancel()
            await asyncio.wait([one._running])
        assert not links._links

    asyncio.run(run())


class IsAway(Proxy):
    async def connect(self, *_: object) -> Any:
        raise RetriableError("the peer does not answer")


def test_a_peer_that_is_away_is_logged_once_however_often_streams_ask_for_it() -> None:
    async def run() -> None:
        links, peer = Links(IsAway(), "here:1"), Peer("there:1", "a run")
        for _ in range(20):
            links.open(peer, "balance", 0, Selection(key="c1"), None, Asker("a client"))
            (link,) = links._links[peer]
            await asyncio.wait([link._running])

    with capture_logs() as logged:
        asyncio.run(run())

    assert [one["event"] for one in logged] == ["a peer's changes cannot be followed"]


@pytest.mark.parametrize("secret", [SECRET, None])
@pytest.mark.shows("shares")
def test_a_peer_says_on_whose_behalf_it_follows_and_is_believed_with_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    front = Owner(tmp_path / "front", secret=secret)
    front.owns = False
    back = Owner(tmp_path / "back", secret=secret)
    askers: list[Asker] = []
    opened = part.LocalPart.__init__

    def noted(self: part.LocalPart, *given: Any) -> None:
        askers.append(given[-1])
        opened(self, *given)

    monkeypatch.setattr(part.LocalPart, "__init__", noted)

    async def run() -> None:
        async with stage(front, back) as on, on.listening(front) as listener:
            await listener.next()

    asyncio.run(run())

    name = "address:127.0.0.1"
    assert set(askers) == {Asker(name if secret is None else digest_of(name), is_peer=True)}


def test_the_name_of_a_client_is_believed_only_with_the_mark_that_it_was_signed_with() -> None:
    asks, asked, stranger = PeerTrust(SECRET), PeerTrust(SECRET), PeerTrust("another secret, as long")
    mark, other = (asks.mark("a:1", Peer("b:1", asked.incarnation), "GET /") for _ in range(2))
    proof = asks.client_proof("token:alice", mark)

    assert asked.client_of(proof, mark) == digest_of("token:alice")
    assert asked.client_of(None, mark) is None
    for wrong, with_mark in ((proof, other), (stranger.client_proof("token:alice", mark), mark), ("alice", mark)):
        with pytest.raises(Exception, match="proof of the client"):
            asked.client_of(wrong, with_mark)
    assert PeerTrust().client_proof("token:alice", "a:1") is None
    assert PeerTrust().client_of(proof, mark) is None
