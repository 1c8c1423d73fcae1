"""Outputs with `fields`: what a declaration refuses, and the records that the driver sends."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.errors import ConfigurationError
from balance_service.model.conditions import col
from balance_service.model.events import EVENT, LAST, Emit, OfState
from balance_service.model.folds import Average, Count, RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.model.versions import declaration_of
from balance_service.testing import event
from balance_service.testing.driver import Driver
from tests.support.models import MONEY, PLACE, WIDE_MONEY, ship

if TYPE_CHECKING:
    from balance_service.model.events import Event, State

FINE_MONEY = {**MONEY, "precision": 9, "scale": 4}
ship("Told", {"id": "string", "level": ["null", "long"], "city": "string", "paid": FINE_MONEY, "ratio": "double"})
ship("Total", {"id": "string", "games": "long", "paid": WIDE_MONEY})
ship("Paid", {"id": "string", "paid": WIDE_MONEY, "mean": ["null", WIDE_MONEY], "games": "long"})
ship("Place2", {"place": PLACE, "level": "long"})
TOLD = {"id": "id", "level": "level", "city": "place.city", "paid": "paid", "ratio": "ratio"}


class Telling(ReadModel):
    """Sends records of some columns, and the events that are large."""

    name = "test-telling"
    source = Stream("games", "Scored")
    emits = (Emit("told", "Told", fields=TOLD), Emit("large", where=col("kind") == "LARGE"))


class Paying(ReadModel):
    """Sends the state after each event, with a column of the event."""

    name = "test-paying"
    source = Stream("games", "Scored")
    key = "id"
    state = "Paid"
    emits = Emit("totals", "Total", each=EVENT, fields={"id": "id", "games": OfState("games"), "paid": OfState("paid")})

    paid = RunningSum("Scored.paid")
    mean = Average("Scored.paid")
    games = Count("Scored")


def defined(base: type[ReadModel], **changed: Any) -> type[ReadModel]:
    return type("Defined", (base,), {**changed, "__module__": __name__})


def emitting(**changed: Any) -> Emit:
    return Emit("told", "Told", **changed)


@pytest.mark.parametrize(
    ("base", "emits", "why"),
    [
        (Telling, Emit("told", fields=TOLD), "name both a record type and `fields`, `of` or `make`, or neither"),
        (Telling, emitting(fields=TOLD, make=lambda _: None), "with two of `fields`, `of` and `make`"),
        (Telling, emitting(fields={**TOLD, "more": "id"}), "emits Told to 'told' with 'more', which is no field of it"),
        (Telling, emitting(fields={"id": "id"}), "without its 'level', which has no default"),
        (Telling, emitting(fields={**TOLD, "city": "place.town"}), "the event's 'place.town', but Scored has no such"),
        (Telling, emitting(fields={**TOLD, "level": "score"}), "'score': it is of type double, and the field of long"),
        (Telling, emitting(fields={**TOLD, "ratio": "level"}), "'level': it is of type int, and the field of double"),
        (
            Telling,
            emitting(fields={**TOLD, "level": OfState("games")}),
            "'games', which does not exist: the model has no",
        ),
        (Paying, emitting(fields={**TOLD, "level": OfState("n")}), "'n', which does not exist; it has id, paid, mean"),
        (Paying, emitting(fields={**TOLD, "ratio": OfState("games")}), "'games': it is of type long, and the field of"),
        (Paying, emitting(fields=TOLD, each=LAST), "`each=LAST` has no event, only the key 'id' and `OfState`"),
        (Paying, Emit("told", "Place2", fields={"place": "place", "level": OfState("paid")}), "of type decimal"),
        (Paying, Emit("told", fields=TOLD), "a record type needs `fields` or an `emit`, and these need a record type"),
    ],
)
def test_fields_that_do_not_fit_are_refused(base: type[ReadModel], emits: Emit, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        defined(base, emits=emits)()


def test_fields_exclude_an_emit_of_ones_own() -> None:
    own = defined(Paying, emit=lambda _self, _state, _event: None)

    with pytest.raises(ConfigurationError, match="with `fields`, and has an `emit` of its own"):
        own()


def test_a_source_of_a_field_is_a_column_or_a_field_of_the_state() -> None:
    with pytest.raises(TypeError, match="3 is no source of a field"):
        Emit("told", "Told", fields={"id": 3})  # type: ignore[dict-item]


def test_fields_are_part_of_the_fingerprint() -> None:
    def fingerprint(fields: dict[str, Any]) -> str:
        model = defined(Paying, emits=Emit("totals", "Total", fields=fields))()
        return declaration_of(model).fingerprint

    taken = {"id": "id", "games": OfState("games"), "paid": OfState("paid")}

    assert fingerprint(taken) == fingerprint(dict(reversed(taken.items())))
    assert fingerprint(taken) != fingerprint({**taken, "paid": "paid"})


def test_a_model_without_states_sends_columns() -> None:
    small = {"id": "g", "level": 7, "place": {"city": "Bern", "since": None}, "paid": Decimal("1.50"), "ratio": 0.5}
    with Driver(Telling()).given(event("Scored", small), event("Scored", {**small, "kind": "LARGE"})) as driver:
        told = {"id": "g", "level": 7, "city": "Bern", "paid": Decimal("1.5000"), "ratio": 0.5}

        assert driver.emitted("told") == [told, told]
        assert [sent["kind"] for sent in driver.emitted("large") if sent] == ["LARGE"]


def test_an_event_whose_record_does_not_fit_is_one_dead_letter_and_its_neighbours_are_sent() -> None:
    large = event("Scored", {"id": "g", "kind": "LARGE", "paid": Decimal(10) ** 5})
    with Driver(Telling()).given(event("Scored", {"id": "a"}), large, event("Scored", {"id": "b"})) as driver:
        (refused,) = driver.dead_letters()

        assert (refused.event.fields, refused.cause) == (large.fields, "output-does-not-fit")
        assert [sent["id"] for sent in driver.emitted("told") if sent] == ["a", "b"]
        assert driver.emitted("large") == []


def test_a_model_with_states_sends_the_state_after_each_event() -> None:
    paid = [event("Scored", {"id": "g", "paid": Decimal(amount)}) for amount in ("1.00", "2.00", "-0.50")]
    with Driver(Paying()).given(*paid, event("Scored", {"id": "h"})).when(paid[0]) as driver:
        sent = [(one["id"], one["games"], one["paid"]) for one in driver.emitted("totals") if one]

    amounts = [("g", 1, "1.00"), ("g", 2, "3.00"), ("g", 3, "2.50"), ("h", 1, "0.00"), ("g", 4, "3.50")]
    assert sent == [(key, games, Decimal(total)) for key, games, total in amounts]


def test_a_state_that_the_record_has_no_room_for_is_one_dead_letter_and_its_neighbours_are_sent() -> None:
    ship("Small", {"id": "string", "paid": {**MONEY, "precision": 5}})
    narrow = defined(Paying, emits=Emit("small", "Small", fields={"id": "id", "paid": OfState("paid")}))
    paid = [event("Scored", {"id": "g", "paid": Decimal(amount)}) for amount in ("1.00", "1000.00", "2.00")]

    with Driver(narrow()).given(*paid) as driver:
        (refused,) = driver.dead_letters()

        assert (refused.event.fields, refused.cause) == (paid[1].fields, "output-does-not-fit")
        assert "paid is Decimal('1001.00'), but decimal(5,2) is expected" in refused.detail
        assert [sent["paid"] for sent in driver.emitted("small") if sent] == [Decimal("1.00"), Decimal("3.00")]
        assert len(driver.redeliver().restart().rebuild().emitted("small")) == 2


def test_a_repeated_event_is_one_although_its_id_is_sent() -> None:
    once = [event("Scored", {"id": "g", "paid": Decimal(1)}, idempotency_key="a") for _ in range(2)]
    with Driver(Paying()).given(*once) as driver:
        assert [sent["games"] for sent in driver.emitted("totals") if sent] == [1]
        assert driver.dead_letters() == []


def test_an_average_is_sent_as_the_model_declares_it() -> None:
    ship("Mean", {"key": "string", "mean": ["null", MONEY]})
    means = defined(Paying, emits=Emit("means", "Mean", each=LAST, fields={"key": "id", "mean": OfState("mean")}))
    paid = [event("Scored", {"id": "g", "paid": Decimal(amount)}) for amount in ("1.00", "2.00", "2.00")]

    with Driver(means()).given(*paid) as driver:
        assert driver.emitted("means") == [{"key": "g", "mean": Decimal("1.67")}]


def test_a_fold_of_ones_own_sends_its_states_and_nothing_once_it_deletes_one() -> None:
    class Counted(ReadModel):
        name = "test-counted"
        source = Stream("games", "Scored")
        key = "id"
        state = "Total"
        emits = Emit("totals", "Total", fields={"id": "id", "games": OfState("games"), "paid": "paid"})

        def fold(self, state: State | None, scored: Event) -> State | None:
            """Counts to two."""
            games = state["games"] + 1 if state else 1
            return None if games > 2 else {"id": scored["id"], "games": games, "paid": scored["paid"]}

    with Driver(Counted()).given(*[event("Scored", {"id": "g"})] * 4) as driver:
        assert [one["games"] for one in driver.emitted("totals") if one] == [1, 2, 1]
