"""Health, metrics and status of an instance: handlers, response bodies and routes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, Protocol

from aiohttp import web
from pydantic import Field
from typing_extensions import TypedDict

from balance_service import api
from balance_service.http.access.authorization import KNOWS
from balance_service.http.access.clients import Scope
from balance_service.http.answer import compact_json, json_response, unavailable
from balance_service.http.openapi import answer_with_document
from balance_service.http.route import (
    OPERATIONS,
    Count,
    Response,
    Role,
    Route,
    Time,
    accepts_events,
    closed,
    ok,
    retry_later,
)
from balance_service.http.streams.event_stream import rendered
from balance_service.model.generations import GenerationStatus
from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.http.instance_details import InstanceDetails
    from balance_service.http.streams.event_stream import EventStream, Streams

_ASK_WITH_TOKEN = f"{api.STATUS}, asked with a token, says why"
_METRICS_SECONDS = 1.0
_STATUS_SECONDS = 1.0
# The viewers of one status take turns; none waits for the time of another.
_TOLERANCE_SECONDS = 0.1
Positive = Annotated[int, Field(ge=1)]
CountOrUnknown = Annotated[int, Field(ge=-1)]


class Operable(Protocol):
    """An instance as operators see it. Methods are called on the event loop's thread and return without waiting."""

    def unready(self) -> Sequence[str]:
        """Reasons why the instance should receive no queries now; empty if it should."""

    def problems(self) -> Sequence[str]:
        """Problems of the hosted read models, whether or not the instance can answer queries."""

    def status(self) -> Mapping[str, Any]:
        """A `Status`."""

    def details(self) -> InstanceDetails:
        """What this instance tells about itself."""

    def metrics(self) -> bytes:
        """Metrics in Prometheus' text format."""


class Operations:
    """Answers operators and orchestrators."""

    def __init__(self, instance: Operable, streams: Streams, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        clock: seconds.
        """
        self._instance = instance
        self._streams = streams
        self._clock = clock
        self._metrics = b""
        self._metrics_at = float("-inf")
        self._status = ""
        self._status_at = float("-inf")

    async def live(self, _request: web.Request) -> web.Response:
        return json_response(Live(status="live"))

    async def ready(self, request: web.Request) -> web.Response:
        """Names reasons and problems, which have addresses and errors, only to clients that may know them."""
        reasons, problems = list(self._instance.unready()), list(self._instance.problems())
        if not request.app[KNOWS](request.headers):
            reasons = reasons and [f"this instance is not ready; {_ASK_WITH_TOKEN}"]
            problems = problems and [f"a read model has a problem; {_ASK_WITH_TOKEN}"]
        if reasons:
            raise unavailable("; ".join(reasons))
        return json_response(Ready(status="ready", problems=problems))

    async def metrics(self, _request: web.Request) -> web.Response:
        """Collects metrics at most once a second, because that takes the event loop's time."""
        if self._clock() - self._metrics_at >= _METRICS_SECONDS:
            self._metrics, self._metrics_at = self._instance.metrics(), self._clock()
        return web.Response(
            body=self._metrics,
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def status(self, request: web.Request) -> web.StreamResponse:
        if accepts_events(request.headers):
            return await self._streams.answer(request, self._follow_status, is_operator=True)
        return json_response(self._instance.status())

    def details(self) -> InstanceDetails:
        """What this instance tells about itself."""
        return self._instance.details()

    async def _follow_status(self, stream: EventStream) -> None:
        """Sends the status, then each change, at most once a second; does not return.

        The status is made once a second for all streams, and never without one.
        """
        sent = ""
        while True:
            status = self._latest_status()
            if status != sent:
                await stream.send(rendered("status", status))
                sent = status
            await asyncio.sleep(_STATUS_SECONDS)

    def _latest_status(self) -> str:
        if self._clock() - self._status_at >= _STATUS_SECONDS - _TOLERANCE_SECONDS:
            self._status, self._status_at = compact_json(self._instance.status()), self._clock()
        return self._status


@dataclass(frozen=True, slots=True, kw_only=True)
class Live(Struct):
    status: Literal["live"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Struct):
    status: Literal["ready"]
    problems: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDeadLetters(Struct):
    """Open dead letters of a task with one cause and status."""

    cause: Annotated[str, Field(examples=["schema-id-unknown"])]
    """Why their records could not be applied."""
    status: Annotated[str, Field(examples=["scheduled"])]
    """What happens to them next."""
    needs_decision: bool
    """Whether an operator must redrive or discard them. The service retries the others."""
    count: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTask(Struct):
    """A task as its instance last published it."""

    task: Annotated[str, Field(pattern="^.+_[0-9]+$", examples=["balance_0"])]
    """Stage and partition."""
    read_model: Annotated[str, Field(examples=["balance"])]
    """The read model of the stage, in the stage's generation; the stage itself if this instance does not host it."""
    partition: Count
    """Partition of the source topic."""
    role: Role
    """`active` folds the source and owns the partition; `standby` follows its changelog."""
    state: Literal["CREATED", "RESTORING", "RUNNING", "TAILING", "WAITING", "HALTED", "CLOSED"]
    """RESTORING replays the changelog and answers nothing. RUNNING folds and answers. TAILING, a standby's state,
    applies the owner's commits and answers queries that accept stale reads. WAITING answers but applies nothing until
    an external resource is back, such as the registry or space on the disk. HALTED applies nothing until an operator
    intervenes."""
    answers: bool
    """Whether it answers as the owner, also queries that do not say how old the answer may be. That the lease of a peer
    holds is taken for granted."""
    epoch: Count
    """Fencing number: increases by one each time the task opens as active; 0 before it is known."""
    position: CountOrUnknown
    """Next source offset to apply: everything below it is in the store; -1 while there is no store."""
    lag: Count | None
    """Records between position and the source's end; null while the end is not known, or if this instance does not
    host the stage."""
    lag_seconds: Annotated[float, Field(ge=0)] | None
    """Time since the source's end passed the position: every record that is older is applied. 0 without a lag; null if
    the lag is."""
    lag_seconds_is_least: bool
    """Whether the end had passed the position before this instance first read it: `lagSeconds` is a lower bound."""
    reason: str
    """Why the task waits or is halted; or since when it stands still, which it does if it has records to apply and has
    applied none for a minute; empty otherwise."""
    since: Time
    """When the task came into its state, or began to stand still. One that is opened again and again counts from the
    first failure. Null if it is not known."""
    restored: Count
    """Changelog records applied since the restore began; a standby also counts later ones."""
    to_restore: Count
    """Changelog offsets to restore, as counted when the restore began."""
    seconds_left: Annotated[float, Field(ge=0)] | None
    """Estimated duration of the rest of the restore; null unless the task is RESTORING."""
    dead_letters: list[OpenDeadLetters]
    """The open dead letters of the partition, as of the position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(PublishedTask):
    """The work of one read model on one partition, on this instance."""

    store_bytes: Count
    """Size of the state store on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePartition(Struct):
    """A partition of a table, as this instance follows it."""

    table: Annotated[str, Field(examples=["players"])]
    """The topic of its rows."""
    partition: Count
    """Partition of that topic."""
    position: CountOrUnknown
    """Next offset of the topic to read; -1 while that is not known."""
    whole: bool
    """Whether it was read to its end since it was opened."""
    reason: str
    """Why it is not followed now; empty while it is."""
    skipped: dict[str, Count]
    """Records that are not valid rows, by cause, since the instance started."""
    late: Count
    """Rows that arrived after an event that they should have been joined with, since the instance started."""
    store_bytes: Count
    """Size of its store on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel(Struct):
    """A generation of a read model."""

    name: Annotated[str, Field(examples=["balance"])]
    """The read model; that of its generation N > 1 is `<model>.gN`."""
    model: Annotated[str, Field(examples=["balance"])]
    """The read model."""
    status: GenerationStatus
    """What the generation is for: see `/api/models/{model}/generations`."""
    since: Time
    """The time of the last step of the read model's generations; null if there was none."""
    read_otherwise: list[int]
    """Ids of the schemas whose events had other values by the decoder's rules under which the generation began, so that
    states have values of both until it is rebuilt."""
    source: Annotated[str, Field(examples=["balance"])]
    """The topic that it folds."""
    partitions: Positive
    """Partitions of that topic."""
    standby_replicas: Count
    """Standbys that each partition should have (`BALANCE_NUM_STANDBY_REPLICAS`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationServer(Struct):
    """An instance, as this one knows it."""

    application_server: str
    """`host:port` under which peers reach it."""
    incarnation: str
    """Random for each start of the process."""
    suspect: bool
    """Not heard from for 3 s; no request is routed to it until it answers again."""
    silent_seconds: Count | None
    """Whole seconds since it was last heard from, if it is suspect; 0 if it is not; null if it was never heard from."""
    shared: bool
    """Two instances run with this address, so many queries are answered 503: give each its own
    `BALANCE_APPLICATION_SERVER`."""
    models: list[str]
    """The read models that it hosts."""
    tasks: list[PublishedTask]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Struct):
    """Something in the service that is not as it should be. Its consequences are no causes of their own."""

    kind: Annotated[str, Field(examples=["halted"])]
    """For programs."""
    urgency: Literal["now", "soon", "none"]
    """`now`: queries get no answer, or outdated ones; act at night, too. `soon`: within hours. `none`: it heals by
    itself within seconds as a rule, or only informs."""
    what: str
    """A sentence, without a full stop."""
    since: Time
    """Since when; null if that is not known."""
    action: str
    """What to do, as a sentence."""
    heals: bool
    """Whether waiting suffices."""
    section: Annotated[str, Field(examples=["BalanceTaskHalted"])]
    """The section of the runbook; empty for none."""
    tasks: list[str]
    """The tasks that it concerns."""
    servers: list[str]
    """The instances where it is, by `host:port`; empty if that is not known, or if it concerns all."""
    follows: list[str]
    """What follows from it, in words; the first 20."""


@closed
class Status(TypedDict):
    """This instance's tasks, and all instances as this one knows them."""

    applicationServer: str
    """`host:port` under which peers reach this instance."""
    ready: bool
    """Whether `/health/ready` answers 200."""
    reasons: list[str]
    """Why the instance is not ready; empty while it is."""
    causes: list[Cause]
    """What is wrong with the service, as this instance sees it; the most urgent first. Empty if nothing is."""
    unknownSettings: Annotated[list[str], Field(examples=[["BALANCE_DISCOUNT"]])]
    """Environment variables of this instance that begin like settings and are none, without those of Kubernetes."""
    partitions: Positive | None
    """The largest number of partitions of a source topic; null while the instance is starting."""
    models: list[HostedModel]
    """The read models that the instance hosts."""
    unhosted: Annotated[list[str], Field(examples=[["activity_1"]])]
    """Tasks of these read models that no instance has: the owner of the partition does not host the model, or the
    partition is changing hands."""
    problems: list[str]
    """Why partitions are not folded now, in the words of Spark and the broker, by read model; and why events became
    dead letters in the last hour because producers choose partitions in another way than declared."""
    leaseHolds: NotRequired[bool]
    """Whether the group has recently confirmed this instance, so that it may answer as owner; absent while the instance
    is starting."""
    tasks: list[Task]
    tables: list[TablePartition]
    """The tables that the read models join with."""
    endsAgeSeconds: Count | None
    """Age of the sources' ends that lags are measured against: 0 while they are at most 3 s old, then whole seconds;
    null before all have been read."""
    applicationServers: list[ApplicationServer]
    """All known instances, including this one."""


class OpenApiDocument(TypedDict):
    openapi: Annotated[str, Field(pattern=r"^3\.1\.")]
    info: dict[str, Any]
    paths: dict[str, Any]


_PUBLISHED: Mapping[str, Any] = {
    "task": "balance_0",
    "partition": 0,
    "role": "active",
    "state": "RUNNING",
    "answers": True,
    "readModel": "balance",
    "epoch": 3,
    "position": 42,
    "lag": 0,
    "lagSeconds": 0,
    "lagSecondsIsLeast": False,
    "reason": "",
    "since": "2026-01-02T03:04:05.678Z",
    "restored": 12,
    "toRestore": 12,
    "secondsLeft": None,
    "deadLetters": [{"cause": "schema-id-unknown", "status": "scheduled", "needsDecision": False, "count": 2}],
}
_STATUS: Mapping[str, Any] = {
    "applicationServer": "localhost:5051",
    "ready": True,
    "reasons": [],
    "causes": [
        {
            "kind": "silent",
            "urgency": "soon",
            "what": "localhost:5052 is not heard of; 1 of its partitions have no owner yet that answers",
            "since": "2026-01-02T03:04:05.678Z",
            "action": "Look whether its process runs, and start it again, unless it was removed",
            "heals": False,
            "section": "BalanceInstanceDown",
            "tasks": ["balance_1"],
            "servers": ["localhost:5052"],
            "follows": ["balance_1 has no owner: queries for its keys get 503, unless a standby may answer"],
        }
    ],
    "unknownSettings": [],
    "partitions": 2,
    "models": [
        {
            "name": "balance",
            "model": "balance",
            "status": "serving",
            "since": "2026-01-02T03:04:05.678Z",
            "readOtherwise": [],
            "source": "balance",
            "partitions": 2,
            "standbyReplicas": 1,
        }
    ],
    "unhosted": [],
    "problems": [],
    "leaseHolds": True,
    "tasks": [
        {
            **_PUBLISHED,
            "storeBytes": 73_400,
        }
    ],
    "tables": [],
    "endsAgeSeconds": 0,
    "applicationServers": [
        {
            "applicationServer": "localhost:5051",
            "incarnation": "5f0c6a1e",
            "suspect": False,
            "silentSeconds": 0,
            "shared": False,
            "models": ["balance"],
            "tasks": [_PUBLISHED],
        }
    ],
}


OPERATIONS_ROUTES = (
    Route(
        name="getLiveness",
        path="/health/live",
        handle=lambda handlers, request: handlers.of(Operations).live(request),
        tag=OPERATIONS,
        scopes=frozenset(),
        is_never_refused=True,
        summary="Is the process alive?",
        description="200 while the process responds at all. Restart an instance that does not.",
        responses=(ok("Alive.", Live, {"status": "live"}),),
    ),
    Route(
        name="getReadiness",
        path=api.READY,
        handle=lambda handlers, request: handlers.of(Operations).ready(request),
        tag=OPERATIONS,
        scopes=frozenset(),
        is_never_refused=True,
        summary="Is the instance ready for queries?",
        description="200 when this instance has joined its group and can answer for at least one of its read models. "
        "Send it queries only then.",
        responses=(
            ok("Ready; `problems` lists problems of read models.", Ready, {"status": "ready", "problems": []}),
            retry_later(
                "Not ready; `detail` has the reasons, separated by semicolons. Where tokens are needed, a client "
                "without one, and the health port, get no reasons and no problems.",
                starting=("Just started", "this instance is starting"),
                restoring=("A store is being restored", "balance_0 is RESTORING"),
            ),
        ),
    ),
    Route(
        name="getMetrics",
        path="/metrics",
        handle=lambda handlers, request: handlers.of(Operations).metrics(request),
        tag=OPERATIONS,
        scopes=frozenset({Scope.OPERATIONS}),
        is_never_refused=True,
        summary="Metrics of this instance",
        description="Prometheus' text format, version 0.0.4. Metrics of tasks carry the labels `read_model` and "
        "`partition`; those of a task's current state also carry `role`.",
        responses=(
            Response(
                status=200,
                description="All metrics.",
                type=str,
                example="# HELP balance_position Next source offset to apply.\n# TYPE balance_position gauge\n"
                'balance_position{partition="0",read_model="balance",role="active"} 42.0\n',
                media_type="text/plain",
            ),
        ),
    ),
    Route(
        name="getStatus",
        path=api.STATUS,
        handle=lambda handlers, request: handlers.of(Operations).status(request),
        tag=OPERATIONS,
        scopes=frozenset({Scope.OPERATIONS}),
        streams="asked",
        summary="This instance and all others, as this one sees them",
        description="Its own tasks, exactly; the tasks of all instances as they last published them, at most about a "
        "second ago unless `suspect`. With `Accept: text/event-stream`, the answer stays open: it sends the status, "
        "then each change, at most once a second.",
        responses=(
            ok(
                "The view of this instance.", Status, _STATUS, events=rendered("status", compact_json(_STATUS)).decode()
            ),
            retry_later("As many streams are open as `BALANCE_MAX_STREAMS` allows."),
        ),
    ),
    Route(
        name="getOpenApi",
        path="/openapi.json",
        handle=lambda _handlers, request: answer_with_document(request),
        tag=OPERATIONS,
        # Any client that may send any request needs the document.
        scopes=frozenset(Scope),
        summary="This document",
        description="Its version is that of the running service.",
        responses=(ok("OpenAPI 3.1.", OpenApiDocument),),
    ),
)
