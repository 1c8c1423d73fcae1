"""Queries for rows of joined tables, over real HTTP: who answers, with which row, and at which position."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from balance_service.avro.codec import AvroCodec
from balance_service.cluster.directory import PublishedModel, ServerTable
from balance_service.engine.records import Position, Role, TaskSnapshot
from balance_service.engine.table_store import TableStore, Version
from balance_service.errors import RetriableError, StoreCorruptedError
from balance_service.formats.known import FORMATS
from balance_service.http.answer import problems
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.queries import Queries
from balance_service.http.table_queries import TableQueries, TablesHere
from balance_service.kafka.lease import Lease
from balance_service.kafka.partitioner import Partitioning
from balance_service.kafka.topics import Watermarks
from balance_service.model.stream import Global, Join, Table
from balance_service.observability.metrics import Metrics
from balance_service.testing.fakes import FakeRegistry
from tests.support.fakes import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from balance_service.model.record_keys import KeyFormat

PLAYER = {"type": "record", "name": "Player", "fields": [{"name": "name", "type": "string"}]}
PARTITIONS = 2
EPOCH = 4
KEYS = {Partitioning(PARTITIONS, "murmur2").of(key.encode()): key for key in map("p{}".format, range(20))}


class Rows:
    """A followed partition of a table, in a real store."""

    def __init__(self, path: Path, codec: AvroCodec) -> None:
        self._codec = codec
        self.store = TableStore(path, 0)
        self.is_whole = True
        self.problem = ""
        self.damage: list[str] = []
        self._at = 0

    @property
    def view(self) -> Any:
        if self.problem:
            raise RetriableError(self.problem)
        return self.store.view

    def put(self, key: bytes, name: str | None, timestamp_ms: int = 0) -> None:
        frame = None if name is None else self._codec.encode({"name": name})
        self.store.apply([(key, Version(timestamp_ms, self._at, frame))], self._at + 1)
        self._at += 1

    def report_damage(self, error: StoreCorruptedError) -> None:
        self.damage.append(str(error))


class Side:
    """An instance that joins with the table `players`."""

    def __init__(self, path: Path, address: str = "", table: Table | None = None, form: KeyFormat = "string") -> None:
        self.table = table or Table("players", "Player", key_format=form)
        self.registry = FakeRegistry()
        codec = AvroCodec(self.registry, "players", PLAYER)
        self.rows = {partition: Rows(path / f"{address}-{partition}", codec) for partition in range(PARTITIONS)}
        self.codec, self.clock = codec, Clock()
        self.address = address
        self.servers = ServerTable(self.clock)
        self.roles: dict[int, Role] = {}
        self.lease = Lease(10_000, self.clock)
        self.lease.renew(self.clock.now)
        self.watermarks = Watermarks("players", lambda: {0: 10, 1: 10}, self.clock)
        self.watermarks.refresh()
        self.asked: list[str] = []

    def owns(self, partition: int, role: Role = Role.ACTIVE) -> None:
        self.roles[partition] = role

    def hears(self, peer: Side, partition: int, role: Role = Role.ACTIVE) -> None:
        state = "RUNNING" if role is Role.ACTIVE else "TAILING"
        tasks = [TaskSnapshot("joins", partition, role, state, EPOCH, 1).record()]
        models = [PublishedModel("ranks", PARTITIONS, "murmur2", versions=(1,)).record()]
        record = {"address": peer.address, "incarnation": "i", "models": models, "tasks": tasks}
        self.servers.hear(peer.address, record, live=True)

    def _task(self, partition: int) -> Any:
        view = SimpleNamespace(position=Position(77, EPOCH, "id"))
        return SimpleNamespace(task_id=SimpleNamespace(partition=partition), role=self.roles[partition], view=view)

    def queries(self, proxy: Proxy) -> TableQueries:
        joins = [Join(table=self.table, on="player", take={"name": "name"}, missing="drop")]
        hosted = SimpleNamespace(
            stage=SimpleNamespace(joins=joins, owner="ranks"),
            source=SimpleNamespace(partitions=PARTITIONS),
            lease=self.lease,
        )
        tasks: Any = SimpleNamespace(
            name="joins", hosted=hosted, all=lambda: [self._task(partition) for partition in self.roles]
        )

        def find(table: Any) -> Rows | None:
            follows = self.roles if not isinstance(self.table, Global) else range(PARTITIONS)
            return self.rows[table.partition] if table.partition in follows and self.roles else None

        tables: Any = SimpleNamespace(
            find=find,
            partitioning=lambda _topic: Partitioning(PARTITIONS, "murmur2", self.table.key_format),
            reader=lambda _topic: FORMATS["avro"].reader(self.registry, PLAYER),
        )
        here = TablesHere(
            stages=[tasks],
            tables=tables,
            servers=self.servers,
            watermarks={"players": self.watermarks},
            address=self.address,
            queries=lambda routing: Queries(
                routing=routing, proxy=proxy, timeout_seconds=2.0, metrics=Metrics(), is_of_table=True
            ),
        )
        return TableQueries(here.answers())

    def app(self, proxy: Proxy) -> web.Application:
        queries = self.queries(proxy)

        async def noted(request: web.Request) -> web.StreamResponse:
            self.asked.append(request.path_qs)
            return await queries.row(request)

        app = web.Application(middlewares=[problems])
        app.router.add_get("/api/tables/{table}/keys/{key}", noted)
        app.router.add_get("/api/tables", queries.list)
        return app

    def close(self) -> None:
        for rows in self.rows.values():
            rows.store.close()


def ask(side: Side, path: str, *others: Side, headers: Mapping[str, str] | None = None) -> tuple[int, Any, Any]:
    """Returns status, body and headers of an answer. The sides get the addresses of real servers first."""

    async def run() -> tuple[int, Any, Any]:
        async with AsyncExitStack() as stack:
            proxies = []
            for one in (*others, side):
                proxies.append(Proxy())
                stack.push_async_callback(proxies[-1].close)
                server = TestServer(web.Application())
                await server.start_server()
                one.address = f"{server.host}:{server.port}"
                port = server.port
                await server.close()
                server = TestServer(one.app(proxies[-1]), port=port)
                await stack.enter_async_context(server)
            for hear in side.__dict__.pop("later", []):
                hear()
            client = await stack.enter_async_context(ClientSession())
            async with client.get(f"http://{side.address}{path}", headers=headers or {}) as response:
                return response.status, json.loads(await response.text()), response.headers

    return asyncio.run(run())


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    sides: list[Side] = []

    def make(**more: Any) -> Side:
        sides.append(Side(tmp_path / str(len(sides)), **more))
        return sides[-1]

    yield make
    for side in sides:
        side.close()


def row(partition: int) -> str:
    return f"/api/tables/players/keys/{KEYS[partition]}"


def test_the_owner_answers_with_the_newest_row_and_the_position_in_its_topic(made: Any) -> None:
    side = made()
    side.owns(0)
    key = KEYS[0].encode()
    side.rows[0].put(key, "Ada", 5)
    side.rows[0].put(key, "Ada Lovelace", 9)
    side.rows[0].put(key, "late", 1)

    status, body, headers = ask(side, row(0))

    assert (status, body) == (200, {"key": KEYS[0], "value": {"name": "Ada Lovelace"}})
    assert (headers["Balance-Position"], headers["Balance-Epoch"], headers["Balance-Role"]) == ("0:3", "4", "active")
    assert headers["Balance-Lag"] == "7"
    assert "Balance-Generation" not in headers


def test_a_deleted_row_and_an_unknown_table_are_not_found(made: Any) -> None:
    side = made()
    side.owns(0)
    side.rows[0].put(KEYS[0].encode(), "Ada")
    side.rows[0].put(KEYS[0].encode(), None, 1)

    status, body, _ = ask(side, row(0))
    assert (status, body["detail"]) == (404, "no such row")
    status, body, _ = ask(side, "/api/tables/teams/keys/t1")
    assert (status, "joins with a table 'teams'" in body["detail"]) == (404, True)


@pytest.mark.shows("owner")
def test_the_owner_of_the_keys_partition_is_asked_and_no_other_copy_answers(made: Any) -> None:
    asker, owner = made(), made()
    asker.owns(0)
    owner.owns(1)
    owner.rows[1].put(KEYS[1].encode(), "of the owner")
    asker.rows[1].put(KEYS[1].encode(), "an old copy")
    asker.later = [lambda: asker.hears(owner, 1)]

    status, body, headers = ask(asker, row(1), owner)

    assert (status, body["value"]) == (200, {"name": "of the owner"})
    assert headers["Balance-Application-Server"] == owner.address
    assert owner.asked == [row(1)]


@pytest.mark.shows("owner")
def test_an_instance_without_a_lease_or_with_a_standby_does_not_answer_as_owner(made: Any) -> None:
    side = made()
    side.owns(0)
    side.rows[0].put(KEYS[0].encode(), "Ada")
    assert ask(side, row(0), headers={FORWARDED_HEADER: "peer:1"})[0] == 200

    side.lease.revoke()
    assert ask(side, row(0), headers={FORWARDED_HEADER: "peer:1"})[0] == 421
    assert ask(side, row(0))[0] == 503

    side.lease.renew(side.clock.now)
    side.owns(0, Role.STANDBY)
    assert ask(side, row(0), headers={FORWARDED_HEADER: "peer:1"})[0] == 421
    status, _, headers = ask(side, f"{row(0)}?minPosition=0:1")
    assert (status, headers["Balance-Role"]) == (200, "standby")
    assert ask(side, f"{row(0)}?maxLag=8")[0] == 503


@pytest.mark.parametrize("why", ["not read to its end", "not open"])
def test_a_table_that_is_not_read_to_its_end_answers_nothing(made: Any, why: str) -> None:
    side = made()
    side.owns(0)
    if why == "not open":
        side.rows[0].problem = why
    else:
        side.rows[0].is_whole = False

    assert ask(side, row(0))[0] == 503


def test_every_owner_answers_for_all_rows_of_a_global(made: Any) -> None:
    table = Global("players", "Player")
    asker, owner = made(table=table), made(table=table)
    owner.owns(0)
    owner.rows[1].put(KEYS[1].encode(), "Ada")
    asker.later = [lambda: asker.hears(owner, 0)]

    status, body, headers = ask(asker, row(1), owner)

    assert (status, body["value"], headers["Balance-Position"]) == (200, {"name": "Ada"}, "1:1")


@pytest.mark.parametrize("number", [-1, 0, 2**63 - 1])
def test_keys_that_are_numbers_are_asked_for_as_numbers(made: Any, number: int) -> None:
    side = made(form="long")
    key = side.table.key_of(number)
    partition = Partitioning(PARTITIONS, "murmur2", "long").of(key)
    side.owns(partition)
    side.rows[partition].put(key, "Ada")

    expected = {"key": str(number), "value": {"name": "Ada"}}
    assert ask(side, f"/api/tables/players/keys/{number}")[:2] == (200, expected)
    assert ask(side, "/api/tables/players/keys/ada")[0] == 400


def test_a_damaged_store_is_reported_and_a_row_of_another_schema_is_unavailable(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = made()
    side.owns(0)
    side.rows[0].store.apply([(KEYS[0].encode(), Version(0, 0, b"\x00\x00\x00\x00\x63x"))], 1)
    status, body, _ = ask(side, row(0))
    assert status == 503
    assert "the row cannot be read any more" in body["detail"]

    def fails(*_: object) -> None:
        raise StoreCorruptedError("bad block")

    monkeypatch.setattr("balance_service.engine.table_store.TableView.newest", fails)
    assert ask(side, row(0))[0] == 503
    assert side.rows[0].damage


def test_the_tables_are_listed(made: Any) -> None:
    status, body, _ = ask(made(form="long"), "/api/tables")

    assert (status, body) == (
        200,
        {
            "tables": [
                {
                    "name": "players",
                    "record": "Player",
                    "keyFormat": "long",
                    "isGlobal": False,
                    "readModels": ["ranks"],
                }
            ]
        },
    )
