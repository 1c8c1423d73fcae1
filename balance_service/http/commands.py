"""Commands: requests that append events. The author of an application brings them, as values of `Command`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from balance_service.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web
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


class JsonNumber(str):
    """The digits of a JSON number. A number never passes through a binary float."""

    __slots__ = ()


def json_object(body: bytes, example: str) -> dict[str, Any]:
    """Parses a body that must be a JSON object; its numbers become `JsonNumber`. Raises InvalidInputError."""
    try:
        parsed = json.loads(
            body,
            parse_float=JsonNumber,
            parse_int=JsonNumber,
            parse_constant=_refuse_constant,
            object_pairs_hook=_without_duplicates,
        )
    except (ValueError, RecursionError):
        raise InvalidInputError(f"the body is not JSON; send {example}") from None
    if not isinstance(parsed, dict):
        raise InvalidInputError(f"the body is not a JSON object; send {example}")
    return parsed


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON does not define which of two values counts. For money, guessing is not an option.
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidInputError("the body has a name more than once in an object")
    return fields


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
