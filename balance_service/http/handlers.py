"""The handlers behind the routes of an instance.

The author of an application adds commands, which are requests that append events, as values of `Command`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from balance_service.http.answer import unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp import web
    from opentelemetry.trace import Tracer

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.http.dead_letters import DeadLetters
    from balance_service.http.generations import GenerationRequests
    from balance_service.http.instances import Instances
    from balance_service.http.model_queries import ModelQueries
    from balance_service.http.operations import Operations
    from balance_service.http.route import Route
    from balance_service.http.streams.event_stream import Streams
    from balance_service.http.streams.link import PeerStreams
    from balance_service.observability.metrics import Metrics
    from balance_service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandContext:
    """The parts of a running instance that commands use."""

    settings: Settings
    registry: SchemaRegistry
    metrics: Metrics
    tracer: Tracer


class CommandHandler(Protocol):
    """Handles the requests of one command. Exists once the instance has reached its broker."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Appends the event, and answers once all in-sync replicas have it."""

    def close(self) -> None:
        """Waits, within a bound, for requests in progress."""


@dataclass(frozen=True, slots=True)
class Command:
    """A route, whose handler calls `Handlers.command`, and the factory of the command's handler.

    `handler` raises RetriableError while the broker or the registry does not respond.
    """

    route: Route
    handler: Callable[[CommandContext], CommandHandler]


class Handlers:
    """The handlers of all routes. Those of queries and commands are set after start-up: until then, they answer 503."""

    def __init__(self, operations: Operations, streams: Streams) -> None:
        self.operations = operations
        self.streams = streams
        self.commands: Mapping[str, CommandHandler] = {}
        self.models: ModelQueries | None = None
        self.dead_letters: DeadLetters | None = None
        self.peers: PeerStreams | None = None
        self.generations: GenerationRequests | None = None
        self.instances: Instances | None = None

    def model_queries(self) -> ModelQueries:
        """Raises Problem 503 while the instance is starting."""
        if self.models is None:
            raise unavailable("this instance is starting")
        return self.models

    def letters(self) -> DeadLetters:
        """Raises Problem 503 while the instance is starting."""
        if self.dead_letters is None:
            raise unavailable("this instance is starting")
        return self.dead_letters

    def generation_requests(self) -> GenerationRequests:
        """Raises Problem 503 while the instance is starting."""
        if self.generations is None:
            raise unavailable("this instance is starting")
        return self.generations

    def other_instances(self) -> Instances:
        """Raises Problem 503 while the instance is starting."""
        if self.instances is None:
            raise unavailable("this instance is starting")
        return self.instances

    def peer_streams(self) -> PeerStreams:
        """Raises Problem 503 while the instance is starting."""
        if self.peers is None:
            raise unavailable("this instance is starting")
        return self.peers

    async def end_streams(self) -> None:
        """Ends all streams, and opens no more."""
        self.streams.close()
        if self.peers is not None:
            await self.peers.close()

    async def command(self, name: str, request: web.Request) -> web.StreamResponse:
        """Raises Problem 503 while the instance is starting."""
        if name not in self.commands:
            raise unavailable("this instance is starting; the event was certainly not written")
        return await self.commands[name].answer(request)
