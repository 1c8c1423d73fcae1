"""The routes that read models declare by `queries`: one key, asked for by a name of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from balance_service.http.access.clients import Scope
from balance_service.http.api.answers import PROVENANCE, ok, problem, unavailable
from balance_service.http.api.declarations import Parameter
from balance_service.http.api.model_routes import MISDIRECTED, MODELS
from balance_service.http.api.route import Route
from balance_service.http.api.schemas import KEY, NUMBER_KEY, exactly
from balance_service.http.model_queries import NUMBERS
from balance_service.http.parameters import MAX_LAG, MIN_POSITION
from balance_service.model.keys import checked_key
from balance_service.model.read_model import Routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from aiohttp import web

    from balance_service.http.handlers import Handlers
    from balance_service.model.read_model import ReadModel


_IF_HOSTED = tuple(replace(header, is_required=False, component=f"{header.name}-If-Hosted") for header in PROVENANCE)


def key_routes(models: Iterable[ReadModel]) -> list[Route]:
    """Those of some read models."""
    return [_key_route(model, model.queries) for model in models if isinstance(model.queries, Routes)]


def _key_route(model: ReadModel, declared: Routes) -> Route:
    key = Parameter(
        name=declared.key,
        description=f"The {declared.noun}. Percent-encoded UTF-8, given exactly once.",
        schema=NUMBER_KEY if model.key_type.is_number else KEY,
        parse=partial(checked_key, name=declared.key),
        example="1" if model.key_type.is_number else "c1",
        is_required=True,
    )

    def answer(handlers: Handlers, request: web.Request) -> Awaitable[web.StreamResponse]:
        return handlers.any_model.by_route(request, model.name, key, declared)

    noun = declared.noun
    return Route(
        name=declared.path.rpartition(".")[2].rpartition("/")[2],
        method="GET",
        path=declared.path,
        answer=answer,
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        is_forwarded=True,
        summary=f"What '{model.name}' knows of a {noun}",
        description=f"Answered from the state store of the instance that owns the {noun}'s partition; the headers name "
        "it. Without `minPosition` the answer is the owner's newest, which may lack the last events; `Balance-Lag` "
        "says how many. With `maxLag` or `minPosition` a standby may answer too, and says so in `Balance-Role`. Reads "
        "are monotonic per instance: it never answers from an earlier position than before, unless the answering "
        "server, its role or its epoch has changed.",
        parameters=(key, MIN_POSITION, MAX_LAG),
        answers=(
            ok(
                "The state, with exactly its digits.",
                exactly({name: _schema(kind) for name, kind in model.field_types.items()}),
                None,
                PROVENANCE,
            ),
            problem(
                400,
                f"`{declared.key}` is missing, empty, repeated, too long or malformed; `minPosition` is malformed, "
                "repeated or of another partition; or `maxLag` is malformed or repeated.",
                {
                    "missing": (f"No {noun} named", f"{declared.key} is missing"),
                    "partition": (
                        "A position of another partition",
                        f"minPosition is of partition 0, the {noun}'s is 1",
                    ),
                },
            ),
            problem(
                403,
                "Only between instances: the header `Balance-Forwarded` lacks the proof that `BALANCE_PEER_SECRET` "
                "asks for.",
                {
                    "unproven": (
                        "A mark without proof",
                        "a forwarded query needs a proof; give all instances the same BALANCE_PEER_SECRET",
                    )
                },
            ),
            problem(
                404,
                f"No event has named this {noun}, as far as the answering instance has read: `Balance-Position` says "
                f"how far. Or no instance hosts '{model.name}'.",
                {"unknown": (f"A {noun} without events", f"no such {noun}")},
                headers=_IF_HOSTED,
            ),
            MISDIRECTED,
            unavailable(
                "No instance can answer now: the owner is starting, restoring, changing or out of reach, "
                "`minPosition` was not reached in time, or none is as near as `maxLag` wants. This says nothing about "
                f"whether the {noun} exists.",
                {
                    "behind": ("minPosition not reached in time", "position 1:42 was not reached in time"),
                    "ownerless": ("The partition is changing hands", "no instance is known to own partition 1"),
                },
            ),
        ),
    )


def _schema(kind: str) -> dict[str, Any]:
    return {"type": "number"} if kind.startswith(NUMBERS) and not kind.endswith("?") else {}
