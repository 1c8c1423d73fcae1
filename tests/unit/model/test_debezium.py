"""`Debezium`: change events as its connectors write them in Avro, with `ExtractNewRecordState` and without."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service import Debezium, ReadModel, Stream, Upsert
from balance_service.engine.dead_letter import Status
from balance_service.errors import ConfigurationError, TaskHaltedError
from balance_service.testing import Driver, check_contract, event, tombstone
from tests.support.debezium import UNAVAILABLE, shipped
from tests.support.models import ship

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balance_service.testing import InputEvent

UNKNOWN = "schema-id-unknown"
MONEY = {"type": "bytes", "scale": 2, "precision": 10, "logicalType": "decimal"}
COLUMNS = {
    "id": "string",
    "email": ["null", "string"],
    "balance": ["null", MONEY],
    "note": ["null", "string"],
    "photo": ["null", "bytes"],
    "tags": ["null", {"type": "array", "items": ["null", "string"]}],
    "seen": "long",
    "opens": ["null", {"type": "int", "logicalType": "time-millis"}],
}
KEPT = {name: kind for name, kind in COLUMNS.items() if name != "opens"}
CUSTOMER = ship("CustomerOfDebezium", KEPT)
ROW = {"email": "a@example.org", "balance": Decimal("1.00"), "note": "large", "photo": b"\x00", "tags": ["x"]}
POSTGRES = shipped("postgresql", COLUMNS, name="EnvelopeOfPostgres")
MYSQL = shipped("mysql", COLUMNS, name="EnvelopeOfMysql")
FLAT = ship("FlatValue", {**COLUMNS, "__deleted": ["null", "string"], "__op": ["null", "string"]})


class Customers(ReadModel):
    """The record's key is the row's text key, by `ExtractField$Key` and `StringConverter`."""

    name = "test-customers"
    source = Stream("pg.public.customers", POSTGRES)
    key = "id"
    state = CUSTOMER
    fold = Debezium(POSTGRES)


class OfMysql(Customers):
    name = "test-customers-of-mysql"
    source = Stream("mysql.shop.customers", MYSQL)
    fold = Debezium(MYSQL)


class Rekeyed(Customers):
    """The record's key is Avro, as Debezium writes it."""

    name = "test-customers-rekeyed"
    source = Stream("pg.public.customers", POSTGRES).by("id")


class Flat(Customers):
    name = "test-customers-flat"
    source = Stream("pg.public.customers", FLAT)
    fold = Debezium(FLAT)


ENVELOPES = [Customers, OfMysql, Rekeyed]


def row(key: str = "a", **columns: Any) -> dict[str, Any]:
    return {"id": key, **ROW, "seen": 1, "opens": None, **columns}


class Table:
    """Makes the records of a table's changes for a model."""

    def __init__(self, model: type[ReadModel]) -> None:
        self.model = model
        self.record = model.source.records[0]

    def change(self, op: str, key: str = "a", unreadable: str | None = None, **columns: Any) -> InputEvent:
        after = None if op in "dtm" else row(key, **columns)
        # Without REPLICA IDENTITY FULL, a deletion has the key alone.
        before = row(key, **dict.fromkeys(ROW)) if op == "d" else None
        if self.model is Flat:
            deleted = "true" if op == "d" else "false"
            return self._event({**row(key, **columns), "__deleted": deleted, "__op": op}, key, unreadable)
        return self._event({"before": before, "after": after, "op": op, "ts_ms": 1}, key, unreadable)

    def _event(self, fields: Mapping[str, Any], key: str, unreadable: str | None) -> InputEvent:
        return event(self.record, fields, record_key=self.key_of(key), unreadable=unreadable)

    def key_of(self, key: str) -> str:
        return f"framed {key}" if self.model is Rekeyed else key

    def tombstone(self, key: str = "a") -> InputEvent:
        return tombstone(self.key_of(key))


@pytest.fixture(params=[*ENVELOPES, Flat], ids=lambda model: model.__name__)
def table(request: pytest.FixtureRequest) -> Table:
    return Table(request.param)


@pytest.fixture(params=[False, True], ids=["singly", "combined"])
def driver(request: pytest.FixtureRequest, table: Table) -> Iterator[Driver]:
    with Driver(table.model, combines_few=request.param) as made:
        yield made


def emails(driver: Driver, *keys: str) -> list[Any]:
    return [None if (found := driver.view(key)) is None else found["email"] for key in keys]


def test_snapshot_inserts_and_updates_make_the_row_and_deletions_remove_it(driver: Driver, table: Table) -> None:
    driver.given(
        table.change("r"),
        table.change("c", "b"),
        table.change("u", "b", email="new@example.org", balance=Decimal("-2.50")),
        table.change("r", "c"),
        table.change("d", "c"),
        table.tombstone("c"),
    )

    assert emails(driver, "a", "b", "c") == ["a@example.org", "new@example.org", None]
    assert driver.view("b") == {**ROW, "email": "new@example.org", "balance": Decimal("-2.50"), "seen": 1}
    driver.given(table.change("d"), table.change("r", "c"))
    assert (emails(driver, "a", "c"), driver.counted) == ([None, "a@example.org"], 2)
    assert not driver.dead_letters()


def test_a_changed_primary_key_is_a_deletion_and_an_insert(driver: Driver, table: Table) -> None:
    driver.given(table.change("c")).given(table.change("d"), table.tombstone(), table.change("c", "z"))

    assert emails(driver, "a", "z") == [None, "a@example.org"]


def test_a_tombstone_whose_deletion_was_compacted_away_deletes_the_row(table: Table) -> None:
    if table.model is Rekeyed:
        pytest.skip("a re-key is by columns; such a source is not compacted")
    with Driver(table.model) as driver:
        driver.given(table.change("c"), table.change("c", "b")).given(table.tombstone())

        assert emails(driver, "a", "b") == [None, "a@example.org"]


def test_a_value_that_was_not_sent_remains_as_it_was(driver: Driver, table: Table) -> None:
    lacking: dict[str, Any] = {"note": UNAVAILABLE, "photo": UNAVAILABLE.encode(), "tags": [UNAVAILABLE]}
    driver.given(table.change("c"), table.change("c", "b"))

    driver.given(table.change("u", email="1", note="larger"), table.change("u", email="2", **lacking))

    assert driver.view("a") == {**ROW, "email": "2", "note": "larger", "seen": 1}
    driver.given(table.change("u", email="3", **lacking)).given(table.change("u", "b", **lacking))
    assert (driver.view("a")["note"], driver.view("b")["note"]) == ("larger", "large")
    assert not driver.dead_letters()


def test_a_value_that_was_not_sent_without_a_former_state_is_a_dead_letter(driver: Driver, table: Table) -> None:
    driver.given(table.change("u", note=UNAVAILABLE), table.change("c", "b"), table.change("d", "b"))
    driver.given(table.change("u", "b", note=UNAVAILABLE))

    assert [one.cause for one in driver.dead_letters()] == ["value-unavailable"] * 2
    assert driver.dead_letters()[0].detail == "'note' was not sent, and there is no former state"
    driver.given(table.change("u"))
    assert [letter.status.value for letter in driver.letters()] == ["superseded", "waiting"]


def test_a_value_that_was_not_sent_is_not_taken_from_before_a_record_that_failed(driver: Driver, table: Table) -> None:
    driver.given(table.change("c", note="first"))
    driver.given(table.change("u", note="second", unreadable=UNKNOWN), table.change("u", email="3", note=UNAVAILABLE))
    driver.given(table.change("u", email="4", note=UNAVAILABLE))
    assert [one.cause for one in driver.dead_letters()] == [UNKNOWN, *["value-unavailable"] * 2]

    driver.mend(UNKNOWN).advance(minutes=5)
    driver.stages[0].decide([2], Status.SCHEDULED)
    driver.advance(minutes=0)

    assert (driver.view("a")["note"], driver.view("a")["email"]) == ("second", "3")


@pytest.mark.shows("newest")
def test_a_late_retry_does_not_overwrite_a_newer_row(driver: Driver, table: Table) -> None:
    driver.given(table.change("c"), table.change("u", email="lost", unreadable=UNKNOWN))
    driver.given(table.change("u", email="newest")).mend(UNKNOWN).advance(minutes=5)

    assert emails(driver, "a") == ["newest"]


@pytest.mark.parametrize("model", ENVELOPES)
def test_a_truncation_halts_with_what_to_do_also_without_a_key(model: type[ReadModel]) -> None:
    with Driver(model) as driver:
        driver.given(Table(model).change("c"))
        truncation = event(model.source.records[0], {"op": "t", "after": None, "before": None})

        with pytest.raises(TaskHaltedError, match=r"offset 1 of .* the table was truncated, .* to a new topic"):
            driver.given(truncation)


@pytest.mark.parametrize("model", ENVELOPES)
def test_messages_are_ignored_and_unknown_operations_are_dead_letters(model: type[ReadModel]) -> None:
    table = Table(model)
    with Driver(model) as driver:
        done = driver.stages[0].commit([table.change("m"), table.change("c"), table.change("x"), table.change("u")])

        assert (done.ignored, done.causes) == (1, {"operation-unknown": 1})


@pytest.mark.parametrize("model", ENVELOPES)
def test_an_update_without_a_row_is_a_dead_letter(model: type[ReadModel]) -> None:
    with Driver(model) as driver:
        driver.given(event(model.source.records[0], {"op": "u", "after": None, "before": row()}, record_key="a"))

        assert [(one.cause, one.detail) for one in driver.dead_letters()] == [("field-null", "'after' is null")]


def test_a_row_under_another_key_is_a_dead_letter() -> None:
    with Driver(Customers) as driver:
        fields = {"op": "c", "after": row("a"), "before": None}
        driver.given(event(POSTGRES, fields, record_key="b"))

        assert [one.cause for one in driver.dead_letters()] == ["key-is-not-id"]


@pytest.mark.parametrize("model", [Customers, Flat])
def test_the_contract_holds(model: type[ReadModel]) -> None:
    check_contract(model, seconds=6.0)


def test_what_the_connector_sends_for_such_values_can_be_named() -> None:
    class Named(Customers):
        fold = Debezium(POSTGRES, unavailable="?")

    table = Table(Customers)
    with Driver(Named) as driver:
        driver.given(table.change("c"), table.change("u", note="?"), table.change("c", "b", note=UNAVAILABLE))

        assert (driver.view("a")["note"], driver.view("b")["note"]) == ("large", UNAVAILABLE)


def test_only_the_fields_of_the_state_and_the_key_are_read() -> None:
    (stage,) = Customers().stages
    (wanted,) = stage.wanted_schemas.values()
    parts = {one["name"]: one["type"] for one in wanted["fields"]}

    assert [*parts] == ["before", "after", "op"]
    for part in ("before", "after"):
        assert [one["name"] for one in parts[part][1]["fields"]] == [*KEPT]


# Declarations

VARIABLE = {
    "type": "record",
    "name": "VariableScaleDecimal",
    "namespace": "io.debezium.data",
    "fields": [{"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}],
}
INEXACT = shipped("postgresql", {"id": "string", "price": "double", "any": VARIABLE}, name="EnvelopeInexact")
PRICED = ship("PricedRow", {"id": "string", "price": MONEY})
ANY_SCALE = ship("AnyScaleRow", {"id": "string", "any": MONEY})
NO_ROW = ship("EnvelopeNoRow", {"op": "string", "after": ["null", "string"]})


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"source": Stream("t", INEXACT), "fold": Debezium(INEXACT), "state": PRICED}, "'after.price' is a double"),
        ({"source": Stream("t", INEXACT), "fold": Debezium(INEXACT), "state": ANY_SCALE}, "'after.any' is a Variable"),
        ({"source": Stream("t", NO_ROW), "fold": Debezium(NO_ROW)}, "its 'after' is no record"),
        ({"source": Stream("t", POSTGRES).by("email").by("id")}, "one `.by` is the only step"),
        ({"source": Stream("t", POSTGRES).by("nothing"), "key": "nothing"}, "continues by 'nothing'"),
        ({"source": Stream("t", POSTGRES).by("id"), "fold": Upsert(POSTGRES)}, "no step of its source"),
        ({"key": "seen"}, "must be a string"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_declaration_is_refused(members: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        type("Refused", (Customers,), {"name": "test-refused", **members})()
    assert why in str(refused.value)
