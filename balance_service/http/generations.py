"""The generations of the read models over HTTP: shows them, and takes operators' requests to rebuild, switch and drop.

Any instance takes a request: it writes the topic of generations, which all instances follow.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from balance_service import api
from balance_service.errors import BalanceServiceError, InvalidInputError
from balance_service.http.access.authorization import CLIENT
from balance_service.http.access.clients import Scope
from balance_service.http.answer import Problem, exact_json_response, unavailable
from balance_service.http.dead_letters import Reason  # noqa: TC001  # pydantic reads the annotations
from balance_service.http.model_queries import ModelName
from balance_service.http.requests import JsonBody, JsonNumber, Parameters, true_or_false, whole_number
from balance_service.http.route import Count, RequestBody, Response, Route, Tag, ok, problem, retry_later
from balance_service.model.generations import Comparison, GenerationStatus, Load, Switch
from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp import web

    from balance_service.cluster.generations import GenerationLog
    from balance_service.http.route import Handle
    from balance_service.model.generations import Declaration, Generations

_TIME = {"anyOf": [{"type": "string"}, {"type": "null"}], "format": "date-time"}
_MOST_SECONDS = 10 * 365 * 86_400
Number = Annotated[int, whole_number(1, 10**9)]


def _refuse_number(given: object) -> object:
    if isinstance(given, JsonNumber):
        raise PydanticCustomError("form", "must be the name of a read model")
    return given


BodyModel = Annotated[ModelName, BeforeValidator(_refuse_number)]


class RebuildBody(JsonBody):
    example: ClassVar[str] = '{"model": "balance", "reason": "states were lost"}'
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "anyOf": [
                {"properties": {"files": {"type": "null"}, "digest": {"type": "null"}}},
                {
                    "properties": {"files": {"type": "string"}, "digest": {"type": "string"}},
                    "required": ["files", "digest"],
                },
            ]
        },
    )

    model: BodyModel
    switch: Annotated[
        Literal["when_equal", "always", "never"] | None,
        Field(
            description="When the new generation begins to serve once it has caught up: if all states are equal, "
            "in any case, or when an operator says so. By default `when_equal`, or, if the new generation has another "
            "version, `never`."
        ),
    ] = None
    keepOld: Annotated[  # noqa: N815  # the name in JSON
        int, whole_number(0, _MOST_SECONDS), Field(description="Seconds to keep the old generation after a switch.")
    ] = api.KEEP_OLD_SECONDS
    maxRate: Annotated[  # noqa: N815  # the name in JSON
        Number | None, Field(description="Events per second that each instance replays at most.")
    ] = None
    files: Annotated[
        str | None,
        Field(
            max_length=1000,
            description="Where a batch job has left the files of the next generation, as `rebuild --master` gives it; "
            "with `digest`. Null: the topic is replayed.",
        ),
    ] = None
    digest: Annotated[
        str | None, Field(pattern=r"^[0-9a-f]{64}$", description="The SHA-256 of the files' manifest.")
    ] = None
    keepFiles: Annotated[  # noqa: N815  # the name in JSON
        bool, true_or_false(), Field(description="Whether the files are left when they are loaded.")
    ] = False
    reason: Reason = "rebuild"


class SwitchBody(JsonBody):
    example: ClassVar[str] = '{"model": "balance", "reason": "the corrected fold is right"}'
    model_config = ConfigDict(extra="forbid")

    model: BodyModel
    to: Annotated[Number | None, Field(description="The generation; by default the only other one.")] = None
    anyway: Annotated[
        bool,
        true_or_false(),
        Field(
            description="Whether it serves although something would be lost by that. Without it, the refusal names "
            "what; with it, that is kept with the reason.",
        ),
    ] = False
    reason: Reason


class DropBody(JsonBody):
    example: ClassVar[str] = '{"model": "balance", "generation": 2, "reason": "its fold is wrong"}'
    model_config = ConfigDict(extra="forbid")

    model: BodyModel
    generation: Number
    reason: Reason


class ModelParameter(Parameters):
    model: ModelName


class Rebuilding(Protocol):
    """What carries generations out on this instance. `status` and `differences` return None for an unknown model."""

    def status(self, model: str) -> ModelGenerations | None:
        """The generations of a read model."""

    def differences(self, model: str) -> Sequence[Difference] | None:
        """The first differences between the two generations, as found here."""


class Checking(Protocol):
    """What checks the requests."""

    def buildable(self, model: str) -> Declaration:
        """What the newest version here is declared to be. Raises InvalidInputError: none can be built now."""

    def loadable(self, model: str, load: Load, declaration: Declaration) -> Declaration:
        """The declaration of a generation that is loaded from files. Raises InvalidInputError: they do not fit."""

    def check_files(self, model: str, files: str) -> str:
        """Why this instance does not see the files of the next generation; empty if it does."""

    def check_switch(self, now: Generations, to: int, *, anyway: bool) -> str:
        """What would be lost by a switch. Raises InvalidInputError: it is refused."""


@dataclass(frozen=True, slots=True)
class GenerationRequests:
    """Handles the requests."""

    rebuilds: Rebuilding
    checks: Checking
    log: GenerationLog

    async def show(self, request: web.Request) -> web.Response:
        return exact_json_response(self._status_of(ModelParameter.of(request).model))

    async def differ(self, request: web.Request) -> web.Response:
        """Shows the first differences between the two generations, as this instance found them."""
        found = self.rebuilds.differences(ModelParameter.of(request).model)
        if found is None:
            raise _unknown(ModelParameter.of(request).model)
        return exact_json_response(Differences(differences=[*found]))

    async def rebuild(self, request: web.Request) -> web.Response:
        given, by = RebuildBody.of_json(await request.read()), _by(request)
        if (given.files is None) is not (given.digest is None):
            raise Problem(400, "files and digest belong together: give both, or none")
        switch = None if given.switch is None else Switch(given.switch)

        def change(now: Generations) -> Generations:
            declaration, load = self.checks.buildable(given.model), None
            if given.files is not None and given.digest is not None:
                load = Load(now.newest + 1, given.files, given.digest, given.keepFiles)
                declaration = self.checks.loadable(given.model, load, declaration)
            return now.rebuilt(declaration, switch, given.keepOld, given.maxRate, by, given.reason, load)

        return await self._changed(given.model, change)

    async def switch(self, request: web.Request) -> web.Response:
        given, by = SwitchBody.of_json(await request.read()), _by(request)

        def change(now: Generations) -> Generations:
            after = now.switched(given.to, by, given.reason)
            lost = self.checks.check_switch(now, after.serving, anyway=given.anyway)
            return replace(after, reason=f"{given.reason} (anyway: {lost})") if lost else after

        return await self._changed(given.model, change)

    async def drop(self, request: web.Request) -> web.Response:
        given, by = DropBody.of_json(await request.read()), _by(request)
        return await self._changed(given.model, lambda now: now.dropped(given.generation, by, given.reason))

    def require_known(self, model: str) -> None:
        """Raises Problem: 404, this instance does not host a read model that keeps states."""
        self._status_of(model)

    async def _changed(self, model: str, change: Callable[[Generations], Generations]) -> web.Response:
        self._status_of(model)
        found: dict[int, Generations] = {}

        def found_once(now: Generations) -> Generations:
            if now.number not in found:
                found[now.number] = change(now)
            return found[now.number]

        def write() -> None:
            # Its checks may take seconds, for which the other writers would be fenced.
            found_once(self.log.newest(model))
            self.log.write(model, found_once)

        try:
            await asyncio.to_thread(write)
        except InvalidInputError as error:
            raise Problem(409, str(error)) from error
        except BalanceServiceError as error:
            raise unavailable(str(error)) from error
        return exact_json_response(self._status_of(model), status=202)

    def _status_of(self, model: str) -> ModelGenerations:
        status = self.rebuilds.status(model)
        if status is None:
            raise _unknown(model)
        return status


def _unknown(model: str) -> Problem:
    return Problem(404, f"this instance does not host a read model '{model[:100]}' that keeps states")


def _by(request: web.Request) -> str:
    return request.get(CLIENT) or str(request.remote)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(Struct):
    generation: Annotated[int, Field(ge=1)]
    version: Annotated[int, Field(ge=1)]
    """The version of the class that folds it."""
    declaration_changed: bool
    """Whether this instance has that version with another declaration than the generation was begun with."""
    decoder_rules: Annotated[int, Field(ge=1)]
    """The number of the decoder's rules under which the generation began."""
    read_otherwise: list[int]
    """Ids of the schemas whose events had other values by these rules, so that states have values of both. None is
    known of a generation that this instance does not fold."""
    status: GenerationStatus
    """`serving` answers queries and sends outputs. `building` replays the topic; `ready` has caught up and was
    compared. `kept` served before, and may serve again."""
    partitions: Count
    """Partitions of the source."""
    halted: str
    """Why the task of a partition is halted, and at which instance, so that the generation does not catch up without an
    operator; empty if none is."""
    loaded: Annotated[float, Field(ge=0, le=1)] | None
    """Which share of the files of a batch job it has loaded, of which it answers nothing before it has all; null if it
    is not loaded from files."""
    running: Count
    """Partitions whose owner folds this generation now."""
    position: Count
    """Offsets applied, over all partitions."""
    lag: Count | None
    """Records that are not applied yet; null while that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGenerations(Struct):
    model: str
    generations: list[Generation]
    comparison: Comparison | None
    """Of the two generations, when the newer one had caught up; null before."""
    switch: Literal["when_equal", "always", "never"] | None
    """When the generation that is built begins to serve."""
    kept_until: Annotated[datetime | None, WithJsonSchema(_TIME)]
    """When the kept generation is dropped."""
    action: str
    """What led to this: `begin`, `rebuild`, `rebuild offline`, `load`, `compare`, `switch`, `settle` or `drop`."""
    by: str
    """Who asked for it, or the command that needs no instance; empty for the service itself."""
    reason: str
    """Who asked gave it; or why the service did it by itself."""
    problem: str
    """Why steps cannot be taken now, and at which instances; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Struct):
    key: str
    serving: Any
    """The answer of the serving generation; null if it has no state."""
    building: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences(Struct):
    differences: list[Difference]
    """The first ones of each partition that this instance owns, at most 20."""


GENERATIONS = Tag("generations", "Rebuilds of read models while they answer: for operators.")
_SCOPES = frozenset({Scope.OPERATE})
_EXAMPLE: Mapping[str, Any] = {
    "model": "balance",
    "generations": [
        {
            "generation": 1,
            "version": 1,
            "declarationChanged": False,
            "decoderRules": 2,
            "readOtherwise": [],
            "status": "serving",
            "partitions": 4,
            "halted": "",
            "loaded": None,
            "running": 4,
            "position": 1200,
            "lag": 0,
        },
        {
            "generation": 2,
            "version": 1,
            "declarationChanged": False,
            "decoderRules": 2,
            "readOtherwise": [],
            "status": "building",
            "partitions": 4,
            "halted": "",
            "loaded": None,
            "running": 4,
            "position": 700,
            "lag": 500,
        },
    ],
    "comparison": None,
    "switch": "when_equal",
    "keptUntil": None,
    "action": "rebuild",
    "by": "alice",
    "reason": "states were lost",
    "problem": "",
}
_NONE = problem(404, "This instance does not host that read model, or it keeps no states.")


def _request(
    name: str,
    handle: Handle,
    summary: str,
    description: str,
    body: type[JsonBody],
    example: Mapping[str, Any],
    refusal: str,
) -> Route:
    return Route(
        name=f"{name}Model",
        method="POST",
        path=f"{api.MODELS}.{name}",
        handle=handle,
        tag=GENERATIONS,
        scopes=_SCOPES,
        summary=summary,
        description=f"{description} The service keeps the request, who made it, when and why, permanently.",
        body=RequestBody(description="At most 16 KiB of JSON.", type=body, examples={"one": ("One", example)}),
        responses=(
            Response(
                status=202, description="Written; the instances carry it out.", type=ModelGenerations, example=_EXAMPLE
            ),
            problem(400, "The body is not such a JSON object."),
            _NONE,
            problem(409, "The generations do not allow it now.", final=("An example", refusal)),
            problem(413, "The body has more than 16 KiB."),
            retry_later("The broker does not respond. Look at the generations before you send it again."),
        ),
    )


GENERATION_ROUTES = (
    Route(
        name="generationsOfModel",
        path=f"{api.MODELS}/{{model}}/generations",
        handle=lambda handlers, request: handlers.of(GenerationRequests).show(request),
        tag=GENERATIONS,
        scopes=frozenset({Scope.READ}),
        summary="The generations of a read model",
        description="Of all instances, as this one knows them.",
        parameters=ModelParameter,
        responses=(ok("The generations.", ModelGenerations, _EXAMPLE), _NONE),
    ),
    Route(
        name="differencesOfModel",
        path=f"{api.MODELS}/{{model}}/differences",
        handle=lambda handlers, request: handlers.of(GenerationRequests).differ(request),
        tag=GENERATIONS,
        scopes=_SCOPES,
        summary="The first differences between two generations",
        description="Of the partitions that this instance owns.",
        parameters=ModelParameter,
        responses=(
            ok(
                "The differences.",
                Differences,
                {"differences": [{"key": "c1", "serving": {"amount": 1.5}, "building": {"amount": 2.5}}]},
            ),
            _NONE,
        ),
    ),
    _request(
        "rebuild",
        lambda handlers, request: handlers.of(GenerationRequests).rebuild(request),
        "Rebuild a read model",
        "Builds a new generation from the beginning of the topic while the serving one answers, and compares the two.",
        RebuildBody,
        {"model": "balance", "switch": "when_equal", "reason": "states were lost"},
        "generation 2 of 'balance' is being built: wait for it, or drop it first",
    ),
    _request(
        "switch",
        lambda handlers, request: handlers.of(GenerationRequests).switch(request),
        "Have another generation serve",
        "The one that was built and has caught up, or the one that is kept. Refused while a partition of it does not "
        "run, is more than 10,000 records behind the serving one or lacks its standbys, while its changelog is not the "
        "one that it wrote, and if it lacks first events that the serving one has; `anyway` switches all the same.",
        SwitchBody,
        {"model": "balance", "to": 2, "reason": "the corrected fold is right"},
        "generation 2 of 'balance' has not caught up yet",
    ),
    _request(
        "drop",
        lambda handlers, request: handlers.of(GenerationRequests).drop(request),
        "Drop a generation",
        "Deletes its changelog and its stores. Cancels a rebuild, if it is the one that is built.",
        DropBody,
        {"model": "balance", "generation": 2, "reason": "its fold is wrong"},
        "generation 1 of 'balance' serves: switch to another one first",
    ),
)
