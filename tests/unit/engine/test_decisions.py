"""Operators' decisions: which are allowed, and the topic that keeps them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.engine.dead_letter import Letter, Status, is_final
from balance_service.engine.decisions import Decision, DecisionLog, LetterId, Verdict
from balance_service.errors import InvalidInputError
from balance_service.kafka import log_reader
from balance_service.kafka.signing import ControlRecords, SharedSecret
from balance_service.kafka.topics import Topic
from balance_service.settings import load_settings
from tests.support.fakes import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.engine.records import Output

EVERY_MS = 300_000
OPEN_AT, OURS_AT, END = 100, 101, 103


def refusal(decision: Decision, letter: Letter | None) -> str | None:
    return Verdict(decision, "me", "why").refusal(letter)


def test_a_misplaced_record_is_not_redriven_and_its_refusal_names_the_way_to_apply_it() -> None:
    letter = Letter.first(42, "key-not-of-this-partition", b"k", 0, EVERY_MS, "declare crc32")

    assert refusal(Decision.REDRIVE, letter) == (
        "only a rebuild with another partitioner can apply it (declare crc32); if the present one is right, discard it"
    )
    assert refusal(Decision.DISCARD, letter) is None


@pytest.mark.parametrize(
    "cause", ["key-null", "frame-missing", "body-undecodable", "key-is-not-customer-id", "customer-id-malformed"]
)
def test_a_record_with_a_final_cause_can_be_discarded_but_not_redriven(cause: str) -> None:
    letter = Letter.first(42, cause, b"k", 0, EVERY_MS)

    assert is_final(cause)
    assert "never goes away" in str(refusal(Decision.REDRIVE, letter))
    assert refusal(Decision.DISCARD, letter) is None


@pytest.mark.parametrize("status", [Status.APPLIED, Status.DISCARDED])
@pytest.mark.parametrize("decision", Decision)
def test_a_closed_dead_letter_allows_no_decision(status: Status, decision: Decision) -> None:
    letter = Letter.first(42, "schema-id-unknown", b"k", 0, EVERY_MS).closed(status, 0)

    assert refusal(decision, letter) == f"it is {status.value} already"


def test_a_record_that_waits_behind_another_cannot_be_redriven() -> None:
    letter = Letter.first(42, "behind-another", b"k", 0, EVERY_MS)

    assert "waits behind" in str(refusal(Decision.REDRIVE, letter))


def test_a_record_that_is_a_dead_letter_is_not_set_aside() -> None:
    letter = Letter.first(42, "field-null", b"k", 0, EVERY_MS)

    assert refusal(Decision.SET_ASIDE, None) is None
    assert refusal(Decision.SET_ASIDE, letter) == "it is a dead letter already: redrive or discard it"


def test_a_record_that_was_set_aside_waits_for_a_decision_and_blocks_its_key() -> None:
    letter = Letter.first(42, "set-aside", b"k", 0, EVERY_MS)

    assert (letter.status, letter.blocks_key) == (Status.WAITING, True)
    assert refusal(Decision.REDRIVE, letter) is refusal(Decision.DISCARD, letter) is None


@pytest.mark.parametrize(
    "text", ["balance", "balance/1", "balance/1:", "/1:2", "balance/-1:2", "balance/1:2\n", "a b/1:2"]
)
def test_a_malformed_id_is_rejected(text: str) -> None:
    with pytest.raises(InvalidInputError, match="not the id of a dead letter"):
        LetterId.parse(text)


def test_an_id_names_stage_partition_and_offset() -> None:
    assert LetterId.parse("rewards-by-customerCardNo/3:42") == LetterId("rewards-by-customerCardNo", 3, 42)


class Topics:
    """A topic with another task's open transaction at 100, and a committed decision behind it."""

    def find(self, name: str) -> Topic:
        return Topic(name, "id", 1)

    def offsets(self, *_: Any, earliest: bool = False, committed: bool = False) -> dict[int, int]:
        return {0: 0 if earliest else OPEN_AT if committed else END}


@pytest.mark.parametrize(
    ("decision", "status"),
    [
        (Decision.DISCARD, Status.DISCARDED),
        (Decision.REDRIVE, Status.APPLIED),
        # The fold skips it without reading it, and an operator may redrive it still.
        (Decision.SET_ASIDE, Status.WAITING),
    ],
)
def test_a_decision_behind_another_tasks_open_transaction_is_read(
    monkeypatch: pytest.MonkeyPatch, decision: Decision, status: Status
) -> None:
    codec = AvroCodec(FakeRegistry(), "decisions", load_schema("DeadLetterDecision"))
    decisions = DecisionLog(records=ControlRecords("decisions"), codec=codec, stage="balance", source_topic_id="s")
    verdict = Verdict(decision, "me", "a test")
    written = decisions.output(0, Letter(7, "field-null", Status.WAITING, 0, 0, -1, b"k"), verdict, 1_000)

    message = SimpleNamespace(
        key=lambda: written.key,
        value=lambda: written.value,
        headers=lambda: written.headers,
        partition=lambda: 0,
        offset=lambda: 0,
    )

    class Reader:
        def __init__(
            self, _config: object, _topic: str, _starts: object, ends: dict[int, int], transaction_seconds: float
        ) -> None:
            assert transaction_seconds >= 60
            self._end = ends[0]

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __iter__(self) -> Iterator[Any]:
            if self._end > OURS_AT:
                yield message

    monkeypatch.setattr(log_reader, "LogReader", Reader)
    topics: Any = Topics()

    known = decisions.decided_letters(load_settings(), topics, [0], 2_000)

    # By its key, the fold knows what waits for the record, or supersedes it.
    assert (known[0][7].status, known[0][7].key) == (status, b"k")


@pytest.mark.shows("control")
@pytest.mark.parametrize("secret", [None, SharedSecret("a secret of all instances")], ids=["no secret", "a secret"])
def test_what_is_no_decision_and_what_no_instance_has_signed_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, secret: SharedSecret | None
) -> None:
    codec = AvroCodec(FakeRegistry(), "decisions", load_schema("DeadLetterDecision"))
    records = ControlRecords("decisions", secret)
    decisions = DecisionLog(records=records, codec=codec, stage="balance", source_topic_id="s")

    def discarded(offset: int) -> Output:
        letter = Letter(offset, "field-null", Status.WAITING, 0, 0, -1, None)
        return decisions.output(0, letter, Verdict(Decision.DISCARD, "me", "a test"), 1_000)

    ours, forged = discarded(7), discarded(8)
    given = [(ours.value, ours.headers), (b"garbage", []), (forged.value, []), (None, [])]
    messages = [
        SimpleNamespace(
            key=lambda: b"k",
            value=partial(lambda value: value, value),
            headers=partial(lambda headers: headers, headers),
            partition=lambda: 0,
            offset=partial(lambda at: at, at),
        )
        for at, (value, headers) in enumerate(given)
    ]
    messages[0].key = lambda: ours.key
    monkeypatch.setattr("balance_service.engine.decisions.reader_to_end", lambda *_, **__: nullcontext(messages))
    topics: Any = Topics()

    known = decisions.decided_letters(load_settings(), topics, [0], 2_000)

    assert sorted(known[0]) == ([7, 8] if secret is None else [7])
    assert [offset for _, offset in records.refused] == ([1, 3] if secret is None else [1, 2, 3])
    # The history of an application has the decisions of all stages.
    of_another = replace(decisions, stage="other")
    told = [decided.id for decided in of_another.read(load_settings(), topics)]
    assert told == [f"balance/0:{offset}" for offset in sorted(known[0])]


def test_the_end_of_the_decisions_is_that_of_one_topic_and_moves_with_its_records() -> None:
    codec = AvroCodec(FakeRegistry(), "decisions", load_schema("DeadLetterDecision"))
    decisions = DecisionLog(records=ControlRecords("decisions"), codec=codec, stage="balance", source_topic_id="s")
    ends = []
    for topic in (None, Topic("decisions", "id", 2), Topic("decisions", "recreated", 2)):
        topics: Any = SimpleNamespace(find=lambda _name, topic=topic: topic, offsets=lambda *_: {1: END, 0: OPEN_AT})
        ends.append(decisions.end(topics))

    assert ends == [None, ("id", (OPEN_AT, END)), ("recreated", (OPEN_AT, END))]
