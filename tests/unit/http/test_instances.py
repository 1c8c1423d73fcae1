"""Any instance tells about any instance, and what was done: for operators only."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from balance_service import api
from balance_service.errors import RetriableError
from balance_service.http.access.clients import Scope
from balance_service.http.answer import Problem
from balance_service.http.app import make_app
from balance_service.http.instances import INSTANCE_ROUTES, Action, Instances
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import Peer, PeerTrust
from balance_service.http.route import Handlers
from balance_service.http.streams.event_stream import Streams
from tests.support.fakes import Details, IdleInstance
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = "here:1"
ACTIONS = [Action(at=None, by="", action="discard", about="balance/1:42", detail="", reason="")]


class Told(IdleInstance):
    """An instance that tells its address."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def details(self) -> Any:
        return Details(self.address)


def asked(
    *paths: str,
    peers: Sequence[str] = ("peer",),
    history: Callable[[], Sequence[Action]] = lambda: ACTIONS,
    has_started: bool = True,
) -> list[tuple[int, Any]]:
    """Returns status and JSON of requests to an instance, all at once. `PEER` in a path is the address of a peer."""

    async def run() -> list[tuple[int, Any]]:
        proxy, handlers = Proxy(), Handlers(Operations(Told(HERE), Streams(1)))
        there, trust = Handlers(), PeerTrust()
        async with (
            TestServer(make_app(there, ROUTES, trust=trust)) as other,
            TestServer(make_app(handlers, ROUTES)) as server,
        ):
            address = f"127.0.0.1:{other.port}"
            there.add(Operations(Told(address), Streams(1)))
            known = {"peer": address, "gone": "127.0.0.1:1"}
            addresses = [known[name] for name in peers]
            if has_started:
                instances = Instances(
                    peer=lambda asked: Peer(asked, trust.incarnation) if asked in addresses else None,
                    proxy=proxy,
                    address=HERE,
                    history=history,
                    timeout_seconds=2.0,
                )
                handlers.add(instances)

            async def one(session: ClientSession, path: str) -> tuple[int, Any]:
                async with session.get(path.replace("PEER", address)) as response:
                    return response.status, await response.json()

            try:
                async with ClientSession(f"http://127.0.0.1:{server.port}") as session:
                    return await asyncio.gather(*(one(session, path) for path in paths))
            finally:
                await proxy.close()

    return asyncio.run(run())


def test_an_instance_tells_about_itself_by_default_and_by_its_address_also_while_it_starts() -> None:
    for has_started in (True, False):
        answers = asked(api.INSTANCE, f"{api.INSTANCE}?address={HERE}", has_started=has_started)

        assert answers == [(200, {"applicationServer": HERE}), (200, {"applicationServer": HERE})]


def test_an_instance_asks_another_one_about_itself() -> None:
    ((status, told),) = asked(f"{api.INSTANCE}?address=PEER")

    assert status == 200
    assert told["applicationServer"].startswith("127.0.0.1:")


def test_an_unknown_instance_is_404_and_one_that_does_not_answer_503() -> None:
    unknown, gone = asked(
        f"{api.INSTANCE}?address=nowhere:1", f"{api.INSTANCE}?address=127.0.0.1:1", peers=("peer", "gone")
    )

    assert (unknown[0], unknown[1]["detail"]) == (404, "no instance at 'nowhere:1' is known here")
    assert gone[0] == 503
    assert "the peer at 127.0.0.1:1 cannot be reached" in gone[1]["detail"]


def test_an_instance_that_starts_knows_no_other_and_no_history() -> None:
    answers = asked(f"{api.INSTANCE}?address=PEER", api.HISTORY, has_started=False)

    assert [status for status, _ in answers] == [503, 503]


def test_one_read_of_the_history_serves_all_requests_that_arrive_during_it() -> None:
    reads = []
    all_asked = threading.Event()

    def read() -> Sequence[Action]:
        reads.append(1)
        all_asked.wait(0.5)
        return ACTIONS

    answers = asked(*[api.HISTORY] * 5, history=read)

    assert answers == [(200, {"actions": [one.record() for one in ACTIONS]})] * 5
    assert len(reads) == 1


def test_a_history_that_cannot_be_read_says_why() -> None:
    def fail() -> Sequence[Action]:
        raise RetriableError("Kafka at k:9092 does not answer")

    ((status, problem),) = asked(api.HISTORY, history=fail)

    assert (status, problem["detail"]) == (503, "the history cannot be read now: Kafka at k:9092 does not answer")


def test_a_history_that_takes_too_long_is_not_waited_for_and_is_the_next_ones() -> None:
    reads = []

    def slow() -> Sequence[Action]:
        reads.append(1)
        time.sleep(0.5)
        return ACTIONS

    async def run() -> list[object]:
        instances = Instances(
            peer=lambda _address: None, proxy=Proxy(), address=HERE, history=slow, timeout_seconds=0.2
        )
        found: list[object] = []
        for wait in (0.6, 0, 0):
            try:
                found.append(await instances.history())
            except Problem as problem:
                found.append(problem.detail)
            await asyncio.sleep(wait)
        return found

    late = "the history was not read within 0.2 s; it is read on: ask again"
    # The third one reads again.
    assert asyncio.run(run()) == [late, ACTIONS, late]
    assert len(reads) == 2


@pytest.mark.parametrize("route", INSTANCE_ROUTES, ids=lambda route: route.name)
def test_only_operators_may_ask_because_the_answers_may_quote_events(route: Any) -> None:
    assert route.scopes == {Scope.OPERATE}
