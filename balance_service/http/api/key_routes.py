"""The routes that read models declare by `queries`: one key, asked for by a name of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from balance_service.http.access.clients import Scope
from balance_service.http.api.answers import PROVENANCE, ok, problem, unavailable
from balance_service.http.api.declarations import Parameter
from balance_service.http.api.model_routes import MISDIRECTED, MODELS
from balance_service.http.api.route import Route
from balance_service.http.api.schemas import CUSTOMER_ID, NUMBER_KEY, exactly
from balance_service.http.model_queries import NUMBERS
from balance_service.http.parameters import MAX_LAG, MIN_POSITION
from balance_service.model.keys import checked_key
from balance_service.model.routes import Routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from aiohttp import web

    from balance_service.http.handlers import Handlers
    from balance_service.model.read_model import ReadModel


def key_routes(models: Iterable[ReadModel]) -> list[Route]:
    """Those of some read models."""
    return [_key_route(model, model.queries) for model in models if isinstance(model.queries, Routes)]


def _key_route(model: ReadModel, declared: Routes) -> Route:
    key = Parameter(
        name=declared.key,
        description=f"The {declared.noun}. Percent-encoded UTF-8, given exactly once.",
        schema=NUMBER_KEY if model.key_type.is_number else CUSTOMER_ID,
        parse=partial(checked_key, name=declared.key),
        example="1" if model.key_type.is_number else "c1",
        is_required=True,
    )

    def answer(handlers: Handlers, request: web.Request) -> Awaitable[web.StreamResponse]:
        return handlers.any_model.by_route(request, model.name, key, declared)

    return Route(
        name=declared.path.rpartition(".")[2].rpartition("/")[2],
        method="GET",
        path=declared.path,
        answer=answer,
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        is_forwarded=True,
        summary=f"What '{model.name}' knows of a {declared.noun}",
        description="Answered as `getBalance` is, by whichever instance owns the key's partition.",
        parameters=(key, MIN_POSITION, MAX_LAG),
        answers=(
            ok(
                "The state.",
                exactly({name: _schema(kind) for name, kind in model.field_types.items()}),
                None,
                PROVENANCE,
            ),
            problem(400, f"`{declared.key}`, `minPosition` or `maxLag` is missing, malformed or repeated."),
            problem(
                404,
                f"No event has named this {declared.noun}, or no instance hosts '{model.name}'.",
                {"unknown": ("One without events", f"no such {declared.noun}")},
                headers=(),
            ),
            MISDIRECTED,
            unavailable("No instance can answer now."),
        ),
    )


def _schema(kind: str) -> dict[str, Any]:
    return {"type": "number"} if kind.startswith(NUMBERS) and not kind.endswith("?") else {}
