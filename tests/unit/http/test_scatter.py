"""Scans over several instances, and the count of an instance's own keys."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from balance_service.engine.records import POSITION_KEY, Position, Role, TaskSnapshot
from balance_service.http.answer import Problem, compact_json, problems
from balance_service.http.scan import CountScan, EntriesScan, TopScan
from balance_service.http.server.limits import Limits, UnderWay, limited
from balance_service.http.stage_dead_letters import DeadLetterScan
from balance_service.kafka.partitioner import Partitioning
from balance_service.model.keys import TEXT
from tests.support.fakes import letters
from tests.support.querying import ASKER, BUSY_SECONDS, EPOCH, PARTITION, POSITIONS, STATES, Instance
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from balance_service.http.answer import Answer
    from balance_service.http.routing import LocalCopy
    from balance_service.http.scan import Scan, Steps, View


MODEL = "/api/models/balance"


def owned_by(instance: Instance) -> int:
    """Returns the count of the instance's own keys."""

    async def ask() -> int:
        scatter = instance.scatter(MODEL)
        count = json.loads((await scatter.answer_owned(CountScan(), ASKER)).body)["count"]
        await scatter.proxy.close()
        return int(count)

    return asyncio.run(ask())


def test_an_owner_counts_what_it_has(instance: Instance) -> None:
    position = Position(10, EPOCH, "t", keys=3)
    instance.store.write([(POSITION_KEY, POSITIONS.encode(position.record()))], 1)

    assert owned_by(instance) == 3


@pytest.mark.parametrize("of_none", [{"owns": False}, {"role": Role.STANDBY}])
def test_an_instance_without_partitions_counts_none(tmp_path: Path, of_none: dict[str, object]) -> None:
    assert owned_by(Instance(tmp_path / "store", **of_none)) == 0  # type: ignore[arg-type]


def test_an_answer_for_a_peer_is_encoded_outside_the_event_loop(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_by: list[str] = []

    def encode(_scan: DeadLetterScan, _part: object) -> str:
        encoded_by.append(threading.current_thread().name)
        return "{}"

    monkeypatch.setattr(DeadLetterScan, "encode", encode)

    async def ask() -> None:
        scatter = instance.scatter(MODEL)
        await scatter.answer_peer(LETTERS, ASKER, [PARTITION], None)
        await scatter.answer_owned(LETTERS, ASKER)
        await scatter.proxy.close()

    asyncio.run(ask())
    assert len(encoded_by) == 2
    assert threading.main_thread().name not in encoded_by


def test_an_owned_partition_that_cannot_be_read_is_an_error(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = instance.task(PARTITION)
    assert task is not None
    task.view = None
    monkeypatch.setattr(instance, "task", lambda partition: task if partition == PARTITION else None)

    with pytest.raises(Problem, match="cannot be read here now") as refused:
        owned_by(instance)

    assert refused.value.status == 503


@dataclass(frozen=True, slots=True)
class Slow(CountScan):
    """Pauses before the last key, and reports its start."""

    seconds: float
    began: list[float] = field(default_factory=list)

    def read(self, copies: Sequence[LocalCopy], view: View) -> Steps[int]:
        self.began.append(time.monotonic())
        yield
        time.sleep(self.seconds)
        yield
        return (yield from CountScan.read(self, copies, view))


def count_slowly(instance: Instance, scan: Slow) -> int:
    async def ask() -> Answer:
        scatter = instance.scatter(MODEL)
        try:
            return (await scatter.gather("count", scan, ASKER, partitions=[PARTITION])).answer(scan)
        finally:
            await scatter.proxy.close()

    return asyncio.run(ask()).status


def test_a_local_read_may_use_the_whole_deadline(instance: Instance) -> None:
    instance.timeout_seconds = 5.0
    slow = Slow(0.6 * instance.timeout_seconds)

    assert count_slowly(instance, slow) == 200
    assert len(slow.began) == 1


def test_a_local_read_beyond_the_deadline_is_not_repeated(instance: Instance) -> None:
    instance.timeout_seconds = 0.5
    slow = Slow(0.6)

    with pytest.raises(Problem, match="no instance could answer"):
        count_slowly(instance, slow)

    assert len(slow.began) == 1


@pytest.mark.parametrize("lie", ["none", "refuses", "hangs", "of another partition", "nonsense"])
def test_a_wrong_claim_costs_one_scan_a_second_attempt(instance: Instance, lie: str) -> None:
    asked: list[str] = []

    def told(request: web.Request, partition: int, count: int) -> web.Response:
        said = {"Position": 9, "Epoch": 3, "Role": "active"}
        headers = {f"Balance-{name}": f"{partition}:{value}" for name, value in said.items()}
        return web.json_response({"count": count}, headers={"Balance-Application-Server": request.host, **headers})

    async def owner(request: web.Request) -> web.Response:
        asked.append("owner")
        return told(request, PARTITION, 3)

    async def liar(request: web.Request) -> web.Response:
        asked.append("liar")
        if lie == "hangs":
            await asyncio.sleep(60)
        if lie == "of another partition":
            return told(request, PARTITION + 1, 666)
        if lie == "nonsense":
            answer = told(request, PARTITION, 666)
            answer.body = b"\xff"
            return answer
        return web.json_response({"count": 666}, status=421 if lie == "refuses" else 200)

    def app(handler: Callable[[web.Request], Awaitable[web.Response]]) -> web.Application:
        made = web.Application()
        made.router.add_get(f"{MODEL}/count", handler)
        return made

    async def run() -> list[int]:
        instance.owns, scatter = False, instance.scatter(MODEL)
        async with TestServer(app(liar)) as lying, TestServer(app(owner)) as owning:
            instance.hear_of_owner(f"127.0.0.1:{lying.port}", epoch=10**15)
            instance.hear_of_owner(f"127.0.0.1:{owning.port}", epoch=3)
            try:
                gathered = [await scatter.gather("count", CountScan(), ASKER, partitions=[PARTITION]) for _ in range(3)]
            finally:
                await scatter.proxy.close()
        return [found.content for found in gathered]

    assert asyncio.run(run()) == [3, 3, 3]
    assert asked == ["liar", "owner", "owner", "owner"]


TOP = TopScan(by="amount", value=STATES.number("amount"))
LETTERS = DeadLetterScan(stage="balance", read_model="balance", key_type=TEXT, letters=letters())
ODD: list[tuple[Scan[Any], bytes]] = [
    (CountScan(), b'{"count":"\xff"}'),
    (CountScan(), b""),
    (CountScan(), b"[]"),
    (CountScan(), b'{"count":null}'),
    (CountScan(), b'{"count":Infinity}'),
    (EntriesScan(), b'{"count":3}'),
    (EntriesScan(), b'{"entries":[7],"next":null}'),
    (EntriesScan(), b'{"entries":[{"key":"a"}],"next":null}'),
    (EntriesScan(), b'{"entries":[{"key":"a","value":1},{"key":{},"value":1}],"next":null}'),
    (EntriesScan(), b'{"entries":[],"next":[]}'),
    (EntriesScan(), b'{"entries":[' + b"[" * 100_000),
    (TOP, b'{"entries":[{"key":"a","value":null}]}'),
    (TOP, b'{"entries":[],"next":"a"}'),
    (LETTERS, b'{"deadLetters":7,"next":null}'),
    (LETTERS, b'{"deadLetters":[{"id":"balance/0:1"},7],"next":null}'),
    (LETTERS, b'{"deadLetters":[{"id":"balance/0:1"},{"id":"7"}],"next":null}'),
    (LETTERS, b'{"deadLetters":[],"next":"7"}'),
]


def answered_by(instance: Instance, scan: Scan[Any], body: bytes, partition: str = str(PARTITION)) -> Answer:
    """Returns the answer if the only peer answers with this body."""

    async def owner(request: web.Request) -> web.Response:
        headers = {"Balance-Application-Server": request.host, "Balance-Position": f"{partition}:9"}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def run() -> Answer:
        instance.owns, scatter = False, instance.scatter(MODEL)
        app = web.Application()
        app.router.add_get(f"{MODEL}/scan", owner)
        async with TestServer(app) as server:
            instance.hear_of_owner(f"127.0.0.1:{server.port}")
            try:
                return (await scatter.gather("scan", scan, ASKER, partitions=[PARTITION])).answer(scan)
            finally:
                await scatter.proxy.close()

    return asyncio.run(run())


@pytest.mark.parametrize(("scan", "body"), ODD)
def test_a_malformed_body_of_a_peer_is_refused(instance: Instance, scan: Scan[Any], body: bytes) -> None:
    with pytest.raises(Problem, match="no instance could answer") as refused:
        answered_by(instance, scan, body)

    assert refused.value.status == 503


def test_a_partition_number_with_too_many_digits_is_refused(instance: Instance) -> None:
    with pytest.raises(Problem, match="no instance could answer"):
        answered_by(instance, CountScan(), b'{"count":3}', partition=5000 * "1")


@pytest.mark.parametrize(
    ("scan", "body"),
    [
        (CountScan(), b'{"count":3}'),
        (
            EntriesScan(limit=2),
            '{"entries":[{"key":"a","value":1.10},{"key":"ë","value":{}}],"next":"ë"}'.encode(),
        ),
        (TOP, b'{"entries":[{"key":"a","value":{"amount":1.10}}]}'),
        (TOP, b'{"entries":[{"key":"a","value":{"amount":1.10}}],"next":"a"}'),
        (LETTERS, b'{"deadLetters":[{"id":"balance/0:1","discardWarning":"","key":null}],"next":"balance/0:1"}'),
    ],
)
def test_a_well_formed_body_of_a_peer_is_forwarded_unchanged(instance: Instance, scan: Scan[Any], body: bytes) -> None:
    assert json.loads(answered_by(instance, scan, body).body, parse_float=str) == json.loads(body, parse_float=str)


@pytest.mark.parametrize("partitions", [1, 700, 1000, 2500])
@pytest.mark.parametrize(
    ("kind", "scan"),
    [("count", CountScan()), ("entries", EntriesScan(after=64 * "\N{BROKEN HEART}", prefix=63 * "\N{BROKEN HEART}"))],
)
def test_a_scan_of_many_partitions_is_split_into_requests_that_fit(
    instance: Instance, kind: str, scan: Scan[Any], partitions: int
) -> None:
    asked: list[int] = []

    async def owner(request: web.Request) -> web.Response:
        about = request.query["partitions"].split(",")
        asked.append(len(about))
        said = {"Position": 9, "Epoch": 3, "Role": "active"}
        headers = {f"Balance-{name}": ",".join(f"{p}:{value}" for p in about) for name, value in said.items()}
        headers |= {"Balance-Application-Server": request.host}
        body = {"count": {"count": len(about)}, "entries": {"entries": [], "next": None}}[kind]
        return web.json_response(body, headers=headers, dumps=compact_json)

    async def run() -> Answer:
        # The test checks the size of requests; a busy machine may be slow.
        instance.timeout_seconds = BUSY_SECONDS
        instance.owns, scatter = False, instance.scatter(MODEL)
        scatter.routing.partitioning = Partitioning(partitions, "murmur2")
        app = web.Application(middlewares=[problems, limited(Limits(), UnderWay(Limits()), ROUTES)])
        app.router.add_get(f"/api/models/{{model}}/{kind}", owner)
        tasks = [TaskSnapshot("balance", one, Role.ACTIVE, "RUNNING", 1, 1).record() for one in range(partitions)]
        async with TestServer(app) as server:
            record = {"incarnation": "i", "models": [], "tasks": tasks}
            instance.servers.hear(f"127.0.0.1:{server.port}", record, live=True)
            try:
                return (await scatter.gather(kind, scan, ASKER)).answer(scan)
            finally:
                await scatter.proxy.close()

    answer = asyncio.run(run())
    assert answer.headers["Balance-Position"] == ",".join(f"{partition}:9" for partition in range(partitions))
    assert sum(asked) == partitions
    if kind == "count":
        assert json.loads(answer.body) == {"count": partitions}
        assert partitions > 1000 or asked == [partitions]
