"""Instances whose task commits what a test says, over real HTTP, and clients that listen to their streams."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import ClientSession, ClientTimeout

from balance_service.cluster.directory import PublishedModel
from balance_service.engine.records import POSITION_KEY, Position, Role, TaskSnapshot
from balance_service.http.access.authorization import Access
from balance_service.http.app import Site, make_app, serve
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import PeerTrust
from balance_service.http.route import Handlers
from balance_service.http.server.limits import Limits
from balance_service.http.server.listening import bind
from balance_service.http.streams.event_stream import Streams
from balance_service.http.streams.link import PeerStreams
from balance_service.kafka.partitioner import Partitioning
from balance_service.model.stage import generation_name
from tests.support.fakes import IdleInstance
from tests.support.querying import POSITIONS, STATES, Instance, OneTask
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from balance_service.http.routing import Routing
    from balance_service.http.server.tls import Tls


KEY = "/api/models/balance/keys/c1"
CHANGES = "/api/models/balance/changes"
BUSY_SECONDS = 10.0


class Event(NamedTuple):
    name: str
    event_id: str | None
    data: str

    @property
    def entry(self) -> tuple[str, str | None]:
        """Key and amount."""
        parsed = json.loads(self.data, parse_float=str)
        return parsed["key"], None if parsed["value"] is None else parsed["value"]["amount"]


@dataclass
class Owner(Instance):
    """An instance of a model with one partition, whose task commits what a test says."""

    secret: str | None = None
    epoch: int = 4
    changelog: str = "c"
    most_streams: int = 100
    access: Access = field(default_factory=Access)
    limits: Limits = field(default_factory=Limits)
    tls: Tls | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.offset = 10
        self.one = OneTask(None, self.role)
        self.show({})

    def task(self, partition: int) -> OneTask | None:
        return self.one if self.owns and partition == 0 else None

    @property
    def routing(self) -> Routing:
        routing = super().routing
        routing.partitioning = Partitioning(1, "murmur2")
        return routing

    def hear(self, other: Owner) -> None:
        """Learns from the directory that another instance owns the partition."""
        of_one = partial(PublishedModel, partitions=1, partitioner="murmur2", versions=(1,))
        record = {
            "address": other.address,
            "incarnation": other.trust.incarnation,
            "models": [of_one(task.stage).record() for task in other.published()],
            "tasks": [task.record() for task in other.published() if other.owns],
        }
        self.servers.hear(other.address, record, live=True)

    def published(self) -> list[TaskSnapshot]:
        """The tasks that the directory has of this instance while it owns the partition."""
        return [
            TaskSnapshot(
                generation_name("balance", self.generation), 0, Role.ACTIVE, "RUNNING", self.epoch, self.offset
            )
        ]

    def show(self, states: Mapping[str, str | None], letters: int = 0) -> None:
        """Stores states and shows them to queries; does not notify the watcher."""
        records = [
            (key.encode(), None if amount is None else STATES.encode({"customerId": key, "amount": Decimal(amount)}))
            for key, amount in states.items()
        ]
        of_letters = {"a cause open": letters} if letters else {}
        position = Position(self.offset, self.epoch, "t", letters=of_letters, changelog_topic_id=self.changelog)
        self.store.write([*records, (POSITION_KEY, POSITIONS.encode(position.record()))], 1)
        self.one.view = self.store.view

    def commit(self, states: Mapping[str, str | None], records: int = 1, *, too_many: bool = False) -> None:
        """Commits as a task does: shows the states, then tells the watcher."""
        start, self.offset = self.offset, self.offset + records
        self.show(states, letters=0 if records else 1)
        if self.one.watcher is not None:
            keys = None if too_many else [key.encode() for key in states]
            self.one.watcher.committed(start, self.offset, keys)

    async def end_streams(self) -> None:
        self.streams.close()
        await self.peer_streams.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Site]:
        listener = bind("127.0.0.1", 0)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.trust = PeerTrust(self.secret)
        proxy = Proxy(self.trust)
        self.streams = Streams(self.most_streams)
        self.model_queries = self.models(proxy)
        self.model_queries.streams = self.streams
        self.peer_streams = PeerStreams(self.model_queries.open_part, self.trust, self.streams.shares)
        handlers = Handlers(Operations(IdleInstance(), self.streams), self.model_queries, self.peer_streams)
        app = make_app(handlers, ROUTES, self.limits, self.trust, self.access)
        site = await serve(app, listener, self.limits, None if self.tls is None else self.tls.server)
        try:
            yield site
        finally:
            await self.end_streams()
            await site.cleanup()
            await proxy.close()
            self.store.close()


def state(event_id: str, key: str, amount: str, generation: int = 1) -> Event:
    """The event of a state, byte for byte."""
    return Event("state", event_id, f'{{"key":"{key}","value":{{"amount":{amount}}},"generation":{generation}}}')


class Listener:
    """Reads the events of one stream."""

    def __init__(self, response: object) -> None:
        self._lines = response.content  # type: ignore[attr-defined]
        self.comments: list[str] = []

    async def next(self) -> Event:
        name, event_id, data = "", None, ""
        while True:
            line = (await asyncio.wait_for(self._lines.readline(), BUSY_SECONDS)).decode()
            assert line, "the stream ended"
            line = line.rstrip("\n")
            if line.startswith(":"):
                self.comments.append(line[2:])
            elif line.startswith("event: "):
                name = line[7:]
            elif line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                data = line[6:]
            elif not line and name:
                return Event(name, event_id, data)

    async def some(self, number: int) -> list[Event]:
        return [await self.next() for _ in range(number)]

    async def silent(self, seconds: float = 0.3) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.next()
        except TimeoutError:
            return True
        return False


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BUSY_SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class Stage:
    """Instances that serve, and a client."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    @asynccontextmanager
    async def listening(
        self, instance: Owner, path: str = KEY, last: str | None = None, token: str | None = None
    ) -> AsyncIterator[Listener]:
        headers = {"Accept": "text/event-stream"}
        headers |= {"Last-Event-ID": last} if last is not None else {}
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        tls = instance.tls
        url = f"{'https' if tls else 'http'}://{instance.address}{path}"
        async with self._session.get(url, headers=headers, ssl=tls.client if tls else True) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream"
            yield Listener(response)


@asynccontextmanager
async def stage(*instances: Owner) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        for instance in instances:
            await stack.enter_async_context(instance.serving())
        for instance in instances:
            for other in instances:
                if other is not instance:
                    instance.hear(other)
        session = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(total=60)))
        yield Stage(session)


def write_tokens(file: Path, token: str) -> None:
    entry = {"name": "client", "sha256": sha256(token.encode()).hexdigest(), "scopes": ["balance:read"]}
    file.write_text(json.dumps({"tokens": [entry]}))
