"""Dead letters of a stage: pages that fit an answer of a peer, and decisions that peers carry out."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request

from balance_service import api
from balance_service.avro.codec import AvroCodec
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.decisions import MAX_REASON_CHARACTERS, Decision, LetterId, Verdict
from balance_service.engine.records import MISPLACED, Position
from balance_service.errors import RetriableError
from balance_service.http.answer import Problem, exact_json_response
from balance_service.http.dead_letters import DeadLetters
from balance_service.http.peers.connections import MAX_BODY_BYTES
from balance_service.http.routing import LocalCopy
from balance_service.http.scheduling import FairScheduler
from balance_service.http.server.limits import MAX_URL_BYTES
from balance_service.http.stage_dead_letters import UNREACHABLE, DeadLetterScan, SourceRecords, StageDeadLetters
from balance_service.model.keys import TEXT, ColumnKey, CompositeKey
from balance_service.model.record_keys import RecordKey
from tests.support import fakes
from tests.support.fakes import FakeRegistry
from tests.support.querying import ASKER, PARTITION, Instance, read_to_its_end

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from unittest.mock import Mock

MANY = range(10**17, 10**17 + 500)
ONE, OTHER = MANY[:2]
STAGE = 249 * "s"
HEART = "\N{BROKEN HEART}"
DISCARD = Verdict(Decision.DISCARD, "alice", "a test")
REDRIVE = DISCARD._replace(decision=Decision.REDRIVE)
LONGEST = 64 << 10
FORTY = 40
NUMBER = ColumnKey("n", is_number=True)
COMPOSITE = CompositeKey((ColumnKey("card", is_number=False), ColumnKey("day", is_number=True)))


@dataclass
class Owner:
    """Carries out decisions. `answers` says what happens to its first answers."""

    letters: dict[int, Status] = field(default_factory=lambda: dict.fromkeys(MANY, Status.WAITING))
    answers: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """The number of dead letters in each request."""
    urls: list[int] = field(default_factory=list)
    """The length of each request's URL."""

    def decide(self, _partition: int, offsets: Sequence[int], verdict: Verdict) -> dict[int, str]:
        known = {at: letter(at, self.letters[at]) if at in self.letters else None for at in offsets}
        refused = {at: why for at, of in known.items() if (why := verdict.refusal(of)) is not None}
        # A redriven record is applied at once.
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
            app.router.add_post(f"{api.DEAD_LETTERS}.{decision.value}", self.handle)
        return app


def letter(offset: int, status: Status) -> Letter:
    return Letter(offset, "schema-id-unknown", status, 0, 0, -1, None)


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path / "store", owns=False, timeout_seconds=10.0)


def source_records(registry: Any) -> SourceRecords:
    nothing: Any = None
    return SourceRecords(records=nothing, registry=registry, scheduler=FairScheduler("scan"), timeout_seconds=1.0)


def decided(
    instance: Instance,
    owner: Owner,
    verdict: Verdict = DISCARD,
    offsets: Sequence[int] = MANY,
    decide: Callable[..., Mapping[int, str]] | None = None,
) -> Mapping[int, str]:
    """The reasons for refusals, by offset, of a decision that an instance forwards."""

    async def run() -> Mapping[int, str]:
        scatter = instance.scatter("/api")
        stage = StageDeadLetters(
            scan=DeadLetterScan(stage=STAGE, read_model="balance", key_type=TEXT, letters=fakes.letters()),
            scatter=scatter,
            records=source_records(None),
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
def test_a_decision_is_accepted_although_the_answer_to_the_first_request_is_lost(
    instance: Instance, becomes: str
) -> None:
    owner = Owner(answers=[becomes])

    assert decided(instance, owner, offsets=[ONE]) == {}
    assert owner.letters[ONE] is Status.DISCARDED


@pytest.mark.parametrize("becomes", ["is lost", "says that it took too long", "not the owner"])
def test_dead_letters_with_an_answer_are_not_sent_again(instance: Instance, becomes: str) -> None:
    owner = Owner(answers=["arrives", becomes])

    assert decided(instance, owner) == {}
    assert set(owner.letters.values()) == {Status.DISCARDED}
    first, again, *_ = owner.asked
    assert sum(owner.asked) == len(MANY) + again
    assert first < len(MANY)


def test_only_dead_letters_without_an_answer_are_reported_as_unreachable(instance: Instance) -> None:
    owner = Owner(answers=["arrives", "not the owner", "not the owner"])

    refused = decided(instance, owner)

    assert set(refused.values()) == {UNREACHABLE}
    assert [at for at in MANY if at not in refused] == [at for at in MANY if owner.letters[at] is Status.DISCARDED]
    assert 0 < len(refused) < len(MANY)


def test_the_longest_decision_is_forwarded_in_requests_within_the_limit_of_a_url(instance: Instance) -> None:
    by, reason = f"jwt:{HEART * 64}", HEART * MAX_REASON_CHARACTERS
    owner = Owner()

    assert decided(instance, owner, DISCARD._replace(by=by, reason=reason)) == {}
    assert set(owner.letters.values()) == {Status.DISCARDED}
    assert sum(owner.asked) == len(MANY)
    assert MAX_URL_BYTES / 2 < max(owner.urls) <= MAX_URL_BYTES


@pytest.mark.parametrize("answers", [[], ["not the owner"]])
def test_a_second_discard_is_refused(instance: Instance, answers: list[str]) -> None:
    owner = Owner(answers=answers)
    owner.letters[ONE] = Status.DISCARDED

    assert decided(instance, owner, offsets=[ONE, OTHER]) == {ONE: "it is discarded already"}
    assert owner.letters[OTHER] is Status.DISCARDED


def test_a_discard_of_an_applied_record_is_refused_although_an_answer_is_lost(instance: Instance) -> None:
    owner = Owner(answers=["is lost"])
    owner.letters[ONE] = Status.APPLIED

    assert decided(instance, owner, DISCARD, offsets=[ONE]) == {ONE: "it is applied already"}


def test_a_redrive_is_accepted_although_its_record_is_applied_before_the_second_request(instance: Instance) -> None:
    owner = Owner(answers=["is lost"])

    # The record is applied at once, so the second answer reports a closed dead letter.
    assert decided(instance, owner, REDRIVE, offsets=[ONE]) == {}
    assert owner.letters[ONE] is Status.APPLIED


def test_a_decision_is_accepted_although_its_commit_here_seemed_to_fail(instance: Instance) -> None:
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


class Kept:
    """Dead letters, as a store returns them."""

    def __init__(self, keys: Sequence[bytes | None]) -> None:
        self._letters = [Letter.first(offset, "key-malformed", key, 0, 1) for offset, key in enumerate(keys)]

    def page(self, _view: object, start: int, limit: int) -> list[Letter]:
        return self._letters[start : start + limit]


@pytest.mark.parametrize(
    "keys",
    [
        FORTY * [LONGEST * b"\xff"],
        FORTY * [LONGEST * b"\0"],
        FORTY * [LONGEST * b"k"],
        FORTY * [b"k", LONGEST * b"\xff"],
    ],
    ids=["no text", "control characters", "text", "some are long"],
)
def test_a_page_of_dead_letters_with_long_keys_fits_an_answer_of_a_peer(keys: Sequence[bytes]) -> None:
    kept: Any = Kept(keys)
    # The scan reads only dead letters.
    nothing: Any = None
    copy = LocalCopy(0, nothing, nothing, Position(0, 1, "id"), was_owned=True, is_frozen=False)
    found: list[str] = []
    start, is_last = 0, False
    while not is_last:
        scan = DeadLetterScan(stage="s", read_model="m", key_type=TEXT, letters=kept, start=(0, start), limit=1000)
        page = read_to_its_end(scan.read([copy], nothing))
        assert len(scan.encode(page)) <= MAX_BODY_BYTES
        found += [letter["id"] for letter in page.letters]
        is_last = page.next is None
        start = 0 if page.next is None else LetterId.parse(page.next).offset + 1

    assert found == [f"s/0:{offset}" for offset in range(len(keys))]


@pytest.mark.parametrize(
    ("key_type", "key", "shown"),
    [
        (TEXT, "Zoë".encode(), {"key": "Zoë"}),
        (TEXT, b"", {"key": ""}),
        (TEXT, None, {"key": None}),
        (TEXT, "\ufffd".encode(), {"key": "\ufffd"}),
        (TEXT, bytes.fromhex("40ff00c3"), {"key": None, "keyBase64": "QP8Aww=="}),
        (NUMBER, NUMBER.encode(-7), {"key": "-7"}),
        (NUMBER, b"\xff", {"key": None, "keyBase64": "/w=="}),
        (COMPOSITE, COMPOSITE.parse("card=a%26b&day=-7"), {"key": "card=a%26b&day=-7"}),
        (COMPOSITE, b"\xff", {"key": None, "keyBase64": "/w=="}),
        (RecordKey.of_format("long"), b"\xff" * 8, {"key": "-1"}),
        (RecordKey.of_format("long"), b"\xff", {"key": None, "keyBase64": "/w=="}),
    ],
)
def test_a_key_is_shown_as_text_or_as_base64(key_type: Any, key: Any, shown: dict[str, Any]) -> None:
    kept: Any = Kept([key])
    nothing: Any = None
    copy = LocalCopy(0, nothing, nothing, Position(0, 1, "id"), was_owned=True, is_frozen=False)
    scan = DeadLetterScan(stage="s", read_model="m", key_type=key_type, letters=kept)

    (letter,) = read_to_its_end(scan.read([copy], nothing)).letters

    assert {name: letter[name] for name in ("key", "keyBase64") if name in letter} == shown


def scanned(*letters: Letter) -> list[dict[str, Any]]:
    """Dead letters as a scan shows them, without their records."""
    kept: Any = SimpleNamespace(page=lambda _view, start, limit: [*letters][start : start + limit])
    nothing: Any = None
    copy = LocalCopy(0, nothing, nothing, Position(0, 1, "id"), was_owned=True, is_frozen=False)
    scan = DeadLetterScan(stage="s", read_model="m", key_type=TEXT, letters=kept)
    return [dict(letter) for letter in read_to_its_end(scan.read([copy], nothing)).letters]


def test_a_dead_letter_tells_when_it_failed_first_and_what_is_against_a_redrive_or_a_discard() -> None:
    final = Letter.first(0, "key-null", None, 1_767_225_600_000, 1)
    waiting = Letter.first(1, "schema-incompatible", b"k", 1_767_225_600_000, 1)
    again = waiting.failed_again("schema-incompatible", 1_767_225_699_000, 1)
    misplaced = Letter.first(2, MISPLACED, b"k", 1_767_225_600_000, 1)
    closed = Letter.first(3, MISPLACED, b"k", 1_767_225_600_000, 1).closed(Status.DISCARDED, 1_767_225_700_000)

    shown = scanned(final, again, misplaced, closed)

    assert [one["failedAt"] for one in shown[:3]] == ["2026-01-01T00:00:00.000Z"] * 3
    refused = [one["redriveRefused"] for one in shown]
    assert refused[:2] == ["its cause, key-null, never goes away: discard it", ""]
    assert refused[2].startswith("only a rebuild with another partitioner can apply it")
    warnings = [one["discardWarning"] for one in shown]
    assert warnings[:2] == ["", ""]
    assert warnings[2].startswith("discard it only if its event was produced again")
    assert warnings[3] == ""


@pytest.mark.parametrize(
    ("timestamp", "shown"),
    [
        ((1, 1_767_225_600_123), "2026-01-01T00:00:00.123Z"),
        ((2, 0), "1970-01-01T00:00:00.000Z"),
        ((0, -1), None),
        # In nanoseconds.
        ((1, 1_767_225_600_123_000_000), None),
    ],
)
def test_a_dead_letter_has_the_time_of_its_record(timestamp: tuple[int, int], shown: str | None) -> None:
    record = SimpleNamespace(value=lambda: b"x", headers=list, timestamp=lambda: timestamp)
    nothing: Any = None
    records = SourceRecords(
        records=lambda *_: ([1], {1: record}),  # type: ignore[arg-type]
        registry=nothing,
        scheduler=FairScheduler("scan"),
        timeout_seconds=9.0,
    )

    (found,) = asyncio.run(records.added_to([{"id": "balance/0:1"}], ASKER))

    assert found["recordAt"] == shown


def test_a_dead_letter_whose_record_is_gone_has_no_time() -> None:
    nothing: Any = None
    records = SourceRecords(
        records=lambda *_: ([1], {}), registry=nothing, scheduler=FairScheduler("scan"), timeout_seconds=9.0
    )

    (found,) = asyncio.run(records.added_to([{"id": "balance/0:1"}], ASKER))

    assert (found["recordAt"], found["valueBase64"]) == (None, None)


def decoded(registry: Any, value: bytes | None, headers: Sequence[Mapping[str, Any]] | None = ()) -> dict[str, Any]:
    """The decoded content of a dead letter, and the reason if there is none."""
    content = None if value is None else base64.b64encode(value).decode()
    given = {"id": "balance/0:1", "headers": headers, "valueBase64": content}
    found = asyncio.run(source_records(registry).decoded(given, ASKER))
    return {name: found[name] for name in ("decoded", "problem")}


def test_a_list_whose_records_cannot_be_read_says_why() -> None:
    def read(*_: object) -> Any:
        raise RetriableError("Kafka at b:9092 does not answer")

    nothing: Any = None
    records = SourceRecords(records=read, registry=nothing, scheduler=FairScheduler("scan"), timeout_seconds=9.0)
    with pytest.raises(Problem, match="cannot be read now: Kafka at b:9092 does not answer"):
        asyncio.run(records.added_to([{"id": "balance/0:1"}], ASKER))


def asked(query: str) -> web.Request:
    request = make_mocked_request("GET", f"{api.DEAD_LETTERS}{query}")
    cast("Mock", request.match_info.route).configure_mock(**{"resource.canonical": api.DEAD_LETTERS})
    return request


def test_a_page_may_lack_partitions_that_no_instance_reads_and_names_them(instance: Instance) -> None:
    async def run() -> tuple[dict[str, Any], int]:
        scatter = instance.scatter("/api")
        scan = DeadLetterScan(stage="balance", read_model="balance", key_type=TEXT, letters=fakes.letters())
        nothing: Any = None
        stage = StageDeadLetters(scan=scan, scatter=scatter, records=source_records(None), decide=nothing)
        letters = DeadLetters({"balance": stage})
        try:
            with pytest.raises(Problem, match="no instance could answer for partitions"):
                await letters.page(asked(""))
            page = await letters.page(asked("?partial=true"))
            return json.loads(page.text or ""), scatter.partitions
        finally:
            await scatter.proxy.close()

    page, partitions = asyncio.run(run())
    assert page == {"deadLetters": [], "next": None, "missing": [f"balance/{n}" for n in range(partitions)]}


def test_a_record_is_decoded_by_the_schema_of_its_producer_with_all_digits() -> None:
    registry = FakeRegistry()
    written = {"customerType": "PRIME", "amount": Decimal("9007199254740993.01")}
    amount = {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 2}
    fields = [{"name": "customerType", "type": "string"}, {"name": "amount", "type": amount}]
    schema = {"type": "record", "name": "of.a.till.Sale", "fields": fields}
    frame = AvroCodec(registry, "sales", schema).encode(written)

    found = decoded(registry, frame, [{"name": "source", "value": "till"}, {"name": "raw", "valueBase64": "wyg="}])

    assert found == {"decoded": {"record": "of.a.till.Sale", "value": written}, "problem": ""}
    assert b"9007199254740993.01" in exact_json_response(found).body  # type: ignore[operator]


def test_a_record_that_cannot_be_decoded_has_the_reason() -> None:
    assert decoded(FakeRegistry(), b"garbage") == {
        "decoded": None,
        "problem": "a record's frame starts with 103, not 0",
    }
    assert "99" in decoded(FakeRegistry(), b"\0\0\0\0\x63xx")["problem"]
    assert decoded(FakeRegistry(), None, None) == {"decoded": None, "problem": ""}


def test_a_registry_that_does_not_answer_leaves_the_dead_letter_without_its_decoded_record() -> None:
    class Silent:
        def writer_schema(self, _schema_id: int) -> None:
            raise RetriableError("the registry does not answer")

    assert decoded(Silent(), b"\0\0\0\0\x63xx") == {"decoded": None, "problem": "the registry does not answer"}
