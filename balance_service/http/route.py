"""Routes as values. The application, authorization, limits, tracing and the OpenAPI document all read them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from aiohttp import hdrs, web
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from balance_service import api
from balance_service.errors import ConfigurationError
from balance_service.http.access.clients import Scope
from balance_service.http.answer import JSON, PROBLEM_JSON, Problem, unavailable
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.requests import POSITION_PATTERN, Parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from multidict import CIMultiDictProxy

T = TypeVar("T")
_GET = hdrs.METH_GET
_MIN_POSITION = "minPosition"
_WEIGHT = re.compile(r"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")
_OF_OPERATORS = frozenset({Scope.OPERATIONS, Scope.OPERATE})

closed = with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))
"""Declares that objects of a TypedDict have no other properties. Docstrings of its fields describe them to clients."""
Count = Annotated[int, Field(ge=0)]
Role = Literal["active", "standby", "halted"]
Time = Annotated[str | None, Field(json_schema_extra={"format": "date-time"})]


class Handlers:
    """The objects that answer requests, by class. Those that need the engine are added when it exists."""

    def __init__(self, *handlers: object) -> None:
        self._of_class: dict[type, Any] = {}
        self._shared: set[type] = set()
        """Base classes of several objects."""
        self.add(*handlers)

    def add(self, *handlers: object) -> None:
        """Has objects answer the routes that name their classes, or base classes that they alone have.

        Raises:
            ConfigurationError: an object has the class of another, so that one would answer the requests of both.
        """
        for handler in handlers:
            for kind in type(handler).mro()[:-1]:
                other = self._of_class.setdefault(kind, handler)
                if other is handler:
                    continue
                if kind in (type(handler), type(other)):
                    raise ConfigurationError(
                        f"two handlers are of class {kind.__qualname__}, and routes find handlers by class; give the "
                        "handler of each command a class of its own that does not derive from another's"
                    )
                self._shared.add(kind)

    def find(self, kind: type[T]) -> T | None:
        """Returns the object of a class; None while the instance is starting.

        Raises:
            ConfigurationError: it is a base class of several objects.
        """
        if kind in self._shared:
            raise ConfigurationError(f"several handlers derive from {kind.__qualname__}; a route names one of them")
        found: T | None = self._of_class.get(kind)
        return found

    def of(self, kind: type[T], consequence: str = "") -> T:
        """Returns the object of a class.

        Args:
            consequence: what follows for the request if there is none.

        Raises:
            Problem: 503, the instance is starting.
        """
        found = self.find(kind)
        if found is None:
            raise unavailable("this instance is starting" + (f"; {consequence}" if consequence else ""))
        return found


Handle = Callable[[Handlers, web.Request], Awaitable[web.StreamResponse]]
"""Answers a request with one of the objects."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A group of routes in the OpenAPI document."""

    name: str
    description: str


OPERATIONS = Tag("operations", "For people and orchestrators.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A header of a response. Its schema is made from `type`."""

    name: str
    description: str
    type: Any
    example: Any = None
    is_required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One of the responses of a route. The schema of its body is made from `type`; None: the body is empty.

    `examples` are by name, each a summary and a value. `events` is an example of the stream that a request may ask for
    instead.
    """

    status: int
    description: str
    type: Any = None
    example: Any = None
    examples: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    headers: tuple[Header, ...] = ()
    media_type: str = JSON
    events: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """The body that a request must have, as JSON. `examples` are as in `Response`."""

    description: str
    type: Any
    examples: Mapping[str, tuple[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A method and a path, the handler, and the description for the OpenAPI document.

    `path` may hold `{names}` of parameters.
    """

    name: str
    """The document's `operationId`."""
    method: str = _GET
    path: str
    handle: Handle
    tag: Tag
    scopes: frozenset[Scope]
    """A client needs one of these. A route without any is open to all."""
    summary: str
    description: str
    parameters: type[Parameters] = Parameters
    body: RequestBody | None = None
    responses: tuple[Response, ...]
    is_never_refused: bool = False
    """Whether the limit on concurrent requests does not apply."""
    is_forwarded: bool = False
    """Whether instances forward such requests to one another."""
    streams: Literal["never", "asked", "always"] = "never"
    """Whether the answer is a stream: never, if the request accepts server-sent events, or always."""
    is_file: bool = False
    """Whether it is a file of the console, and so no part of the API: the document does not describe it."""

    @property
    def is_open(self) -> bool:
        """Whether requests need no token and have no rate limit."""
        return not self.scopes

    def is_stream(self, request: web.Request) -> bool:
        """Whether the answer to a request stays open."""
        return self.streams == "always" or (self.streams == "asked" and accepts_events(request.headers))

    def waits(self, request: web.Request) -> bool:
        """Whether the answer to a request may wait for a position."""
        return _MIN_POSITION in self.parameters.not_in_header and _MIN_POSITION in request.query

    @property
    def is_for_operators(self) -> bool:
        """Whether only operators may send requests, for which some places are reserved."""
        return bool(self.scopes) and self.scopes <= _OF_OPERATORS

    @property
    def is_probe(self) -> bool:
        """Whether the health port serves the route, and the connections that are reserved for probes."""
        return self.is_open and not self.is_file

    @property
    def checks_names(self) -> bool:
        """Whether a parameter of the query that the route does not know is an error. Probes may add some."""
        return not (self.is_open or self.is_never_refused)

    @property
    def is_of_operations(self) -> bool:
        """Whether the route is about the service, not its data. Such requests are frequent and have no spans."""
        return self.tag is OPERATIONS


def accepts_events(headers: CIMultiDictProxy[str]) -> bool:
    """Whether a request with these headers prefers server-sent events, where a route answers with JSON too.

    A client that takes both equally gets JSON, which ends; a wildcard alone is not JSON's name.
    Source: RFC 9110, section 12.5.1.
    """
    if hdrs.ACCEPT not in headers:
        return False
    accepted = ",".join(headers.getall(hdrs.ACCEPT)).lower()
    if api.EVENT_STREAM not in accepted:
        return False
    qualities = dict(map(_quality, accepted.split(",")))
    of_events = qualities.get(api.EVENT_STREAM, 0.0)
    by_name = qualities.get(JSON, qualities.get("application/*"))
    if by_name is not None:
        return of_events > by_name
    return of_events > 0 and of_events >= qualities.get("*/*", 0.0)


def _quality(accepted: str) -> tuple[str, float]:
    """A media range of the header Accept, and its weight from 0 to 1."""
    media_range, *parameters = (part.strip() for part in accepted.split(";"))
    weight = next((value for name, _, value in (p.partition("=") for p in parameters) if name.strip() == "q"), "1")
    return media_range, float(weight) if _WEIGHT.fullmatch(weight.strip()) else 1.0


class RouteTable:
    """The routes of an application. Raises ValueError if two have the same method and path."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes: dict[tuple[str, str], Route] = {}
        for route in routes:
            if self._routes.setdefault((route.method, route.path), route) is not route:
                raise ValueError(f"{route.method} {route.path} is declared twice; give one of the two another path")

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    @property
    def probes(self) -> RouteTable:
        return RouteTable(route for route in self if route.is_probe)

    def of(self, request: web.Request) -> Route | None:
        """The route that aiohttp matched; None if no route has the path and method.

        Uses the match, not the path as sent: no spelling of a path gets around a check.
        """
        matched = request.match_info.route
        if matched.resource is None:
            return None
        method = _GET if matched.method == hdrs.METH_HEAD else matched.method
        return self._routes[method, matched.resource.canonical]

    def add_to(self, app: web.Application, handlers: Handlers) -> None:
        """Registers the routes; HEAD like GET, without the body (RFC 9110, section 9.3.2)."""
        for route in self:
            # aiohttp's default pattern does not match a parameter that contains a brace.
            path = re.sub(r"\{(\w+)\}", r"{\1:[^/]+}", route.path)
            handler = _handler(route, handlers)
            for method in (_GET, hdrs.METH_HEAD) if route.method == _GET else (route.method,):
                app.router.add_route(method, path, handler)


def _handler(route: Route, handlers: Handlers) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        # Peers name more than clients, and those of a later version perhaps more than is known here.
        # Nor does the route know the columns of a read model's keys.
        has_names = not route.parameters.of_columns or route.parameters.columns
        if route.checks_names and has_names and FORWARDED_HEADER not in request.headers:
            route.parameters.check_names(request)
        return await route.handle(handlers, request)

    return handler


@closed
class ProblemDetails(TypedDict):
    """Problem details, RFC 9457."""

    type: Literal["about:blank"]
    """No information beyond the status."""
    title: str
    """The name of the status."""
    status: Annotated[int, Field(ge=400, le=599)]
    """The HTTP status."""
    detail: Annotated[str, Field(min_length=1)]
    """One sentence for the caller."""


RETRY_AFTER = Header(
    name=api.RETRY_AFTER,
    description="Seconds to wait before the next attempt.",
    type=Annotated[int, Field(ge=1)],
    example=1,
)
GENERATION = Header(
    name=api.GENERATION,
    description="The generation of the read model that gave the answer. Each has its own positions and epochs.",
    type=Annotated[int, Field(ge=1)],
    example=1,
)
PROVENANCE = (
    Header(
        name=api.APPLICATION_SERVER,
        description="`host:port` of the instance whose store gave the answer.",
        type=Annotated[str, Field(pattern="^.+:[0-9]{1,5}$")],
        example="localhost:5051",
    ),
    Header(
        name=api.ROLE,
        description="Role of the task that gave the answer. `active`: the owner of the partition. `standby`: any other "
        "copy, such as one that follows the owner's changelog. `halted`: the owner, which the read model's own code "
        "has halted at the position.",
        type=Role,
        example="active",
    ),
    Header(
        name=api.POSITION,
        description="`partition:offset`: the answer includes exactly the events of the partition below this offset.",
        type=Annotated[str, Field(pattern=f"^{POSITION_PATTERN}$")],
        example="1:42",
    ),
    Header(
        name=api.EPOCH,
        description="Fencing number of the task that gave the answer: a later owner has a higher one.",
        type=Count,
        example=3,
    ),
    Header(
        name=api.LAG,
        description="Records of the partition that the answer does not include yet, by a reading of the topic's end at "
        "most 3 s old; absent without such a reading.",
        type=Count,
        example=0,
        is_required=False,
    ),
    Header(
        name=api.AGE,
        description="With `maxAge`: the answer includes all events of the partition until so many seconds ago.",
        type=Annotated[str, Field(pattern="^[0-9]+[.][0-9]$")],
        example="12.3",
        is_required=False,
    ),
    GENERATION,
)
"""The instance, role, position and generation behind an answer for one key."""


def ok(
    description: str, body: Any, example: object = None, headers: tuple[Header, ...] = (), events: str = ""
) -> Response:
    """200 with JSON, or with the stream that `events` is an example of."""
    return Response(status=200, description=description, type=body, example=example, headers=headers, events=events)


def problem(status: int, description: str, headers: tuple[Header, ...] = (), **examples: tuple[str, str]) -> Response:
    """An error.

    Args:
        examples: by name, each a summary and the problem's detail.
    """
    return Response(
        status=status,
        description=description,
        type=ProblemDetails,
        examples={name: (summary, Problem(status, detail).body) for name, (summary, detail) in examples.items()},
        headers=headers,
        media_type=PROBLEM_JSON,
    )


def retry_later(description: str, **examples: tuple[str, str]) -> Response:
    """503 with `Retry-After`."""
    return problem(503, description, (RETRY_AFTER,), **examples)


MISDIRECTED = problem(
    421,
    "Only between instances: a peer asked for partitions that this instance does not have.",
    misdirected=("Ownership has moved", "localhost:5052 does not have partitions 1"),
)
