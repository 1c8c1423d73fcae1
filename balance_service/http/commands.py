"""Commands: requests that append events. The author of an application adds them, as values of `Command`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.trace import Tracer

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.http.route import Route
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

    def close(self) -> None:
        """Waits, within a bound, for requests in progress."""


@dataclass(frozen=True, slots=True)
class Command:
    """A route, and the factory of the handler that it finds by its class, as in `Handlers.of`.

    Each command of an application has a handler class of its own, which does not derive from another command's:
    otherwise the application does not start, with a ConfigurationError.
    `handler` raises RetriableError while the broker or the registry does not respond.
    """

    route: Route
    handler: Callable[[CommandContext], CommandHandler]
