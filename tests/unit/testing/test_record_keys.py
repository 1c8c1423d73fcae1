"""Read models whose key is the record's own, and outputs and tables with numbers as keys, in the test driver."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Annotated, Any
from uuid import NAMESPACE_DNS, UUID, uuid5

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balance_service.engine.outputs import SENDER_HEADER
from balance_service.errors import ConfigurationError
from balance_service.kafka.partitioner import Partitioning
from balance_service.model.events import LAST, Emit, OfState
from balance_service.model.folds import Count, RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.record_keys import KEY_FORMAT_HEADER, KEY_FORMATS, RECORD_KEY, KeyFormat, RecordKey
from balance_service.model.stream import Global, Stream
from balance_service.model.value_types import scale
from balance_service.model.versions import declaration_of
from balance_service.testing import Driver, event, row
from balance_service.testing.contract import CONTRACT, Check
from balance_service.testing.rows import tombstone
from balance_service.testing.strategies import batches
from tests.support.composite import Purchase
from tests.support.record_keys import Joined, KeyedOrders, Label, Labels, Order, Orders, OrdersById, totals_of

MODELS = {form: totals_of(form) for form in KEY_FORMATS}
KEYS: dict[KeyFormat, Any] = {
    "string": "c1",
    "int": -5,
    "long": -(2**63),
    "uuid": UUID("123e4567-e89b-12d3-a456-426614174000"),
    "bytes": b"\xff\0",
}


def long(number: int) -> bytes:
    return struct.pack(">q", number)


def order(key: Any, amount: int = 1) -> Any:
    return event("Order", {"amount": amount}, record_key=key)


@pytest.mark.parametrize("form", KEY_FORMATS)
def test_the_records_own_key_is_the_key_of_the_state(form: KeyFormat) -> None:
    with Driver(MODELS[form]) as driver:
        driver.given(order(KEYS[form], 2), order(KEYS[form], 5)).then({"total": 7, "orders": 2})

        assert driver.view(KEYS[form]) == {"total": 7, "orders": 2}
        shown = KEYS[form].hex() if form == "bytes" else str(KEYS[form])
        assert driver.view(shown, into=KeyedOrders) == KeyedOrders(shown, 7, 2)
        assert not driver.dead_letters()
        driver.redeliver().restart().rebuild().then({"total": 7, "orders": 2})


def test_text_is_the_default_and_a_state_does_not_repeat_its_key() -> None:
    with Driver(totals_of(None)) as driver:
        driver.given(order("c1"))

        ((key, frame),) = driver.states().items()

    assert key == b"c1"
    assert driver.state_codec.decode(frame) == {"total": 1, "orders": 1}
    assert MODELS["string"].description()["key"] == "key"


@pytest.mark.parametrize(
    ("form", "key"), [("int", b"12345"), ("long", b"1"), ("uuid", b"x"), ("bytes", b""), ("string", b"\n")]
)
def test_a_record_whose_key_has_another_form_is_a_dead_letter(form: KeyFormat, key: bytes) -> None:
    with Driver(MODELS[form]) as driver:
        driver.given(order(key))

        (letter,) = driver.dead_letters()
        assert letter.cause == "key-malformed"
        assert "name the `key_format` of the topic's producers" in letter.detail
        assert not driver.states()


def test_a_record_without_a_key_is_a_dead_letter() -> None:
    with Driver(MODELS["long"]) as driver:
        driver.given({"amount": 1})

        (letter,) = driver.dead_letters()
        assert (letter.cause, letter.detail) == ("key-null", "the record has no key, and the read model's key is that")
        with pytest.raises(ValueError, match="give it a `record_key`"):
            driver.then(None)


def test_a_dead_letter_keeps_the_key_that_the_producer_wrote() -> None:
    with Driver(MODELS["long"]) as driver:
        driver.given(event("Order", {"amount": 1}, record_key=-1, unreadable="schema-id-unknown"))

        (batch,) = [letters for _, letters, _ in driver.last_stage.writer.commits if letters]
        assert [letter.key for letter in batch] == [long(-1)]


def test_later_records_of_a_key_wait_for_an_earlier_one() -> None:
    with Driver(OrdersById) as driver:
        driver.given(event("Order", {"amount": 1}, record_key=-1, unreadable="schema-id-unknown"), order(-1, 2))
        driver.given(order(-1, 3), order(7, 4))

        assert [one.cause for one in driver.dead_letters()] == ["schema-id-unknown", "behind-another", "behind-another"]
        assert driver.view(7) == {"total": 4, "orders": 1}
        driver.mend("schema-id-unknown").advance(minutes=6)
        assert driver.view(-1) == {"total": 6, "orders": 3}


def test_a_tombstone_deletes_the_state_of_its_key() -> None:
    with Driver(OrdersById) as driver:
        driver.given(order(-1), order(1), tombstone(-1))

        assert driver.view(-1) is None
        assert driver.view(1) == {"total": 1, "orders": 1}


def test_an_output_has_the_key_that_the_record_came_with() -> None:
    with Driver(OrdersById) as driver:
        driver.given(order(-1), order(2**63 - 1))

        sent = driver.last_stage.sent("own-totals")
        assert [output.key for output in sent] == [long(-1), long(2**63 - 1)]
        assert {dict(output.headers)[KEY_FORMAT_HEADER] for output in sent} == {b"long"}


@pytest.mark.parametrize("model", [*MODELS.values(), OrdersById()], ids=[*MODELS, "own fold"])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@settings(max_examples=8, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_the_contract_holds(check: Check, model: ReadModel, data: st.DataObject) -> None:
    check(model, data.draw(batches(model)))


@dataclass
class PerDay:
    day: int
    total: int


class Days(ReadModel):
    """Keyed by a number, as the stores have it."""

    name = "days-in-order"
    source = Stream("purchases", Purchase).by("day")
    state = PerDay
    total = RunningSum("Purchase.amount")
    emits = Emit("day-totals", each=LAST)


class DaysAsLongs(Days):
    name = "days-as-longs"
    emits = Emit("day-totals", each=LAST, key_format="long")


class PassesDays(ReadModel):
    name = "passes-days"
    source = Stream("purchases", Purchase).by("day")
    emits = Emit("by-day", key_format="long")


def keys_sent(model: type[ReadModel], topic: str, days: list[int]) -> list[Any]:
    with Driver(model) as driver:
        for day in days:
            driver.given(Purchase("c", day, 1))
        return [(output.key, dict(output.headers).get(KEY_FORMAT_HEADER)) for output in driver.last_stage.sent(topic)]


NUMBERS = [-1, 0, 2**62, -(2**63)]


@dataclass
class Paid:
    amount: Annotated[Decimal, scale(2)]


@dataclass
class Sum:
    total: Annotated[Decimal, scale(2)]


def sums_of(form: KeyFormat) -> type[ReadModel]:
    members = {
        "name": "own-sums",
        "source": Stream("own-orders", Paid, key_format=form),
        "key": RECORD_KEY,
        "state": Sum,
        "total": RunningSum("Paid.amount"),
    }
    return type("OwnSums", (ReadModel,), members)


@pytest.mark.parametrize("form", KEY_FORMATS)
def test_a_sum_under_the_records_own_key_is_added_in_columns(form: KeyFormat) -> None:
    model = sums_of(form)
    keys = [KEYS[form], *([-1, 0, 2**31 - 1] if form in ("int", "long") else [])]
    for key, amounts in product(keys, [("1.00", "-0.25"), ("0.00",), ("12345678901234.56", "0.01")]):
        with Driver(model, combines_few=True) as fast, Driver(model, combines_few=True, is_accelerated=False) as slow:
            assert (fast.last_stage.processor.acceleration is None) == (form == "uuid")  # type: ignore[attr-defined]
            for amount in amounts:
                event_of_it = event("Paid", {"amount": Decimal(amount)}, record_key=key)
                assert fast.given(event_of_it).states() == slow.given(event_of_it).states()
            assert fast.view(key) == {"total": sum(map(Decimal, amounts))}


@pytest.mark.parametrize("form", KEY_FORMATS)
def test_partitions_of_keys_in_rows_are_those_of_each(form: KeyFormat) -> None:
    kind, partitioning = RecordKey.of_format(form), Partitioning(7, "murmur2", form)
    values = {"string": ["a1", "b2"], "bytes": ["00ff", "ff00"], "uuid": [str(uuid5(NAMESPACE_DNS, t)) for t in "ab"]}
    keys = [kind.encode(value) for value in values.get(form, [-1, 0, 5, 2**31 - 1])]
    rows = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)

    assert partitioning.of_rows(rows).tolist() == partitioning.of_keys(keys)


def test_the_keys_of_outputs_are_as_before_without_a_key_format() -> None:
    assert keys_sent(Days, "day-totals", NUMBERS) == [((day + 2**63).to_bytes(8, "big"), None) for day in NUMBERS]


@pytest.mark.parametrize(("model", "topic"), [(DaysAsLongs, "day-totals"), (PassesDays, "by-day")])
def test_an_output_may_have_longs_as_java_writes_them(model: type[ReadModel], topic: str) -> None:
    assert keys_sent(model, topic, NUMBERS) == [(long(day), b"long") for day in NUMBERS]


def test_the_greatest_numbers_of_a_column_are_dead_letters_since_their_keys_are_reserved() -> None:
    with Driver(DaysAsLongs) as driver:
        driver.given(Purchase("c", 2**63 - 1, 1), Purchase("c", 2**63 - 2**56, 1), Purchase("c", 2**63 - 2**56 - 1, 1))

        assert [one.cause for one in driver.dead_letters()] == ["key-reserved"] * 2
        assert [output.key for output in driver.last_stage.sent("day-totals")] == [long(2**63 - 2**56 - 1)]


def test_a_key_format_changes_the_fingerprint_of_the_model_that_names_it() -> None:
    class Same(Days):
        emits = Emit("day-totals", each=LAST, key_format=None)

    class Longs(Days):
        emits = Emit("day-totals", each=LAST, key_format="long")

    same, longs = declaration_of(Same()), declaration_of(Longs())
    assert declaration_of(Days()).fingerprint == same.fingerprint != longs.fingerprint
    forms = {declaration_of(model).reads for model in MODELS.values()}
    assert len(forms) == len(KEY_FORMATS)


class GlobalLabels(Labels):
    name = "global-labels"
    source = (
        Stream("purchases", Purchase)
        .join(Global("day-labels", Label, key_format="long"), on="day", take={"label": "label"})
        .by("label", record=Joined)
    )


@pytest.mark.parametrize("model", [Labels, GlobalLabels])
def test_an_event_joins_the_row_of_a_number(model: type[ReadModel]) -> None:
    days = [-1, 0, 2**63 - 1, -(2**63)]
    with Driver(model) as driver:
        driver.given(*(row("day-labels", day, Label(f"day {day}")) for day in days))
        driver.given(*(Purchase("c", day, 1) for day in days), Purchase("c", 7, 1))

        assert [driver.view(f"day {day}") for day in days] == [{"purchases": 1}] * 4
        assert [one.cause for one in driver.dead_letters()] == ["join-missing"]


def test_a_re_key_in_front_of_a_table_of_longs_writes_longs() -> None:
    with Driver(Labels) as driver:
        driver.given(*(row("day-labels", day, Label("l")) for day in (-1, 5)))
        driver.given(Purchase("c", -1, 1), Purchase("c", 5, 1))

        first = driver.stages[0].writer.sent
        assert [output.key for output in first] == [long(-1), long(5)]
        assert SENDER_HEADER in dict(first[0].headers)


def test_a_row_of_a_table_of_numbers_needs_a_number() -> None:
    with Driver(Labels) as driver, pytest.raises(ValueError, match="invalid literal"):
        driver.given(row("day-labels", "monday", Label("l")))


def model_of(**members: Any) -> type[ReadModel]:
    base = {"name": "refused", "key": RECORD_KEY, "state": Orders, "orders": Count("Order")}
    return type("Refused", (ReadModel,), {**base, "total": RunningSum("Order.amount"), **members})


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"source": Stream("o", Order, key_format="avro")}, 'key_format="avro": such a key has a schema id'),  # type: ignore[arg-type]
        ({"source": Stream("o", Order, key_format="json")}, "any order, and spaces, so that no query"),  # type: ignore[arg-type]
        ({"source": Stream("o", Order, key_format="varint")}, "must be one of string, int, long, uuid, bytes"),  # type: ignore[arg-type]
        ({"source": Stream("o", Order).by("amount")}, "RECORD_KEY, and a source that is re-keyed"),
        ({"source": Stream("o", Order, key_format="long"), "key": "amount"}, "is that of `key = RECORD_KEY`"),
        ({"sources": (Stream("o", Order), Stream("p", Order))}, "`sources` and the key RECORD_KEY"),
        ({"source": Stream("o", Order), "state": KeyedOrders}, "states with a 'key', which is what answers call"),
        (
            {"source": Stream("o", Order, key_format="int"), "emits": Emit("t", key_format="long")},
            "key_format 'long', and its keys are sent as its source has them: int",
        ),
        (
            {
                "source": Stream("o", Order).join(
                    Global("t", Label, key_format="uuid"), on="amount", take={"label": "label"}
                )
            },
            "must be one of string, int, long; a UUID is text",
        ),
    ],
)
def test_a_declaration_that_cannot_hold_is_refused(members: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        model_of(**members)()


def test_a_re_keyed_source_may_say_that_its_keys_are_avro() -> None:
    class FromAvro(Days):
        source = Stream("purchases", Purchase, key_format="avro").by("day")  # type: ignore[arg-type]

    assert declaration_of(FromAvro()).reads == declaration_of(Days()).reads


@pytest.mark.parametrize(
    ("source", "emits", "said"),
    [
        (Stream("p", Purchase).by("card"), Emit("t", key_format="long"), "its keys are card: only a number"),
        (Stream("p", Purchase).by("day"), Emit("t", key_format="bytes"), "only a number may be written as a long"),
        (Stream("p", Purchase), Emit("t", key_format="long"), "name the `key_format` of its source, too"),
    ],
)
def test_an_output_whose_keys_have_no_such_form_is_refused(source: Stream, emits: Emit, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        type("Refused", (ReadModel,), {"name": "refused", "source": source, "emits": emits})()


def test_a_table_of_longs_is_joined_on_a_number_only() -> None:
    class ByText(Labels):
        source = (
            Labels.source.__class__("purchases", Purchase)
            .join(Global("day-labels", Label, key_format="long"), on="card", take={"label": "label"})
            .by("label", record=Joined)
        )

    with pytest.raises(ConfigurationError, match="which has long keys, on 'card', which is no int or long"):
        ByText()


def test_an_output_of_a_model_may_not_name_the_key_as_a_field() -> None:
    with pytest.raises(ConfigurationError, match="'key'"):
        model_of(
            source=Stream("o", Order),
            emits=Emit(
                "t",
                KeyedOrders,
                each=LAST,
                fields={"key": "key", "total": OfState("total"), "orders": OfState("orders")},
            ),
        )()
