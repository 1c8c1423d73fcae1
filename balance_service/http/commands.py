"""Commands: requests that append events. Whoever puts an application together brings them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web
    from opentelemetry.trace import Tracer

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.http.api.route import Route
    from balance_service.observability.metrics import Metrics
    from balance_service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """What a running instance has for commands."""

    settings: Settings
    registry: SchemaRegistry
    metrics: Metrics
    tracer: Tracer


class Taking(Protocol):
    """Takes one command, from the time on at which the instance has reached its broker."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Append what the request says, and answer once all in-sync replicas have it."""

    def close(self) -> None:
        """Wait, within a bound, for what is under way."""


@dataclass(frozen=True, slots=True)
class Command:
    """A route, whose answer asks `Handlers.command`, and what takes its requests.

    `taking` raises RetriableError while broker or registry do not answer.
    """

    route: Route
    taking: Callable[[Writing], Taking]
