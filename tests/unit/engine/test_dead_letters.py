"""Dead letters of a task: when they are retried, which records wait for them, and that each record counts once."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine import dead_letters
from balance_service.engine.dead_letter import KEPT_CLOSED_MS, Letter, Status, open_letters
from balance_service.engine.dead_letters import Letters
from balance_service.engine.opening import starting_changes
from balance_service.engine.records import MISPLACED, POSITION_KEY, Position
from balance_service.engine.store import StateStore
from balance_service.errors import ConfigurationError, PoisonRecordError
from balance_service.model.events import EVENT, PER_KEY, Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.read_models.balance import Balance
from balance_service.testing import Driver, event
from balance_service.testing.driver import DrivenTask
from balance_service.testing.fakes import FakeTables
from balance_service.testing.rows import driven_stages
from tests.support.fakes import FakeRegistry, letters, position_codec, record_scan_starts
from tests.support.models import MONEY, ship

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.model.events import Event, State
    from balance_service.testing import InputEvent

UNKNOWN = "schema-id-unknown"
INCOMPATIBLE = "schema-incompatible"
EVERY_MS = 300_000
A_WEEK_MINUTES = KEPT_CLOSED_MS / 60_000
POSITIONS = position_codec()


class Named(ReadModel):
    """Keeps all names of an id in order, and sends the state after each. Refuses an empty name."""

    name = "test-named"
    source = Stream("test-named", ship("NameTold", {"id": "string", "name": "string", "paid": MONEY}))
    key = "id"
    state = ship("NameKept", {"id": "string", "names": {"type": "array", "items": "string"}})
    emits = Emit("test-names", each=EVENT)

    def fold(self, state: State | None, told: Event) -> State:
        if not told["name"]:
            raise PoisonRecordError("name-empty", "a name has letters")
        return {"id": told["id"], "names": [*(state["names"] if state else []), told["name"]]}


def funds(amount: str, customer: str = "alice", unreadable: str | None = None, **more: Any) -> Any:
    return event("FundsAdded", {"customerId": customer, "amount": Decimal(amount)}, unreadable=unreadable, **more)


def told(name: str, key: str = "a", unreadable: str | None = None) -> Any:
    return event("NameTold", {"id": key, "name": name}, unreadable=unreadable)


def statuses(driver: Driver) -> list[str]:
    return [letter.status.value for letter in driver.letters()]


@pytest.fixture
def balance() -> Iterator[Driver]:
    with Driver(Balance()) as driver:
        yield driver


@pytest.fixture
def named() -> Iterator[Driver]:
    with Driver(Named()) as driver:
        yield driver


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    with closing(StateStore(tmp_path / "store", POSITIONS)) as opened:
        yield opened


def task(model: ReadModel) -> DrivenTask:
    options: Any = {"few_rows": {}, "is_accelerated": True, "idempotency_window_ms": 1_000}
    registry, stages = FakeRegistry(), driven_stages(model)
    tables = FakeTables(model.name, stages, registry)
    return DrivenTask(model, stages[-1], registry, tables, **options)


def amounts(driver: Driver) -> Any:
    view = driver.view("alice")
    return None if view is None else view["amount"]


# Retries, redrives and discards


def test_a_record_is_applied_when_its_dead_letter_is_due_after_its_cause_is_gone(balance: Driver) -> None:
    balance.given(funds("1.00"), funds("2.00", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=4.9)
    assert (amounts(balance), statuses(balance)) == (Decimal("1.00"), ["scheduled"])

    balance.advance(minutes=0.1)

    assert (amounts(balance), statuses(balance)) == (Decimal("3.00"), ["applied"])


def test_a_retried_record_is_applied_once(balance: Driver) -> None:
    balance.given(funds("2.00", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=5)

    balance.advance(minutes=500).restart().rebuild().advance(minutes=500)

    assert amounts(balance) == Decimal("2.00")


def test_a_discarded_record_never_counts(balance: Driver) -> None:
    balance.given(funds("1.00"), funds("2.00", unreadable=UNKNOWN)).discard(1).mend(UNKNOWN)

    balance.advance(minutes=50).rebuild().advance(minutes=50)

    assert (amounts(balance), statuses(balance)) == (Decimal("1.00"), ["discarded"])


def test_a_redriven_record_is_retried_at_once(balance: Driver) -> None:
    balance.given(funds("2.00", unreadable=INCOMPATIBLE)).advance(minutes=500)
    assert statuses(balance) == ["waiting"]

    balance.mend(INCOMPATIBLE).redrive(0)

    assert (amounts(balance), statuses(balance)) == (Decimal("2.00"), ["applied"])


def test_a_redriven_record_that_fails_again_waits_again(balance: Driver) -> None:
    balance.given(funds("2.00", unreadable=INCOMPATIBLE)).redrive(0)

    (letter,) = balance.letters()
    assert (letter.status, letter.attempt, letter.cause) == (Status.WAITING, 1, INCOMPATIBLE)


def test_a_dead_letter_that_is_closed_while_its_record_is_read_again_stays_closed() -> None:
    stage = task(Balance())
    stage.commit([funds("2.00", unreadable=UNKNOWN)])
    stage.mend(UNKNOWN)
    stage.now_ms = EVERY_MS
    batch = stage.due()
    assert batch is not None

    stage.decide([0], Status.DISCARDED)
    stage.deliver(batch)

    assert (stage.states(), [letter.status for letter in stage.letters()]) == ({}, [Status.DISCARDED])
    stage.store.close()


def test_closed_dead_letters_are_forgotten_after_a_week(balance: Driver) -> None:
    balance.given(funds("1.00", unreadable=UNKNOWN), funds("2.00", unreadable=INCOMPATIBLE))
    balance.mend(UNKNOWN).advance(minutes=5).discard(1)

    balance.advance(minutes=A_WEEK_MINUTES - 1)
    assert statuses(balance) == ["applied", "discarded"]

    balance.advance(minutes=1).restart()
    assert statuses(balance) == []
    assert balance.letter_counts() == {}


def test_dead_letters_are_counted_by_cause_and_status(balance: Driver) -> None:
    balance.given(*[funds("1.00", unreadable=UNKNOWN)] * 3, funds("1.00", unreadable=INCOMPATIBLE)).discard(0)

    assert open_letters(balance.letter_counts()) == {(UNKNOWN, "scheduled"): 2, (INCOMPATIBLE, "waiting"): 1}


# Rebuilds


def test_a_rebuild_retries_no_dead_letters_until_it_has_passed_them(store: StateStore) -> None:
    keeping = letters(now_ms=lambda: EVERY_MS)
    carried = keeping.carry_over([Letter.first(5, UNKNOWN, b"k", 0, EVERY_MS)])
    for position, retried in ((0, []), (5, []), (6, [5])):
        stands_at = Position(position, 1, "id", source="balance:0", letters=carried.counted)
        store.write([*carried.records, (POSITION_KEY, POSITIONS.encode(stands_at.record()))], position + 1)

        assert [letter.offset for letter in keeping.due(store).again] == retried


@pytest.mark.shows("rebuild")
def test_a_rebuild_writes_no_dead_letter_twice_and_sends_nothing_twice(named: Driver) -> None:
    named.given(told("x"), told("y", unreadable=UNKNOWN), told("", "b"), told("z", "b"))
    refused, sent = named.dead_letters(), named.emitted("test-names")

    named.rebuild()
    assert (named.dead_letters(), named.emitted("test-names")) == ([], sent)
    assert statuses(named) == ["scheduled", "waiting"]

    named.mend(UNKNOWN).advance(minutes=5)
    assert [len(record["names"]) for record in named.emitted("test-names")[len(sent) :] if record] == [2]
    assert [given.cause for given in refused] == [UNKNOWN, "name-empty"]


@pytest.mark.shows("retried-once")
def test_a_replayed_dead_letter_is_applied_in_its_turn_and_sends_its_output_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = task(Named())
    stage.commit([told("x"), told("y", unreadable=MISPLACED), told("z"), told("w", "b", unreadable=MISPLACED)])
    stage.mend(MISPLACED)
    stage.events[3] = replace(stage.events[3], unreadable=MISPLACED)
    letters_before, written = stage.letters(), len(stage.writer.sent)

    with monkeypatch.context() as patched:
        patched.setattr(stage, "letters", lambda: [letter.to_be_replayed(0) for letter in letters_before])
        stage.rebuild()

    assert [output.offset for output in stage.writer.sent[written:]] == [1]
    assert [frame[5:] for frame in stage.states().values()] == [b"\x02a" + b"\x06\x02x\x02y\x02z\x00"]
    assert [letter.status.value for letter in stage.letters()] == ["applied", "scheduled"]
    assert [*stage.dead_letters()] == []

    stage.rebuild()
    assert len(stage.writer.sent) == written + 1
    stage.store.close()


def test_an_event_that_fails_only_in_a_replay_is_not_sent_again_by_its_retry() -> None:
    stage = task(Named())
    stage.commit([told("x"), told("y")])
    sent, states = len(stage.sent("test-names")), stage.states()
    stage.events = [stage.events[0], replace(stage.events[1], unreadable=UNKNOWN)]

    stage.rebuild()
    assert [letter.status for letter in stage.letters()] == [Status.SCHEDULED]
    stage.mend(UNKNOWN)
    stage.now_ms += EVERY_MS
    batch = stage.due()
    assert batch is not None
    stage.deliver(batch)

    assert stage.states() == states
    assert (sent, len(stage.sent("test-names"))) == (2, 2)
    stage.store.close()


# Order


@pytest.mark.shows("key-order")
def test_later_events_of_a_key_wait_if_order_matters(named: Driver) -> None:
    named.given(told("x"), told("y", unreadable=UNKNOWN), told("z"), told("other", "b"))
    named.given(told("w"))

    assert (named.view("a"), named.view("b")) == ({"names": ["x"]}, {"names": ["other"]})
    assert statuses(named) == ["scheduled", "behind", "behind"]

    named.mend(UNKNOWN).advance(minutes=5)
    assert named.view("a") == {"names": ["x", "y", "z", "w"]}


def test_waiting_events_are_applied_once_the_one_before_them_is_discarded(named: Driver) -> None:
    named.given(told("x", unreadable=INCOMPATIBLE), told("y"), told("z"))

    named.discard(0)

    assert named.view("a") == {"names": ["y", "z"]}
    assert statuses(named) == ["discarded", "applied", "applied"]


def test_a_second_unreadable_event_blocks_the_events_after_it(named: Driver) -> None:
    named.given(told("x", unreadable=UNKNOWN), told("y"), told("z", unreadable=INCOMPATIBLE), told("w"))

    named.mend(UNKNOWN).advance(minutes=5)
    assert named.view("a") == {"names": ["x", "y"]}
    assert statuses(named) == ["applied", "applied", "waiting", "behind"]

    named.mend(INCOMPATIBLE).redrive(2)
    assert named.view("a") == {"names": ["x", "y", "z", "w"]}


@pytest.mark.parametrize("keys", [3, 1_100])
def test_waiting_events_are_applied_once_the_fold_has_refused_the_one_before_them(named: Driver, keys: int) -> None:
    named.given(*[told("", f"k{n}", UNKNOWN) for n in range(keys)], *[told("y", f"k{n}") for n in range(keys)])

    named.mend(UNKNOWN).advance(minutes=5)

    assert {letter.status.value for letter in named.letters()} == {"waiting", "applied"}
    assert named.view("k0") == named.view(f"k{keys - 1}") == {"names": ["y"]}


def test_a_failed_retry_counts_no_attempt_for_the_events_behind_it(named: Driver) -> None:
    named.given(told("x", unreadable=INCOMPATIBLE), told("y")).redrive(0)

    assert [(letter.status.value, letter.attempt) for letter in named.letters()] == [("waiting", 1), ("behind", 0)]


def test_an_event_that_the_fold_refuses_blocks_no_others(named: Driver) -> None:
    named.given(told("x"), told(""), told("y"))

    assert named.view("a") == {"names": ["x", "y"]}


def test_more_waiting_events_than_one_commit_retries_keep_their_order(named: Driver) -> None:
    many = [told(str(n)) for n in range(2_500)]
    named.given(told("x", unreadable=UNKNOWN), *many)

    named.mend(UNKNOWN).advance(minutes=5)

    assert named.view("a") == {"names": ["x", *(str(n) for n in range(2_500))]}


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_an_event_that_waits_between_two_retried_ones_is_applied_too(
    named: Driver, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(dead_letters, "_MAX_RETRIED", at_once)
    named.given(told("1", unreadable=UNKNOWN), told("2"), told("3", unreadable=UNKNOWN), told("4"))

    named.mend(UNKNOWN).advance(minutes=5).advance(minutes=500)

    assert named.view("a") == {"names": ["1", "2", "3", "4"]}
    assert set(statuses(named)) == {"applied"}


def test_no_more_dead_letters_are_read_than_are_retried(named: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    named.given(told("x", unreadable=UNKNOWN), *(told(str(n)) for n in range(100)))
    monkeypatch.setattr(dead_letters, "_MAX_RETRIED", 10)
    read: list[int] = []
    decode = Letters.decode

    def recorded(keeping: Letters, offset: int, frame: bytes) -> Letter:
        read.append(offset)
        return decode(keeping, offset, frame)

    monkeypatch.setattr(Letters, "decode", recorded)
    named.advance(minutes=5)

    assert len(read) < 50


@pytest.mark.parametrize(
    ("failed", "status"), [(told("1", unreadable=UNKNOWN), "applied"), (told(""), "waiting")], ids=["closed", "refused"]
)
def test_dead_letters_that_block_no_key_cost_no_lookup_by_key(
    named: Driver, monkeypatch: pytest.MonkeyPatch, failed: InputEvent, status: str
) -> None:
    named.given(failed).mend(UNKNOWN).advance(minutes=5)
    assert statuses(named) == [status]
    scanned_from = record_scan_starts(monkeypatch)
    named.given(*(told("2", key) for key in "abcdefgh"))

    assert named.view("h") == {"names": ["2"]}
    assert len(scanned_from) < 8


def test_events_wait_for_no_others_if_the_result_does_not_depend_on_order(balance: Driver) -> None:
    balance.given(funds("1.00", unreadable=UNKNOWN), funds("2.00"))

    assert amounts(balance) == Decimal("2.00")


@pytest.mark.shows("key-order")
def test_if_a_model_begins_to_keep_order_later_events_wait_for_each_open_dead_letter(store: StateStore) -> None:
    any_order, in_order = letters(), letters(keeps_order=True)
    held = [Letter.first(at, UNKNOWN, key, 0, EVERY_MS) for at, key in ((0, b"i"), (3, b"k"), (5, b"k"), (8, b"l"))]
    closed = Letter.first(7, UNKNOWN, b"m", 0, EVERY_MS).closed(Status.APPLIED, 0)
    changes = any_order.carry_over([*held, closed])
    position = Position(9, 1, "id", letters=changes.counted)
    store.write([*changes.records, (POSITION_KEY, POSITIONS.encode(position.record()))], 1)
    keys = [b"i", b"k", b"l", b"m"]
    assert in_order.blocked_after(store, keys, frozenset()) == {}

    # The task opens.
    hosted: Any = SimpleNamespace(
        stage=SimpleNamespace(retries=False, compacted=False),
        processor=SimpleNamespace(letters=in_order),
        generations=SimpleNamespace(others=lambda _stage: []),
    )
    ((moved, opened),) = starting_changes(store, hosted, 0, replace(position, inherited=0), 0, lambda: False)
    store.write([*opened.records], 2)
    assert moved.inherited == 0

    assert in_order.blocked_after(store, keys, frozenset()) == {b"i": 0, b"k": 3, b"l": 8}
    assert in_order.blocked_after(store, keys, frozenset({3})) == {b"i": 0, b"k": 5, b"l": 8}
    assert in_order.on_open(store).records == []


def test_if_a_model_ceases_to_keep_order_waiting_dead_letters_are_retried(store: StateStore) -> None:
    held = [Letter.first(at, cause, b"k", 0, EVERY_MS) for at, cause in ((3, UNKNOWN), (5, "behind-another"))]
    ordered, unordered = letters(keeps_order=True), letters(now_ms=lambda: 7)
    carried = ordered.carry_over(held)
    stands_at = Position(6, 1, "id", source="balance:0", letters=carried.counted)
    store.write([*carried.records, (POSITION_KEY, POSITIONS.encode(stands_at.record()))], 10)
    assert ordered.on_open(store).records == []

    changes = unordered.on_open(store)
    moved = replace(stands_at, letters=changes.counted)
    store.write([*changes.records, (POSITION_KEY, POSITIONS.encode(moved.record()))], 20)

    assert [(due.offset, due.status) for due in unordered.due(store).again] == [(5, Status.SCHEDULED)]
    assert ordered.blocked_after(store, [b"k"], frozenset()) == {}
    assert unordered.on_open(store).records == []


def test_opening_reads_no_dead_letters_that_nothing_looks_for(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    unordered = letters()
    carried = unordered.carry_over([Letter.first(3, UNKNOWN, b"k", 0, EVERY_MS)])
    stands_at = Position(6, 1, "id", source="balance:0", letters=carried.counted)
    store.write([*carried.records, (POSITION_KEY, POSITIONS.encode(stands_at.record()))], 10)

    def between(*_: object) -> list[Letter]:
        raise AssertionError("dead letters are read")

    monkeypatch.setattr(type(unordered), "between", between)
    assert unordered.on_open(store).records == []


def test_a_rebuild_with_a_model_that_ceased_to_keep_order_makes_waiting_dead_letters_due() -> None:
    unordered = letters(now_ms=lambda: 7)

    (letter,) = unordered.carry_over([Letter.first(5, "behind-another", b"k", 0, EVERY_MS)]).after.values()

    assert (letter.status, letter.due_ms) == (Status.SCHEDULED, 7)


def test_a_models_fold_decides_whether_order_matters() -> None:
    assert (Balance().keeps_order, Named().keeps_order) == (False, True)


def test_order_across_a_repartition_is_rejected() -> None:
    class Rekeyed(ReadModel):
        name = "test-rekeyed-order"
        source = Stream("test-named", "NameTold").by("name")
        state = "NameKept"
        order = PER_KEY

        def fold(self, state: State | None, told: Event) -> State | None:
            return state

    with pytest.raises(ConfigurationError, match="continues by another key"):
        Rekeyed()
