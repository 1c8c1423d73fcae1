"""The OpenAPI document, made of what the routes declare and of what is asked of clients here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from balance_service.http.api.answers import RETRY_AFTER, problem
from balance_service.http.api.declarations import JSON, Component, Header
from balance_service.process.package import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balance_service.http.api.declarations import Answer, Content, Parameter
    from balance_service.http.api.route import Route

DOCUMENT = web.AppKey("document", str)
"""Where an application keeps its document."""

_INFO = {
    "title": "Balance service",
    "version": __version__,
    "summary": "Live queries of customers' balances, folded from the events of a Kafka topic.",
    "description": "A command appends an event; a query reads the fold of all events so far. There is a short delay "
    "between the two: to read your own write, pass the `Balance-Position` of an `addFunds` answer as `minPosition` of "
    "`getBalance`.\n\nAsk any instance: one that does not own a customer's partition asks the one that does. While "
    "the owner cannot answer, standbys may, if the query says how stale its answer may be (`maxLag`, `minPosition`); "
    "`Balance-Role` tells.\n\nEvery error is an `application/problem+json` document (RFC 9457) whose `detail` is one "
    "sentence for the caller. 400 and 404 will not change by asking again; 503 carries `Retry-After` and will. Beyond "
    "the errors named below, an unknown path answers 404, a URL of more than 4 KiB 414, headers of more than 16 KiB in "
    "all 431, a request that arrives too slowly 408, one too many at a time 503, a method that a path does not take "
    "405 with `Allow`, and a fault of the service 500. `HEAD` answers as `GET` does, without the body. No answer may "
    "be stored (`Cache-Control: no-store`). Parameters and properties that are not named here are ignored.",
    "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
}
_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token that the operator of this service has issued, or a JWT of the identity provider it trusts.",
}
_CHALLENGE = Header(
    name="WWW-Authenticate",
    description="What was wrong with the token; RFC 6750.",
    schema={"type": "string", "pattern": "^Bearer "},
)


async def answer_with_document(request: web.Request) -> web.Response:
    """The application's own document."""
    return web.Response(text=request.app[DOCUMENT], content_type="application/json")


def document(routes: Iterable[Route], *, authorises: bool = False, limits_rate: bool = False) -> dict[str, Any]:
    """The document of some routes.

    Args:
        authorises: clients need tokens.
        limits_rate: clients may ask only so often.
    """
    components = _Components()
    paths: dict[str, Any] = {}
    tags = {}
    for route in routes:
        operation = _operation(route, authorises=authorises, limits_rate=limits_rate)
        paths.setdefault(route.path, {})[route.method.lower()] = components.referred_to(operation)
        tags[route.tag.name] = {"name": route.tag.name, "description": route.tag.description}
    schemes = {"securitySchemes": {"bearer": _BEARER}} if authorises else {}
    return {
        "openapi": "3.1.0",
        "info": _INFO,
        "servers": [{"url": "/", "description": "The instance that serves this document."}],
        "tags": list(tags.values()),
        "paths": paths,
        "components": {**components.sections, **schemes},
    }


class _Components:
    """The components that were met so far."""

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, Any]] = {}
        self._met: dict[tuple[str, str], Component] = {}

    def referred_to(self, node: Any) -> Any:
        """The same, with a reference in place of each component."""
        if isinstance(node, Component):
            return {"$ref": self._reference(node)}
        if isinstance(node, Mapping):
            return {name: self.referred_to(value) for name, value in node.items()}
        if isinstance(node, list):
            return [self.referred_to(value) for value in node]
        return node

    def _reference(self, component: Component) -> str:
        kind, name = component.kind, component.name
        known = self._met.setdefault((kind, name), component)
        if known != component:
            raise ValueError(f"{kind} has two components of the name {name}; give one of them another")
        section = self.sections.setdefault(kind, {})
        if name not in section:
            section[name] = {}
            section[name] = self.referred_to(component.definition)
        return f"#/components/{kind}/{name}"


def _operation(route: Route, *, authorises: bool, limits_rate: bool) -> dict[str, Any]:
    answers = {answer.status: answer for answer in route.answers}
    for refusal in _refusals(route, authorises=authorises, limits_rate=limits_rate):
        known = answers.get(refusal.status)
        answers[refusal.status] = refusal if known is None else _both(known, refusal)
    operation: dict[str, Any] = {
        "operationId": route.name,
        "tags": [route.tag.name],
        "summary": route.summary,
        "description": route.description,
    }
    if route.parameters:
        operation["parameters"] = [_parameter(parameter) for parameter in route.parameters]
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "description": route.body.description,
            "content": _content(route.body.content),
        }
    if authorises and not route.is_open:
        operation["security"] = [{"bearer": [scope.value]} for scope in sorted(route.scopes)]
    operation["responses"] = {str(status): _answer(answers[status]) for status in sorted(answers)}
    return operation


def _refusals(route: Route, *, authorises: bool, limits_rate: bool) -> list[Answer]:
    """What is answered to clients that are not let in."""
    if route.is_open:
        return []
    refusals = [problem(403, "A browser sends it for a page of another site or origin.")]
    if route.body is not None:
        refusals.append(problem(415, f"`Content-Type` is not `{JSON}`. Nothing was done."))
    if not authorises:
        refusals.append(problem(421, "The header `Host` names a host by which this instance is not known."))
    else:
        scopes = " or ".join(f"`{scope}`" for scope in sorted(route.scopes))
        refusals += [
            problem(400, "There is more than one token."),
            problem(401, "There is no token, or none that is accepted.", headers=(_CHALLENGE,)),
            problem(403, f"The token does not grant {scopes}."),
        ]
    if limits_rate:
        refusals.append(problem(429, "This client asks too often. Nothing was begun.", headers=(RETRY_AFTER,)))
    return refusals


def _both(one: Answer, other: Answer) -> Answer:
    return replace(one, description=f"{one.description} {other.description}", headers=(*one.headers, *other.headers))


def _parameter(parameter: Parameter[Any]) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.is_required or parameter.place == "path",
        "description": parameter.description,
        "schema": parameter.schema,
        "example": parameter.example,
    }


def _answer(answer: Answer) -> dict[str, Any]:
    described: dict[str, Any] = {"description": answer.description}
    if answer.headers:
        described["headers"] = {header.name: _header(header) for header in answer.headers}
    if answer.content is not None:
        described["content"] = _content(answer.content)
    return described


def _header(header: Header) -> Component:
    definition: dict[str, Any] = {
        "required": header.is_required,
        "description": header.description,
        "schema": header.schema,
    }
    if header.example is not None:
        definition["example"] = header.example
    return Component("headers", header.component or header.name, definition)


def _content(content: Content) -> dict[str, Any]:
    described: dict[str, Any] = {"schema": content.schema}
    if content.example is not None:
        described["example"] = content.example
    if content.examples:
        described["examples"] = {
            name: {"summary": summary, "value": value} for name, (summary, value) in content.examples.items()
        }
    return {content.media_type: described}
