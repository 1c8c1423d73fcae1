"""Outputs of read models: for which events, how often, and failures."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.frames import frame_header
from balance_service.engine.commit import write_position
from balance_service.engine.dead_letter import Status
from balance_service.engine.fold import FoldProcessor
from balance_service.errors import PoisonRecordError, TaskHaltedError
from balance_service.model.events import EVENT, LAST, Emit
from balance_service.model.folds import RunningSum, add
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.read_models.purchases import Purchases
from balance_service.read_models.rewards import Rewards
from balance_service.testing import Driver, InputEvent, event
from tests.support.models import SCORED, Noted

if TYPE_CHECKING:
    from collections.abc import Mapping

LINE = {"itemCode": "a", "description": "apple", "quantity": 2, "unitPrice": Decimal("1.50"), "amount": Decimal("3.00")}


def sold(amount: str, card: str = "1234567890", kind: str = "PRIME", **more: Any) -> InputEvent:
    fields = {"invoiceNumber": f"i-{amount}", "customerCardNo": card, "customerType": kind}
    where = {name: more.pop(name) for name in ("record_key", "idempotency_key", "timestamp_ms") if name in more}
    return event("PosInvoice", {**fields, "totalAmount": Decimal(amount), **more}, **where)


class Totals(ReadModel):
    """Emits the last points of each commit; a total of 0 deletes the state."""

    name = "test-totals"
    source = Stream("pos", "PosInvoice").by("customerCardNo")
    state = "Rewards"
    emits = Emit("totals", each=LAST)

    def fold(self, state: Mapping[str, Any] | None, invoice: Mapping[str, Any]) -> Mapping[str, Any] | None:
        points = add(state["points"] if state else Decimal(0), invoice["totalAmount"])
        return {"customerCardNo": invoice["customerCardNo"], "points": points} if points else None


class Picky(Totals):
    """Emits for each event, except those that it refuses."""

    name = "test-picky"
    emits = Emit("told", "Notification", each=EVENT)

    def emit(self, state: Mapping[str, Any], invoice: Mapping[str, Any]) -> Any:
        match invoice["invoiceNumber"]:
            case "i-1.00":
                return None
            case "i-2.00":
                raise PoisonRecordError("told-too-late", "it cannot be told any more")
            case "i-3.00":
                return {"invoiceNumber": 3}
            case "i-7.00":
                return [_notified(invoice["absent"], "7")]
            case "i-4.00":
                return [_notified(invoice, "x" * (1 << 20))]
            case number:
                return [_notified(invoice, number), _notified(invoice, f"{number} again")]


class Unmade(ReadModel):
    """Its `make` fails."""

    name = "test-unmade"
    source = Stream("pos", "PosInvoice")
    emits = Emit("told", "Notification", make=lambda invoice: [_notified(invoice["absent"], "7")])


class Paid(ReadModel):
    """Emits each state of a standard fold."""

    name = "test-paid"
    source = Stream("games", SCORED)
    key = "id"
    state = "Tally"
    emits = Emit("paid", each=EVENT)

    paid = RunningSum(f"{SCORED}.paid")


def _notified(invoice: Mapping[str, Any], number: str) -> dict[str, Any]:
    points = {"earnedLoyaltyPoints": Decimal(0), "totalLoyaltyPoints": Decimal(0)}
    return {
        "invoiceNumber": number,
        "customerCardNo": invoice["customerCardNo"],
        "totalAmount": invoice["totalAmount"],
        **points,
    }


def test_points_are_a_share_of_members_purchases() -> None:
    with Driver(Rewards()) as driver:
        driver.given(sold("10.00"), sold("5.00", kind="REGULAR"), sold("7.77", card="2")).when(sold("0.01")).then(
            {"points": Decimal("0.2002")}
        )
        assert driver.view("2") == {"points": Decimal("0.1554")}
        assert driver.dead_letters() == []


def test_each_purchase_of_a_member_is_notified_with_the_total_after_it() -> None:
    with Driver(Rewards()) as driver:
        driver.given(sold("10.00"), sold("5.00", card="2")).when(sold("1.00"))

        sent = driver.emitted("notifications")
        assert [(n["invoiceNumber"], n["earnedLoyaltyPoints"], n["totalLoyaltyPoints"]) for n in sent if n] == [
            ("i-10.00", Decimal("0.2000"), Decimal("0.2000")),
            ("i-5.00", Decimal("0.1000"), Decimal("0.1000")),
            ("i-1.00", Decimal("0.0200"), Decimal("0.2200")),
        ]


def test_emit_of_a_standard_fold_gets_the_event_and_the_state_after_it() -> None:
    with Driver(Noted()) as driver:
        driver.given(*[event(SCORED, {"id": "k", "paid": Decimal(paid), "tags": [paid]}) for paid in ("1.00", "2.00")])

        assert [(n["paid"], n["tags"], n["total"]) for n in driver.emitted("notes") if n] == [
            (Decimal("1.00"), ["1.00"], Decimal("1.00")),
            (Decimal("2.00"), ["2.00"], Decimal("3.00")),
        ]


def test_a_repeated_idempotency_key_is_passed_on_and_counts_once_in_the_fold() -> None:
    with Driver(Rewards()) as driver:
        driver.given(sold("10.00", idempotency_key="k"), sold("10.00", idempotency_key="k"))

        assert driver.view("1234567890") == {"points": Decimal("0.2000")}
        assert len(driver.emitted("notifications")) == 1


def test_a_redelivered_batch_is_emitted_once() -> None:
    with Driver(Rewards()) as driver:
        driver.when(sold("10.00")).redeliver().restart().redeliver()

        assert len(driver.emitted("notifications")) == 1


def test_a_rebuild_emits_nothing_again_and_makes_the_same_states() -> None:
    events = [sold("1.00"), sold("2.00"), sold("3.00"), sold("9.00"), sold("5.00")]
    for model, topic in ((Picky(), "told"), (Totals(), "totals")):
        with Driver(model) as first, Driver(model) as again:
            first.given(*events)
            stage = again.last_stage
            position = stage.store.position
            assert position is not None
            begun_anew = replace(position, emitted_up_to=4)
            write_position(begun_anew, stage.processor.position_codec, stage.store, stage.writer)
            again.given(*events[:4])
            assert again.emitted(topic) == []
            again.given(events[4])

            assert again.states() == first.states()
            assert [letter.cause for letter in again.dead_letters()] == [f.cause for f in first.dead_letters()]
            assert again.emitted(topic) == first.emitted(topic)[-len(again.emitted(topic)) :]
            assert again.emitted(topic)


def test_an_event_may_emit_several_records_one_or_none() -> None:
    with Driver(Picky()) as driver:
        driver.given(sold("1.00"), sold("5.00"))

        assert [n["invoiceNumber"] for n in driver.emitted("told") if n] == ["i-5.00", "i-5.00 again"]
        assert driver.view("1234567890") == {"points": Decimal("6.0000")}


def test_an_event_whose_emit_refuses_it_is_a_dead_letter_and_not_applied() -> None:
    with Driver(Picky()) as driver:
        driver.given(sold("5.00"), sold("2.00"), sold("3.00"), sold("4.00"))

        assert [letter.cause for letter in driver.dead_letters()] == [
            "told-too-late",
            "output-does-not-fit",
            "output-does-not-fit",
        ]
        assert driver.view("1234567890") == {"points": Decimal("5.0000")}


@pytest.mark.parametrize(("model", "topic"), [(Picky, "driver-test-picky-by-customerCardNo"), (Unmade, "pos")])
def test_a_failing_emit_or_make_halts_the_task_at_the_event(model: type[ReadModel], topic: str) -> None:
    with Driver(model()) as driver, pytest.raises(TaskHaltedError) as halted:
        driver.given(sold("7.00"))

    assert str(halted.value) == (
        f"the code of the read model {model.name} fails at offset 0 of {topic}:0 with KeyError; "
        "correct it, and restart the instance"
    )


def test_a_record_is_not_re_keyed_by_an_invalid_key() -> None:
    with Driver(Totals()) as driver:
        driver.given(sold("5.00", card="x" * 256), sold("6.00", card="x" * 257))

        assert [letter.cause for letter in driver.dead_letters()] == ["customer-card-no-malformed"]
        assert len(driver.emitted("totals")) == 1


def test_a_record_too_large_for_the_re_keyed_topic_is_a_dead_letter_with_its_own_key() -> None:
    # Such a record was compressed in the source topic, and is written uncompressed to the re-keyed one.
    large = sold("6.00", record_key="store", customerName="x" * (1 << 20))
    with Driver(Totals()) as driver:
        driver.given(sold("5.00"), large, sold("7.00"))

        (refused,) = driver.dead_letters()
        assert (refused.event, refused.cause) == (large, "output-does-not-fit")
        first = driver.stages[0]
        ((letter,),) = [letters for _, letters, _ in first.writer.commits if letters]
        assert (letter.offset, letter.key, letter.value) == (1, b"store", first.events[1].body)
        first.decide([1], Status.SCHEDULED)
        driver.advance(minutes=0)
        assert [(kept.offset, kept.status) for kept in first.letters()] == [(1, Status.WAITING)]
        assert driver.view("1234567890") == {"points": Decimal("12.0000")}


def test_the_last_state_of_a_key_is_emitted_once_per_commit_and_a_deletion_as_a_tombstone() -> None:
    with Driver(Totals()) as driver:
        driver.given(sold("5.00"), sold("1.00", card="2"), sold("6.00")).given(sold("-1.00", card="2"))

        assert driver.emitted("totals") == [
            {"customerCardNo": "2", "points": Decimal("1.0000")},
            {"customerCardNo": "1234567890", "points": Decimal("11.0000")},
            None,
        ]
        (output,) = [output for output in driver.last_stage.sent("totals") if output.value is None]
        assert (output.key, output.headers) == (
            b"2",
            [("origin", b"driver-test-totals-by-customerCardNo:0:3"), ("sent-by", b"driver-test-totals:source")],
        )


def test_each_state_of_a_standard_fold_is_emitted_with_the_schema_of_its_topic() -> None:
    with Driver(Paid()) as driver:
        folding = driver.last_stage.processor
        assert isinstance(folding, FoldProcessor)
        assert folding.emission is not None
        codec: Any = folding.emission.codec
        codec.schema_id, codec.header = 7, frame_header(7)
        driver.given(*(event(SCORED, {"id": "g", "paid": Decimal(paid)}) for paid in ("1.00", "2.00")))

        first, second = (output.value for output in driver.last_stage.sent("paid"))
        assert first is not None
        assert second is not None
        assert driver.state_codec.decode(driver.states()[b"g"][:5] + first[5:])["paid"] == Decimal("1.00")
        assert second == frame_header(7) + driver.states()[b"g"][5:]


def test_deliveries_are_shipped_in_upper_and_lower_case_and_all_lines_masked() -> None:
    with Driver(Purchases()) as driver:
        home = sold("3.00", deliveryType="home-Delivery", lines=[LINE, LINE], customerName="Ann", timestamp_ms=7)
        driver.given(sold("1.00", deliveryType="TAKEAWAY", lines=[LINE], record_key="store"), home)

        assert driver.emitted("shipments") == [driver.last_stage.events[1].values]
        lines = driver.emitted("hadoop")
        assert [line["customerCardDigits"] for line in lines if line] == ["7890"] * 3
        assert all("customerName" not in line and "address" not in line for line in lines if line)
        (shipped,) = driver.last_stage.sent("shipments")
        assert (shipped.key, shipped.timestamp_ms, shipped.headers) == (
            None,
            7,
            [("origin", b"pos:0:1"), ("sent-by", b"driver-purchases:source")],
        )
        assert driver.last_stage.sent("hadoop")[0].key == b"store"
