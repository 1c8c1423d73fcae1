"""The driver for tests of read models, which uses the fold and commit of the service."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.errors import InvalidInputError, RetriableError, TaskHaltedError
from balance_service.model.folds import Count
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.read_models.activity import Activity
from balance_service.read_models.balance import Balance
from balance_service.read_models.leaderboard import Leaderboard
from balance_service.read_models.rewards import Rewards
from balance_service.testing import Driver, event, row
from tests.support.models import Session, Summary, ship

if TYPE_CHECKING:
    from collections.abc import Iterator

ship("Noticed", {"customerCardNo": "string", "notices": "long"})


class Notified(ReadModel):
    """Counts what `Rewards` sends."""

    name = "test-notified"
    source = Stream("notifications", "Notification")
    key = "customerCardNo"
    state = "Noticed"
    notices = Count("Notification")


def funds(amount: str, customer: str = "alice", **more: Any) -> Any:
    return event("FundsAdded", {"customerId": customer, "amount": Decimal(amount)}, **more)


def amount(digits: str) -> dict[str, Decimal]:
    return {"amount": Decimal(digits)}


@pytest.fixture
def balance() -> Iterator[Driver]:
    with Driver(Balance()) as driver:
        yield driver


@pytest.fixture
def session() -> Iterator[Driver]:
    with Driver(Session()) as driver:
        yield driver


def test_the_view_includes_given_and_later_events(balance: Driver) -> None:
    balance.given(funds("1.00"), funds("5.00", "bob")).when(funds("2.50")).then(amount("3.50"))

    assert balance.view("bob") == amount("5.00")
    assert balance.view("nobody") is None


def test_a_failed_check_shows_both_views(balance: Driver) -> None:
    with pytest.raises(AssertionError, match=r'"amount":1.00}, not {"amount":2.00'):
        balance.when(funds("1.00")).then(amount("2.00"))


def test_a_mapping_is_an_event_of_the_only_record(balance: Driver) -> None:
    balance.when({"customerId": "alice", "amount": Decimal("1.00")}).then(amount("1.00"))


def test_a_malformed_uuid_is_kept() -> None:
    with Driver(Summary()) as summary:
        summary.given(event("Scored", {"id": "g", "ref": "nonsense"})).restart().when(event("Scored", {"id": "g"}))

        assert summary.view("g")["games"] == 2
        summary.when(event("Scored", {"id": "g", "ref": "NONSENSE"}))
        assert summary.view("g")["ref"] == "NONSENSE"


def test_unknown_fields_are_refused() -> None:
    with Driver(Balance()) as driver, pytest.raises(ValueError, match="is not a valid FundsAdded"):
        driver.given(event("FundsAdded", {"customer": "alice"}))


@pytest.mark.parametrize(
    ("amount", "why"),
    [
        (1.5, "amount is 1.5 of type float, but decimal(18,2) is expected; give a Decimal"),
        ("1.50", "amount is '1.50' of type str, but decimal(18,2) is expected; give a Decimal"),
        (Decimal("1.234"), "Scale provided in schema does not match the decimal"),
    ],
)
def test_the_error_for_a_value_of_a_wrong_type_names_the_expected_one(amount: Any, why: str) -> None:
    with Driver(Balance()) as driver, pytest.raises(ValueError, match=re.escape(why)):
        driver.given(event("FundsAdded", {"customerId": "alice", "amount": amount}))


def test_the_error_for_a_value_of_a_nullable_field_names_the_expected_type() -> None:
    refused = "level is 'high' of type str, but int is expected"
    with Driver(Summary()) as driver, pytest.raises(ValueError, match=refused):
        driver.given(scored(level="high"))


def test_a_check_before_the_first_event_is_refused(balance: Driver) -> None:
    with pytest.raises(ValueError, match="there was no event yet"):
        balance.then(amount("0.00"))


def test_an_event_of_another_key_is_a_dead_letter(balance: Driver) -> None:
    wrong = funds("1.00", record_key="bob")

    balance.when(wrong)

    why = "the record's key is not the customerId of its event"
    assert balance.dead_letters() == [(wrong, "key-is-not-customer-id", why)]
    assert balance.view("alice") is None


def test_a_malformed_key_is_a_dead_letter(balance: Driver) -> None:
    ((_, cause, why),) = balance.when(funds("1.00", "")).dead_letters()
    assert (cause, why) == ("customer-id-malformed", "customerId must have 1 to 256 bytes of UTF-8")


def test_of_events_with_one_idempotency_key_the_first_counts(balance: Driver) -> None:
    once = funds("1.00", idempotency_key="once")

    balance.given(once).when(once).then(amount("1.00"))


def test_a_redelivered_batch_counts_once(balance: Driver) -> None:
    balance.given(funds("1.00")).when(funds("2.00")).redeliver().then(amount("3.00"))


def test_a_restored_store_continues(balance: Driver) -> None:
    balance.given(funds("1.00")).restart().when(funds("2.00")).then(amount("3.00"))


def test_activity_does_not_depend_on_the_order_of_events() -> None:
    days = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3)]
    events = [
        event("FundsAdded", {"customerId": "alice", "amount": Decimal(digits), "occurredOn": on})
        for digits, on in (("2.00", days[1]), ("-7.00", days[0]), ("2.50", days[2]))
    ]

    with Driver(Activity()) as driver:
        driver.given(*events[:2]).when(events[2]).then(
            {"additions": 3, "first": days[0], "latest": days[2], "greatest": Decimal("2.50")}
        )


def scored(**fields: Any) -> Any:
    return event("Scored", {"id": "g", "kind": "SMALL", **fields})


def ended() -> Any:
    return event("Ended", {"id": "g"})


def test_a_fold_that_returns_none_deletes_the_state(session: Driver) -> None:
    session.given(scored())

    assert session.commit([ended()]).deleted == 1
    assert session.view("g") is None
    assert session.restart().view("g") is None


def test_a_deleted_key_starts_again_without_state(session: Driver) -> None:
    session.given(scored(), scored(), ended(), scored(tags=["back"]))

    view = session.view("g")
    assert (view["games"], view["event"]) == (1, "back")


def test_deleting_a_missing_state_counts_nothing(session: Driver) -> None:
    assert session.commit([ended()]).deleted == 0
    assert session.commit([scored(), ended()]).deleted == 0


def test_a_fold_refuses_an_event_with_a_cause(session: Driver) -> None:
    large = scored(kind="LARGE")

    session.given(scored()).when(large, scored())

    assert session.dead_letters() == [(large, "game-too-large", "only small games are played")]
    assert session.view("g")["games"] == 2


def test_a_state_that_does_not_fit_its_schema_is_a_dead_letter(
    session: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "fold", lambda *_: {"games": "many"})

    assert [letter.cause for letter in session.when(scored()).dead_letters()] == ["state-does-not-fit"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"games": "many"}, "games is 'many' of type str, but int is expected"),
        ({"games": 1 << 70}, f"games is {1 << 70}, which int cannot hold"),
        ({"event": "x" * (1 << 20)}, "the changelog does not accept its "),
    ],
)
def test_a_dead_letter_names_the_field_of_the_state_that_does_not_fit(
    session: Driver, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], why: str
) -> None:
    fold = Session.fold
    monkeypatch.setattr(Session, "fold", lambda *given: {**(fold(*given) or {}), **changed})

    (refused,) = session.when(scored()).dead_letters()

    assert refused.detail.startswith(f"the fold's state cannot be kept: {why}")
    assert len(refused.detail) <= 500


def test_an_own_fold_gets_the_time_of_each_event(session: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    own = Session.fold

    def fold(model: Session, state: Any, event: Any) -> Any:
        times.append(event.timestamp_ms)
        return own(model, state, event)

    monkeypatch.setattr(Session, "fold", fold)
    session.given(*(event("Scored", {"id": "g", "kind": "SMALL"}, timestamp_ms=at) for at in (5, 1)))

    assert times == [5, 1]


def test_a_failing_fold_halts_the_task_at_the_event_with_its_error(
    session: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.given(scored(), scored())
    before = session.states()
    own = Session.fold

    def fold(model: Session, state: Any, event: Any) -> Any:
        return own(model, state, event) if "bad" not in event["tags"] else event["absent"]

    monkeypatch.setattr(Session, "fold", fold)

    with pytest.raises(TaskHaltedError) as halted:
        session.given(scored(), scored(tags=["bad"]), scored())

    assert str(halted.value) == (
        "the code of the read model test-session fails at offset 3 of games:0 with KeyError; "
        "correct it, and restart the instance"
    )
    assert isinstance(halted.value.__cause__, KeyError)
    assert session.states() == before
    assert session.dead_letters() == []


@pytest.mark.parametrize("error", [RetriableError("away"), InvalidInputError("wrong")])
def test_an_error_of_the_service_raised_by_a_fold_is_a_failure_of_the_fold(
    session: Driver, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fold(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Session, "fold", fold)

    with pytest.raises(TaskHaltedError, match="fails at offset 0 of games:0"):
        session.given(scored())


def scores(player: int, score: float, product: int = 1, **more: Any) -> Any:
    return event("ScoreEvent", {"score": score, "product_id": product, "player_id": player}, **more)


def player(number: int, name: str, **more: Any) -> Any:
    return row("players", number, {"id": number, "name": name}, **more)


def product(number: int, name: str) -> Any:
    return row("products", number, {"id": number, "name": name})


@pytest.fixture
def leaderboard() -> Iterator[Driver]:
    with Driver(Leaderboard()) as driver:
        yield driver


def places(driver: Driver, product: int = 1) -> list[tuple[str, str, float]]:
    return [(one["gameName"], one["playerName"], one["score"]) for one in driver.view(str(product)) or ()]


def test_events_pass_re_keys_and_joins_with_the_rows_given(leaderboard: Driver) -> None:
    leaderboard.given(player(7, "Ann"), player(8, "Bo"), product(1, "Chess"))

    leaderboard.when(scores(7, 10.0), scores(8, 20.0))

    assert places(leaderboard) == [("Chess", "Bo", 20.0), ("Chess", "Ann", 10.0)]
    assert len(leaderboard.emitted("high-scores")) == 1


def test_rows_of_a_call_are_there_before_its_events(leaderboard: Driver) -> None:
    leaderboard.given(scores(7, 10.0), player(7, "Ann"), product(1, "Chess"))

    assert places(leaderboard) == [("Chess", "Ann", 10.0)]


def test_an_event_joins_the_row_as_of_its_time(leaderboard: Driver) -> None:
    leaderboard.given(product(1, "Chess"), player(7, "Ann", timestamp_ms=10), player(7, "Anna", timestamp_ms=20))

    leaderboard.given(scores(7, 1.0, timestamp_ms=15), scores(7, 2.0, timestamp_ms=20))

    assert [name for _, name, _ in places(leaderboard)] == ["Anna", "Ann"]


def test_an_event_without_its_row_is_a_dead_letter_until_the_row_is_there(leaderboard: Driver) -> None:
    lost = scores(7, 10.0)
    leaderboard.given(product(1, "Chess")).when(lost)
    assert [(letter.event.fields, letter.cause) for letter in leaderboard.dead_letters()] == [
        (lost.fields, "join-missing")
    ]

    leaderboard.given(player(7, "Ann")).advance(minutes=5)

    assert places(leaderboard) == [("Chess", "Ann", 10.0)]


def test_a_deleted_row_is_missing(leaderboard: Driver) -> None:
    leaderboard.given(product(1, "Chess"), player(7, "Ann"), row("players", 7, None)).when(scores(7, 10.0))

    assert [letter.cause for letter in leaderboard.dead_letters()] == ["join-missing"]


def test_a_redelivery_and_a_restart_of_all_stages_change_nothing(leaderboard: Driver) -> None:
    leaderboard.given(player(7, "Ann"), product(1, "Chess"), scores(7, 10.0))

    leaderboard.redeliver().restart().when(scores(7, 5.0))

    assert [score for *_, score in places(leaderboard)] == [10.0, 5.0]


def test_after_the_joins_events_are_joined_records() -> None:
    joined = {"score": 1.0, "player_id": 7, "product_id": 1, "playerName": "Ann", "gameName": "Chess"}

    with Driver(Leaderboard(), after_joins=True) as driver:
        driver.when(joined)

        assert places(driver) == [("Chess", "Ann", 1.0)]


def test_a_row_of_a_table_that_is_not_joined_is_refused(leaderboard: Driver) -> None:
    with pytest.raises(
        ValueError, match="leaderboard joins with no table 'customers'; it joins with players, products"
    ):
        leaderboard.given(row("customers", "a", {}))


def test_the_error_for_a_row_that_does_not_fit_names_the_field(leaderboard: Driver) -> None:
    with pytest.raises(ValueError, match="is not a valid Player: name is 5 of type int, but string is expected"):
        leaderboard.given(row("players", 7, {"name": 5}))


def test_a_check_says_that_every_event_is_a_dead_letter(leaderboard: Driver) -> None:
    with pytest.raises(ValueError, match=r"every event is a dead letter \(join-missing\)"):
        leaderboard.when(scores(7, 10.0)).then(None)


def test_a_mapping_for_a_model_of_several_records_is_refused(session: Driver) -> None:
    with pytest.raises(
        ValueError, match=r"give `event\(record, fields\)` instead of a mapping, with one of Scored, Ended"
    ):
        session.given({"id": "g"})


def test_what_a_model_emits_is_given_to_the_next_one() -> None:
    paid = {"invoiceNumber": "I-1", "customerCardNo": "49", "customerType": "PRIME", "totalAmount": Decimal("50.00")}
    with Driver(Rewards()) as first, Driver(Notified()) as second:
        first.given(paid, paid)

        second.given(*filter(None, first.emitted("notifications")))

        assert second.view("49") == {"notices": 2}
