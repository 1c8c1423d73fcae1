"""Dead letters that wait for others: none is forgotten, whichever of a key are tried together."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from balance_service.engine import dead_letters as engine
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.records import POSITION_KEY, Position
from balance_service.engine.store import StateStore
from balance_service.testing import Driver
from tests.support.fakes import letters, position_codec, record_scan_starts
from tests.unit.engine.test_letters import EVERY_MS, UNKNOWN, Named, statuses, told

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.testing import InputEvent


@pytest.fixture
def named() -> Iterator[Driver]:
    with Driver(Named()) as driver:
        yield driver


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_what_waits_between_two_that_are_tried_together_is_tried_too(
    named: Driver, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(engine, "_MAX_RETRIED", at_once)
    named.given(told("1", unreadable=UNKNOWN), told("2"), told("3", unreadable=UNKNOWN), told("4"))

    named.mend(UNKNOWN).advance(minutes=5).advance(minutes=500)

    assert named.view("a") == {"names": ["1", "2", "3", "4"]}
    assert set(statuses(named)) == {"applied"}


def test_no_more_letters_are_looked_up_than_are_tried(named: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    named.given(told("x", unreadable=UNKNOWN), *(told(str(n)) for n in range(100)))
    monkeypatch.setattr(engine, "_MAX_RETRIED", 10)
    looked_up: list[int] = []
    decode = engine.Letters.decode

    def counted(keeping: engine.Letters, offset: int, frame: bytes) -> Letter:
        looked_up.append(offset)
        return decode(keeping, offset, frame)

    monkeypatch.setattr(engine.Letters, "decode", counted)
    named.advance(minutes=5)

    assert len(looked_up) < 50


@pytest.mark.parametrize(
    ("failed", "status"), [(told("1", unreadable=UNKNOWN), "applied"), (told(""), "waiting")], ids=["closed", "refused"]
)
def test_letters_that_hold_no_key_cost_the_keys_of_later_batches_nothing(
    named: Driver, monkeypatch: pytest.MonkeyPatch, failed: InputEvent, status: str
) -> None:
    named.given(failed).mend(UNKNOWN).advance(minutes=5)
    assert statuses(named) == [status]
    looked_from = record_scan_starts(monkeypatch)
    named.given(*(told("2", key) for key in "abcdefgh"))

    assert named.view("h") == {"names": ["2"]}
    assert len(looked_from) < 8


def test_once_order_matters_no_more_what_waited_for_it_is_tried(tmp_path: Path) -> None:
    codec = position_codec()
    held = [Letter.first(at, cause, b"k", 0, EVERY_MS) for at, cause in ((3, UNKNOWN), (5, "behind-another"))]
    ordered, unordered = letters(keeps_order=True), letters(now_ms=lambda: 7)
    carried = ordered.carry_over(held)
    with closing(StateStore(tmp_path / "store", codec)) as store:
        stands_at = Position(6, 1, "id", source="balance:0", letters=carried.counted)
        store.write([*carried.records, (POSITION_KEY, codec.encode(stands_at.record()))], 10)
        assert ordered.on_open(store).records == []

        changes = unordered.on_open(store)
        moved = replace(stands_at, letters=changes.counted)
        store.write([*changes.records, (POSITION_KEY, codec.encode(moved.record()))], 20)

        assert [(due.offset, due.status) for due in unordered.due(store).again] == [(5, Status.SCHEDULED)]
        assert ordered.blocked_after(store, [b"k"], frozenset()) == {}
        assert unordered.on_open(store).records == []


def test_a_rebuild_by_a_model_for_which_order_matters_no_more_leaves_nothing_waiting() -> None:
    (letter,) = (
        letters(now_ms=lambda: 7).carry_over([Letter.first(5, "behind-another", b"k", 0, EVERY_MS)]).after.values()
    )

    assert (letter.status, letter.due_ms) == (Status.SCHEDULED, 7)


def test_what_fails_only_in_a_replay_is_not_sent_a_second_time_when_it_heals(named: Driver) -> None:
    named.given(told("x"), told("y"))
    sent = named.emitted("test-names")
    stage = named._last
    stage.events = [stage.events[0], replace(stage.events[1], unreadable=UNKNOWN)]

    named.rebuild()
    assert statuses(named) == ["scheduled"]
    named.mend(UNKNOWN).advance(minutes=5)

    assert named.view("a") == {"names": ["x", "y"]}
    assert named.emitted("test-names") == sent


def test_a_closed_letter_whose_record_fails_in_a_replay_is_of_its_key_and_of_its_cause() -> None:
    known_by_its_decision = Letter.first(5, "redriven", None, 0, EVERY_MS).closed(Status.APPLIED, 1)

    again = known_by_its_decision.failed_in_replay(UNKNOWN, b"k", 9)

    assert (again.status, again.cause, again.key, again.due_ms) == (Status.SCHEDULED, UNKNOWN, b"k", 9)
    assert again.blocks_key
