"""What operators ask about one instance, which may be another than the one that they reach; and what was done."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from balance_service import api
from balance_service.errors import BalanceServiceError, RetriableError
from balance_service.http.access.clients import Scope
from balance_service.http.answer import Problem, json_response, unavailable
from balance_service.http.instance_details import InstanceDetails
from balance_service.http.operations import Operations
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.requests import Parameters
from balance_service.http.route import OPERATIONS, Handlers, Route, Time, ok, problem, retry_later
from balance_service.http.shares import asker_of
from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp import web

    from balance_service.http.answer import Answer
    from balance_service.http.peers.proxy import Proxy
    from balance_service.http.peers.trust import Peer

# The console asks for the history every 30 s.
_LATE_SECONDS = 60.0


class InstanceParameters(Parameters):
    address: str | None = Field(
        None,
        description="`host:port` of the instance, as `/api/status` has it; by default the one that is asked.",
        examples=["localhost:5052"],
    )


class Instances:
    """Asks other instances about themselves, and reads the history. Belongs to the event loop."""

    def __init__(
        self,
        *,
        peer: Callable[[str], Peer | None],
        proxy: Proxy,
        address: str,
        history: Callable[[], Sequence[Action]],
        timeout_seconds: float,
    ) -> None:
        """Args:
        peer: returns the instance with an address; None if no such instance is known.
        address: of this instance.
        history: reads it; blocks. Raises BalanceServiceError: it cannot be read now.
        """
        self._peer = peer
        self._proxy = proxy
        self._address = address
        self._history = history
        self._timeout_seconds = timeout_seconds
        self._reading: asyncio.Task[Sequence[Action]] | None = None
        self._read_at: float | None = None
        """When the last read ended whose result no request got; None if there is none."""

    async def ask(self, address: str, client: str) -> Answer:
        """Returns another instance's answer.

        Raises:
            Problem: 404, no such instance is known; 503, it does not answer.
        """
        peer = self._peer(address)
        if peer is None:
            raise Problem(404, f"no instance at {address[:300]!r} is known here")
        try:
            return await self._proxy.get(peer, api.INSTANCE, {}, self._address, self._timeout_seconds, client=client)
        except RetriableError as error:
            raise unavailable(str(error)) from error

    async def history(self) -> Sequence[Action]:
        """Returns what was done. One read serves all requests that arrive during it, or the next if it took too long.

        Raises:
            Problem: 503, it cannot be read now.
        """
        is_late = self._read_at is not None and time.monotonic() - self._read_at < _LATE_SECONDS
        if self._reading is None or (self._reading.done() and not is_late):
            self._reading, self._read_at = asyncio.create_task(asyncio.to_thread(self._history)), None
            self._reading.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                actions = await asyncio.shield(self._reading)
        except TimeoutError as error:
            text = f"the history was not read within {self._timeout_seconds:g} s; it is read on: ask again"
            raise unavailable(text) from error
        except BalanceServiceError as error:
            raise unavailable(f"the history cannot be read now: {error}") from error
        # The request of a client that has left does not get here.
        self._read_at = None
        return actions

    def _ended(self, read: asyncio.Task[Sequence[Action]]) -> None:
        # All who asked may have left before it fails.
        if not read.cancelled() and read.exception() is None:
            self._read_at = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Action(Struct):
    """A decision about a dead letter, or a step of a read model's generations."""

    at: Time
    by: str
    """Whose token it was; without tokens, the address that asked; or the command that needs no instance; or `the
    service`, for what it did by itself."""
    action: Annotated[str, Field(examples=["discard"])]
    about: Annotated[str, Field(examples=["balance/1:42"])]
    """The id of a dead letter, or a read model."""
    detail: Annotated[str, Field(examples=["generation 2 serves, 1 is dropped"])]
    """The cause of the dead letter; or which generations there are after the step, and which it dropped."""
    reason: str
    """Who decided gave it; or why the service did it by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Struct):
    actions: list[Action]
    """The last 200, the newest first."""


_DETAILS: Mapping[str, Any] = {
    "applicationServer": "localhost:5051",
    "version": "0.1.0",
    "startedAt": "2026-01-02T03:04:05.678Z",
    "processors": 2,
    "python": {"cpuSeconds": 41.7, "memoryBytes": 312_000_000},
    "jvm": {"cpuSeconds": 103.2, "memoryBytes": 701_000_000},
    "heapBytes": 210_000_000,
    "mostHeapBytes": 512_000_000,
    "freeBytes": 52_000_000_000,
    "diskBytes": 100_000_000_000,
    "storeBytes": 73_400,
    "settings": [{"name": "BALANCE_HTTP_PORT", "value": "5051", "isSet": True}],
    "halted": [],
    "log": [
        {
            "at": "2026-01-02T03:04:05.678Z",
            "level": "warning",
            "line": '{"reason": "…", "event": "task waiting"}',
            "times": 3,
        }
    ],
}
_ACTION: Mapping[str, Any] = {
    "at": "2026-01-02T03:04:05.678Z",
    "by": "alice",
    "action": "discard",
    "about": "balance/1:42",
    "detail": "its cause was frame-missing",
    "reason": "a test event",
}


async def _answer_details(handlers: Handlers, request: web.Request) -> web.StreamResponse:
    given, details = InstanceParameters.of(request), handlers.of(Operations).details()
    if FORWARDED_HEADER in request.headers or given.address in (None, details.application_server):
        return json_response(details)
    return (await handlers.of(Instances).ask(str(given.address), asker_of(request).name)).response()


async def _answer_history(handlers: Handlers, _request: web.Request) -> web.StreamResponse:
    return json_response(History(actions=[*await handlers.of(Instances).history()]))


INSTANCE_ROUTES = (
    Route(
        name="getInstance",
        path=api.INSTANCE,
        handle=_answer_details,
        tag=OPERATIONS,
        scopes=frozenset({Scope.OPERATE}),
        is_forwarded=True,
        summary="One instance: its process, its settings, and the end of its log",
        description="Secrets are hidden. The log and the tasks that are halted by a model's own code may quote events.",
        parameters=InstanceParameters,
        responses=(
            ok("The instance.", InstanceDetails, _DETAILS),
            problem(400, "A parameter is repeated or unknown."),
            problem(404, "No instance with that address is known."),
            retry_later("That instance does not answer, or this one is starting and knows no other."),
        ),
    ),
    Route(
        name="getHistory",
        path=api.HISTORY,
        handle=_answer_history,
        tag=OPERATIONS,
        scopes=frozenset({Scope.OPERATE}),
        summary="What operators did",
        description="Decisions about dead letters, and steps of generations, including those of the service itself. "
        "Both are kept permanently; these are the last ones. Requests that were refused changed nothing, and are not "
        "kept.",
        responses=(
            ok("The history.", History, {"actions": [_ACTION]}),
            retry_later("The broker does not respond, or the instance is starting."),
        ),
    ),
)
