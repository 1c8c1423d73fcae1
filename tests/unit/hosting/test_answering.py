"""What answers the requests of a started instance."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp.test_utils import make_mocked_request

from balance_service.cluster.directory import PublishedModel, ServerTable
from balance_service.hosting.answering import Answering
from balance_service.http.answer import Problem
from balance_service.http.model_queries import ModelQueries
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import PeerTrust
from balance_service.http.route import Handlers
from balance_service.http.scan import TopScan
from balance_service.http.shares import Asker
from balance_service.http.streams.event_stream import Streams
from balance_service.observability.metrics import Metrics
from balance_service.read_models.add_funds import AddFundsHandler
from balance_service.settings import load_settings
from tests.support.fakes import Clock, IdleInstance
from tests.support.shipped import MODELS, ROUTES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

pytestmark = pytest.mark.usefixtures("no_environment")


def with_handlers(work: Callable[[Handlers], Coroutine[Any, Any, None]], *, has_left: bool = False) -> None:
    """Gives some work the handlers of an instance that hosts nothing, and whose peer hosts `balance`.

    Args:
        has_left: whether the peer has stopped.
    """

    class Command(AddFundsHandler):
        def __init__(self) -> None:
            """Has no publisher."""

    async def run() -> None:
        table = ServerTable(Clock())
        published = PublishedModel("balance", 2, "murmur2", versions=(1,)).record()
        table.hear("peer:1", {"address": "peer:1", "incarnation": "i", "models": [published], "tasks": []}, live=True)
        if has_left:
            table.hear("peer:1", None, live=True)
        generations = SimpleNamespace(serving=lambda _model: 1, of=lambda _model: SimpleNamespace(live=[1]))
        instance: Any = SimpleNamespace(
            engine=SimpleNamespace(
                models={}, stages={}, tables={}, table_watermarks=None, serving_stages=[], generations=generations
            ),
            directory=SimpleNamespace(table=table, is_read=True),
            rebuilds=SimpleNamespace(checks=SimpleNamespace()),
            commands=[Command()],
        )
        streams, proxy = Streams(1), Proxy()
        http: Any = SimpleNamespace(trust=PeerTrust(), streams=streams)
        settings = load_settings(read_timeout_seconds=0.1)
        answering = Answering(instance, proxy, Metrics(), settings, MODELS, http)
        await work(Handlers(Operations(IdleInstance(), streams), *answering.handlers()))
        await proxy.close()

    asyncio.run(run())


@pytest.mark.parametrize("route", [*ROUTES], ids=lambda route: route.name)
def test_every_route_finds_what_answers_it(route: Any) -> None:
    refusals: list[str] = []

    async def work(handlers: Handlers) -> None:
        # There is no engine, so most of them fail.
        with contextlib.suppress(Exception):
            try:
                await route.handle(handlers, make_mocked_request(route.method, route.path))
            except Problem as problem:
                refusals.append(problem.detail)

    with_handlers(work)

    assert not [refusal for refusal in refusals if "starting" in refusal]


@pytest.mark.shows("no-500", "404")
@pytest.mark.parametrize("has_left", [False, True])
def test_a_top_of_a_read_model_that_only_peers_host_is_asked_of_them(*, has_left: bool) -> None:
    async def work(handlers: Handlers) -> None:
        answers = handlers.of(ModelQueries).of("balance")
        scan = TopScan(by="amount", value=answers.scatter.routing.number("amount"))
        with pytest.raises(Problem, match="no instance could answer for partitions 0,1"):
            await answers.scatter.gather("top", scan, Asker("a client"))

    with_handlers(work, has_left=has_left)
