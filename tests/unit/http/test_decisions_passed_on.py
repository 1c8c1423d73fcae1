"""Decisions about dead letters that an instance has a peer carry out: what is answered tells what was done."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.decisions import MOST_REASON, Decision, Verdict
from balance_service.errors import RetriableError
from balance_service.http.dead_letters import PATH, StageLetters
from balance_service.http.letter_records import LetterRecords
from balance_service.http.letter_scan import LetterScan
from balance_service.http.scheduling import FairScheduler
from balance_service.http.server.limits import MAX_URL_BYTES
from balance_service.model.keys import TEXT
from tests.support import fakes
from tests.support.querying import PARTITION, Instance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

MANY = range(10**17, 10**17 + 500)
ONE, OTHER = MANY[:2]
STAGE = 249 * "s"
HEART = "\N{BROKEN HEART}"
DISCARD = Verdict(Decision.DISCARD, "alice", "a test")
REDRIVE = DISCARD._replace(decision=Decision.REDRIVE)
NOBODY = "nobody can be asked about its partition now; decide again"


@dataclass
class Owner:
    """Carries decisions out; of each of its first requests it is told what becomes of the answer."""

    letters: dict[int, Status] = field(default_factory=lambda: dict.fromkeys(MANY, Status.WAITING))
    answers: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """How many letters each request was about."""
    urls: list[int] = field(default_factory=list)
    """How long its URL was."""

    def decide(self, _partition: int, offsets: Sequence[int], verdict: Verdict) -> dict[int, str]:
        known = {at: letter(at, self.letters[at]) if at in self.letters else None for at in offsets}
        refused = {at: why for at, of in known.items() if (why := verdict.refusal(of)) is not None}
        # What is redriven is applied at once.
        status = Status.DISCARDED if verdict.decision is Decision.DISCARD else Status.APPLIED
        self.letters |= dict.fromkeys(set(offsets) - refused.keys(), status)
        return refused

    async def handle(self, request: web.Request) -> web.Response:
        becomes = self.answers.pop(0) if self.answers else "arrives"
        verdict = Verdict(Decision(request.path.rpartition(".")[2]), request.query["by"], request.query["reason"])
        offsets = [int(offset) for offset in request.query["offsets"].split(",")]
        self.asked.append(len(offsets))
        self.urls.append(len(request.raw_path))
        if becomes == "not the owner":
            return web.json_response({}, status=421)
        refused = self.decide(int(request.query["partitions"]), offsets, verdict)
        if becomes == "is lost":
            assert request.transport is not None
            request.transport.abort()
        if becomes == "says that it took too long":
            return web.json_response({}, status=503)
        if becomes == "is of another form":
            return web.json_response([])
        return web.json_response({"refused": {str(offset): why for offset, why in refused.items()}})

    def app(self) -> web.Application:
        app = web.Application()
        for decision in Decision:
            app.router.add_post(f"{PATH}.{decision.value}", self.handle)
        return app


def letter(offset: int, status: Status) -> Letter:
    return Letter(offset, "schema-id-unknown", status, 0, 0, -1, None)


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path / "store", owns=False, timeout_seconds=10.0)


def decided(
    instance: Instance,
    owner: Owner,
    verdict: Verdict = DISCARD,
    offsets: Sequence[int] = MANY,
    decide: Callable[..., Mapping[int, str]] | None = None,
) -> Mapping[int, str]:
    """Why a decision was refused, by offset, after an instance has had it carried out."""

    async def run() -> Mapping[int, str]:
        nothing: Any = None
        scatter = instance.scatter("/api")
        stage = StageLetters(
            scan=LetterScan(stage=STAGE, read_model="balance", key_type=TEXT, letters=fakes.letters()),
            scatter=scatter,
            records=LetterRecords(records=nothing, scheduler=FairScheduler("scan"), timeout_seconds=1.0),
            decide=decide or owner.decide,
        )
        async with TestServer(owner.app()) as server:
            instance.hear_of_owner(f"127.0.0.1:{server.port}")
            try:
                return await stage.decided(PARTITION, offsets, verdict)
            finally:
                await scatter.proxy.close()

    return asyncio.run(run())


@pytest.mark.parametrize("becomes", ["is lost", "says that it took too long", "is of another form"])
def test_what_was_carried_out_is_not_told_as_refused_where_the_answer_is_lost(instance: Instance, becomes: str) -> None:
    owner = Owner(answers=[becomes])

    assert decided(instance, owner, offsets=[ONE]) == {}
    assert owner.letters[ONE] is Status.DISCARDED


@pytest.mark.parametrize("becomes", ["is lost", "says that it took too long", "not the owner"])
def test_what_an_owner_has_answered_for_is_not_asked_again(instance: Instance, becomes: str) -> None:
    owner = Owner(answers=["arrives", becomes])

    assert decided(instance, owner) == {}
    assert set(owner.letters.values()) == {Status.DISCARDED}
    first, again, *_ = owner.asked
    assert sum(owner.asked) == len(MANY) + again
    assert first < len(MANY)


def test_what_is_not_carried_out_in_the_end_is_told_by_itself(instance: Instance) -> None:
    owner = Owner(answers=["arrives", "not the owner", "not the owner"])

    refused = decided(instance, owner)

    assert set(refused.values()) == {NOBODY}
    assert [at for at in MANY if at not in refused] == [at for at in MANY if owner.letters[at] is Status.DISCARDED]
    assert 0 < len(refused) < len(MANY)


def test_a_decision_of_the_longest_kind_is_passed_on_in_requests_that_are_not_too_long(instance: Instance) -> None:
    by, reason = f"jwt:{HEART * 64}", HEART * MOST_REASON
    owner = Owner()

    assert decided(instance, owner, DISCARD._replace(by=by, reason=reason)) == {}
    assert set(owner.letters.values()) == {Status.DISCARDED}
    assert sum(owner.asked) == len(MANY)
    assert MAX_URL_BYTES / 2 < max(owner.urls) <= MAX_URL_BYTES


@pytest.mark.parametrize("answers", [[], ["not the owner"]])
def test_what_was_discarded_before_is_refused(instance: Instance, answers: list[str]) -> None:
    owner = Owner(answers=answers)
    owner.letters[ONE] = Status.DISCARDED

    assert decided(instance, owner, offsets=[ONE, OTHER]) == {ONE: "it is discarded already"}
    assert owner.letters[OTHER] is Status.DISCARDED


def test_what_was_applied_before_is_refused_even_where_an_answer_is_lost(instance: Instance) -> None:
    owner = Owner(answers=["is lost"])
    owner.letters[ONE] = Status.APPLIED

    assert decided(instance, owner, DISCARD, offsets=[ONE]) == {ONE: "it is applied already"}


def test_what_is_redriven_and_applied_before_it_is_asked_for_again_is_not_told_as_refused(instance: Instance) -> None:
    owner = Owner(answers=["is lost"])

    # It is applied at once, so the second answer says that it is closed.
    assert decided(instance, owner, REDRIVE, offsets=[ONE]) == {}
    assert owner.letters[ONE] is Status.APPLIED


def test_what_is_written_here_though_its_commit_seemed_to_fail_is_not_told_as_refused(instance: Instance) -> None:
    instance.owns = True
    owner = Owner()
    failures = [RetriableError("the decision is written, and the store lacks it")]

    def decide(partition: int, offsets: Sequence[int], verdict: Verdict) -> Mapping[int, str]:
        refused = owner.decide(partition, offsets, verdict)
        if failures:
            raise failures.pop()
        return refused

    owner.answers = ["not the owner"]
    assert decided(instance, owner, offsets=[ONE], decide=decide) == {}
    assert owner.letters[ONE] is Status.DISCARDED
