"""Dead letters after they were written: when they are tried again, what waits for them, how often they count."""

from __future__ import annotations

import tempfile
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.dead_letter import GONE, KEPT_CLOSED_MS, Letter, Status, is_final, open_letters
from balance_service.engine.decisions import Decision, LetterId, Verdict
from balance_service.engine.records import POSITION_KEY, Position
from balance_service.engine.store import StateStore
from balance_service.errors import ConfigurationError, InvalidInputError, PoisonRecordError
from balance_service.model.events import EVENT, PER_KEY, Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.read_models.balance import Balance
from balance_service.testing import Driver, event
from balance_service.testing.driver import DrivenTask
from balance_service.testing.rows import driven_stages
from tests.support.fakes import FakeRegistry, letters, position_codec
from tests.support.models import MONEY, ship

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.model.events import Event, State

UNKNOWN = "schema-id-unknown"
INCOMPATIBLE = "schema-incompatible"
EVERY_MS = 300_000
A_WEEK_MINUTES = KEPT_CLOSED_MS / 60_000


class Named(ReadModel):
    """The last name, and how often it was told; refuses an empty one. Sends each."""

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


def amounts(driver: Driver) -> Any:
    view = driver.view("alice")
    return None if view is None else view["amount"]


def test_a_letter_heals_once_its_cause_is_gone_and_it_is_due(balance: Driver) -> None:
    balance.given(funds("1.00"), funds("2.00", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=4.9)
    assert (amounts(balance), statuses(balance)) == (Decimal("1.00"), ["scheduled"])

    balance.advance(minutes=0.1)

    assert (amounts(balance), statuses(balance)) == (Decimal("3.00"), ["applied"])


def test_a_record_that_healed_is_not_applied_again(balance: Driver) -> None:
    balance.given(funds("2.00", unreadable=UNKNOWN)).mend(UNKNOWN).advance(minutes=5)

    balance.advance(minutes=500).restart().rebuild().advance(minutes=500)

    assert amounts(balance) == Decimal("2.00")


def test_attempts_are_twice_as_far_apart_each_time_up_to_a_bound_and_end_parked() -> None:
    letter = Letter.first(42, UNKNOWN, b"k", 0, EVERY_MS)
    waits = []
    while letter.status is Status.SCHEDULED:
        waits.append(letter.due_ms // EVERY_MS)
        letter = letter.failed_again(UNKNOWN, 0, EVERY_MS)

    assert waits == [1, 2, 4, 8, 16, 32, 64, 72, 72, 72]
    assert (letter.status, letter.attempt, letter.due_ms) == (Status.PARKED, 10, -1)


@pytest.mark.parametrize("cause", ["balance-overflow", INCOMPATIBLE, "field-null", "of-a-model", GONE])
def test_what_does_not_heal_by_itself_waits_for_an_operator(cause: str) -> None:
    letter = Letter.first(42, cause, b"k", 0, EVERY_MS)

    assert (letter.status, letter.due_ms) == (Status.WAITING, -1)


@pytest.mark.parametrize(
    "cause", ["key-null", "frame-missing", "body-undecodable", "key-is-not-customer-id", "customer-id-malformed"]
)
def test_what_can_never_be_applied_is_not_redriven_but_discarded(cause: str) -> None:
    letter = Letter.first(42, cause, b"k", 0, EVERY_MS)

    assert is_final(cause)
    assert "never goes away" in str(Verdict(Decision.REDRIVE, "me", "why").refusal(letter))
    assert Verdict(Decision.DISCARD, "me", "why").refusal(letter) is None


@pytest.mark.parametrize("status", [Status.APPLIED, Status.DISCARDED])
@pytest.mark.parametrize("decision", Decision)
def test_nothing_is_decided_about_what_is_closed(status: Status, decision: Decision) -> None:
    letter = Letter.first(42, UNKNOWN, b"k", 0, EVERY_MS).closed(status, 0)

    assert Verdict(decision, "me", "why").refusal(letter) == f"it is {status.value} already"


def test_what_waits_behind_another_is_not_redriven() -> None:
    letter = Letter.first(42, "behind-another", b"k", 0, EVERY_MS)

    assert "waits behind" in str(Verdict(Decision.REDRIVE, "me", "why").refusal(letter))


def test_a_discarded_record_never_counts(balance: Driver) -> None:
    balance.given(funds("1.00"), funds("2.00", unreadable=UNKNOWN)).discard(1).mend(UNKNOWN)

    balance.advance(minutes=50).rebuild().advance(minutes=50)

    assert (amounts(balance), statuses(balance)) == (Decimal("1.00"), ["discarded"])


def test_a_redriven_record_is_tried_at_once(balance: Driver) -> None:
    balance.given(funds("2.00", unreadable=INCOMPATIBLE)).advance(minutes=500)
    assert statuses(balance) == ["waiting"]

    balance.mend(INCOMPATIBLE).redrive(0)

    assert (amounts(balance), statuses(balance)) == (Decimal("2.00"), ["applied"])


def test_a_letter_that_is_redriven_in_vain_waits_again(balance: Driver) -> None:
    balance.given(funds("2.00", unreadable=INCOMPATIBLE)).redrive(0)

    (letter,) = balance.letters()
    assert (letter.status, letter.attempt, letter.cause) == (Status.WAITING, 1, INCOMPATIBLE)


def test_a_letter_that_is_closed_while_its_record_is_read_again_is_left_alone() -> None:
    registry, model = FakeRegistry(), Balance()
    options: Any = {"few_rows": {}, "is_accelerated": True, "idempotency_window_ms": 1_000}
    with tempfile.TemporaryDirectory() as folder:
        stage = DrivenTask(model, driven_stages(model)[-1], registry, folder, **options)
        stage.commit([funds("2.00", unreadable=UNKNOWN)])
        stage.mend(UNKNOWN)
        stage.now_ms = EVERY_MS
        batch = stage.due()
        assert batch is not None

        stage.decide([0], Status.DISCARDED)
        stage.deliver(batch)

        assert (stage.states(), [letter.status for letter in stage.letters()]) == ({}, [Status.DISCARDED])
        stage.store.close()


def test_letters_are_not_tried_while_a_rebuild_has_not_come_to_them(tmp_path: Path) -> None:
    keeping = letters(now_ms=lambda: EVERY_MS)
    codec = position_codec()
    with closing(StateStore(tmp_path / "store", codec)) as store:
        carried = keeping.carry_over([Letter.first(5, UNKNOWN, b"k", 0, EVERY_MS)])
        for position, tried in ((0, []), (5, []), (6, [5])):
            stands_at = Position(position, 1, "id", source="balance:0", letters=carried.counted)
            store.write([*carried.records, (POSITION_KEY, codec.encode(stands_at.record()))], position + 1)

            assert [letter.offset for letter in keeping.due(store).again] == tried


def test_a_rebuild_writes_no_letter_twice_and_sends_nothing_twice(named: Driver) -> None:
    named.given(told("x"), told("y", unreadable=UNKNOWN), told("", "b"), told("z", "b"))
    refused, sent = named.dead_letters(), named.emitted("test-names")

    named.rebuild()
    assert (named.dead_letters(), named.emitted("test-names")) == ([], sent)
    assert statuses(named) == ["scheduled", "waiting"]

    named.mend(UNKNOWN).advance(minutes=5)
    assert [len(record["names"]) for record in named.emitted("test-names")[len(sent) :] if record] == [2]
    assert [given.cause for given in refused] == [UNKNOWN, "name-empty"]


def test_closed_letters_are_forgotten_after_a_week(balance: Driver) -> None:
    balance.given(funds("1.00", unreadable=UNKNOWN), funds("2.00", unreadable=INCOMPATIBLE))
    balance.mend(UNKNOWN).advance(minutes=5).discard(1)

    balance.advance(minutes=A_WEEK_MINUTES - 1)
    assert statuses(balance) == ["applied", "discarded"]

    balance.advance(minutes=1).restart()
    assert statuses(balance) == []
    assert balance.letter_counts() == {}


def test_letters_are_counted_by_cause_and_status(balance: Driver) -> None:
    balance.given(*[funds("1.00", unreadable=UNKNOWN)] * 3, funds("1.00", unreadable=INCOMPATIBLE)).discard(0)

    assert open_letters(balance.letter_counts()) == {(UNKNOWN, "scheduled"): 2, (INCOMPATIBLE, "waiting"): 1}


def test_later_events_of_a_key_wait_where_their_order_matters(named: Driver) -> None:
    named.given(told("x"), told("y", unreadable=UNKNOWN), told("z"), told("other", "b"))
    named.given(told("w"))

    assert (named.view("a"), named.view("b")) == ({"names": ["x"]}, {"names": ["other"]})
    assert statuses(named) == ["scheduled", "behind", "behind"]

    named.mend(UNKNOWN).advance(minutes=5)
    assert named.view("a") == {"names": ["x", "y", "z", "w"]}


def test_what_waited_goes_on_once_the_one_before_it_is_discarded(named: Driver) -> None:
    named.given(told("x", unreadable=INCOMPATIBLE), told("y"), told("z"))

    named.discard(0)

    assert named.view("a") == {"names": ["y", "z"]}
    assert statuses(named) == ["discarded", "applied", "applied"]


def test_of_two_that_cannot_be_read_the_second_holds_what_comes_after_it(named: Driver) -> None:
    named.given(told("x", unreadable=UNKNOWN), told("y"), told("z", unreadable=INCOMPATIBLE), told("w"))

    named.mend(UNKNOWN).advance(minutes=5)
    assert named.view("a") == {"names": ["x", "y"]}
    assert statuses(named) == ["applied", "applied", "waiting", "behind"]

    named.mend(INCOMPATIBLE).redrive(2)
    assert named.view("a") == {"names": ["x", "y", "z", "w"]}


@pytest.mark.parametrize("keys", [3, 1_100])
def test_what_waited_goes_on_once_the_one_before_it_was_judged_and_refused(named: Driver, keys: int) -> None:
    named.given(*[told("", f"k{n}", UNKNOWN) for n in range(keys)], *[told("y", f"k{n}") for n in range(keys)])

    named.mend(UNKNOWN).advance(minutes=5)

    assert {letter.status.value for letter in named.letters()} == {"waiting", "applied"}
    assert named.view("k0") == named.view(f"k{keys - 1}") == {"names": ["y"]}


def test_what_waits_is_not_counted_as_tried_where_the_one_before_it_fails_again(named: Driver) -> None:
    named.given(told("x", unreadable=INCOMPATIBLE), told("y")).redrive(0)

    assert [(letter.status.value, letter.attempt) for letter in named.letters()] == [("waiting", 1), ("behind", 0)]


def test_an_event_that_the_fold_refuses_was_judged_in_its_turn_and_holds_nobody(named: Driver) -> None:
    named.given(told("x"), told(""), told("y"))

    assert named.view("a") == {"names": ["x", "y"]}


def test_more_than_a_commit_takes_keep_their_order(named: Driver) -> None:
    many = [told(str(n)) for n in range(2_500)]
    named.given(told("x", unreadable=UNKNOWN), *many)

    named.mend(UNKNOWN).advance(minutes=5)

    assert named.view("a") == {"names": ["x", *(str(n) for n in range(2_500))]}


def test_folds_that_come_to_the_same_in_any_order_wait_for_nobody(balance: Driver) -> None:
    balance.given(funds("1.00", unreadable=UNKNOWN), funds("2.00"))

    assert amounts(balance) == Decimal("2.00")


def test_once_order_matters_later_events_wait_for_what_was_open_before(tmp_path: Path) -> None:
    any_order, in_order = letters(), letters(keeps_order=True)
    with closing(StateStore(tmp_path / "store", position_codec())) as store:
        changes = any_order.carry_over([Letter.first(3, UNKNOWN, b"k", 0, EVERY_MS)])
        position = Position(9, 1, "id", letters=changes.counted)
        store.write([*changes.records, (POSITION_KEY, position_codec().encode(position.record()))], 1)
        assert in_order.blocked_after(store, [b"k"], frozenset()) == {}

        store.write([*in_order.on_open(store).records], 2)

        assert in_order.blocked_after(store, [b"k"], frozenset()) == {b"k": 3}
        assert in_order.on_open(store).records == []


def test_what_a_fold_depends_on_tells_whether_order_matters() -> None:
    assert (Balance().keeps_order, Named().keeps_order) == (False, True)


def test_order_across_a_re_key_is_refused() -> None:
    class Rekeyed(ReadModel):
        name = "test-rekeyed-order"
        source = Stream("test-named", "NameTold").by("name")
        state = "NameKept"
        order = PER_KEY

        def fold(self, state: State | None, told: Event) -> State | None:
            return state

    with pytest.raises(ConfigurationError, match="continues by another key"):
        Rekeyed()


@pytest.mark.parametrize(
    "text", ["balance", "balance/1", "balance/1:", "/1:2", "balance/-1:2", "balance/1:2\n", "a b/1:2"]
)
def test_what_is_no_letters_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="not the id of a dead letter"):
        LetterId.parse(text)


def test_a_letters_id_names_stage_partition_and_offset() -> None:
    assert LetterId.parse("rewards-by-customerCardNo/3:42") == LetterId("rewards-by-customerCardNo", 3, 42)
