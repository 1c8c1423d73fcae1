"""Events of every type, decoded by Spark: equal to the test driver's, also after schema evolution."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balance_service.avro.frames import frame_header, opened
from balance_service.avro.schemas import fields_of, load_schema, without_null
from balance_service.engine.batch import updates_in
from balance_service.errors import PoisonRecordError
from balance_service.model.conditions import col
from balance_service.model.events import Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.read_models.activity import Activity
from balance_service.read_models.balance import Balance
from balance_service.read_models.purchases import Purchases
from balance_service.read_models.rewards import Rewards
from balance_service.read_models.symbols import Symbols
from balance_service.settings import load_settings
from balance_service.spark.combine import PartitionRows
from balance_service.spark.decode import Decoder
from balance_service.spark.row_query import RowQuery
from balance_service.spark.session import one_record, start_spark
from balance_service.testing import event, tombstone
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import encoded, key_of, rows_of
from tests.integration.decoding import AT, SCORED, Writers, causes, decoded, evolved, update, written
from tests.support.composite import Purchase, SpentPerDay
from tests.support.models import MODELS, MONEY, WHEN, Session, ship
from tests.support.models import Chosen as Some
from tests.support.shipped import declared, jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession


EVENTS = [
    event("Scored", SCORED),
    event("Scored", {"id": "h", "level": 7, "score": float("nan"), "place": {"city": "", "since": None}}),
    event("Scored", {"id": "g", "paid": Decimal("9999999999999999.99"), "kind": "SMALL"}),
    event("Scored", {"id": "g"}, record_key="h"),
]
ENDED = [event("Ended", {"id": "g"}), event("Ended", {"id": "g", "reason": "over"})]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


def test_values_without_a_frame_are_refused_in_the_same_words_as_elsewhere(spark: SparkSession) -> None:
    values = [b"", b"\1\0\0\0\1", b"\xff    ", b"{}", b' {"id": "g"}\n', b"[1, 2, 3]", b"{games", b"{"]
    refused = []
    for value in values:
        with pytest.raises(PoisonRecordError) as caught:
            opened(value)
        refused.append((caught.value.cause, str(caught.value)))

    rows = decoded(spark, Session(), [load_schema("Scored")], [(b"g", None, value) for value in values])

    assert [*zip(causes(rows), rows.notes["detail"].to_pylist(), strict=True)] == refused


@pytest.mark.parametrize("read_model", MODELS, ids=lambda read_model: read_model.name)
def test_spark_decodes_the_same_rows_as_the_driver(spark: SparkSession, read_model: ReadModel) -> None:
    records = read_model.source.records
    stage = read_model.stages[-1]
    events = [encoded(given, stage) for given in [*EVENTS, *ENDED] if given.record in records]
    framed = [(key_of(read_model, stage, given), records.index(given.record) + 1, given.body) for given in events]

    rows = decoded(spark, read_model, [load_schema(record) for record in records], framed)

    expected = PartitionRows(rows_of(read_model, stage, dict(enumerate(events)), FakeRegistry()))
    found = [(single.key, single.update) for single in rows.single_updates(rows.updates)]
    assert repr(found) == repr([(single.key, single.update) for single in expected.single_updates(expected.updates)])
    assert causes(rows) == causes(expected) == ["key-is-not-id"]
    assert rows.notes["detail"].drop_null().to_pylist() == ["the record's key is not the id of its event"]


def test_a_running_query_hands_over_what_folds_of_some_events_add(spark: SparkSession) -> None:
    read_model = Some()
    (stage,) = read_model.stages
    given = encoded(event("Scored", {**SCORED, "level": 4, "paid": Decimal("12.34")}), stage)
    decoder = Decoder(spark, read_model, stage, Writers(*map(load_schema, stage.records)))  # type: ignore[arg-type]
    decoder.resolve([1, 2])
    frame = (frame_header(1) + (given.body or b"")).hex()

    def read(_positions: Mapping[int, int]) -> DataFrame:
        record = one_record(spark).drop("key", "value")
        return decoder.updates(record.selectExpr("*", "cast('g' as binary) as key", f"X'{frame}' as value"))

    with RowQuery(spark, jvm_scratch(), read, {0: 0}) as query:
        batch = query.rows[0].pull(60.0)

    assert batch is not None
    rows = PartitionRows(pa.Table.from_batches([batch]))
    offset = rows.updates["offset"][0].as_py()
    expected = PartitionRows(rows_of(read_model, stage, {offset: given}, FakeRegistry()))
    assert repr(rows.single_updates(rows.updates)) == repr(expected.single_updates(expected.updates))
    slices = rows.combined(read_model.combine, few_rows=0).slices()
    (found,) = (update for some in slices for update in updates_in(some, [0]))
    assert found.update["mean"] == {"sum": Decimal("12.34"), "count": 1}


def test_a_tombstone_is_an_update_if_the_model_declares_it(spark: SparkSession) -> None:
    (stage,) = Symbols().stages
    sent = [event("Symbol", {"symbol": "TCS", "name": "Tata"}), tombstone("TCS"), tombstone("INFY")]
    events = [encoded(given, stage) for given in sent]
    framed = [(key_of(Symbols(), stage, given), 1, given.body) for given in events]

    rows = decoded(spark, Symbols(), [load_schema("Symbol")], framed)

    expected = PartitionRows(rows_of(Symbols(), stage, dict(enumerate(events)), FakeRegistry()))
    assert repr(rows.single_updates(rows.updates)) == repr(expected.single_updates(expected.updates))
    assert causes(rows) == []
    schema = load_schema("FundsAdded")
    assert causes(decoded(spark, Balance(), [schema], [(b"alice", 1, None)])) == ["value-null"]


def test_a_tombstone_needs_a_valid_key_and_an_empty_value_is_no_tombstone(spark: SparkSession) -> None:
    records = [(b"\xffkey", 1, None), (b"TCS", 1, b""), (b"TCS", 2, b"")]

    assert causes(decoded(spark, Symbols(), [load_schema("Symbol"), load_schema("Player")], records)) == [
        "key-reserved",
        "body-undecodable",
        "ignored",
    ]


ADDRESS = fields_of(without_null(fields_of(load_schema("PosInvoice"))["address"])[0])
INVOICES = st.fixed_dictionaries(
    {
        "invoiceNumber": st.just("i"),
        "customerCardNo": st.sampled_from(["1", "22", "é", ""]),
        "customerType": st.sampled_from(["PRIME", "prime", "REGULAR", "PRIME ", "PRİME", ""]) | st.text(max_size=5),
        "deliveryType": st.sampled_from(["HOME-DELIVERY", "home-delivery", "HOME-DELİVERY", "TAKEAWAY", "ß", "SS"]),
        "totalAmount": st.sampled_from([Decimal("2.99"), Decimal("3.00"), Decimal("3.01")]),
        "address": st.none() | st.fixed_dictionaries({name: st.sampled_from(["Bern", ""]) for name in ADDRESS}),
    }
)
ANY_CASE = Stream("pos", "PosInvoice").where(col("deliveryType").lower() == "home-delivery")
IN_TURN = [
    Stream("pos", "PosInvoice").where(col("customerType") == "PRIME").by("customerCardNo"),
    ANY_CASE.by("customerCardNo"),
    ANY_CASE.where(col("customerType") == "PRIME").by("storeId"),
    Stream("pos", "PosInvoice")
    .where(~(col("address.city") == "Bern") | (col("totalAmount") > 3) | col("customerType").isin("PRIME", ""))
    .by("customerCardNo"),
]


@pytest.mark.parametrize("source", IN_TURN, ids=["one condition", "case ignored", "two conditions", "any of three"])
def test_spark_passes_on_the_same_records_as_the_row_interpreter(spark: SparkSession, source: Stream) -> None:
    stage, schema, read_model = declared("rewards", source)[0], load_schema("PosInvoice"), Rewards()

    @settings(max_examples=4, deadline=None)
    @given(st.lists(INVOICES, min_size=1, max_size=60))
    def check(sold: list[dict[str, Any]]) -> None:
        events = [encoded(event("PosInvoice", fields, record_key=None), stage) for fields in sold]
        rows = decoded(spark, read_model, [schema], [(b"s", 1, given.body) for given in events], stage)

        expected = PartitionRows(rows_of(read_model, stage, dict(enumerate(events)), FakeRegistry()))
        assert rows.updates["key"].to_pylist() == expected.updates["key"].to_pylist()
        assert rows.updates["offset"].to_pylist() == expected.updates["offset"].to_pylist()
        assert causes(rows) == causes(expected)
        assert [value[5:] for value in rows.updates["value"].to_pylist()] == expected.updates["value"].to_pylist()

    check()


def test_spark_does_not_decode_columns_that_are_not_selected(spark: SparkSession) -> None:
    invoice = load_schema("PosInvoice")
    money = {"type": "fixed", "name": "Money", "size": 8, "logicalType": "decimal", "precision": 18, "scale": 2}
    # `lines` has another type, and `totalAmount` uses a type that an unselected field defines.
    changed = {"totalAmount": "Money", "lines": {"type": "array", "items": {"type": "map", "values": "long"}}}
    fields = [{**field, "type": changed.get(field["name"], field["type"])} for field in invoice["fields"]]
    later = {**invoice, "fields": [{"name": "fee", "type": money}, *fields]}
    invoiced = {"customerCardNo": "1", "customerType": "PRIME", "totalAmount": Decimal("12.34")}
    sold = encoded(event("PosInvoice", invoiced), Purchases().stages[0])
    other = {**sold.values, "fee": Decimal("0.01"), "lines": [{"a": 1}]}
    records = [(b"1", 1, written(invoice, dict(sold.values))), (b"1", 2, written(later, other))]

    rows = decoded(spark, Rewards(), [invoice, later], records)

    assert [single.update["points"] for single in rows.single_updates(rows.updates)] == [Decimal("0.2468")] * 2
    assert causes(rows) == []
    # A model that selects these columns decodes them.
    assert causes(decoded(spark, Purchases(), [invoice, later], records[1:])) == ["schema-incompatible"]


class Chosen(Balance):
    """Balances that select only the columns they fold."""

    name = "test-chosen"
    source = Balance.source.select("amount")


@pytest.mark.parametrize("read_model", [Balance(), Chosen()], ids=["all columns", "selected columns"])
def test_damage_in_a_column_that_is_not_read_is_found(spark: SparkSession, read_model: ReadModel) -> None:
    till = {"type": "enum", "name": "Till", "symbols": ["SHOP", "WEB"]}
    funds = load_schema("FundsAdded")
    later = {**funds, "fields": [{"name": "till", "type": till}, *funds["fields"]]}
    added = {"till": "WEB", "id": "e1", "occurredOn": AT, "customerId": "alice", "amount": Decimal("12.34")}
    body = written(later, added)
    of_no_till = b"\x04" + body[1:]
    records = [(b"alice", 1, body), (b"alice", 1, of_no_till)]

    assert causes(decoded(spark, read_model, [later], records)) == ["body-undecodable"]


class Named(ReadModel):
    """Invoices with the customer's name only."""

    name = "test-named"
    source = Stream("pos", "PosInvoice").select("customerName")
    # Only code of the model's own receives the event.
    emits = Emit("named", "PosInvoice", make=dict)


def test_an_event_with_null_in_a_selected_column_is_decoded(spark: SparkSession) -> None:
    invoice = load_schema("PosInvoice")
    sold = [event("PosInvoice", {"customerName": name}) for name in (None, "Ann")]
    events = [encoded(given, Named().stages[0]) for given in sold]
    records = [(b"1", 1, given.body) for given in events]

    rows = decoded(spark, Named(), [invoice], [*records, (b"1", 1, b"\x04"), (b"1", 1, b"")])

    found = [single.update["PosInvoice"] for single in rows.single_updates(rows.updates)]
    assert found == [{"customerName": None}, {"customerName": "Ann"}]
    assert causes(rows) == ["body-undecodable"] * 2
    by_name = declared("m", Stream("pos", "PosInvoice").by("customerName").select())[0]
    assert causes(decoded(spark, Rewards(), [invoice], records, by_name)) == ["field-null"]


def test_spark_encodes_numeric_keys_and_passes_on_records_without_a_key(spark: SparkSession) -> None:
    stage, schema, read_model = (
        declared("m", Stream("s", "ScoreEvent").by("player_id"))[0],
        load_schema("ScoreEvent"),
        Rewards(),
    )
    numbers = [0, 1, -1, 300, 2**40, -(2**63), 2**56, 0x7F << 56, 2**63 - 1]
    events = [encoded(event("ScoreEvent", {"player_id": number}), stage) for number in numbers]

    rows = decoded(spark, read_model, [schema], [(None, 1, given.body) for given in events], stage)

    expected = PartitionRows(rows_of(read_model, stage, dict(enumerate(events)), FakeRegistry()))
    assert rows.updates["key"].to_pylist() == expected.updates["key"].to_pylist()
    # The greatest number would start with the byte that is reserved for other records.
    assert causes(rows) == causes(expected) == ["key-reserved"] * 2


PARTS = st.text(st.sampled_from("\0\1\2az\xff\U0010ffff"), max_size=4) | st.text(
    st.characters(codec="utf-8"), max_size=4
)
ENDS = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 0x7F << 56]) | st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=15, deadline=None)
@given(
    purchases=st.lists(
        st.builds(Purchase, st.none() | PARTS | st.sampled_from([246, 247]).map("c".__mul__), ENDS, st.just(1)),
        min_size=1,
        max_size=30,
    ),
    columns=st.sampled_from([("card", "day"), ("day", "card")]),
)
def test_spark_encodes_composite_keys_as_python_does(
    spark: SparkSession, purchases: list[Purchase], columns: tuple[str, ...]
) -> None:
    read_model = type("OfColumns", (SpentPerDay,), {"source": Stream("p", Purchase).by(*columns), "key": columns})()
    stage, last = read_model.stages
    events = [encoded(event(purchase), stage) for purchase in purchases]
    schema = stage.schemas["Purchase"]

    rows = decoded(spark, read_model, [schema], [(None, 1, given.body) for given in events], stage)

    expected = PartitionRows(rows_of(read_model, stage, dict(enumerate(events)), FakeRegistry()))
    assert rows.updates["key"].to_pylist() == expected.updates["key"].to_pylist()
    assert causes(rows) == causes(expected)
    assert rows.notes["detail"].to_pylist() == expected.notes["detail"].to_pylist()
    # The last stage checks the key of a record against its columns.
    keyed = [(key, 1, events[n].body) for n, key in zip(offsets(rows), rows.updates["key"].to_pylist(), strict=True)]
    if keyed:
        assert causes(decoded(spark, read_model, [schema], keyed, last)) == []
        others = [(key + b"\0", number, body) for key, number, body in keyed]
        named = f"key-is-not-{columns[0]}-{columns[1]}"
        assert causes(decoded(spark, read_model, [schema], others, last)) == [named] * len(keyed)


def offsets(rows: PartitionRows) -> list[int]:
    return rows.updates["offset"].to_pylist()  # type: ignore[no-any-return]


PLACE_OF_LATER = {
    "type": "record",
    "name": "Place",
    "fields": [
        {"name": "street", "type": "string"},
        {"name": "since", "type": ["null", WHEN]},
        {"name": "city", "type": "string"},
    ],
}


def test_nested_fields_are_matched_by_name(spark: SparkSession) -> None:
    later = evolved(place=PLACE_OF_LATER, level="int", tags={"type": "array", "items": ["null", "string"]})
    fields = {**SCORED, "level": 3, "place": {"street": "s", "since": None, "city": "Bern"}}

    scored = update(decoded(spark, Session(), [later], [(b"g", 1, written(later, fields))]))["Scored"]

    assert (scored["place"], scored["level"], scored["tags"]) == ({"city": "Bern", "since": None}, 3, ["a", "é"])


def test_types_that_an_unselected_field_defines_are_resolved_by_full_name(spark: SparkSession) -> None:
    fields = {"aKind": fields_of(evolved())["kind"], **fields_of(evolved(kind="tests.Kind"))}
    later = {**evolved(), "fields": [{"name": name, "type": kind} for name, kind in fields.items()]}
    body = written(later, {**SCORED, "aKind": "SMALL"})

    assert update(decoded(spark, Session(), [later], [(b"g", 1, body)]))["Scored"]["kind"] == "LARGE"


@pytest.mark.parametrize(
    "changed",
    [
        {"place": {**PLACE_OF_LATER, "fields": PLACE_OF_LATER["fields"][:2]}},
        {"place": "string"},
        {"tags": {"type": "array", "items": "long"}},
        {"score": "string"},
        {"level": "long"},
        {"photo": None},
        {"paid": "double"},
    ],
    ids=[
        "lacks a nested field",
        "no record",
        "other items",
        "no number",
        "wider",
        "lacks a field",
        "inexact",
    ],
)
def test_a_schema_that_would_change_the_meaning_of_values_is_incompatible(
    spark: SparkSession, changed: dict[str, Any]
) -> None:
    assert causes(decoded(spark, Session(), [evolved(**changed)], [(b"g", 1, b"")])) == ["schema-incompatible"]


def test_an_unknown_enum_symbol_is_incompatible(spark: SparkSession) -> None:
    later = evolved(kind={"type": "enum", "name": "Kind", "symbols": ["HUGE", "SMALL"]})
    bodies = [written(later, {**SCORED, "kind": kind}) for kind in ("HUGE", "SMALL")]

    rows = decoded(spark, Session(), [later], [(b"g", 1, body) for body in bodies])

    assert causes(rows) == ["schema-incompatible"]
    assert update(rows)["Scored"]["kind"] == "SMALL"


def test_invalid_utf_8_and_out_of_range_times_are_dead_letters(spark: SparkSession) -> None:
    raw = copy.deepcopy(load_schema("Ended"))
    raw["fields"] = [{"name": "id", "type": "bytes"}, {"name": "reason", "type": ["null", "string"]}]
    stamped = copy.deepcopy(load_schema("FundsAdded"))
    stamped["fields"][1]["type"] = "long"
    funds = {"id": "i", "customerId": "c", "amount": Decimal(1)}

    broken = decoded(spark, Session(), [load_schema("Scored"), raw], [(b"\xfe", 2, written(raw, {"id": b"\xfe"}))])
    late = decoded(
        spark,
        Activity(),
        [stamped],
        [(b"c", 1, written(stamped, {**funds, "occurredOn": at})) for at in (10**15, 2**63 - 1, 5)],
    )
    balance = decoded(spark, Balance(), [stamped], [(b"c", 1, written(stamped, {**funds, "occurredOn": 10**15}))])

    assert causes(broken) == ["id-malformed"]
    assert causes(late) == ["time-out-of-range"] * 2
    # The field is in milliseconds.
    assert update(late)["first"] == datetime(1970, 1, 1, 0, 0, 0, 5_000, UTC)
    assert update(balance) == {"amount": Decimal("1.00")}


def test_a_nested_decimal_keeps_every_digit(spark: SparkSession) -> None:
    wide = {**MONEY, "precision": 30}
    place = {"type": "record", "name": "Place", "fields": [{"name": "rent", "type": MONEY}]}
    ship("Rented", fields_of(evolved(place=place)))
    writer = {**evolved(place={**place, "fields": [{"name": "rent", "type": wide}]}), "name": "Rented"}
    rent = Decimal("1234567890123456789012345678.90")

    class Rented(Session):
        name = "test-rented"
        source = Stream("games", "Rented")

    scored = update(
        decoded(spark, Rented(), [writer], [(b"g", 1, written(writer, {**SCORED, "place": {"rent": rent}}))])
    )

    assert scored["Rented"]["place"] == {"rent": rent}
