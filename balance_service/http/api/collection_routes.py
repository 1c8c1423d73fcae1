"""The routes of read models that answer as collections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.http.access.clients import Scope
from balance_service.http.api.answers import PROVENANCE, ok, problem, unavailable
from balance_service.http.api.declarations import Parameter
from balance_service.http.api.model_routes import MODELS, OF_ALL
from balance_service.http.api.route import Route
from balance_service.http.api.schemas import NUMBER_KEY, count, exactly
from balance_service.http.collection_queries import CollectionQueries
from balance_service.http.parameters import LIMIT, MAX_LAG, MIN_POSITION, PARTIAL
from balance_service.model.read_model import Collection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from aiohttp import web

    from balance_service.http.api.declarations import Answer, Header, Schema
    from balance_service.http.handlers import Handlers
    from balance_service.http.model_queries import ModelQueries
    from balance_service.model.keys import KeyType
    from balance_service.model.read_model import ReadModel

_COUNT = exactly({"count": count("How many there are.")})
_LIST: dict[str, Any] = {"type": "array"}
_BY_KEY = {"type": "object", "additionalProperties": _LIST}


def _parameter(name: str, key_type: KeyType, description: str, *, is_required: bool = True) -> Parameter[str]:
    """A key: a required one is in the path, any other in the query."""

    def parse(text: str) -> str:
        key_type.parse(text)
        return text

    return Parameter(
        name=name,
        place="path" if is_required else "query",
        description=description,
        schema=NUMBER_KEY if key_type.is_number else {"type": "string"},
        parse=parse,
        example="1",
        is_required=is_required,
    )


def collection_routes(models: Iterable[ReadModel]) -> list[Route]:
    """Those of some read models."""
    collections = [(model, model.queries) for model in models if isinstance(model.queries, Collection)]
    return [route for model, declared in collections for route in _routes(model, declared)]


def _routes(model: ReadModel, declared: Collection) -> tuple[Route, ...]:
    noun, name = declared.noun, model.name
    queries = CollectionQueries(
        name=name,
        declared=declared,
        key_type=model.key_type,
        key=_parameter(declared.key, model.key_type, f"The {noun}."),
        start=_parameter("from", model.key_type, f"The first {noun} to be listed."),
        end=_parameter("to", model.key_type, f"The last {noun} to be listed."),
        after=_parameter(
            "after", model.key_type, f"The {noun} after which the list begins, as `Link` names it.", is_required=False
        ),
    )

    no_host = problem(404, f"No instance hosts '{name}'.", headers=())

    def route(
        operation: str,
        path: str,
        ask: Callable[[ModelQueries, web.Request], Awaitable[web.Response]],
        summary: str,
        *,
        schema: Schema,
        headers: tuple[Header, ...] = OF_ALL,
        unknown: Answer = no_host,
        **more: Any,
    ) -> Route:
        def answer(handlers: Handlers, request: web.Request) -> Awaitable[web.StreamResponse]:
            return ask(handlers.any_model, request)

        return Route(
            name=f"{name}{operation}",
            method="GET",
            path=f"{declared.path}{path}",
            answer=answer,
            tag=MODELS,
            scopes=frozenset({Scope.READ}),
            summary=summary,
            answers=(
                ok("The answer.", schema, None, headers),
                problem(400, "A parameter is missing, malformed or repeated."),
                unknown,
                unavailable("Some of it cannot be read now."),
            ),
            **more,
        )

    everything = (queries.after, LIMIT, MAX_LAG, PARTIAL)
    paged = f"In the order of their keys. Where there are more than `limit`, `Link` names the next page. Of {name}."
    one = problem(404, f"Nothing is known of this {noun}, or no instance hosts '{name}'.", headers=())
    # What is spelt out goes before what is a parameter.
    return (
        route("All", "", queries.all, f"All, by {noun}", description=paged, parameters=everything, schema=_BY_KEY),
        route(
            "Count",
            "/count",
            queries.count,
            "How many there are",
            description="On all instances.",
            parameters=(MAX_LAG, PARTIAL),
            schema=_COUNT,
        ),
        route(
            "CountLocal",
            "/count/local",
            queries.count_local,
            "How many the asked instance owns",
            description="Others are not asked.",
            schema=_COUNT,
        ),
        route(
            "One",
            f"/{{{declared.key}}}",
            queries.one,
            f"One {noun}",
            description="Answered as `getBalance` is, by whichever instance owns the key's partition.",
            parameters=(queries.key, MIN_POSITION, MAX_LAG),
            schema=_LIST,
            headers=PROVENANCE,
            unknown=one,
        ),
        route(
            "Range",
            "/{from}/{to}",
            queries.range,
            f"All from one {noun} to another",
            description=f"Both ends inclusive. {paged}",
            parameters=(queries.start, queries.end, *everything),
            schema=_BY_KEY,
        ),
    )
