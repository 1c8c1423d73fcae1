"""Queries for any read model, on this instance or a peer: handlers and routes below `/api/models`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NotRequired
from urllib.parse import quote

from pydantic import Field
from typing_extensions import TypedDict

from balance_service.errors import InvalidInputError
from balance_service.http.access.clients import Scope
from balance_service.http.answer import Problem, json_response
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.requests import (
    KeyParameters,
    Limit,
    MaxLag,
    Parameters,
    Partitions,
    ScanParameters,
    key_query,
    key_text,
)
from balance_service.http.route import (
    MISDIRECTED,
    PROVENANCE,
    Count,
    Header,
    Route,
    Tag,
    closed,
    ok,
    problem,
    retry_later,
)
from balance_service.http.scan import CountScan, EntriesScan, TopScan
from balance_service.http.scheduling import asker_of
from balance_service.http.server.ahead_of_aiohttp import ending_with
from balance_service.model.keys import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp import web

    from balance_service.http.answer import Answer
    from balance_service.http.queries import Queries
    from balance_service.http.requests import KeyQuery
    from balance_service.http.route import Handle
    from balance_service.http.scan import Scan
    from balance_service.http.scatter import Scatter
    from balance_service.kafka.partitioner import Partitioning
    from balance_service.model.keys import KeyType
    from balance_service.model.read_model import ReadModel, Routes

PATH = "/api/models"
DEFAULT_ENTRIES, _DEFAULT_TOP = 100, 10
NUMBERS = ("decimal", "double", "float", "int", "long")
"""Prefixes of the types of numeric fields."""


ModelName = Annotated[str, Field(description="The read model; `/api/models` lists them.", examples=["balance"])]


class ModelKeyParameters(KeyParameters):
    model: ModelName


class CountParameters(ScanParameters):
    model: ModelName


class EntriesParameters(CountParameters):
    start: Annotated[str, key_text("from")] | None = Field(
        None, alias="from", description="The first key to list.", examples=["c1"]
    )
    end: Annotated[str, key_text("to")] | None = Field(
        None, alias="to", description="The last key to list.", examples=["c1"]
    )
    prefix: Annotated[str, key_text("prefix")] | None = Field(
        None, description="The prefix of every key to list.", examples=["c1"]
    )
    after: Annotated[str, key_text("after")] | None = Field(
        None, description="List keys after this one: `next` of the previous page.", examples=["c1"]
    )
    limit: Limit | None = None


class TopParameters(CountParameters):
    by: str = Field(description="The field whose greatest values are listed.", examples=["amount"])
    limit: Limit | None = None


class _ForwardedScan(Parameters):
    partitions: Partitions
    max_lag: MaxLag | None = Field(None, alias="maxLag")


@dataclass(frozen=True, slots=True)
class ModelAnswers:
    """Answers queries for one read model."""

    queries: Queries
    scatter: Scatter
    description: Mapping[str, Any]

    async def gathered(self, request: web.Request, given: ScanParameters, kind: str, scan: Scan) -> Answer:
        """Answers a client's query for all keys, gathered from the instances."""
        with ending_with(request):
            return await self.scatter.answer(
                kind, scan, asker_of(request), max_lag=given.max_lag, is_partial=given.partial
            )


@dataclass(slots=True, eq=False)
class ModelQueries:
    """Handles the routes below `/api/models`."""

    known: Mapping[str, ReadModel]
    """The read models whose declaration this instance has, hosted here or not, by name."""
    hosted: Mapping[str, ModelAnswers]
    """The read models of this instance, by name."""
    elsewhere: Callable[[], Mapping[str, Partitioning]]
    """Returns where the keys of the read models are that peers host, by name. Raises Problem while that is unknown."""
    of_peers: Callable[[str, Partitioning], ModelAnswers]
    """Name and partitioning of a read model → answers that come from peers."""

    async def list(self, _request: web.Request) -> web.Response:
        names = sorted({*self.hosted, *self.elsewhere()})
        return json_response({"models": [description_of(name, self.known) for name in names]})

    async def key(self, request: web.Request) -> web.Response:
        answers = self.of(request.match_info["model"])
        return await self.one(request, answers, ModelKeyParameters, "key")

    async def one(
        self, request: web.Request, answers: ModelAnswers, parameters: type[KeyParameters], noun: str
    ) -> web.Response:
        """Answers for the key in a request's path."""
        name = answers.description["name"]

        def parse() -> KeyQuery:
            given = parameters.of(request)
            return key_query(given, f"{PATH}/{name}/keys/{quote(given.key, safe='')}", noun, self.key_type_of(name))

        return await answers.queries.get(request, parse)

    async def by_route(
        self, request: web.Request, name: str, parameters: type[KeyParameters], declared: Routes
    ) -> web.Response:
        """Answers for a key at the path that a read model declares."""

        def parse() -> KeyQuery:
            given, key_type = parameters.of(request), self.key_type_of(name)
            return key_query(given, declared.path, declared.noun, key_type, in_query_as=declared.key)

        return await self.of(name).queries.get(request, parse)

    async def entries(self, request: web.Request) -> web.Response:
        given = EntriesParameters.of(request)
        key_type = self.key_type_of(given.model)
        if given.prefix is not None and key_type.is_number:
            raise InvalidInputError(
                "prefix requires text keys, and the keys of this read model are numbers: use from, to"
            )
        for key in (given.start, given.end, given.after):
            if key is not None:
                key_type.parse(key)
        scan = EntriesScan(
            start=given.start,
            end=given.end,
            prefix=given.prefix,
            after=given.after,
            limit=given.limit or DEFAULT_ENTRIES,
            key_type=key_type,
        )
        return await self._scanned(request, given, "entries", scan)

    async def count(self, request: web.Request) -> web.Response:
        return await self._scanned(request, CountParameters.of(request), "count", CountScan())

    async def top(self, request: web.Request) -> web.Response:
        given = TopParameters.of(request)
        answers = self.of(given.model)
        fields = answers.description["fields"]
        numbers = [name for name, kind in fields.items() if kind.startswith(NUMBERS)]
        if given.by not in numbers:
            raise InvalidInputError(f"by must be a numeric field: {', '.join(numbers) or 'there is none'}")
        scan = TopScan(
            by=given.by,
            value=answers.scatter.number(given.by),
            limit=given.limit or _DEFAULT_TOP,
            key_type=self.key_type_of(given.model),
        )
        return await self._scanned(request, given, "top", scan)

    async def _scanned(self, request: web.Request, given: CountParameters, kind: str, scan: Scan) -> web.Response:
        answers = self.of(given.model)
        if FORWARDED_HEADER not in request.headers:
            return (await answers.gathered(request, given, kind, scan)).response()
        forwarded = _ForwardedScan.of(request)
        with ending_with(request):
            answer = await answers.scatter.answer_peer(scan, asker_of(request), forwarded.partitions, forwarded.max_lag)
        return answer.response()

    def of(self, name: str) -> ModelAnswers:
        """Raises Problem 404: no instance hosts the read model, or the read model keeps no states."""
        model = self.known.get(name)
        if model is not None and not model.has_states():
            raise Problem(404, f"the read model '{name}' keeps no states: it only emits")
        answers = self.hosted.get(name)
        if answers is not None:
            return answers
        partitioning = self.elsewhere().get(name)
        if partitioning is not None:
            return self.of_peers(name, partitioning)
        raise Problem(404, f"there is no read model '{name[:100]}' here; {PATH} lists all read models")

    def key_type_of(self, name: str) -> KeyType:
        """The type of a read model's keys; text if only peers know the read model."""
        model = self.known.get(name)
        return TEXT if model is None or not model.has_states() else model.key_type


def description_of(name: str, known: Mapping[str, ReadModel]) -> Mapping[str, Any]:
    """A `ModelDescription`. A read model that only peers know has a name and no more."""
    model = known.get(name)
    return {"name": name, "source": "", "key": "", "fields": {}} if model is None else model.description()


@closed
class ModelDescription(TypedDict):
    name: str
    source: str
    """The topic that it folds."""
    key: str
    """The column of the keys; empty if the read model keeps no states."""
    fields: dict[str, str]
    """The fields of its answers, with their types."""


@closed
class Models(TypedDict):
    models: list[ModelDescription]


@closed
class Entry(TypedDict):
    key: str
    value: Any
    """The read model's answer for the key; `/api/models` lists its fields."""


@closed
class EntriesPage(TypedDict):
    entries: list[Entry]
    next: str | None


@closed
class TopEntries(TypedDict):
    entries: list[Entry]
    next: NotRequired[str]
    """The last entry's key, if the answer was cut off because it exceeds 1 MiB."""


@closed
class KeyCount(TypedDict):
    count: Count
    """Keys that have a state."""


MODELS = Tag("models", "Queries for any read model.")


def _by_partition(name: str, description: str, item: str, example: str) -> Header:
    return Header(
        name=name,
        description=f"For each partition, {description}: `partition:value`, separated by commas.",
        type=Annotated[str, Field(pattern=f"^[0-9]+:{item}(?:,[0-9]+:{item})*$")],
        example=example,
        is_required=False,
    )


SCAN_PROVENANCE = (
    PROVENANCE[0],
    _by_partition(
        "Balance-Position", "the offset below which the answer includes exactly its events", "[0-9]+", "0:12"
    ),
    _by_partition("Balance-Epoch", "the fencing number of the task that answered", "[0-9]+", "0:3"),
    _by_partition("Balance-Role", "the role of that task", "(?:active|standby)", "0:active"),
    _by_partition("Balance-Lag", "the records that the answer does not include yet, if known", "[0-9]+", "0:0"),
    Header(
        name="Balance-Missing",
        description="The partitions that the answer lacks, if the query allows that.",
        type=Annotated[str, Field(pattern="^[0-9]+(?:,[0-9]+)*$")],
        example="1",
        is_required=False,
    ),
)
_EXAMPLE = {"entries": [{"key": "c1", "value": {"amount": 12.34}}], "next": None}


def _scan(
    name: str,
    handle: Handle,
    *,
    summary: str,
    description: str,
    parameters: type[CountParameters],
    body: Any,
    example: object,
) -> Route:
    """A query for all keys of a read model."""
    return Route(
        name=f"{name}OfModel",
        path=f"{PATH}/{{model}}/{name}",
        handle=handle,
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        is_forwarded=True,
        summary=summary,
        description=f"{description} The instance queries every instance that owns a partition. Each partition is read "
        "at one position, which the headers name; the answer as a whole is not a snapshot.",
        parameters=parameters,
        responses=(
            ok("The answer.", body, example, SCAN_PROVENANCE),
            problem(400, "A parameter is missing, malformed or repeated."),
            problem(
                404,
                "There is no such read model.",
                model=(
                    "A misspelled name",
                    "there is no read model 'balances' here; /api/models lists all read models",
                ),
            ),
            MISDIRECTED,
            retry_later(
                "A partition cannot be read now, and the query does not set `partial`; or the client has too many "
                "scans in progress.",
                missing=("A partition is changing hands", "no instance could answer for partitions 1"),
                share=(
                    "Too many scans of one client",
                    "this client's share of scans is used up: 2 of its scans are in progress here and 32 wait; "
                    "retry when some are finished",
                ),
            ),
        ),
    )


MODEL_ROUTES = (
    Route(
        name="listModels",
        path=PATH,
        handle=lambda handlers, request: handlers.model_queries().list(request),
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        summary="The read models",
        description="The read models that this instance and its peers host, each with the fields of its answers.",
        responses=(
            ok(
                "The read models.",
                Models,
                {
                    "models": [
                        {
                            "name": "balance",
                            "source": "balance",
                            "key": "customerId",
                            "fields": {"amount": "decimal(38,2)"},
                        }
                    ]
                },
            ),
            retry_later("The instance is starting."),
        ),
    ),
    Route(
        name="getKeyOfModel",
        path=f"{PATH}/{{model}}/keys/{{key}}",
        handle=lambda handlers, request: handlers.model_queries().key(request),
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        is_forwarded=True,
        summary="The state of one key",
        description="Answers as `getBalance` does, for any read model.",
        parameters=ModelKeyParameters,
        responses=(
            ok("The key and its value.", Entry, {"key": "c1", "value": {"amount": 12.34}}, PROVENANCE),
            problem(400, "The key, `minPosition` or `maxLag` is malformed, or `minPosition` is of another partition."),
            problem(404, "There is no such read model, or the key has no state."),
            MISDIRECTED,
            retry_later("No instance can answer now."),
        ),
    ),
    _scan(
        "entries",
        lambda handlers, request: handlers.model_queries().entries(request),
        summary="Keys and their values",
        description="In key order, by their bytes in UTF-8, both ends inclusive.",
        parameters=EntriesParameters,
        body=EntriesPage,
        example=_EXAMPLE,
    ),
    _scan(
        "count",
        lambda handlers, request: handlers.model_queries().count(request),
        summary="The number of keys",
        description="Each commit maintains the number, so the answer is exact and costs no scan.",
        parameters=CountParameters,
        body=KeyCount,
        example={"count": 3},
    ),
    _scan(
        "top",
        lambda handlers, request: handlers.model_queries().top(request),
        summary="The keys with the greatest values",
        description="The keys with the greatest value of a field; equal values in key order. Reads every key, so it "
        "takes long if there are many.",
        parameters=TopParameters,
        body=TopEntries,
        example={"entries": _EXAMPLE["entries"]},
    ),
)
