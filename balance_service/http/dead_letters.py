"""Dead letters over HTTP: lists them for operators, and takes operators' decisions about them.

The instance that owns a dead letter's partition carries out a decision, in the transaction that also records it. Any
instance accepts a decision and forwards it to the owner. Decisions are idempotent: a closed dead letter stays closed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator
from typing_extensions import TypedDict

from balance_service import api
from balance_service.engine.dead_letter import Status
from balance_service.engine.decisions import (
    LETTER_ID_PATTERN,
    MAX_IDS,
    NO_LETTER,
    NO_PARTITION,
    REASON_PATTERN,
    STAGE_PATTERN,
    TRY_AGAIN,
    Decision,
    LetterId,
    Verdict,
    reason_of,
)
from balance_service.errors import BalanceServiceError, InvalidInputError
from balance_service.http.access.authorization import CLIENT
from balance_service.http.access.clients import Scope
from balance_service.http.answer import Problem, exact_json_response, json_response, unavailable
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.requests import (
    POSITION_PATTERN,
    JsonBody,
    Limit,
    Parameters,
    Partial,
    Partitions,
    Position,
    formed,
    numbers,
)
from balance_service.http.route import (
    MISDIRECTED,
    Count,
    RequestBody,
    Response,
    Route,
    Tag,
    Time,
    closed,
    ok,
    problem,
    retry_later,
)
from balance_service.http.server.ahead_of_aiohttp import ending_with
from balance_service.http.shares import asker_of
from balance_service.http.stage_dead_letters import UNREACHABLE, StageDeadLetters
from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp import web

_DEFAULT_LETTERS = 100
_MISDIRECTED, _UNAVAILABLE = 421, 503
_NOT_HERE = "this instance hosts no read model with that stage; ask an instance that does"
_STATUSES = [status.value for status in Status]
Cause = Annotated[
    str,
    # Peers receive it in a URL.
    formed(".{1,200}", "text of 1 to 200 characters"),
    Field(description="List only this cause.", examples=["schema-id-unknown"]),
]
StatusName = Annotated[
    Status,
    formed("|".join(_STATUSES), f"one of {', '.join(_STATUSES)}", Status),
    Field(description="List only this status.", examples=["waiting"]),
]
Reason = Annotated[
    str,
    PlainValidator(
        reason_of,
        json_schema_input_type=Annotated[
            str, Field(pattern=REASON_PATTERN, description="The reason, for later readers.")
        ],
    ),
]
Id = Annotated[
    str,
    Field(
        pattern=LETTER_ID_PATTERN,
        description="The stage, and the partition and offset of the record in its source.",
        examples=["balance/1:42"],
    ),
]


class ListParameters(Parameters):
    model: str | None = Field(None, description="List only this read model.", examples=["balance"])
    cause: Cause | None = None
    status: StatusName | None = None
    after: Annotated[LetterId, PlainValidator(LetterId.parse, json_schema_input_type=Id)] | None = Field(
        None, description="List dead letters after this one: `next` of the previous page.", examples=["balance/1:42"]
    )
    limit: Limit | None = None
    partial: Partial = Field(
        False,
        description="`true`: list those of the partitions that can be read; `missing` names the others.",
    )


class _ForwardedList(Parameters):
    stage: str
    start: Position = Field(alias="from")
    partitions: Partitions


class _ForwardedDecision(Parameters):
    stage: str
    partitions: Partitions
    by: str
    reason: Reason
    offsets: Annotated[list[int], numbers(18, "42,43")]


class IdParameters(Parameters):
    id: Annotated[Id, Field(description="The dead letter's id, percent-encoded.")]


class StageAndRecordParameters(Parameters):
    stage: Annotated[
        str,
        Field(pattern=f"^{STAGE_PATTERN}$", description="The part of the id before the slash.", examples=["balance"]),
    ]
    record: Annotated[
        str,
        Field(pattern=f"^{POSITION_PATTERN}$", description="The part of the id after the slash.", examples=["1:42"]),
    ]


def _checked_ids(given: object) -> object:
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_IDS or not all(type(one) is str for one in given):
        raise InvalidInputError(
            f"ids must be a list of 1 to {MAX_IDS} ids of dead letters; send {DecisionBody.example}"
        )
    for one in given:
        LetterId.parse(one)
    return given


class DecisionBody(JsonBody):
    example: ClassVar[str] = '{"ids": ["balance/1:42"], "reason": "a test event"}'
    # A discarded record is lost: a name that might narrow the selection must not be ignored.
    model_config = ConfigDict(extra="forbid")

    ids: Annotated[list[Id], Field(min_length=1, max_length=MAX_IDS), BeforeValidator(_checked_ids)]
    reason: Reason

    @property
    def letter_ids(self) -> list[LetterId]:
        """The ids, without repetitions."""
        return [*dict.fromkeys(map(LetterId.parse, self.ids))]


class DeadLetters:
    """Handles requests for the dead letters of the stages that this instance hosts."""

    def __init__(self, stages: Mapping[str, StageDeadLetters]) -> None:
        """Args:
        stages: by `Stage.identity`. It may change.
        """
        self._stages = stages

    async def page(self, request: web.Request) -> web.Response:
        """Lists dead letters by stage, partition and offset, a page at a time."""
        given = ListParameters.of(request)
        limit = given.limit or _DEFAULT_LETTERS
        if FORWARDED_HEADER in request.headers:
            return await self._page_for_peer(request, given, limit)
        after, following = given.after, None
        found: list[Any] = []
        missing: list[str] = []
        for name in self._stages_of(given.model):
            if after is not None and name < after.stage:
                continue
            is_here = after is not None and name == after.stage
            start = (after.partition, after.offset + 1) if after is not None and is_here else (0, 0)
            stage = self._stages[name]
            scan = replace(stage.scan, cause=given.cause, status=given.status, start=start, limit=limit - len(found))
            with ending_with(request):
                page, following, lacking = await stage.page(scan, asker_of(request), is_partial=given.partial)
            found += page
            missing += [f"{name}/{partition}" for partition in lacking]
            if following is not None or len(found) == limit:
                break
        if following is None and len(found) == limit:
            # Another stage may have more.
            following = found[-1]["id"]
        return json_response({"deadLetters": found, "next": following, "missing": missing})

    async def _page_for_peer(self, request: web.Request, given: ListParameters, limit: int) -> web.Response:
        forwarded = _ForwardedList.of(request)
        stage = self._hosted(forwarded.stage)
        scan = replace(stage.scan, cause=given.cause, status=given.status, start=forwarded.start, limit=limit)
        with ending_with(request):
            answer = await stage.scatter.answer_peer(scan, asker_of(request), forwarded.partitions, None)
        return answer.response()

    async def one(self, request: web.Request) -> web.Response:
        """Shows one dead letter, by its id or by the parts of the id before and after the slash."""
        letter_id = LetterId.parse("/".join(request.match_info.values()))
        if letter_id.stage not in self._stages:
            raise Problem(404, f"{letter_id}: {_NOT_HERE}")
        with ending_with(request):
            letter = await self._stages[letter_id.stage].one(letter_id, asker_of(request))
        if letter is None:
            raise Problem(404, NO_LETTER)
        return exact_json_response(letter)

    async def decide(self, request: web.Request, decision: Decision) -> web.Response:
        """Has owners carry out a decision about some dead letters, and reports those that refuse it."""
        if FORWARDED_HEADER in request.headers:
            return await self._decide_for_peer(request, decision)
        given = DecisionBody.of_json(await request.read())
        ids = given.letter_ids
        verdict = Verdict(decision, request.get(CLIENT) or str(request.remote), given.reason)
        by_partition: dict[tuple[str, int], list[int]] = {}
        for letter_id in ids:
            by_partition.setdefault((letter_id.stage, letter_id.partition), []).append(letter_id.offset)
        outcomes = await asyncio.gather(
            *(self._decided(stage, at, offsets, verdict) for (stage, at), offsets in by_partition.items())
        )
        refused = {
            LetterId(*place, offset): why
            for place, outcome in zip(by_partition, outcomes, strict=True)
            for offset, why in outcome.items()
        }
        if len(refused) == len(ids):
            # One that passes by itself, if there is one.
            raise min((_refusal(*one) for one in refused.items()), key=lambda problem: problem.status != _UNAVAILABLE)
        outcome = DecisionOutcome(
            accepted=[str(letter_id) for letter_id in ids if letter_id not in refused],
            refused=[Refusal(id=str(letter_id), reason=why) for letter_id, why in refused.items()],
        )
        return json_response(outcome, status=202)

    async def _decide_for_peer(self, request: web.Request, decision: Decision) -> web.Response:
        given = _ForwardedDecision.of(request)
        stage, (partition, *_) = self._hosted(given.stage), given.partitions
        try:
            refused = await stage.decided_here(partition, given.offsets, Verdict(decision, given.by, given.reason))
        except BalanceServiceError as error:
            raise unavailable(str(error)) from error
        if refused is None:
            raise Problem(_MISDIRECTED, f"{stage.scatter.routing.address} does not own partition {partition}")
        return json_response({"refused": {str(offset): why for offset, why in refused.items()}})

    async def _decided(self, stage: str, partition: int, offsets: Sequence[int], verdict: Verdict) -> Mapping[int, str]:
        if stage not in self._stages:
            return dict.fromkeys(offsets, _NOT_HERE)
        return await self._stages[stage].decided(partition, offsets, verdict)

    def _stages_of(self, model: str | None) -> list[str]:
        """The names of the stages of a read model; None: of all read models. Raises Problem 404."""
        names = [name for name, stage in sorted(self._stages.items()) if model in (None, stage.scan.read_model)]
        if not names:
            raise Problem(404, f"this instance does not host a read model '{str(model)[:100]}'")
        return names

    def _hosted(self, stage: str) -> StageDeadLetters:
        if stage not in self._stages:
            raise Problem(_MISDIRECTED, f"this instance does not host stage '{stage[:100]}'")
        return self._stages[stage]


def _refusal(letter_id: LetterId, why: str) -> Problem:
    detail = f"{letter_id}: {why}"
    if why == UNREACHABLE or why.endswith(TRY_AGAIN):
        return unavailable(detail)
    return Problem(404 if why in (NO_LETTER, NO_PARTITION, _NOT_HERE) else 409, detail)


@closed
class TextHeader(TypedDict):
    name: str
    value: str | None
    """Its value, as text."""


@closed
class BytesHeader(TypedDict):
    name: str
    valueBase64: str
    """Its value, if that is not UTF-8."""


@closed
class DeadLetter(TypedDict):
    id: Id
    model: str
    """The read model."""
    cause: str
    """Why the last attempt to apply the record failed."""
    detail: str
    """What to do about this record, if the cause alone does not say it; else empty."""
    status: Annotated[str, Field(json_schema_extra={"enum": [*_STATUSES]})]
    """What happens to it next."""
    attempt: Count
    """The number of retries so far."""
    recordAt: Time
    """The record's timestamp; null if the topic has deleted the record, or if it is no time before the year 10000."""
    failedAt: Time
    """When the record could not be applied for the first time."""
    dueAt: Time
    """The time of the next retry."""
    redriveRefused: str
    """Why a redrive would be refused; empty if it would not."""
    discardWarning: str
    """Why the record should not be discarded, although it can be; empty if there is no such reason."""
    key: str | None
    """The record's key, as text; null if it has none or the key is not UTF-8."""
    keyBase64: NotRequired[str]
    """The record's key, if it is not UTF-8."""
    headers: list[TextHeader | BytesHeader] | None
    """The record's headers, in order, including repetitions; null if the topic has deleted the record, or if a name is
    not UTF-8."""
    valueBase64: str | None
    """The record's value; null if it has none or the topic has deleted the record."""


@closed
class Decoded(TypedDict):
    record: str
    """The full name of the Avro record; empty if the schema is not one of a record."""
    value: Any
    """The content, by the schema that the producer registered. Numbers have all their digits."""


@closed
class DecodedDeadLetter(DeadLetter):
    decoded: Decoded | None
    """The record's value, if it has one that can be decoded."""
    problem: str
    """Why the value is not decoded; else empty."""


@closed
class DeadLettersPage(TypedDict):
    deadLetters: list[DeadLetter]
    next: str | None
    missing: Annotated[list[str], Field(examples=[["balance/1"]])]
    """The stages and partitions whose dead letters the page lacks; empty unless `partial` is `true`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Struct):
    id: Id
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionOutcome(Struct):
    accepted: list[Id]
    refused: list[Refusal]


_TAG = Tag("dead letters", "Records that could not be applied: for operators.")
_SCOPES = frozenset({Scope.OPERATE})
_EXAMPLE: DeadLetter = {
    "id": "balance/1:42",
    "model": "balance",
    "cause": "schema-id-unknown",
    "detail": "",
    "status": "scheduled",
    "attempt": 0,
    "recordAt": "2026-01-02T02:59:05.012Z",
    "failedAt": "2026-01-02T02:59:05.678Z",
    "redriveRefused": "",
    "discardWarning": "",
    "dueAt": "2026-01-02T03:04:05.678Z",
    "key": "alice",
    "headers": [{"name": "source", "value": "till-7"}, {"name": "signature", "valueBase64": "wyg="}],
    "valueBase64": "AAAAAGMC",
}
_DECODED: DecodedDeadLetter = {
    **_EXAMPLE,
    "decoded": None,
    "problem": "it names schema 99, which the registry does not know",
}
_NONE = problem(404, "There is no such dead letter.", none=("It never existed", NO_LETTER))
_UNREADABLE = retry_later(
    "Some of them cannot be read now.",
    missing=("A partition is changing hands", "no instance could answer for partitions 1"),
)


def _one(name: str, path: str, parameters: type[Parameters]) -> Route:
    return Route(
        name=name,
        path=f"{api.DEAD_LETTERS}/{path}",
        handle=lambda handlers, request: handlers.of(DeadLetters).one(request),
        tag=_TAG,
        scopes=_SCOPES,
        summary="One dead letter",
        description="With the record that could not be applied, as its producer sent it, and decoded if possible.",
        parameters=parameters,
        responses=(
            ok("The dead letter.", DecodedDeadLetter, _DECODED),
            problem(400, "The id is malformed."),
            _NONE,
            _UNREADABLE,
        ),
    )


def _decision(decision: Decision, summary: str, description: str) -> Route:
    return Route(
        name=f"{decision.value}DeadLetters",
        method="POST",
        path=f"{api.DEAD_LETTERS}.{decision.value}",
        handle=lambda handlers, request: handlers.of(DeadLetters).decide(request, decision),
        tag=_TAG,
        scopes=_SCOPES,
        is_forwarded=True,
        summary=summary,
        description=f"{description} The service keeps the decision, who made it, when and why, permanently; it writes "
        "them in the transaction that applies the decision. A repeated request has no further effect.",
        body=RequestBody(
            description="At most 16 KiB of JSON.",
            type=DecisionBody,
            examples={"one": ("One dead letter", {"ids": ["balance/1:42"], "reason": "a test event"})},
        ),
        responses=(
            Response(
                status=202,
                description="Carried out for at least one dead letter; `refused` has the others, with the reasons.",
                type=DecisionOutcome,
                example={"accepted": ["balance/1:42"], "refused": []},
            ),
            problem(400, "The body is not such a JSON object."),
            _NONE,
            problem(
                409,
                "The decision does not apply to any of them.",
                final=(
                    "A permanent cause",
                    "balance/1:42: its cause, frame-missing, never goes away: discard it",
                ),
            ),
            problem(413, "The body has more than 16 KiB."),
            MISDIRECTED,
            retry_later(
                "No instance owns the partition of any of them now, the owner does not respond, or it cannot carry the "
                "decision out for the moment. Send the decision again."
            ),
        ),
    )


DEAD_LETTER_ROUTES = (
    Route(
        name="listDeadLetters",
        path=api.DEAD_LETTERS,
        handle=lambda handlers, request: handlers.of(DeadLetters).page(request),
        tag=_TAG,
        scopes=_SCOPES,
        is_forwarded=True,
        summary="Dead letters",
        description="Of the read models that this instance hosts, by stage, partition and offset; closed ones for "
        "seven days. If few have the cause or status, a page may have fewer than `limit` and still a `next`.",
        parameters=ListParameters,
        responses=(
            ok("A page.", DeadLettersPage, {"deadLetters": [_EXAMPLE], "next": None, "missing": []}),
            problem(400, "A parameter is malformed or repeated."),
            problem(404, "This instance does not host that read model."),
            MISDIRECTED,
            _UNREADABLE,
        ),
    ),
    _one("getDeadLetter", "{id}", IdParameters),
    _one("getDeadLetterOfStage", "{stage}/{record}", StageAndRecordParameters),
    _decision(
        Decision.REDRIVE,
        "Retry dead letters",
        "Their records are retried, usually within 2 s, later while the partition lags.",
    ),
    _decision(Decision.DISCARD, "Discard dead letters", "Their records are never applied, not even after a rebuild."),
    _decision(
        Decision.SET_ASIDE,
        "Set aside records that partitions stand still at",
        "Each becomes a dead letter, undecoded, and its partition goes on behind it. An id names the next record of a "
        "partition, at the task's position or the first behind it. The refusal of any other names the position.",
    ),
)
