"""Queries that read models declare with `Routes` or `Collection`: handlers and routes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema, create_model

from balance_service import api
from balance_service.http.access.clients import Scope
from balance_service.http.answer import JSON, Answer
from balance_service.http.key_target import KEY_SCOPES, declared_target, names_of
from balance_service.http.model_queries import DEFAULT_ENTRIES, NUMBERS, ModelQueries
from balance_service.http.model_routes import MODELS, SCAN_PROVENANCE, Entry, KeyCount
from balance_service.http.requests import (
    Limit,
    Parameters,
    ScanParameters,
    key_of_type,
    key_parameters,
    text_type,
)
from balance_service.http.route import MISDIRECTED, PROVENANCE, Route, ok, problem, retry_later
from balance_service.http.scan import CountScan, EntriesScan
from balance_service.http.shares import asker_of
from balance_service.model.json_view import exact_json
from balance_service.model.read_model import Collection, Routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from aiohttp import web

    from balance_service.http.route import Handlers, Header
    from balance_service.model.read_model import ReadModel

_VALUES = list[Any]
_BY_KEY = dict[str, list[Any]]


def declared_routes(models: Iterable[ReadModel]) -> Iterator[Route]:
    """The routes that read models declare."""
    for model in models:
        match model.queries:
            case Routes() as declared:
                yield key_route(model, declared)
            case Collection() as declared:
                yield from _collection_routes(model, declared)


def key_route(model: ReadModel, declared: Routes) -> Route:
    """A route for one key, which the query names."""
    target = declared_target(model, declared)
    parameters = key_parameters(
        declared.key, model.key_type, f"The {declared.noun}. Percent-encoded UTF-8, given exactly once."
    )

    noun, names = declared.noun, names_of(declared)
    fields = {name: _field_schema(kind) for name, kind in model.field_types.items()}
    return Route(
        name=declared.path.rpartition(".")[2].rpartition("/")[2],
        path=declared.path,
        handle=lambda handlers, request: handlers.of(ModelQueries).key(request, target, parameters),
        tag=MODELS,
        scopes=KEY_SCOPES,
        is_forwarded=target.is_forwarded,
        summary=f"The answer of '{model.name}' for a {noun}",
        description=f"Answered from the state store of the instance that owns the {noun}'s partition; the headers name "
        "it. Without `minPosition` the answer is the owner's newest, which may lack the last events; `Balance-Lag` "
        "says how many. With `maxLag`, `maxAge` or `minPosition` another copy may answer; `Balance-Role` shows that. "
        "Reads are monotonic per instance: it never answers from an earlier position than before, unless the answering "
        "server, its role, its epoch or the generation has changed.",
        parameters=parameters,
        responses=(
            ok(
                "The state, with exactly its digits.",
                Annotated[
                    dict[str, Any],
                    WithJsonSchema(
                        {
                            "type": "object",
                            "additionalProperties": False,
                            "required": [*fields],
                            "properties": fields,
                        }
                    ),
                ],
                None,
                PROVENANCE,
            ),
            problem(
                400,
                f"{' or '.join([f'`{name}`' for name in names])} is missing, empty, repeated, too long or malformed; "
                "`minPosition` is malformed, repeated or of another partition; or `maxLag` or `maxAge` is malformed or "
                "repeated.",
                missing=(f"No {noun} named", f"{names[0]} is missing"),
                partition=(
                    "A position of another partition",
                    f"minPosition is for partition 0; the {noun} is in partition 1",
                ),
            ),
            problem(
                403,
                "Only between instances: the header `Balance-Forwarded` lacks the proof that `BALANCE_PEER_SECRET` "
                "requires.",
                unproven=(
                    "A mark without proof",
                    "a forwarded query needs a proof; give all instances the same BALANCE_PEER_SECRET",
                ),
            ),
            problem(
                404,
                f"No event has named this {noun} below the position in `Balance-Position`. Or no instance hosts "
                f"'{model.name}'.",
                unknown=(f"A {noun} without events", f"no such {noun}"),
                headers=tuple(replace(header, is_required=False) for header in PROVENANCE),
            ),
            MISDIRECTED,
            retry_later(
                "No instance can answer now: the owner is starting, restoring, changing or unreachable, "
                "`minPosition` was not reached in time, or no copy is within `maxLag` or `maxAge`. The response says "
                f"nothing about whether the {noun} exists.",
                behind=("minPosition not reached in time", "position 1:42 was not reached in time"),
                ownerless=("The partition is changing hands", "no instance answers for partition 1 now"),
            ),
        ),
    )


def _field_schema(kind: str) -> dict[str, Any]:
    return {"type": "number"} if kind.startswith(NUMBERS) and not kind.endswith("?") else {}


class PageParameters(ScanParameters):
    """A page of a collection."""

    after: str | None = None
    limit: Limit | None = None


class RangeParameters(PageParameters):
    start: str = Field(alias="from")
    end: str = Field(alias="to")


class CompositeRangeParameters(RangeParameters):
    """`within` has the columns of the key before the last, by the names of their parameters."""

    of_columns: ClassVar[str] = "within"
    within: dict[str, str] = Field(description="A column of every key.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionQueries:
    """Answers queries for a read model as a collection. Peers receive them at the routes of every read model."""

    model: ReadModel
    names: tuple[str, ...]
    """Of the parameters with the columns of the key."""
    page_parameters: type[PageParameters]
    range_parameters: type[RangeParameters]

    @staticmethod
    def of(model: ReadModel, declared: Collection) -> CollectionQueries:
        noun = declared.noun
        kind: Any = Annotated[str, key_of_type(model.key_type)]
        *firsts, last = model.key_type.parts
        example = ["1" if firsts else last.example]
        end_kind: Any = Annotated[str, key_of_type(last)]
        after = Field(
            None,
            description=f"List from the {noun} after this one; `Link` of the previous page has it.",
            examples=example,
        )
        start = Field(alias="from", description=f"The first {noun} to list.", examples=example)
        end = Field(alias="to", description=f"The last {noun} to list.", examples=example)
        ranged = create_model(
            "RangeParameters",
            __base__=CompositeRangeParameters if firsts else RangeParameters,
            after=(kind | None, after),
            start=(end_kind, start),
            end=(end_kind, end),
        )
        ranged.columns = {name: text_type(part) for name, part in zip(names_of(declared), firsts, strict=False)}
        return CollectionQueries(
            model=model,
            names=names_of(declared),
            page_parameters=create_model("PageParameters", __base__=PageParameters, after=(kind | None, after)),
            range_parameters=ranged,
        )

    async def all(self, models: ModelQueries, request: web.Request) -> web.Response:
        """A page of values, by key."""
        return await self._entries(models, request, self.page_parameters.of(request))

    async def range(self, models: ModelQueries, request: web.Request) -> web.Response:
        """A page of values in a range of keys, both ends inclusive."""
        given = self.range_parameters.of(request)
        within: dict[str, str] = {}
        if isinstance(given, CompositeRangeParameters):
            firsts = zip(self.model.key_type.columns, self.names[:-1], strict=False)
            within = {column: given.within[name] for column, name in firsts}
        self.model.key_type.range(given.start, given.end, within=within)
        return await self._entries(models, request, given, given.start, given.end, within)

    async def count(self, models: ModelQueries, request: web.Request) -> web.Response:
        given = ScanParameters.of(request)
        answers, scan = models.of(self.model.name, given.generation), CountScan()
        return (await answers.gathered(request, given, "count", scan)).answer(scan).response()

    async def count_local(self, models: ModelQueries, request: web.Request) -> web.Response:
        answer = await models.of(self.model.name).scatter.answer_owned(CountScan(), asker_of(request))
        return answer.response()

    async def _entries(
        self,
        models: ModelQueries,
        request: web.Request,
        given: PageParameters,
        start: str | None = None,
        end: str | None = None,
        within: Mapping[str, str] | None = None,
    ) -> web.Response:
        scan = EntriesScan(
            start=start,
            end=end,
            after=given.after,
            within=within or {},
            limit=given.limit or DEFAULT_ENTRIES,
            key_type=self.model.key_type,
        )
        found = await models.of(self.model.name, given.generation).gathered(request, given, "entries", scan)
        page = found.content
        if self.model.key_type.is_composite:
            body = f"[{','.join([entry.text for entry in page.entries])}]"
        else:
            body = f"{{{','.join([f'{exact_json(entry.key)}:{entry.json}' for entry in page.entries])}}}"
        response = Answer(200, body.encode(), JSON, found.headers).response()
        if page.next is not None:
            # A sum over pages of two generations is of neither.
            generation = {"generation": found.headers[api.GENERATION]} if api.GENERATION in found.headers else {}
            following = request.rel_url.update_query({"after": page.next, **generation})
            response.headers["Link"] = f'<{following}>; rel="next"'
        return response


def _collection_routes(model: ReadModel, declared: Collection) -> tuple[Route, ...]:
    noun, name = declared.noun, model.name
    target = declared_target(model, declared)
    of_key = key_parameters(declared.key, model.key_type, f"The {noun}.")
    queries = CollectionQueries.of(model, declared)
    one, listed = "".join([f"/{{{name}}}" for name in queries.names]), _BY_KEY
    ranged = f"{one.rpartition('/')[0]}/{{from}}/{{to}}"
    if model.key_type.is_composite:
        listed = list[Entry]  # type: ignore[assignment]

    def route(
        operation: str,
        path: str,
        answer: Callable[[ModelQueries, web.Request], Awaitable[web.Response]],
        summary: str,
        description: str,
        *,
        body: Any,
        parameters: type[Parameters] = Parameters,
        headers: tuple[Header, ...] = SCAN_PROVENANCE,
        unknown: str = f"No instance hosts '{name}'.",
    ) -> Route:
        def handle(handlers: Handlers, request: web.Request) -> Awaitable[web.StreamResponse]:
            return answer(handlers.of(ModelQueries), request)

        return Route(
            name=f"{name}{operation}",
            path=f"{declared.path}{path}",
            handle=handle,
            tag=MODELS,
            scopes=frozenset({Scope.READ}),
            summary=summary,
            description=description,
            parameters=parameters,
            responses=(
                ok("The answer.", body, None, headers),
                problem(400, "A parameter is missing, malformed or repeated."),
                problem(404, unknown),
                retry_later("A partition cannot be read now."),
            ),
        )

    paged = f"In key order. If there are more than `limit`, `Link` names the next page. Of {name}."
    # Fixed paths come before paths with parameters.
    return (
        route("All", "", queries.all, f"All, by {noun}", paged, parameters=queries.page_parameters, body=listed),
        route(
            "Count",
            "/count",
            queries.count,
            "The number of keys",
            "On all instances.",
            parameters=ScanParameters,
            body=KeyCount,
        ),
        route(
            "CountLocal",
            "/count/local",
            queries.count_local,
            "The number of keys that this instance owns",
            "Queries no other instance.",
            body=KeyCount,
        ),
        route(
            "One",
            one,
            lambda models, request: models.key(request, target, of_key),
            f"One {noun}",
            "Answered as `getBalance` is, by the instance that owns the key's partition.",
            parameters=of_key,
            body=_VALUES,
            headers=PROVENANCE,
            unknown=f"No event has named this {noun}, or no instance hosts '{name}'.",
        ),
        route(
            "Range",
            ranged,
            queries.range,
            f"All from one {noun} to another",
            f"Both ends inclusive. {paged}",
            parameters=queries.range_parameters,
            body=listed,
        ),
    )
