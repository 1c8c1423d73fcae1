"""Queries for any read model, on this instance or a peer: the handlers below `/api/models`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from balance_service import api
from balance_service.errors import InvalidInputError
from balance_service.http.answer import Problem, compact_json, json_response
from balance_service.http.key_target import target_of_any_model
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.requests import (
    POSITION_PATTERN,
    CompositeText,
    GenerationNumber,
    KeyParameters,
    Limit,
    MaxLag,
    Parameters,
    Partitions,
    ScanParameters,
    formed,
    generation_of,
    key_text,
)
from balance_service.http.route import accepts_events
from balance_service.http.scan import CountScan, EntriesScan, TopScan
from balance_service.http.server.ahead_of_aiohttp import ending_with
from balance_service.http.shares import asker_of
from balance_service.http.streams.event_stream import rendered
from balance_service.http.streams.part import EventId, PartEndedError, Selection
from balance_service.model.keys import TEXT, checked_key
from balance_service.model.stage import generation_name, model_and_generation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp import web

    from balance_service.cluster.directory import PublishedModel
    from balance_service.http.key_target import KeyQuery, KeyTarget
    from balance_service.http.queries import Queries
    from balance_service.http.scan import Scan
    from balance_service.http.scatter import Gathered, Scatter
    from balance_service.http.shares import Asker
    from balance_service.http.streams.changes import Changes
    from balance_service.http.streams.event_stream import EventStream, Streams
    from balance_service.http.streams.feed import Point
    from balance_service.http.streams.part import LocalPart
    from balance_service.kafka.partitioner import Partitioning
    from balance_service.model.flow import Flow
    from balance_service.model.keys import KeyType
    from balance_service.model.read_model import ReadModel

P = TypeVar("P")
DEFAULT_ENTRIES, _DEFAULT_TOP = 100, 10
_LOOK_AGAIN_SECONDS = 0.1
NUMBERS = ("decimal", "double", "float", "int", "long")
"""Prefixes of the types of numeric fields."""


ModelName = Annotated[str, Field(description="The read model; `/api/models` lists them.", examples=["balance"])]


First = Annotated[Annotated[str, key_text("from")] | None, Field(description="The first key.", examples=["c1"])]
Last = Annotated[Annotated[str, key_text("to")] | None, Field(description="The last key.", examples=["c1"])]
Prefix = Annotated[
    Annotated[str, key_text("prefix")] | None, Field(description="The prefix of every key.", examples=["c1"])
]
_POINTS = f"{POSITION_PATTERN}(?:,{POSITION_PATTERN})*(?:@[A-Za-z0-9+/_=-]{{0,64}})?"
_EVENT_ID = "1/0:12,1:40@Xv7Qd0iOSDuBJ1kzTbGSXA"
LastEventId = Annotated[
    EventId | None,
    formed(
        f"(?:[1-9][0-9]{{0,8}}/{_POINTS}(?:;{_POINTS})*)?",
        f"the id of an event of this stream, such as {_EVENT_ID}",
        EventId.parse,
    ),
    Field(
        description="For a stream: the `id` of the last event that the client has. The stream goes on from there, "
        "unless the read model was built again since: then it begins with the states.",
        examples=[_EVENT_ID],
    ),
]


class ModelParameters(Parameters):
    model: ModelName


class ModelKeyParameters(KeyParameters):
    model: ModelName
    last_event_id: LastEventId | None = Field(None, alias=api.LAST_EVENT_ID)
    in_header: ClassVar[frozenset[str]] = frozenset({api.LAST_EVENT_ID})


class CompositeKeyParameters(ModelKeyParameters):
    of_columns: ClassVar[str] = "key"
    key: CompositeText = Field(
        description="The columns of a composite key, each a parameter of its own.",
        examples=[{"card": "c1", "day": "20"}],
    )


Within = Annotated[
    dict[str, str],
    Field(
        default_factory=dict,
        description="The first columns of a composite key, each a parameter of its own; `from`, `to` and `prefix` are "
        "of the next one.",
        examples=[{"card": "c1"}],
    ),
]


class CountParameters(ScanParameters):
    model: ModelName


class EntriesParameters(CountParameters):
    of_columns: ClassVar[str] = "within"
    start: First = Field(None, alias="from")
    end: Last = Field(None, alias="to")
    prefix: Prefix = None
    after: str | None = Field(
        None, description="List keys after this one: `next` of the previous page.", examples=["c1"]
    )
    limit: Limit | None = None
    within: Within


class ChangesParameters(Parameters):
    of_columns: ClassVar[str] = "within"
    model: ModelName
    start: First = Field(None, alias="from")
    end: Last = Field(None, alias="to")
    prefix: Prefix = None
    within: Within
    generation: GenerationNumber | None = None
    last_event_id: LastEventId | None = Field(None, alias=api.LAST_EVENT_ID)
    in_header: ClassVar[frozenset[str]] = frozenset({api.LAST_EVENT_ID})


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
    changes: Changes
    description: Mapping[str, Any]

    async def gathered(self, request: web.Request, given: ScanParameters, kind: str, scan: Scan[P]) -> Gathered[P]:
        """Scans all keys for a client, on the instances that have them."""
        with ending_with(request):
            return await self.scatter.gather(
                kind, scan, asker_of(request), max_lag=given.max_lag, is_partial=given.partial
            )


@dataclass(slots=True, eq=False)
class ModelQueries:
    """Handles the routes below `/api/models`."""

    known: Mapping[str, ReadModel]
    """The read models whose declaration this instance has, hosted here or not, by name."""
    hosted: Mapping[str, ModelAnswers]
    """The generations of this instance, by `generation_name`."""
    elsewhere: Callable[[], Mapping[str, PublishedModel]]
    """Returns the generations that peers host, or hosted lately, by `generation_name`. Raises Problem while unknown."""
    of_peers: Callable[[str, Partitioning, KeyType], ModelAnswers]
    """`generation_name`, partitioning and type of the keys → answers that come from peers."""
    flows: Mapping[str, Flow]
    """The flows of the events of the read models hosted here, by name."""
    streams: Streams
    serving: Callable[[str], int] = lambda _model: 1
    """Returns the generation of a read model that answers unless the query names one."""
    live: Callable[[str], Sequence[int]] = lambda _model: (1,)
    """Returns the generations of a read model that are not dropped."""

    async def list(self, _request: web.Request) -> web.Response:
        names = sorted({model_and_generation(name)[0] for name in (*self.hosted, *self.elsewhere())})
        return json_response({"models": [description_of(name, self.known) for name in names]})

    async def flow(self, request: web.Request) -> web.Response:
        """Answers with the flow of a read model's events."""
        name = request.match_info["model"]
        flow = self.flows.get(name)
        if flow is None:
            raise Problem(404, f"this instance does not host a read model '{name[:100]}'")
        edges = [
            {"source": edge.source.id, "target": edge.target.id, "kind": edge.kind, "label": edge.label}
            for edge in flow.edges
        ]
        nodes = [{"id": node.id, "kind": node.kind, "name": node.name} for node in flow.nodes]
        return json_response({"nodes": nodes, "edges": edges, **({"plans": flow.plans} if flow.plans else {})})

    async def key(self, request: web.Request, target: KeyTarget, parameters: type[KeyParameters]) -> web.Response:
        """Answers for the key at a target that a read model declares."""
        answers = self.of(target.model, generation_of(request))
        return await self._one(request, answers, target, parameters.of)

    async def key_of_any(self, request: web.Request) -> web.StreamResponse:
        """Answers for the key at the target that every read model has, or with a stream."""
        return await self._key_of_any(request, ModelKeyParameters)

    async def composite_key_of_any(self, request: web.Request) -> web.StreamResponse:
        """As `key_of_any`, for a key of several columns."""
        return await self._key_of_any(request, CompositeKeyParameters)

    async def _key_of_any(self, request: web.Request, parameters: type[ModelKeyParameters]) -> web.StreamResponse:
        name = request.match_info["model"]
        answers, key_type = self.of(name, generation_of(request)), self.key_type_of(name)
        target = target_of_any_model(name, key_type)
        if bool(target.parameters) != bool(parameters.of_columns):
            asked = "&".join([f"{column}=…" for column in target.parameters])
            form = f"{target.path}?{asked}" if asked else f"{target.path}/KEY"
            columns = ", ".join(key_type.columns) if asked else "one column"
            raise InvalidInputError(f"the key of '{name}' is {columns}: ask for {form}")
        # As with other parameters, a peer may name more.
        if parameters.of_columns and FORWARDED_HEADER not in request.headers:
            parameters.check_names(request, key_type.columns)
        read = partial(parameters.of, columns=key_type.columns)
        if not accepts_events(request.headers):
            return await self._one(request, answers, target, read)
        given = read(request)
        if given.min_position is not None or given.max_lag is not None or given.max_age is not None:
            raise InvalidInputError(
                "a stream begins with the owner's newest state: omit minPosition, maxLag and maxAge"
            )
        key_type.parse(given.key)
        return await self._streamed(request, given, answers, Selection(key=given.key))

    async def _one(
        self,
        request: web.Request,
        answers: ModelAnswers,
        target: KeyTarget,
        read: Callable[[web.Request], KeyParameters],
    ) -> web.Response:
        def parse() -> KeyQuery:
            given = read(request)
            return target.query(given.key, given)

        asker = asker_of(request)
        return (await answers.queries.answer(parse, asker.name, is_forwarded=asker.is_peer)).response()

    async def changes(self, request: web.Request) -> web.StreamResponse:
        given = ChangesParameters.of(request)
        answers = self.of(given.model, given.generation)
        within = self._within(request, given)
        selection = Selection(start=given.start, end=given.end, prefix=given.prefix, within=within)
        selection.bounds(self.key_type_of(given.model))
        return await self._streamed(request, given, answers, selection)

    async def _streamed(
        self,
        request: web.Request,
        given: ModelKeyParameters | ChangesParameters,
        answers: ModelAnswers,
        selection: Selection,
    ) -> web.StreamResponse:
        """Answers with the stream of a generation, and after a switch of the next one, on the same connection."""
        asker, model, named = asker_of(request), given.model, given.generation

        async def send(stream: EventStream) -> None:
            following: ModelAnswers | None = answers
            reached = given.last_event_id
            while following is not None:
                changes = following.changes
                follow = changes.follow_range if selection.key is None else changes.follow_key
                holds = partial(self._is_followed, following, model, named)
                await stream.send_while(holds, follow(stream, selection, reached, asker))
                # A generation that serves again has states that the client has since had otherwise.
                reached, following = None, await self._next(model, named)
            await stream.send(rendered("end", compact_json({"detail": f"generation {named} of '{model}' is dropped"})))

        return await self.streams.answer(request, send)

    def _is_followed(self, answers: ModelAnswers, model: str, named: int | None) -> bool:
        """Whether a stream goes on with a generation: the one that the request names while it lives, or that serves."""
        if named is not None and named not in self.live(model):
            return False
        name = generation_name(model, named or self.serving(model))
        # Once this instance hosts the generation, answers that come from peers alone would lack its own partitions.
        return name == answers.queries.routing.read_model and self.hosted.get(name, answers) is answers

    async def _next(self, model: str, named: int | None) -> ModelAnswers | None:
        """Waits for the answers that a stream goes on with; None if the generation that it names is dropped."""
        while named is None or named in self.live(model):
            with suppress(Problem):
                return self.of(model, named)
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        return None

    def open_part(
        self, name: str, partition: int, selection: Selection, since: Point | None, asker: Asker
    ) -> LocalPart:
        """Opens a part of a stream for a peer. Raises PartEndedError: this instance does not own the partition."""
        answers = self.hosted.get(name)
        if answers is None:
            raise PartEndedError
        return answers.changes.open_local(partition, selection, since, asker)

    async def entries(self, request: web.Request) -> web.Response:
        given = EntriesParameters.of(request)
        key_type, within = self.key_type_of(given.model), self._within(request, given)
        if given.after is not None and not key_type.is_composite:
            checked_key(given.after, "after")
        key_type.range(given.start, given.end, given.prefix, within)
        if given.after is not None:
            key_type.parse(given.after)
        scan = EntriesScan(
            start=given.start,
            end=given.end,
            prefix=given.prefix,
            after=given.after,
            within=within,
            limit=given.limit or DEFAULT_ENTRIES,
            key_type=key_type,
        )
        return await self._scanned(request, given, "entries", scan)

    async def count(self, request: web.Request) -> web.Response:
        return await self._scanned(request, CountParameters.of(request), "count", CountScan())

    async def top(self, request: web.Request) -> web.Response:
        given = TopParameters.of(request)
        answers = self.of(given.model, given.generation)
        fields = answers.description["fields"]
        numbers = [name for name, kind in fields.items() if kind.startswith(NUMBERS)]
        if given.by not in numbers:
            raise InvalidInputError(f"by must be a numeric field: {', '.join(numbers) or 'there is none'}")
        scan = TopScan(
            by=given.by,
            value=answers.scatter.routing.number(given.by),
            limit=given.limit or _DEFAULT_TOP,
            key_type=self.key_type_of(given.model),
        )
        return await self._scanned(request, given, "top", scan)

    def _within(self, request: web.Request, given: EntriesParameters | ChangesParameters) -> Mapping[str, str]:
        """Returns the columns of a composite key that a request fixes. Raises InvalidInputError: a name is unknown."""
        key_type = self.key_type_of(given.model)
        columns = key_type.columns if key_type.is_composite else ()
        # As with other parameters, a peer may name more.
        if FORWARDED_HEADER not in request.headers:
            given.check_names(request, columns)
        return {name: given.within[name] for name in columns if name in given.within}

    async def _scanned(self, request: web.Request, given: CountParameters, kind: str, scan: Scan[P]) -> web.Response:
        answers = self.of(given.model, given.generation)
        if FORWARDED_HEADER not in request.headers:
            return (await answers.gathered(request, given, kind, scan)).answer(scan).response()
        forwarded = _ForwardedScan.of(request)
        with ending_with(request):
            answer = await answers.scatter.answer_peer(scan, asker_of(request), forwarded.partitions, forwarded.max_lag)
        return answer.response()

    def serving_answers(self, name: str) -> ModelAnswers | None:
        """Returns the answers of a read model's serving generation, if this instance hosts it."""
        return self.hosted.get(generation_name(name, self.serving(name)))

    def of(self, name: str, generation: int | None = None) -> ModelAnswers:
        """Returns the answers of a generation; None for the one that serves.

        Raises:
            Problem: 404, no instance hosts, or hosted lately, the read model or the generation, or the read model keeps
                no states.
        """
        model = self.known.get(name)
        if model is not None and not model.has_states():
            raise Problem(404, f"the read model '{name}' keeps no states: it only emits")
        stage = generation_name(name, generation or self.serving(name))
        answers = self.hosted.get(stage)
        if answers is not None:
            return answers
        published = self.elsewhere().get(stage)
        if published is not None:
            key_type = published.key_type if model is None else model.key_type
            return self.of_peers(stage, published.partitioning, key_type)
        if generation is not None:
            raise Problem(404, f"the read model '{name[:100]}' has no generation {generation} here")
        raise Problem(404, f"there is no read model '{name[:100]}' here; {api.MODELS} lists all read models")

    def key_type_of(self, name: str) -> KeyType:
        """Returns the type of a read model's keys. Raises Problem, as `elsewhere`, if only peers may know it."""
        if (model := self.known.get(name)) is not None:
            return model.key_type if model.has_states() else TEXT
        # All generations have the same.
        found = (published for stage, published in self.elsewhere().items() if model_and_generation(stage)[0] == name)
        return next((published.key_type for published in found), TEXT)


def description_of(name: str, known: Mapping[str, ReadModel]) -> Mapping[str, Any]:
    """A `ModelDescription`. A read model that only peers know has a name and no more."""
    model = known.get(name)
    return {"name": name, "source": "", "key": "", "fields": {}} if model is None else model.description()
