"""Queries for any read model, hosted here or elsewhere: which there are, one key, a range, how many, the greatest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from aiohttp import web

from balance_service.errors import InvalidInputError
from balance_service.http.answer import Problem, compact_json
from balance_service.http.given import Given
from balance_service.http.parameters import (
    AFTER,
    BY,
    FROM,
    KEY,
    LIMIT,
    MAX_LAG,
    MODEL,
    PARTIAL,
    PARTITIONS,
    PREFIX,
    TO,
    key_query,
)
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.scan import Count, Entries, Top
from balance_service.http.scheduling import asker_of
from balance_service.http.server.ahead_of_aiohttp import ending_with
from balance_service.model.keys import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balance_service.http.answer import Answer
    from balance_service.http.api.declarations import Parameter
    from balance_service.http.queries import Queries
    from balance_service.http.scan import Scan
    from balance_service.http.scatter import Scatter
    from balance_service.model.keys import KeyType
    from balance_service.model.read_model import ReadModel, Routes

PATH = "/api/models"
DEFAULT_ENTRIES, _DEFAULT_TOP = 100, 10
NUMBERS = ("decimal", "double", "float", "int", "long")
"""What the types of fields that are numbers begin with."""


@dataclass(frozen=True, slots=True)
class ModelAnswers:
    """What answers queries for one read model."""

    queries: Queries
    scatter: Scatter
    description: Mapping[str, Any]

    async def gathered(self, request: web.Request, kind: str, scan: Scan) -> Answer:
        """The answer to a client's question about all keys, gathered from the instances."""
        given = Given(request)
        max_lag, is_partial = given.optional(MAX_LAG), given.optional(PARTIAL) or False
        with ending_with(request):
            return await self.scatter.answer(kind, scan, asker_of(request), max_lag=max_lag, is_partial=is_partial)


@dataclass(slots=True, eq=False)
class ModelQueries:
    """Answers the routes below `/api/models`."""

    known: Mapping[str, ReadModel]
    """By name, the read models that this instance can tell of, hosted here or not."""
    hosted: Mapping[str, ModelAnswers]
    """By name, what answers for the read models of this instance."""
    elsewhere: Callable[[], Mapping[str, int]]
    """Those that peers host, each with the partitions of its source. Raises Problem while that is not known."""
    of_peers: Callable[[str, int], ModelAnswers]
    """Such a read model → what answers for it by asking peers."""

    async def list(self, _request: web.Request) -> web.Response:
        """The read models that this instance and its peers host."""
        names = sorted({*self.hosted, *self.elsewhere()})
        return web.json_response({"models": [self.description_of(name) for name in names]}, dumps=compact_json)

    async def key(self, request: web.Request) -> web.Response:
        """The state of one key."""
        answers = self.of(request.match_info[MODEL.name])
        return await self.one(request, answers, KEY, "key")

    async def one(self, request: web.Request, answers: ModelAnswers, key: Parameter[str], noun: str) -> web.Response:
        """The state of the key that a parameter in the path names."""

        def path_of(text: str) -> str:
            return f"{_path(answers)}/keys/{quote(text, safe='')}"

        key_type = self.key_type_of(answers.description["name"])
        return await answers.queries.get(request, lambda: key_query(request, key, path_of, noun, key_type))

    async def by_route(self, request: web.Request, model: str, key: Parameter[str], declared: Routes) -> web.Response:
        """The state of one key, asked for at a path that the read model declares."""
        queries, key_type = self.of(model).queries, self.key_type_of(model)
        return await queries.get(
            request, lambda: key_query(request, key, lambda _: declared.path, declared.noun, key_type)
        )

    async def entries(self, request: web.Request) -> web.Response:
        """Keys and their states, in key order."""
        given = Given(request)
        key_type, prefix = self.key_type_of(request.match_info[MODEL.name]), given.optional(PREFIX)
        if prefix is not None and key_type.is_number:
            raise InvalidInputError("prefix is for keys that are text; these are numbers: use from and to")
        scan = Entries(
            start=_checked(key_type, given.optional(FROM)),
            end=_checked(key_type, given.optional(TO)),
            prefix=prefix,
            after=_checked(key_type, given.optional(AFTER)),
            limit=given.optional(LIMIT) or DEFAULT_ENTRIES,
            key_type=key_type,
        )
        return await self._scanned(request, given, "entries", scan)

    async def count(self, request: web.Request) -> web.Response:
        """How many keys have a state."""
        return await self._scanned(request, Given(request), "count", Count())

    async def top(self, request: web.Request) -> web.Response:
        """The keys with the greatest value of a field."""
        given = Given(request)
        by, answers = given.required(BY), self.of(request.match_info[MODEL.name])
        fields = answers.description["fields"]
        numbers = [name for name, kind in fields.items() if kind.startswith(NUMBERS)]
        if by not in numbers:
            raise InvalidInputError(f"by must be a field that is a number: {', '.join(numbers) or 'there is none'}")
        key_type = self.key_type_of(request.match_info[MODEL.name])
        limit, value = given.optional(LIMIT) or _DEFAULT_TOP, answers.scatter.number(by)
        scan = Top(by=by, value=value, limit=limit, key_type=key_type)
        return await self._scanned(request, given, "top", scan)

    async def _scanned(self, request: web.Request, given: Given, kind: str, scan: Scan) -> web.Response:
        answers = self.of(request.match_info[MODEL.name])
        if FORWARDED_HEADER in request.headers:
            partitions = given.required(PARTITIONS)
            max_lag = given.optional(MAX_LAG)
            with ending_with(request):
                answer = await answers.scatter.answer_peer(scan, asker_of(request), partitions, max_lag)
        else:
            answer = await answers.gathered(request, kind, scan)
        return answer.response()

    def of(self, name: str) -> ModelAnswers:
        """What answers for a read model.

        Raises:
            Problem: 404 if neither this instance nor a peer hosts it, or if it has no states.
        """
        model = self.known.get(name)
        if model is not None and not model.has_states():
            raise Problem(404, f"the read model '{name}' keeps no states: it only emits")
        answers = self.hosted.get(name)
        if answers is not None:
            return answers
        partitions = self.elsewhere().get(name)
        if partitions is not None:
            return self.of_peers(name, partitions)
        raise Problem(404, f"there is no read model '{name[:100]}' here; {PATH} lists those that there are")

    def key_type_of(self, name: str) -> KeyType:
        """How the keys of a read model are written; text, of one that only peers know."""
        model = self.known.get(name)
        return TEXT if model is None or not model.has_states() else model.key_type

    def description_of(self, name: str) -> Mapping[str, Any]:
        """See the function of this name."""
        return description_of(name, self.known)


def _checked(key_type: KeyType, key: str | None) -> str | None:
    """A key that a query names, if it can be one. Raises InvalidInputError."""
    if key is not None:
        key_type.parse(key)
    return key


def _path(answers: ModelAnswers) -> str:
    return f"{PATH}/{answers.description['name']}"


def description_of(name: str, known: Mapping[str, ReadModel]) -> Mapping[str, Any]:
    """A read model as clients are told of it; of one that only peers know, its name."""
    model = known.get(name)
    return {"name": name, "source": "", "key": "", "fields": {}} if model is None else model.description()
