"""Whether every instance sees the folder that a batch job is to fill: asked before the job, which may take hours."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from balance_service import api
from balance_service.errors import RetriableError
from balance_service.http.access.clients import Scope
from balance_service.http.answer import MALFORMED, json_response
from balance_service.http.generations import GENERATIONS, GenerationRequests, ModelParameter
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.route import Route, ok, problem, retry_later
from balance_service.http.shares import asker_of
from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp import web

    from balance_service.http.peers.proxy import Proxy
    from balance_service.http.peers.trust import Peer
    from balance_service.http.route import Handlers

_SECONDS = 20.0


class FilesParameters(ModelParameter):
    files: Annotated[
        str,
        Field(
            max_length=1000,
            description="The place of the folder, as `rebuild --files` has it.",
            examples=["s3://bucket/rebuilds"],
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesProblem(Struct):
    application_server: Annotated[str, Field(examples=["localhost:5052"])]
    problem: str
    """Why it does not see the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSeen(Struct):
    problems: list[FilesProblem]
    """The instances that do not see it; empty if all do."""


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """Asks the instances that host a read model. Belongs to the event loop."""

    peers: Callable[[str], Sequence[Peer]]
    proxy: Proxy
    address: str

    async def ask(self, model: str, files: str, client: str) -> list[FilesProblem]:
        asked = (self._problem(peer, model, files, client) for peer in self.peers(model))
        return [found for some in await asyncio.gather(*asked) for found in some]

    async def _problem(self, peer: Peer, model: str, files: str, client: str) -> list[FilesProblem]:
        path = f"{api.MODELS}/{model}/files"
        try:
            answer = await self.proxy.get(peer, path, {"files": files}, self.address, _SECONDS, client=client)
            return [
                FilesProblem(application_server=peer.address, problem=str(one["problem"]))
                for one in json.loads(answer.body)["problems"]
            ]
        except RetriableError as error:
            return [FilesProblem(application_server=peer.address, problem=str(error))]
        except MALFORMED:
            return [FilesProblem(application_server=peer.address, problem="it does not tell: is it of this version?")]


async def _answer(handlers: Handlers, request: web.Request) -> web.StreamResponse:
    requests, peers = handlers.of(GenerationRequests), handlers.of(PeerFiles)
    given = FilesParameters.of(request)
    requests.require_known(given.model)
    own = asyncio.to_thread(requests.checks.check_files, given.model, given.files)
    if FORWARDED_HEADER in request.headers:
        found, others = await own, list[FilesProblem]()
    else:
        found, others = await asyncio.gather(own, peers.ask(given.model, given.files, asker_of(request).name))
    here = [FilesProblem(application_server=peers.address, problem=found)] if found else []
    return json_response(FilesSeen(problems=[*here, *others]))


_EXAMPLE: Mapping[str, Any] = {
    "problems": [
        {
            "applicationServer": "localhost:5052",
            "problem": "--files: s3://bucket/rebuilds/shop/balance.g2, which the command has made, is not there: name "
            "a place that all instances share",
        }
    ]
}

FILES_ROUTES = (
    Route(
        name="filesOfModel",
        path=f"{api.MODELS}/{{model}}/files",
        handle=_answer,
        tag=GENERATIONS,
        scopes=frozenset({Scope.OPERATE}),
        is_forwarded=True,
        summary="Whether all instances see the files of the next generation",
        description="The command `rebuild --master` makes the folder, and asks this before the job.",
        parameters=FilesParameters,
        responses=(
            ok("The instances that do not see the folder.", FilesSeen, _EXAMPLE),
            problem(400, "A parameter is missing, repeated or unknown."),
            problem(404, "This instance does not host that read model, or it keeps no states."),
            retry_later("The instance is starting."),
        ),
    ),
)
