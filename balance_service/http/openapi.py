"""The OpenAPI document, generated from the routes. Source: OpenAPI 3.1."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web
from pydantic import Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from balance_service import api
from balance_service.http.answer import JSON
from balance_service.http.route import RETRY_AFTER, Header, problem
from balance_service.process.package import __version__
from balance_service.structs import absent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from balance_service.http.route import Response, Route, RouteTable

DOCUMENT: web.AppKey[Callable[[], str]] = web.AppKey("document")
"""Returns the document of an application, as JSON."""

_INFO = {
    "title": "Balance service",
    "version": __version__,
    "summary": "Live queries of customers' balances, folded from the events of a Kafka topic.",
    "description": "A command appends an event; a query reads the fold of all events so far. There is a short delay "
    "between the two: to read your own write, pass the `Balance-Position` of an `addFunds` answer as `minPosition` of "
    "`getBalance`.\n\nAny instance answers: one that does not own a customer's partition asks the owner. While "
    "the owner cannot answer, other copies may, if the query says how stale its answer may be (`maxLag`, `maxAge`, "
    "`minPosition`); "
    "`Balance-Role` shows which role answered.\n\nEvery error is an `application/problem+json` document (RFC 9457) "
    "whose `detail` is one sentence for the caller. A retry does not change 400 and 404; a 503 carries `Retry-After` "
    "and may succeed later. Beyond the errors named below, an unknown path answers 404, a URL of more than 4 KiB 414, "
    "headers of more than 16 KiB in total 431, a request that arrives too slowly 408, one too many at a time 503, a "
    "method that a path does not accept 405 with `Allow`, and a fault of the service 500. `HEAD` answers as `GET` "
    "does, without the body. No answer may be stored (`Cache-Control: no-store`). The service ignores parameters and "
    "properties that are not named here.",
    "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
}
_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token that the operator of this service has issued, or a JWT of the identity provider it trusts.",
}
_CHALLENGE = Header(
    name="WWW-Authenticate",
    description="The reason why the token was not accepted; RFC 6750.",
    type=Annotated[str, Field(pattern="^Bearer ")],
)
_REFERENCE = "#/components/schemas/{model}"


async def answer_with_document(request: web.Request) -> web.Response:
    # Its first generation takes some 0.2 s, and must stop neither the event loop nor the start of the instance.
    return web.Response(text=await asyncio.to_thread(request.app[DOCUMENT]), content_type=JSON)


@lru_cache(maxsize=4)
def document_json(routes: RouteTable, *, authorises: bool, limits_rate: bool) -> str:
    described = document(routes, authorises=authorises, limits_rate=limits_rate)
    return json.dumps(described, ensure_ascii=False, separators=(",", ":"))


def document(routes: Iterable[Route], *, authorises: bool = False, limits_rate: bool = False) -> dict[str, Any]:
    """The document of some routes.

    Args:
        authorises: clients need tokens.
        limits_rate: the rate of each client's requests is limited.
    """
    described = [
        (route, _responses(route, authorises=authorises, limits_rate=limits_rate))
        for route in routes
        if not route.is_file
    ]
    schemas = _Schemas(described)
    paths: dict[str, Any] = {}
    tags: dict[str, str] = {}
    for route, responses in described:
        tags[route.tag.name] = route.tag.description
        operation: dict[str, Any] = {
            "operationId": route.name,
            "tags": [route.tag.name],
            "summary": route.summary,
            "description": route.description,
        }
        if route.parameters.model_fields:
            operation["parameters"] = schemas.parameters(route)
        if (body := route.body) is not None:
            content = {"schema": schemas.of(body.type), "examples": _examples(body.examples)}
            operation["requestBody"] = {
                "required": True,
                "description": body.description,
                "content": {JSON: content},
            }
        if authorises and not route.is_open:
            operation["security"] = [{"bearer": [scope.value]} for scope in sorted(route.scopes)]
        operation["responses"] = {str(one.status): _response(one, schemas) for one in responses}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": _INFO,
        "servers": [{"url": "/", "description": "The instance that serves this document."}],
        "tags": [{"name": name, "description": description} for name, description in tags.items()],
        "paths": paths,
        "components": {
            "schemas": schemas.definitions,
            **({"securitySchemes": {"bearer": _BEARER}} if authorises else {}),
        },
    }


class _JsonSchemas(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        """No titles: they would repeat the names of the properties."""
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        """An answer has each field of its dataclass, with or without a default in Python, unless it may be absent."""
        if field["type"] == "dataclass-field":
            return field["schema"].get("default_factory") is not absent
        return super().field_is_required(field, total)

    def dataclass_field_schema(self, schema: Any) -> Any:
        """Without defaults: they are those of the service, and not of its clients."""
        inner = schema["schema"]
        return self.generate_inner(inner["schema"] if inner["type"] == "default" else inner)


class _Schemas:
    """JSON Schemas of the types that routes name. Types with names become definitions."""

    def __init__(self, described: Iterable[tuple[Route, Iterable[Response]]]) -> None:
        # By identity: metadata of annotated types need not be hashable.
        types = {id(kind): kind for route, responses in described for kind in _types(route, responses)}
        generated, shared = TypeAdapter.json_schemas(
            [(key, "validation", TypeAdapter(kind)) for key, kind in types.items()],
            ref_template=_REFERENCE,
            schema_generator=_JsonSchemas,
        )
        self._schemas = {key: schema for (key, _), schema in generated.items()}
        self.definitions: dict[str, Any] = shared.get("$defs", {})

    def of(self, kind: Any) -> Any:
        return self._schemas[id(kind)]

    def parameters(self, route: Route) -> list[dict[str, Any]]:
        """The parameters of a route, from the properties of its model."""
        model = route.parameters
        schema = model.model_json_schema(ref_template=_REFERENCE, schema_generator=_JsonSchemas)
        self.definitions |= schema.get("$defs", {})
        described: list[dict[str, Any]] = []
        for name, given in schema["properties"].items():
            if name == model.of_columns and model.columns:
                described += self._columns(route)
                continue
            # A parameter that is not given has no value: it is never null.
            kinds = [kind for kind in given.get("anyOf", ()) if kind != {"type": "null"}]
            own = {key: value for key, value in given.items() if key not in ("anyOf", "default")}
            value = {**kinds[0], **own} if kinds else own
            place = "path" if f"{{{name}}}" in route.path else "header" if name in model.in_header else "query"
            described.append(
                {
                    "name": name,
                    "in": place,
                    "required": name in schema.get("required", ()),
                    "description": value.pop("description"),
                    "example": value.pop("examples")[0],
                    "schema": value,
                }
            )
        return described

    def _columns(self, route: Route) -> list[dict[str, Any]]:
        """The parameters that are the columns of a composite key."""
        told = route.parameters.model_fields[route.parameters.of_columns].description
        described = []
        for name, kind in route.parameters.columns.items():
            schema = TypeAdapter(kind).json_schema(ref_template=_REFERENCE, schema_generator=_JsonSchemas)
            self.definitions |= schema.pop("$defs", {})
            place = "path" if f"{{{name}}}" in route.path else "query"
            described.append({"name": name, "in": place, "required": True, "description": told, "schema": schema})
        return described


def _types(route: Route, responses: Iterable[Response]) -> Iterator[Any]:
    if route.body is not None:
        yield route.body.type
    for response in responses:
        yield from (header.type for header in response.headers)
        if response.type is not None:
            yield response.type


def _responses(route: Route, *, authorises: bool, limits_rate: bool) -> list[Response]:
    """The responses that a route declares and those of the checks before it, by status."""
    responses = {response.status: response for response in route.responses}
    for refusal in _refusals(route, authorises=authorises, limits_rate=limits_rate):
        known = responses.get(refusal.status)
        responses[refusal.status] = refusal if known is None else _both(known, refusal)
    return [responses[status] for status in sorted(responses)]


def _refusals(route: Route, *, authorises: bool, limits_rate: bool) -> list[Response]:
    if route.is_open:
        return []
    refusals = [problem(403, "A browser sent the request for a page of another site or origin.")]
    if route.checks_names:
        refusals.append(problem(400, "The query has a parameter that is not known here."))
    if route.body is not None:
        refusals.append(problem(415, f"`Content-Type` is not `{JSON}`. Nothing was done."))
    if not authorises:
        refusals.append(problem(421, "The `Host` header names a host that is not a name of this instance."))
    else:
        scopes = " or ".join(f"`{scope}`" for scope in sorted(route.scopes))
        refusals += [
            problem(400, "There is more than one token."),
            problem(401, "There is no token, or none that is accepted.", headers=(_CHALLENGE,)),
            problem(403, f"The token does not grant {scopes}."),
        ]
    if limits_rate:
        refusals.append(
            problem(429, "This client sends requests too often. Nothing was started.", headers=(RETRY_AFTER,))
        )
    return refusals


def _both(one: Response, other: Response) -> Response:
    return replace(one, description=f"{one.description} {other.description}", headers=(*one.headers, *other.headers))


def _response(response: Response, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {"description": response.description}
    if response.headers:
        described["headers"] = {header.name: _header(header, schemas) for header in response.headers}
    if response.type is not None:
        content = {"schema": schemas.of(response.type)}
        if response.example is not None:
            content["example"] = response.example
        if response.examples:
            content["examples"] = _examples(response.examples)
        described["content"] = {response.media_type: content}
    if response.events:
        stream = {"schema": {"type": "string"}, "example": response.events}
        described.setdefault("content", {})[api.EVENT_STREAM] = stream
    return described


def _header(header: Header, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "required": header.is_required,
        "description": header.description,
        "schema": schemas.of(header.type),
    }
    if header.example is not None:
        described["example"] = header.example
    return described


def _examples(examples: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    return {name: {"summary": summary, "value": value} for name, (summary, value) in examples.items()}
