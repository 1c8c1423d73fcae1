"""Dead letters over HTTP: what there are, on all instances, and what operators decide about them.

A decision is carried out by the instance that owns the letter's partition, in one transaction with the record of it.
Any instance takes it, and passes it on. Taken twice it is as if taken once: what is closed stays closed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from balance_service.engine.decisions import NO_LETTER, Decision, LetterId, Verdict, closed_already
from balance_service.errors import (
    BalanceServiceError,
    NotAuthorizedError,
    RetriableError,
    StoreFullError,
    TaskMigratedError,
)
from balance_service.http.access.authorization import CLIENT
from balance_service.http.answer import Problem, compact_json, unavailable
from balance_service.http.bodies import decision
from balance_service.http.given import Given
from balance_service.http.letter_parameters import (
    AFTER_LETTER,
    CAUSE,
    LETTERS_FROM,
    OF_MODEL,
    OFFSETS,
    STAGE,
    STATUS,
    VERDICT_BY,
    VERDICT_REASON,
)
from balance_service.http.parameters import LIMIT, PARTITIONS
from balance_service.http.peers.proxy import split_to_fit
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.scatter import MALFORMED
from balance_service.http.scheduling import asker_of
from balance_service.http.server.ahead_of_aiohttp import ending_with

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balance_service.http.letter_records import LetterRecords
    from balance_service.http.letter_scan import LetterScan
    from balance_service.http.peers.trust import Peer
    from balance_service.http.scatter import Scatter
    from balance_service.http.scheduling import Asker

PATH = "/api/deadLetters"
_DEFAULT_LETTERS = 100
_ATTEMPTS = 2
_AGAIN_SECONDS = 0.3
_MISDIRECTED = 421
_NOT_HERE = "this instance hosts no read model with that stage; ask one that does"
_NOBODY = "nobody can be asked about its partition now; decide again"

Decide = Callable[[int, Sequence[int], Verdict], Mapping[int, str]]
"""Partition, offsets, verdict → by offset, why a decision makes no sense; the rest is done. Takes long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLetters:
    """The dead letters of one stage: `scan` without a place or a condition; `decide` for partitions owned here."""

    scan: LetterScan
    scatter: Scatter
    records: LetterRecords
    decide: Decide

    async def one(self, letter_id: LetterId, asker: Asker) -> Mapping[str, Any] | None:
        """A letter; None if there is none. Raises Problem 503."""
        scan = replace(self.scan, start=(letter_id.partition, letter_id.offset), limit=1)
        if letter_id.partition >= self.scatter.partitions:
            return None
        found, _ = await self._told(scan, asker, [letter_id.partition])
        letters = [one for one in found if one["id"] == str(letter_id)]
        return next(iter(await self.records.added_to(letters, asker)), None)

    async def page(self, scan: LetterScan, asker: Asker) -> tuple[list[dict[str, Any]], str | None]:
        """Letters with their records, and the id after which to go on, if there are more. Raises Problem 503."""
        found, following = await self._told(scan, asker)
        letters = await self.records.added_to(found, asker)
        return letters, letters[-1]["id"] if len(letters) < len(found) else following

    async def _told(
        self, scan: LetterScan, asker: Asker, partitions: Iterable[int] | None = None
    ) -> tuple[list[Any], str | None]:
        page = json.loads((await self.scatter.answer("deadLetters", scan, asker, partitions=partitions)).body)
        return page["deadLetters"], page["next"]

    async def decided(self, partition: int, offsets: Sequence[int], verdict: Verdict) -> Mapping[int, str]:
        """Have a decision carried out by whoever owns the partition; by offset, why it was not."""
        if partition >= self.scatter.partitions:
            return dict.fromkeys(offsets, NO_LETTER)
        deadline = time.monotonic() + self.scatter.timeout_seconds
        outcome = _Outcome(offsets, verdict)
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_AGAIN_SECONDS)
            try:
                refused = await self.decided_here(partition, outcome.left, verdict)
            except BalanceServiceError:
                outcome.unknown(outcome.left)
                refused = None
            if refused is None:
                await self._decided_there(partition, outcome, deadline)
            else:
                outcome.told(outcome.left, refused)
            if not outcome.left:
                break
        return outcome.refused | dict.fromkeys(outcome.left, _NOBODY)

    async def decided_here(self, partition: int, offsets: Sequence[int], verdict: Verdict) -> Mapping[int, str] | None:
        """By this instance; None if it does not own the partition.

        Raises:
            BalanceServiceError: it may have been carried out, or not.
        """
        copy = self.scatter.routing.copy(partition)
        if copy is None or not self.scatter.routing.is_owned(copy):
            return None
        try:
            return await asyncio.to_thread(self.decide, partition, offsets, verdict)
        except (NotAuthorizedError, StoreFullError) as error:
            return dict.fromkeys(offsets, str(error))
        except TaskMigratedError:
            return None

    async def _decided_there(self, partition: int, outcome: _Outcome, deadline: float) -> None:
        """By the peer that owns the partition, as far as there is one and it answers."""
        routing = self.scatter.routing
        for peer, seconds, _ in routing.in_turn(partition, deadline, takes_standbys=False):
            if await self._decided_by(peer, partition, outcome, time.monotonic() + seconds):
                routing.believe(partition, peer)
                return
            routing.doubt(partition, peer)

    async def _decided_by(self, peer: Peer, partition: int, outcome: _Outcome, deadline: float) -> bool:
        """Whether a peer has answered for all that was left."""
        verdict = outcome.verdict
        path = f"{PATH}.{verdict.decision.value}"
        told = {"stage": self.scan.stage, "partitions": str(partition), "by": verdict.by, "reason": verdict.reason}
        for asked, parameters in split_to_fit("offsets", outcome.left, path, told):
            left = max(0.0, deadline - time.monotonic())
            try:
                answer = await self.scatter.proxy.get(peer, path, parameters, self.scatter.address, left, method="POST")
            except RetriableError:
                outcome.unknown(asked)
                return False
            if answer.status != 200:
                if answer.status != _MISDIRECTED:
                    outcome.unknown(asked)
                return False
            try:
                refused = {int(offset): str(why) for offset, why in json.loads(answer.body)["refused"].items()}
            except MALFORMED:
                outcome.unknown(asked)
                return False
            outcome.told(asked, refused)
        return True


class _Outcome:
    """What has become of a decision about letters of one partition, while one owner or another is asked.

    An owner that did not answer may have carried it out. What is then found closed as the decision closes it counts as
    carried out.
    """

    def __init__(self, offsets: Sequence[int], verdict: Verdict) -> None:
        self.verdict = verdict
        self.left = list(offsets)
        """Those for which no owner has answered."""
        self.refused: dict[int, str] = {}
        """By offset, why it was not carried out."""
        self._unknown: set[int] = set()
        self._is_done = closed_already(verdict.decision.closes_as)

    def told(self, offsets: Sequence[int], refused: Mapping[int, str]) -> None:
        """An owner has answered for some, and says which it has refused."""
        for offset in offsets:
            why = refused.get(offset)
            if why is not None and not (offset in self._unknown and why == self._is_done):
                self.refused[offset] = why
        self.left = [offset for offset in self.left if offset not in offsets]

    def unknown(self, offsets: Sequence[int]) -> None:
        """An owner was asked about some, and nobody knows what it did."""
        self._unknown.update(offsets)


class DeadLetters:
    """Answers for the dead letters of the stages that this instance hosts."""

    def __init__(self, stages: Mapping[str, StageLetters]) -> None:
        self._stages = dict(sorted(stages.items()))

    async def page(self, request: web.Request) -> web.Response:
        """Letters, by stage, partition and offset, a page at a time."""
        given = Given(request)
        cause, status, limit = given.optional(CAUSE), given.optional(STATUS), given.optional(LIMIT) or _DEFAULT_LETTERS
        if FORWARDED_HEADER in request.headers:
            stage = self._of(given.required(STAGE))
            start = given.required(LETTERS_FROM)
            scan = replace(stage.scan, cause=cause, status=status, start=start, limit=limit)
            partitions = given.required(PARTITIONS)
            with ending_with(request):
                return (await stage.scatter.answer_peer(scan, asker_of(request), partitions, None)).response()
        after, following = given.optional(AFTER_LETTER), None
        found: list[Any] = []
        for name in self._named(given.optional(OF_MODEL)):
            if after is not None and name < after.stage:
                continue
            is_here = after is not None and name == after.stage
            start = (after.partition, after.offset + 1) if after is not None and is_here else (0, 0)
            stage = self._stages[name]
            scan = replace(stage.scan, cause=cause, status=status, start=start, limit=limit - len(found))
            with ending_with(request):
                page, following = await stage.page(scan, asker_of(request))
            found += page
            if following is not None or len(found) == limit:
                break
        if following is None and len(found) == limit:
            # Another stage may have more.
            following = found[-1]["id"]
        return web.json_response({"deadLetters": found, "next": following}, dumps=compact_json)

    async def one(self, request: web.Request) -> web.Response:
        """One letter, by its id, or by what comes before and after the slash in it."""
        letter_id = LetterId.parse("/".join(request.match_info.values()))
        if letter_id.stage not in self._stages:
            raise Problem(404, f"{letter_id}: {_NOT_HERE}")
        with ending_with(request):
            letter = await self._stages[letter_id.stage].one(letter_id, asker_of(request))
        if letter is None:
            raise Problem(404, NO_LETTER)
        return web.json_response(letter, dumps=compact_json)

    async def decide(self, request: web.Request, made: Decision) -> web.Response:
        """Carry out a decision about some letters, and say which it was refused for."""
        if FORWARDED_HEADER in request.headers:
            return await self._decide_for_peer(request, made)
        ids, reason = decision(await request.read())
        verdict = Verdict(made, request.get(CLIENT) or str(request.remote), reason)
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
            letter_id, why = next(iter(refused.items()))
            raise _refusal(letter_id, why)
        body = {
            "accepted": [str(letter_id) for letter_id in ids if letter_id not in refused],
            "refused": [{"id": str(letter_id), "reason": why} for letter_id, why in refused.items()],
        }
        return web.json_response(body, status=202, dumps=compact_json)

    async def _decide_for_peer(self, request: web.Request, made: Decision) -> web.Response:
        given = Given(request)
        stage, (partition, *_) = self._of(given.required(STAGE)), given.required(PARTITIONS)
        verdict = Verdict(made, given.required(VERDICT_BY), given.required(VERDICT_REASON))
        offsets = given.required(OFFSETS)
        try:
            refused = await stage.decided_here(partition, offsets, verdict)
        except BalanceServiceError as error:
            raise unavailable(str(error)) from error
        if refused is None:
            raise Problem(_MISDIRECTED, f"{stage.scatter.address} does not own partition {partition}")
        return web.json_response({"refused": {str(offset): why for offset, why in refused.items()}}, dumps=compact_json)

    async def _decided(self, stage: str, partition: int, offsets: Sequence[int], verdict: Verdict) -> Mapping[int, str]:
        if stage not in self._stages:
            return dict.fromkeys(offsets, _NOT_HERE)
        return await self._stages[stage].decided(partition, offsets, verdict)

    def _named(self, model: str | None) -> list[str]:
        """The stages of a read model, or all."""
        names = [name for name, stage in self._stages.items() if model in (None, stage.scan.read_model)]
        if not names:
            raise Problem(404, f"this instance does not host a read model '{str(model)[:100]}'")
        return names

    def _of(self, stage: str) -> StageLetters:
        if stage not in self._stages:
            raise Problem(_MISDIRECTED, f"this instance does not host stage '{stage[:100]}'")
        return self._stages[stage]


def _refusal(letter_id: LetterId, why: str) -> Problem:
    detail = f"{letter_id}: {why}"
    if why == _NOBODY:
        return unavailable(detail)
    return Problem(404 if why in (NO_LETTER, _NOT_HERE) else 409, detail)
