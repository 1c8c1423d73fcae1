"""The reference of routes, from the routes themselves and their OpenAPI document."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from balance_service.http.access.clients import Scope
from balance_service.http.declared_queries import declared_routes
from balance_service.http.openapi import document
from balance_service.model.json_view import exact_json
from tests.docs.markdown import joined, section, table
from tests.support.shipped import MODELS, ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from balance_service.http.route import Route

_HEAD = """\
# HTTP API

Every instance serves these routes. Its OpenAPI 3.1 document, at `/openapi.json`, describes them in full, with the
schemas of all bodies. Numbers are JSON numbers with exactly their digits. Errors are `application/problem+json` (RFC
9457), whose `detail` is a sentence for the caller.

| status | meaning |
| --- | --- |
| 400, 413, 415 | the request is malformed, larger than 16 KiB, or not `application/json`; nothing was done |
| 404 | no such key: the answering instance looked; or no such read model, dead letter or path |
| 409 | a decision applies to none of its dead letters; or a rebuild, switch or drop is refused |
| 421, 403 | a host name in `Host` that the instance does not have; a browser's request for a page of another origin |
| 401, 403, 429 | [access control](../how-to/secure.md) refuses the request; a token needs `balance:SCOPE` |
| 503 | no instance can answer now, or too many requests are in progress; a retry after `Retry-After` may succeed |

`HEAD` is answered as `GET` is. No answer may be stored (`Cache-Control: no-store`). Unknown parameters are 400,
except of `/health/*` and `/metrics`.

"""
_LISTS = """\
Answers about several partitions list `partition:value`, separated by commas, for epoch, lag, position and role, and
name the instance that collected them. The `Balance-Position` of a command is where its event becomes visible.
"""
_MOST_OBVIOUS = 30
_ONE_KEY = "getKeyOfModel"
"""The route whose headers are described."""
_DECLARED = {route.name for route in declared_routes(MODELS)}
_SENTENCE = re.compile(r"\S.*?[.](?= |$)")
_COLUMNS = ("route", "parameters, or body", "answers", "scope")


def page() -> str:
    own = [(route, operation) for route, operation in _operations() if route.name not in _DECLARED]
    declared = [(route, operation) for route, operation in _operations() if route.name in _DECLARED]
    return joined(
        [
            _HEAD,
            section("Routes", table(_COLUMNS, _rows(own, sentences=2))),
            section("Routes of the shipped read models", table(_COLUMNS, _rows(declared, sentences=1))),
            section("Parameters", table(("parameter or request header", "meaning"), _parameters(own))),
            section("Response headers", table(("header", "value"), _headers(ROUTES)), _LISTS),
        ]
    )


def _operations() -> Iterator[tuple[Route, dict[str, Any]]]:
    paths = document(ROUTES)["paths"]
    return ((route, paths[route.path][route.method.lower()]) for route in ROUTES)


def _rows(operations: Iterable[tuple[Route, dict[str, Any]]], sentences: int) -> Iterator[Sequence[str]]:
    first: dict[str, str] = {}
    for route, operation in operations:
        query = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"]
        summary, description = route.summary, " ".join(_SENTENCE.findall(route.description)[:sentences])
        if (described := first.setdefault(description, route.path)) != route.path:
            description = f"As `{described}`."
        scopes = sorted(scope.removeprefix("balance:") for scope in route.scopes)
        yield (
            f"`{route.method} {route.path}`",
            _body(route) or " ".join(f"`{name}`" for name in query),
            f"{summary if summary.endswith('?') else f'{summary}.'} {description}",
            "open" if route.is_open else "any" if len(scopes) == len(Scope) else ", ".join(scopes),
        )


def _body(route: Route) -> str:
    """Returns the first example of a route's body; empty if it takes none."""
    if route.body is None:
        return ""
    _, value = next(iter(route.body.examples.values()))
    return f"`{exact_json(value)}`"


def _parameters(operations: Iterable[tuple[Route, dict[str, Any]]]) -> Iterable[Sequence[str]]:
    meanings: dict[str, str] = {}
    for _, operation in operations:
        for parameter in operation.get("parameters", ()):
            # Names such as `from`, `status` and `prefix` say it all.
            if parameter["in"] != "path" and len(parameter["description"]) > _MOST_OBVIOUS:
                meanings.setdefault(parameter["name"], parameter["description"])
    return ((f"`{name}`", meaning) for name, meaning in sorted(meanings.items(), key=lambda item: item[0].lower()))


def _headers(routes: Iterable[Route]) -> Iterable[Sequence[str]]:
    meanings = {
        header.name: header.description
        for route in sorted(routes, key=lambda route: route.name == _ONE_KEY)
        for response in route.responses
        for header in response.headers
    }
    return ((f"`{name}`", meaning) for name, meaning in sorted(meanings.items()))
