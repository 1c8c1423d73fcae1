"""Queries for rows of the tables that read models join with: the handlers and routes below `/api/tables`.

A task follows the partitions of the tables that it joins with, so the instance that owns it answers for their rows, as
it does for keys of its states. Of a `Global`, every instance that joins with it has all rows.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field
from typing_extensions import TypedDict

from balance_service import api
from balance_service.engine.records import Position, Role, TableId
from balance_service.errors import PoisonRecordError, RetriableError, StoreCorruptedError
from balance_service.http.access.clients import Scope
from balance_service.http.answer import Problem, json_response
from balance_service.http.key_target import KEY_SCOPES, KeyTarget
from balance_service.http.model_routes import MODELS, Entry
from balance_service.http.requests import CopyParameters
from balance_service.http.route import MISDIRECTED, PROVENANCE, Route, closed, ok, problem, retry_later
from balance_service.http.routing import Routing
from balance_service.http.shares import asker_of
from balance_service.kafka.lease import AlwaysHeld
from balance_service.model.record_keys import RecordKey
from balance_service.model.stream import Global

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp import web

    from balance_service.cluster.directory import ApplicationServer, ServerTable
    from balance_service.engine.store import StoreView
    from balance_service.engine.table_partition import TablePartition
    from balance_service.engine.table_store import TableView
    from balance_service.engine.tables import Tables
    from balance_service.engine.task import Task, Watcher
    from balance_service.engine.tasks import Tasks
    from balance_service.http.key_target import KeyQuery
    from balance_service.http.queries import Queries
    from balance_service.http.routing import ReadableTask
    from balance_service.kafka.lease import Lease
    from balance_service.kafka.topics import Watermarks
    from balance_service.model.stream import Table

_MOST_NAME = 100


@closed
class TableDescription(TypedDict):
    name: str
    """The topic of its rows."""
    record: str
    """The simple name of the rows' schema."""
    keyFormat: str
    """The serializer of its keys: `string`, `int` or `long`."""
    isGlobal: bool
    """Whether every instance that joins with it has all rows."""
    readModels: list[str]
    """Those that join with it."""


@closed
class TableList(TypedDict):
    tables: list[TableDescription]


class RowParameters(CopyParameters):
    """`minPosition`, `maxLag` and `maxAge` are of the table's topic."""

    table: str = Field(description="The topic of the rows; `/api/tables` lists them.", examples=["players"])


class RowsView:
    """The rows of a table's partition as of one write, as queries read the states of a task."""

    def __init__(self, rows: TableView, epoch: int) -> None:
        self._rows = rows
        self.position = Position(rows.offset, epoch, "")

    def get(self, key: bytes) -> bytes | None:
        """Returns the newest version of a row, in the frame of its format; None if it is deleted, or never was."""
        newest = self._rows.newest(key)
        return None if newest is None else newest.frame


@dataclass(frozen=True, slots=True)
class FollowedRows:
    """A table's partition, as queries read a task. It answers as long as a task that joins with it does."""

    table: TablePartition
    task: Task
    lease: Lease
    """Of the task's source: stages of several may join with one table."""

    @property
    def role(self) -> Role:
        return self.task.role

    @property
    def view(self) -> StoreView | None:
        # Until it is read to its end, rows are missing, or old.
        task_view = self.task.view
        if task_view is None or not self.table.is_whole or (self.role is Role.ACTIVE and not self.lease.holds):
            return None
        epoch = 0 if task_view.position is None else task_view.position.epoch
        with suppress(RetriableError):
            # Queries for one key use no more of a view than this has.
            return cast("StoreView", RowsView(self.table.view, epoch))
        return None

    frozen_view = None

    def watch(self, watcher: Watcher | None) -> None:
        """Rows are not followed."""


@dataclass(frozen=True, slots=True)
class JoiningServers:
    """The instances that have a table's partition: those of the tasks that join with it."""

    table: ServerTable
    stages: Sequence[Tasks]
    is_global: bool

    def owners(
        self, _table: str, partition: int, states: frozenset[str], *, suspects: bool = False
    ) -> list[ApplicationServer]:
        return self._of_all(partial(self.table.owners, states=states, suspects=suspects), partition)

    def standbys(
        self, _table: str, partition: int, states: frozenset[str], *, suspects: bool = False
    ) -> list[ApplicationServer]:
        return self._of_all(partial(self.table.standbys, states=states, suspects=suspects), partition)

    def servers(self) -> Sequence[ApplicationServer]:
        return self.table.servers()

    def _of_all(self, of: Callable[[str, int], list[ApplicationServer]], partition: int) -> list[ApplicationServer]:
        found: dict[str, ApplicationServer] = {}
        for stage in self.stages:
            # The owner of any partition has all rows of a `Global`.
            numbers = _turned(partition, stage.hosted.source.partitions) if self.is_global else (partition,)
            for server in (server for number in numbers for server in of(stage.name, number)):
                found.setdefault(server.address, server)
        return [*found.values()]


def _turned(first: int, count: int) -> Sequence[int]:
    """Returns all numbers below a count, from another one for each first one."""
    return [(first + number) % count for number in range(count)]


@dataclass(frozen=True, slots=True)
class TableAnswers:
    """Answers queries for the rows of one table."""

    table: Table
    queries: Queries
    read_models: Sequence[str]

    @property
    def target(self) -> KeyTarget:
        path = f"{api.TABLES}/{self.table.topic}/keys"
        key_type = RecordKey.of_format(self.table.key_format)
        return KeyTarget(
            model=self.table.topic, noun="row", path=path, peer_path=path, key_type=key_type, echoes_key=True
        )

    def description(self) -> TableDescription:
        return {
            "name": self.table.topic,
            "record": str(self.table.record),
            "keyFormat": self.table.key_format,
            "isGlobal": isinstance(self.table, Global),
            "readModels": [*self.read_models],
        }


class TableQueries:
    """Handles the routes below `/api/tables`."""

    def __init__(self, tables: Mapping[str, TableAnswers]) -> None:
        """Args:
        tables: those that stages of this instance join with, by topic.
        """
        self._tables = tables

    async def list(self, _request: web.Request) -> web.Response:
        return json_response({"tables": [table.description() for _, table in sorted(self._tables.items())]})

    async def row(self, request: web.Request) -> web.Response:
        """Answers with the newest version of a row."""
        name = request.match_info["table"]
        table = self._tables.get(name)
        if table is None:
            raise Problem(
                404, f"no read model here joins with a table '{name[:_MOST_NAME]}'; {api.TABLES} lists the tables"
            )
        target = table.target

        def parse() -> KeyQuery:
            given = RowParameters.of(request)
            return target.query(given.key, given)

        query = parse()
        asker = asker_of(request)
        return (await table.queries.answer(lambda: query, asker.name, is_forwarded=asker.is_peer)).response()


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesHere:
    """The tables that stages of this instance join with, and what is needed to ask for their rows."""

    stages: Sequence[Tasks]
    tables: Tables
    servers: ServerTable
    watermarks: Mapping[str, Watermarks]
    """By the topic of the table."""
    address: str
    queries: Callable[[Routing], Queries]

    def answers(self) -> dict[str, TableAnswers]:
        """Returns what answers for each table, by topic."""
        joined: dict[str, list[Tasks]] = {}
        declared: dict[str, Table] = {}
        for tasks in sorted(self.stages, key=lambda tasks: tasks.name):
            for topic, table in {join.table.topic: join.table for join in tasks.hosted.stage.joins}.items():
                declared.setdefault(topic, table)
                joined.setdefault(topic, []).append(tasks)
        return {topic: self._answers_of(table, joined[topic]) for topic, table in declared.items()}

    def _answers_of(self, table: Table, stages: Sequence[Tasks]) -> TableAnswers:
        topic, is_global = table.topic, isinstance(table, Global)

        def followed(partition: int) -> FollowedRows | None:
            """The local copy: that of an owner, if there is one."""
            rows = self.tables.find(TableId(topic, partition))
            if rows is None:
                return None
            of_stages = [
                FollowedRows(rows, task, tasks.hosted.lease)
                for tasks in stages
                for task in tasks.all()
                if is_global or task.task_id.partition == partition
            ]
            answering = [one for one in of_stages if one.view is not None]
            return min(answering, key=lambda one: one.role is not Role.ACTIVE, default=None)

        def damaged(partition: int, _read: ReadableTask, error: StoreCorruptedError) -> None:
            if (rows := self.tables.find(TableId(topic, partition))) is not None:
                rows.report_damage(error)

        def decode(frame: bytes) -> Mapping[str, Any]:
            try:
                return self.tables.reader(topic).decode_foreign(frame)
            except PoisonRecordError as error:
                raise RetriableError(f"the row cannot be read any more: {error}") from error

        routing = Routing(
            read_model=f"table {topic}",
            partitioning=self.tables.partitioning(topic),
            address=self.address,
            servers=JoiningServers(self.servers, stages, is_global),
            task=followed,
            view=decode,
            on_damage=damaged,
            lease=AlwaysHeld(),
            watermarks=self.watermarks[topic],
        )
        read_models = sorted({tasks.hosted.stage.owner for tasks in stages})
        return TableAnswers(table, self.queries(routing), read_models)


TABLE_ROUTES = (
    Route(
        name="listTables",
        path=api.TABLES,
        handle=lambda handlers, request: handlers.of(TableQueries).list(request),
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        summary="The tables that read models join with",
        description="Of the models here.",
        responses=(
            ok(
                "The tables.",
                TableList,
                {
                    "tables": [
                        {
                            "name": "players",
                            "record": "Player",
                            "keyFormat": "string",
                            "isGlobal": False,
                            "readModels": ["leaderboard"],
                        }
                    ]
                },
            ),
            retry_later("The instance is starting."),
        ),
    ),
    Route(
        name="getRowOfTable",
        path=f"{api.TABLES}/{{table}}/keys/{{key}}",
        handle=lambda handlers, request: handlers.of(TableQueries).row(request),
        tag=MODELS,
        scopes=KEY_SCOPES,
        is_forwarded=True,
        summary="The newest row of one key",
        description="Answered as `getKeyOfModel` is. Positions and lags are of the table's topic. An instance answers "
        "that owns a partition which is joined with the key's, or for a `Global` any that joins with it. Joins take "
        "the version of the time of the event; this is the newest.",
        parameters=RowParameters,
        responses=(
            ok(
                "The key and its row.",
                Entry,
                {"key": "p1", "value": {"id": "p1", "name": "Ada"}},
                tuple(header for header in PROVENANCE if header.name != api.GENERATION),
            ),
            problem(
                400,
                "The key, `minPosition`, `maxLag` or `maxAge` is malformed, or `minPosition` is of another partition.",
            ),
            problem(404, "No read model of this instance joins with such a table, or the key has no row."),
            MISDIRECTED,
            retry_later("No instance can answer now, or the table is not read to its end yet."),
        ),
    ),
)
