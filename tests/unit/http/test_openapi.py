"""The OpenAPI document is complete, its schemas agree with the parsers, and it is generated from the routes alone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import jsonschema_rs
import pytest
import schemathesis
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from typing_extensions import TypedDict

from balance_service.errors import InvalidInputError
from balance_service.http.access.clients import Scope
from balance_service.http.app import make_app, make_health_app
from balance_service.http.openapi import document
from balance_service.http.operations import Operations
from balance_service.http.requests import Parameters
from balance_service.http.route import Handlers, Route, RouteTable, Tag, ok
from balance_service.http.streams.event_stream import Streams
from balance_service.read_models.add_funds import AddFundsParameters, amount_of
from tests.support.fakes import IdleInstance
from tests.support.shipped import GET_BALANCE_PARAMETERS, ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterator

_DOCUMENTS = [
    json.loads(json.dumps(document(ROUTES))),
    json.loads(json.dumps(document(ROUTES, authorises=True, limits_rate=True))),
]


def accepts(schema: Any, value: Any) -> bool:
    """Whether a value conforms to a schema of the document."""
    root = {"allOf": [schema], "components": _DOCUMENTS[0]["components"]}
    return jsonschema_rs.Draft202012Validator(root).is_valid(value)


def schema_of(name: str) -> Any:
    """The schema of a parameter, as the document has it."""
    for methods in _DOCUMENTS[0]["paths"].values():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == name:
                    return parameter["schema"]
    raise AssertionError(name)


def resolved(whole: Any, schema: Any) -> Any:
    """The schema that a reference names."""
    return whole["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def described(node: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """All parts of a document that have a schema, with their places."""
    if isinstance(node, dict):
        if "schema" in node:
            yield where, node
        for name, value in node.items():
            yield from described(value, f"{where}/{name}")
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from described(value, f"{where}/{number}")


@pytest.mark.parametrize("whole", _DOCUMENTS, ids=["open", "guarded"])
def test_the_document_is_valid_openapi(whole: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(whole).validate()
    operations = [operation for methods in whole["paths"].values() for operation in methods.values()]

    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] and operation["description"] for operation in operations)
    assert {tag["name"] for tag in whole["tags"]} == {name for o in operations for name in o["tags"]}


@pytest.mark.parametrize("whole", _DOCUMENTS, ids=["open", "guarded"])
def test_every_example_conforms_to_its_schema(whole: dict[str, Any]) -> None:
    examples = 0
    for where, node in described(whole):
        values = [e["value"] for e in node.get("examples", {}).values()] if "examples" in node else []
        values += [node["example"]] if "example" in node else []
        for value in values:
            examples += 1
            assert accepts(node["schema"], value), f"{where}: {value}"
    for name, schema in whole["components"]["schemas"].items():
        for value in schema.get("examples", ()):
            examples += 1
            assert accepts(schema, value), f"{name}: {value}"

    assert examples > 25


_TEXTS = (
    st.text(max_size=40)
    | st.from_regex(r"[0-9]{1,20}:[0-9]{1,20}", fullmatch=True)
    | st.text("!~09:. ", max_size=140)
    | st.text("a", min_size=250, max_size=260)
)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("customerId", GET_BALANCE_PARAMETERS),
        ("minPosition", GET_BALANCE_PARAMETERS),
        ("maxLag", GET_BALANCE_PARAMETERS),
        ("Idempotency-Key", AddFundsParameters),
    ],
)
def test_a_parameter_accepts_exactly_what_its_schema_allows(name: str, parameters: type[Parameters]) -> None:
    schema = schema_of(name)

    # No text is too long in bytes alone: JSON Schema counts characters.
    @given(_TEXTS)
    def check(text: str) -> None:
        refusal = ""
        try:
            parameters.parse({"customerId": "c1", name: text})
        except InvalidInputError as error:
            refusal = str(error)
        assert accepts(schema, text) == (not refusal)
        assert not refusal or refusal.startswith(name)

    check()


@given(st.text("0123456789.", max_size=22) | st.from_regex(r"[0-9]{1,17}\.[0-9]{1,3}0{0,2}", fullmatch=True))
def test_an_amount_in_a_string_is_accepted_exactly_if_its_schema_allows_it(text: str) -> None:
    try:
        amount_of(text)
    except InvalidInputError:
        assert not accepts({"$ref": "#/components/schemas/Amount"}, text)
    else:
        assert accepts({"$ref": "#/components/schemas/Amount"}, text)


def test_two_types_of_one_name_are_both_documented() -> None:
    route = next(iter(ROUTES))

    class Status(TypedDict):
        other: str

    shown = document([*ROUTES, replace(route, path="/other", responses=(ok("Another.", Status),))])

    schema = shown["paths"]["/other"][route.method.lower()]["responses"]["200"]["content"]["application/json"]["schema"]
    assert [*resolved(shown, schema)["properties"]] == ["other"]
    status = shown["paths"]["/api/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert "applicationServer" in resolved(shown, status)["properties"]


def test_two_routes_of_one_method_and_path_are_refused() -> None:
    route = next(iter(ROUTES))

    with pytest.raises(ValueError, match=f"{route.method} {route.path} is declared twice"):
        RouteTable([*ROUTES, replace(route, name="another")])


def test_the_application_answers_the_routes_of_the_document_and_no_others() -> None:
    handlers = Handlers(Operations(IdleInstance(), Streams(10)))

    def served(app: web.Application) -> set[tuple[str, str]]:
        return {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource is not None}

    documented = {(m.upper(), path) for path, methods in _DOCUMENTS[0]["paths"].items() for m in methods}
    documented |= {("HEAD", path) for method, path in documented if method == "GET"}
    assert served(make_app(handlers, ROUTES)) == documented
    assert served(make_health_app(handlers, ROUTES)) == {
        (method, f"/health/{probe}") for method in ("GET", "HEAD") for probe in ("live", "ready")
    }


class ThingParameters(Parameters):
    thing: str = Field(description="The thing.", examples=["a"])


async def _thing(request: web.Request) -> web.Response:
    return web.json_response({"thing": ThingParameters.of(request).thing})


def test_a_declared_route_is_answered_and_documented() -> None:
    route = Route(
        name="getThing",
        method="GET",
        path="/api/things/{thing}/parts",
        handle=lambda _handlers, request: _thing(request),
        tag=Tag("things", "Things."),
        scopes=frozenset({Scope.READ}),
        summary="A thing",
        description="One of the things.",
        parameters=ThingParameters,
        responses=(ok("It.", dict[str, str]),),
    )
    routes = RouteTable((*ROUTES, route))

    async def run() -> tuple[Any, Any, int]:
        app = make_app(Handlers(Operations(IdleInstance(), Streams(10))), routes)
        async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as client:
            async with client.get("/api/things/a%20b/parts") as answer:
                found = await answer.json()
            async with client.get("/openapi.json") as answer:
                shown = await answer.json()
            async with client.post("/api/things/a/parts") as answer:
                return found, shown, answer.status

    found, shown, status = asyncio.run(run())

    assert found == {"thing": "a b"}
    assert shown["paths"]["/api/things/{thing}/parts"]["get"]["parameters"][0]["in"] == "path"
    assert status == 405
    guarded = document(routes, authorises=True)["paths"]["/api/things/{thing}/parts"]["get"]
    assert guarded["security"] == [{"bearer": ["balance:read"]}]
