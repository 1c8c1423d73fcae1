"""The query side of an instance, and fake peers with given responses."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from balance_service import api
from balance_service.cluster.directory import PublishedModel, ServerTable
from balance_service.engine.records import POSITION_KEY, Position, Role, TaskSnapshot
from balance_service.engine.store import StateStore, StoreView
from balance_service.errors import MustAskError, RetriableError
from balance_service.http.answer import Answer as Received
from balance_service.http.answer import problems
from balance_service.http.key_target import KeyQuery, declared_target
from balance_service.http.model_queries import ModelAnswers, ModelQueries
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import FORWARDED_HEADER, PROOF_HEADER, PeerTrust
from balance_service.http.queries import Queries
from balance_service.http.routing import Routing
from balance_service.http.scatter import Scatter
from balance_service.http.scheduling import FairScheduler
from balance_service.http.shares import Asker, asker_of
from balance_service.http.streams.changes import Changes
from balance_service.http.streams.event_stream import Streams
from balance_service.http.streams.feed import Pace
from balance_service.http.streams.link import Links
from balance_service.http.streams.part import Reader
from balance_service.kafka.lease import Lease
from balance_service.kafka.partitioner import Partitioning, partition_of
from balance_service.kafka.topics import Watermarks
from balance_service.model.stage import generation_name
from balance_service.observability.metrics import Metrics
from balance_service.read_models.balance import Balance
from tests.support.api import GET_BALANCE as PATH
from tests.support.fakes import Clock, balance_codec, position_codec
from tests.support.shipped import GET_BALANCE_PARAMETERS, KNOWN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    from balance_service.engine.task import Watcher
    from balance_service.errors import StoreCorruptedError
    from balance_service.http.routing import ReadableTask
    from balance_service.http.scan import Steps

P = TypeVar("P")
BALANCE = Balance().description()
STATES = balance_codec()
POSITIONS = position_codec()
PARTITIONS = 2
CUSTOMER = "c+1 &=ë"
PARTITION = partition_of(CUSTOMER.encode(), PARTITIONS)
OTHER_PARTITION = 1 - PARTITION
EPOCH = 4
END = 100
ASKER = Asker("a client")
TIMEOUT_SECONDS = 2.0
ASKING_SECONDS = 0.5
BUSY_SECONDS = 10.0
"""Allowed delay on a busy machine."""


@dataclass
class Answer:
    status: int
    text: str
    headers: Mapping[str, str]
    seconds: float

    @property
    def detail(self) -> str:
        assert self.headers["Content-Type"].startswith("application/problem+json")
        problem = json.loads(self.text)
        assert problem["status"] == self.status
        return str(problem["detail"])


def read_to_its_end(steps: Steps[P]) -> P:
    """Runs a scan to its end and returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: P = end.value
            return result


class OneTask:
    """The readable part of a task; a test can replace its views and its role."""

    def __init__(self, view: StoreView | None, role: Role) -> None:
        self.view = view
        self.frozen_view: StoreView | None = None
        self.role = role
        self.watcher: Watcher | None = None

    def watch(self, watcher: Watcher | None) -> None:
        self.watcher = watcher

    @property
    def is_watched(self) -> bool:
        return self.watcher is not None


class UnknownSchemas:
    """The schemas of an instance's states, for which the registry must be asked first; it takes its time."""

    def __init__(self) -> None:
        self.is_away = False
        self.threads: list[str] = []
        """Those that have asked."""
        self._is_known = False

    def view(self, known: Callable[[bytes], Any], frame: bytes) -> Any:
        if not self._is_known:
            raise MustAskError(self._ask)
        return known(frame)

    def _ask(self) -> None:
        self.threads.append(threading.current_thread().name)
        time.sleep(ASKING_SECONDS)
        if self.is_away:
            raise RetriableError("the schema registry is away")
        self._is_known = True


@dataclass
class Instance:
    """The query side of an instance: a real store, a real lease, a real proxy; no Kafka."""

    path: Path
    address: str = "asker:1"
    owns: bool = True
    role: Role = Role.ACTIVE
    clock: Clock = field(default_factory=Clock)
    damaged: list[int] = field(default_factory=list)
    damaged_tasks: list[ReadableTask] = field(default_factory=list)
    timeout_seconds: float = TIMEOUT_SECONDS
    generation: int = 1
    coalesced: list[int] = field(default_factory=list)
    is_halted: bool = False
    """Whether the model's own code has halted the task."""
    answers_when_halted: bool = False
    is_closed: bool = False
    """Whether the task was closed, and no other one has opened the store."""
    hosts: bool = True
    """Whether it hosts the read model."""
    schemas: UnknownSchemas | None = None
    """Those of its states; None if they are known."""

    def __post_init__(self) -> None:
        self.store = StateStore(self.path, POSITIONS)
        self.move_to(10)
        self.lease = Lease(10_000, self.clock)
        self.lease.renew(self.clock.now)
        self.watermarks = Watermarks("balance", lambda: {PARTITION: END}, self.clock)
        self.watermarks.refresh()
        self.servers = ServerTable(self.clock)

    def put(self, amount: str, customer_id: str = CUSTOMER) -> None:
        state = {"customerId": customer_id, "amount": Decimal(amount)}
        self.store.write([(customer_id.encode(), STATES.encode(state))], 1)

    def move_to(self, position: int) -> None:
        self.store.write([(POSITION_KEY, POSITIONS.encode(Position(position, EPOCH, "t").record()))], 1)

    def hear_of_owner(self, address: str, epoch: int = 1, incarnation: str = "i", state: str = "RUNNING") -> None:
        self._hear(address, Role.ACTIVE, state, epoch, incarnation)

    def hear_of_standby(self, address: str, state: str = "TAILING") -> None:
        self._hear(address, Role.STANDBY, state, 0)

    def hear_of_host(self, address: str) -> None:
        """An instance without a task of the partition."""
        self._hear(address)

    def _hear(
        self, address: str, role: Role | None = None, state: str = "", epoch: int = 0, incarnation: str = "i"
    ) -> None:
        tasks = [TaskSnapshot("balance", PARTITION, role, state, epoch, 1).record()] if role else []
        models = [PublishedModel("balance", PARTITIONS, "murmur2", versions=(1,)).record()]
        record = {"address": address, "incarnation": incarnation, "models": models, "tasks": tasks}
        self.servers.hear(address, record, live=True)

    def hear_of_damage(self, partition: int, task: ReadableTask, _error: StoreCorruptedError) -> None:
        self.damaged.append(partition)
        self.damaged_tasks.append(task)

    def task(self, partition: int) -> OneTask | None:
        if not self.owns or self.is_closed or partition != PARTITION:
            return None
        task = OneTask(self.store.view, self.role)
        if self.is_halted:
            task.view, task.frozen_view = None, task.view
        return task

    def left(self, partition: int) -> OneTask | None:
        if not self.is_closed or partition != PARTITION:
            return None
        task = OneTask(None, Role.STANDBY)
        task.frozen_view = self.store.view
        return task

    @property
    def routing(self) -> Routing:
        read_model = Balance()

        def view(frame: bytes) -> Any:
            return read_model.view(STATES.decode(frame))

        of_peers = Routing(
            read_model=generation_name("balance", self.generation),
            partitioning=Partitioning(PARTITIONS, "murmur2"),
            address=self.address,
            servers=self.servers,
        )
        if not self.hosts:
            return of_peers
        return replace(
            of_peers,
            task=self.task,
            left=self.left,
            view=view if self.schemas is None else partial(self.schemas.view, view),
            number=STATES.number,
            on_damage=self.hear_of_damage,
            lease=self.lease,
            watermarks=self.watermarks,
            answers_when_halted=self.answers_when_halted,
        )

    def queries(self, proxy: Proxy, metrics: Metrics | None = None) -> Queries:
        return Queries(
            routing=self.routing,
            proxy=proxy,
            timeout_seconds=self.timeout_seconds,
            metrics=metrics or Metrics(),
        )

    def models(self, proxy: Proxy, metrics: Metrics | None = None) -> ModelQueries:
        """Returns the queries of read model `balance`, with all data in one partition."""
        queries, scatter = self.queries(proxy, metrics), self.scatter(f"{api.MODELS}/balance")
        answers = ModelAnswers(queries, scatter, self.changes(proxy), BALANCE)
        return ModelQueries(KNOWN, {"balance": answers}, dict, lambda *_: answers, {}, Streams(10))

    def changes(self, proxy: Proxy) -> Changes:
        reader = Reader(
            generation=self.generation,
            routing=self.routing,
            key_type=Balance().key_type,
            scheduler=FairScheduler("scan"),
            on_coalesced=self.coalesced.append,
        )
        return Changes(reader, Links(proxy, self.address), Pace())

    def scatter(self, path: str) -> Scatter:
        """Returns a scatter query. The caller closes its proxy."""
        return Scatter(
            routing=self.routing,
            proxy=Proxy(),
            path=path,
            generation=None if path == "/api" else 1,
            timeout_seconds=self.timeout_seconds,
            scheduler=FairScheduler("scan"),
        )

    @asynccontextmanager
    async def app(self) -> AsyncIterator[web.Application]:
        proxy = Proxy()
        queries = self.queries(proxy)
        app = web.Application(middlewares=[problems])
        app.router.add_get(PATH, partial(_balance, queries), allow_head=False)
        try:
            yield app
        finally:
            await proxy.close()


def balance_query(request: web.Request) -> KeyQuery:
    """The query in a request of getBalance."""
    given = GET_BALANCE_PARAMETERS.of(request)
    return declared_target(Balance(), Balance.queries).query(given.key, given)


async def _balance(queries: Queries, request: web.Request) -> web.Response:
    client, is_forwarded = asker_of(request)
    answer = await queries.answer(lambda: balance_query(request), client, is_forwarded=is_forwarded)
    return answer.response()


async def _ask(app: web.Application, headers: Mapping[str, str], parameters: Mapping[str, str]) -> Answer:
    async with TestServer(app) as server, ClientSession() as client:
        began = time.monotonic()
        async with client.get(server.make_url(PATH).with_query(parameters), headers=headers) as response:
            return Answer(response.status, await response.text(), response.headers, time.monotonic() - began)


def ask(instance: Instance, *, headers: Mapping[str, str] | None = None, **parameters: str) -> Answer:
    async def run() -> Answer:
        async with instance.app() as app:
            return await _ask(app, headers or {}, {"customerId": CUSTOMER, **parameters})

    return asyncio.run(run())


@dataclass
class Peer:
    """A fake peer: answers with a given function and records its requests."""

    answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    asked: list[web.Request] = field(default_factory=list)
    elsewhere: int = 0

    def app(self) -> web.Application:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.asked.append(request)
            return await self.answer(request)

        async def other(_request: web.Request) -> web.StreamResponse:
            self.elsewhere += 1
            return web.json_response({"amount": 666})

        app = web.Application()
        app.router.add_get(PATH, handle)
        app.router.add_get("/{tail:.*}", other)
        return app


def ask_with_peers(
    instance: Instance,
    *peers: Peer,
    before: Callable[[list[str]], object] | None = None,
    owns: bool = False,
    **parameters: str,
) -> Answer:
    """Queries an instance that knows these peers and takes the last one for the owner."""

    async def run() -> Answer:
        async with AsyncExitStack() as stack:
            addresses = []
            for peer in peers:
                server = await stack.enter_async_context(TestServer(peer.app()))
                addresses.append(f"{server.host}:{server.port}")
            for epoch, address in enumerate(addresses, 1):
                if before is None:
                    instance.hear_of_owner(address, epoch)
            if before is not None:
                before(addresses)
            app = await stack.enter_async_context(instance.app())
            return await _ask(app, {}, {"customerId": CUSTOMER, **parameters})

    instance.owns = owns
    return asyncio.run(run())


def proving(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], secret: str
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Wraps a response function: signs its responses with a peer secret."""
    trust = PeerTrust(secret)

    async def handle(request: web.Request) -> web.StreamResponse:
        response = await answer(request)
        assert isinstance(response, web.Response)
        assert isinstance(response.body, bytes)
        given = Received(response.status, response.body, response.content_type, response.headers)
        response.headers[PROOF_HEADER] = trust.proof_of(given, request.headers[FORWARDED_HEADER]) or ""
        return response

    return handle


def answering(
    status: int = 200, text: str = '{"amount":12.34}', headers: Mapping[str, str] | None = None
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Returns a response function of an instance that owns the partition, unless `headers` say otherwise."""

    async def handle(request: web.Request) -> web.StreamResponse:
        content_type = "application/json" if status == 200 else "application/problem+json"
        its_own = {"Balance-Application-Server": request.host, "Balance-Role": "active"} if status in (200, 404) else {}
        its_own |= headers or {}
        return web.Response(status=status, text=text, headers=its_own, content_type=content_type)

    return handle
