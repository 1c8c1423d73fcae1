"""The routes of every read model: which there are, one key, a range, how many, the greatest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.http.access.clients import Scope
from balance_service.http.api.answers import PROVENANCE, ok, problem, unavailable
from balance_service.http.api.declarations import Header
from balance_service.http.api.route import Route, Tag
from balance_service.http.api.schemas import count, exactly
from balance_service.http.model_queries import PATH
from balance_service.http.parameters import (
    AFTER,
    BY,
    FROM,
    KEY,
    LIMIT,
    MAX_LAG,
    MIN_POSITION,
    MODEL,
    PARTIAL,
    PREFIX,
    TO,
)

if TYPE_CHECKING:
    from balance_service.http.api.declarations import Parameter, Schema
    from balance_service.http.api.route import Answering

MODELS = Tag("models", "Queries for any read model.")
_VALUE = {"description": "What the read model answers of one key; its fields are at `/api/models`."}
_ENTRY = exactly({"key": {"type": "string"}, "value": _VALUE})
_ENTRIES = exactly({"entries": {"type": "array", "items": _ENTRY}, "next": {"type": ["string", "null"]}})
_FOLLOWING = {
    "type": "string",
    "description": "The last entry's key, where entries are missing: they came to over 1 MiB.",
}
_TOP = exactly(
    {"entries": {"type": "array", "items": _ENTRY}, "next": _FOLLOWING},
    optional=frozenset({"next"}),
)
_EXAMPLE = {"entries": [{"key": "c1", "value": {"amount": 12.34}}], "next": None}


def _of_partitions(name: str, description: str, item: str, example: str) -> Header:
    return Header(
        name=name,
        component=f"{name}-Of-Partitions",
        description=f"Of each partition, {description}: `partition:value`, separated by commas.",
        schema={"type": "string", "pattern": f"^[0-9]+:{item}(?:,[0-9]+:{item})*$"},
        example=example,
        is_required=False,
    )


OF_ALL = (
    PROVENANCE[0],
    _of_partitions("Balance-Position", "the offset below which exactly its events are in the answer", "[0-9]+", "0:12"),
    _of_partitions("Balance-Epoch", "the fencing number of the task that answered", "[0-9]+", "0:3"),
    _of_partitions("Balance-Role", "the role of that task", "(?:active|standby)", "0:active"),
    _of_partitions("Balance-Lag", "the records that the answer has not seen yet, if that is known", "[0-9]+", "0:0"),
    Header(
        name="Balance-Missing",
        description="The partitions that the answer lacks, if it was allowed to.",
        schema={"type": "string", "pattern": "^[0-9]+(?:,[0-9]+)*$"},
        example="1",
        is_required=False,
    ),
)
_UNKNOWN_MODEL = problem(
    404,
    "There is no such read model.",
    {"model": ("A misspelled name", "there is no read model 'balances' here; /api/models lists those that there are")},
)
MISDIRECTED = problem(
    421,
    "Only between instances: a peer asked about partitions that this instance does not have.",
    {"misdirected": ("Ownership has moved", "localhost:5052 does not have partitions 1")},
)


def _scan(
    name: str,
    answer: Answering,
    *,
    summary: str,
    description: str,
    parameters: tuple[Parameter[Any], ...],
    schema: Schema,
    example: object,
) -> Route:
    """A question about all keys of a read model."""
    return Route(
        name=f"{name}OfModel",
        method="GET",
        path=f"{PATH}/{{model}}/{name}",
        answer=answer,
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        is_forwarded=True,
        summary=summary,
        description=f"{description} Asked of every instance that owns a partition. Each partition is read as of one "
        "moment, which the headers name; together they are of several.",
        parameters=(MODEL, *parameters, MAX_LAG, PARTIAL),
        answers=(
            ok("The answer.", schema, example, OF_ALL),
            problem(400, "A parameter is missing, malformed or repeated."),
            _UNKNOWN_MODEL,
            MISDIRECTED,
            unavailable(
                "Some partition cannot be read now, and `partial` is not given; or the client has too many scans under "
                "way.",
                {
                    "missing": ("A partition is changing hands", "no instance could answer for partitions 1"),
                    "share": (
                        "Too many scans of one client",
                        "this client's share of scans is used up: 2 of its scans are in progress here and 32 wait; "
                        "retry when some are finished",
                    ),
                },
            ),
        ),
    )


_LIST = Route(
    name="listModels",
    method="GET",
    path=PATH,
    answer=lambda handlers, request: handlers.any_model.list(request),
    tag=MODELS,
    scopes=frozenset({Scope.READ}),
    summary="The read models",
    description="Those that this instance and its peers host, each with the fields of its answers.",
    answers=(
        ok(
            "The read models.",
            exactly({"models": {"type": "array", "items": {"type": "object"}}}),
            {
                "models": [
                    {"name": "balance", "source": "balance", "key": "customerId", "fields": {"amount": "decimal(38,2)"}}
                ]
            },
        ),
        unavailable("The instance is starting."),
    ),
)
_KEY = Route(
    name="getKeyOfModel",
    method="GET",
    path=f"{PATH}/{{model}}/keys/{{key}}",
    answer=lambda handlers, request: handlers.any_model.key(request),
    tag=MODELS,
    scopes=frozenset({Scope.READ}),
    is_forwarded=True,
    summary="The state of one key",
    description="Answered as `getBalance` is, for any read model.",
    parameters=(MODEL, KEY, MIN_POSITION, MAX_LAG),
    answers=(
        ok("The key and its value.", _ENTRY, {"key": "c1", "value": {"amount": 12.34}}, PROVENANCE),
        problem(400, "The key, `minPosition` or `maxLag` is malformed, or `minPosition` is of another partition."),
        problem(404, "There is no such read model, or the key has no state.", headers=()),
        MISDIRECTED,
        unavailable("No instance can answer now."),
    ),
)
MODEL_ROUTES = (
    _LIST,
    _KEY,
    _scan(
        "entries",
        lambda handlers, request: handlers.any_model.entries(request),
        summary="Keys and their values",
        description="In key order, by their bytes in UTF-8, both ends inclusive.",
        parameters=(FROM, TO, PREFIX, AFTER, LIMIT),
        schema=_ENTRIES,
        example=_EXAMPLE,
    ),
    _scan(
        "count",
        lambda handlers, request: handlers.any_model.count(request),
        summary="How many keys there are",
        description="Kept with each commit, so the answer is exact and costs no scan.",
        parameters=(),
        schema=exactly({"count": count("Keys that have a state.")}),
        example={"count": 3},
    ),
    _scan(
        "top",
        lambda handlers, request: handlers.any_model.top(request),
        summary="The greatest",
        description="The keys with the greatest value of a field, equal ones by key. Every key is read: this takes "
        "long where there are many.",
        parameters=(BY, LIMIT),
        schema=_TOP,
        example={"entries": _EXAMPLE["entries"]},
    ),
)
