"""The routes of dead letters: what there are, and what operators decide about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.engine.dead_letter import Status
from balance_service.engine.decisions import LETTER_ID_PATTERN, MOST_IDS, NO_LETTER, REASON_PATTERN, Decision
from balance_service.http.access.clients import Scope
from balance_service.http.api.answers import ok, problem, unavailable
from balance_service.http.api.declarations import Answer, Body, Content
from balance_service.http.api.model_routes import MISDIRECTED
from balance_service.http.api.route import Route, Tag
from balance_service.http.api.schemas import count, exactly, text
from balance_service.http.dead_letters import PATH
from balance_service.http.letter_parameters import (
    AFTER_LETTER,
    CAUSE,
    LETTER,
    LETTER_RECORD,
    LETTER_STAGE,
    OF_MODEL,
    STATUS,
)
from balance_service.http.parameters import LIMIT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from balance_service.http.api.declarations import Parameter
    from balance_service.http.handlers import Handlers

_TAG = Tag("dead letters", "Records that could not be applied: for operators.")
_SCOPES = frozenset({Scope.OPERATE})
_ID = text("The stage, and partition and offset of the record in its source.", pattern=LETTER_ID_PATTERN)
_HEADER = {
    "oneOf": [
        exactly(
            {"name": text("Its name."), "value": {"type": ["string", "null"], "description": "Its value, as text."}}
        ),
        exactly({"name": text("Its name."), "valueBase64": text("Its value, where that is no UTF-8.")}),
    ]
}
_LETTER = exactly(
    {
        "id": _ID,
        "model": text("The read model."),
        "cause": text("Why the record could not be applied when it was last tried."),
        "status": {"enum": [status.value for status in Status], "description": "What becomes of it next."},
        "attempt": count("How often it was tried again."),
        "dueAt": {"type": ["string", "null"], "format": "date-time", "description": "When it is tried again."},
        "key": {"type": ["string", "null"], "description": "The record's, as text; null if it has none or is no text."},
        "keyBase64": text("The record's, where it is no UTF-8."),
        "headers": {
            "type": ["array", "null"],
            "items": _HEADER,
            "description": "Those of the record, in order and with every repetition; null if its topic has dropped "
            "it, or if a name is no UTF-8.",
        },
        "valueBase64": {
            "type": ["string", "null"],
            "description": "Its value; null if there is none, or its topic has dropped it.",
        },
    },
    optional=frozenset({"keyBase64"}),
)
_EXAMPLE = {
    "id": "balance/1:42",
    "model": "balance",
    "cause": "schema-id-unknown",
    "status": "scheduled",
    "attempt": 0,
    "dueAt": "2026-01-02T03:04:05.678Z",
    "key": "alice",
    "headers": [{"name": "source", "value": "till-7"}, {"name": "signature", "valueBase64": "wyg="}],
    "valueBase64": "AAAAAGMC",
}
_DECIDED = exactly(
    {
        "accepted": {"type": "array", "items": _ID},
        "refused": {"type": "array", "items": exactly({"id": _ID, "reason": text("Why.")})},
    }
)
_NONE = problem(
    404,
    "There is no such dead letter.",
    {"none": ("Never one", NO_LETTER)},
)
_UNREADABLE = unavailable(
    "Some of them cannot be read now.",
    {"missing": ("A partition is changing hands", "no instance could answer for partitions 1")},
)


def _one(name: str, path: str, *parameters: Parameter[str]) -> Route:
    return Route(
        name=name,
        method="GET",
        path=f"{PATH}/{path}",
        answer=lambda handlers, request: handlers.letters.one(request),
        tag=_TAG,
        scopes=_SCOPES,
        summary="One dead letter",
        description="With the record that could not be applied, as its producer sent it.",
        parameters=parameters,
        answers=(ok("The dead letter.", _LETTER, _EXAMPLE), problem(400, "The id is malformed."), _NONE, _UNREADABLE),
    )


def _decision(decision: Decision, summary: str, description: str) -> Route:
    return Route(
        name=f"{decision.value}DeadLetters",
        method="POST",
        path=f"{PATH}.{decision.value}",
        answer=_deciding(decision),
        tag=_TAG,
        scopes=_SCOPES,
        is_forwarded=True,
        summary=summary,
        description=f"{description} Who has decided, when and why is kept for ever, in the transaction in which it "
        "takes effect. Sent twice, it is as if sent once.",
        body=Body(
            description="At most 16 KiB of JSON.",
            content=Content(
                schema=exactly(
                    {
                        "ids": {"type": "array", "items": _ID, "minItems": 1, "maxItems": MOST_IDS},
                        "reason": text("Why, for those who look later.", pattern=REASON_PATTERN),
                    }
                ),
                example={"ids": ["balance/1:42"], "reason": "a test event"},
            ),
        ),
        answers=(
            Answer(
                status=202,
                description="Decided, of some at least; `refused` says why not of others.",
                content=Content(schema=_DECIDED, example={"accepted": ["balance/1:42"], "refused": []}),
            ),
            problem(400, "The body is not such a JSON object."),
            _NONE,
            problem(
                409,
                "It makes no sense for any of them.",
                {
                    "final": (
                        "A cause that stays",
                        "balance/1:42: its cause, frame-missing, never goes away: discard it",
                    )
                },
            ),
            problem(413, "The body has more than 16 KiB."),
            MISDIRECTED,
            unavailable("Nobody owns the partition of any of them now, or its owner does not answer. Decide again."),
        ),
    )


def _deciding(decision: Decision) -> Callable[[Handlers, web.Request], Awaitable[web.StreamResponse]]:
    return lambda handlers, request: handlers.letters.decide(request, decision)


DEAD_LETTER_ROUTES = (
    Route(
        name="listDeadLetters",
        method="GET",
        path=PATH,
        answer=lambda handlers, request: handlers.letters.page(request),
        tag=_TAG,
        scopes=_SCOPES,
        is_forwarded=True,
        summary="Dead letters",
        description="Of the read models that this instance hosts, by stage, partition and offset; closed ones for "
        "seven days. A page may have fewer than `limit`, and still a `next`, where few are of a cause or status.",
        parameters=(OF_MODEL, CAUSE, STATUS, AFTER_LETTER, LIMIT),
        answers=(
            ok(
                "A page.",
                exactly({"deadLetters": {"type": "array", "items": _LETTER}, "next": {"type": ["string", "null"]}}),
                {"deadLetters": [_EXAMPLE], "next": None},
            ),
            problem(400, "A parameter is malformed or repeated."),
            problem(404, "This instance does not host that read model.", headers=()),
            MISDIRECTED,
            _UNREADABLE,
        ),
    ),
    _one("getDeadLetter", "{id}", LETTER),
    _one("getDeadLetterOfStage", "{stage}/{record}", LETTER_STAGE, LETTER_RECORD),
    _decision(Decision.REDRIVE, "Try dead letters again at once", "Their records are tried again within a second."),
    _decision(Decision.DISCARD, "Discard dead letters", "Their records never count, after a rebuild neither."),
)
