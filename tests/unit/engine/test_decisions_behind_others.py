"""DecisionLog about dead letters, where other tasks write theirs to the same partition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.decisions import Decision, DecisionLog, Verdict
from balance_service.kafka import log_reader
from balance_service.kafka.topics import Topic
from balance_service.settings import load_settings
from tests.support.fakes import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

OPEN_AT, OURS_AT, END = 100, 101, 103


class Topics:
    """At 100, another task has a transaction open; behind it, a decision is committed."""

    def find(self, name: str) -> Topic:
        return Topic(name, "id", 1)

    def offsets(self, *_: Any, earliest: bool = False, committed: bool = False) -> dict[int, int]:
        return {0: 0 if earliest else OPEN_AT if committed else END}


def test_one_that_lies_behind_anothers_open_transaction_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = AvroCodec(FakeRegistry(), "decisions", load_schema("DeadLetterDecision"))
    decisions = DecisionLog(topic="decisions", codec=codec, stage="balance", source_topic_id="s")
    verdict = Verdict(Decision.DISCARD, "me", "a test")
    written = decisions.output(0, Letter(7, "field-null", Status.WAITING, 0, 0, -1, None), verdict, 1_000)

    class Reader:
        def __init__(self, _config: object, _topic: str, _starts: object, ends: dict[int, int]) -> None:
            self._end = ends[0]

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __iter__(self) -> Iterator[Any]:
            if self._end > OURS_AT:
                yield SimpleNamespace(value=lambda: written.value)

    monkeypatch.setattr(log_reader, "LogReader", Reader)
    topics: Any = Topics()

    known = decisions.closed_letters(load_settings(), topics, [0], 2_000)

    assert known[0][7].status is Status.DISCARDED
