"""Checks of a declaration: an invalid read model is refused with the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import pytest

from balance_service import scale
from balance_service.errors import ConfigurationError
from balance_service.model.conditions import col
from balance_service.model.events import Emit
from balance_service.model.folds import Count, Greatest, Latest, RunningSum, Top
from balance_service.model.read_model import ReadModel
from balance_service.model.standard_fold import Combine
from balance_service.model.stream import Global, Stream, Table
from balance_service.read_models.balance import Balance
from tests.support.models import KIND, MONEY, WIDE_MONEY, Peaks, Ranks, Session, Summary, ship

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.model.stream import Partitioner

SUM = RunningSum("FundsAdded.amount")
AMOUNT = {"source": Stream("amounts", "Amount"), "amount": Count("Amount"), "state": "Counted"}
NO_STATE = dict.fromkeys(("key", "state", "amount"))
ship("Narrow", {"customerId": "string", "amount": MONEY})
ship("Rounded", {"customerId": "string", "amount": {**WIDE_MONEY, "scale": 1}})
ship("Counted", {"customerId": "string", "amount": "long"})
ship("COUNTED", {"customerId": "string", "amount": "long"})
ship("Amount", {"customerId": "string"})
ship("Note", {"customerId": "string", "amount": MONEY})
ship("Bare", {"amount": WIDE_MONEY})
ship("Listed", {"customerId": "string", "amount": {"type": "array", "items": "string"}})
ship("Stamped", {"customerId": "long", "offset": "long", "kind": KIND})


ship("Timed", {"customerId": "string", "at": {"type": "array", "items": {"type": "int", "logicalType": "time-millis"}}})
ship("Either", {"customerId": "string", "what": ["null", "string", "long"]})


def define(**changed: Any) -> type[ReadModel]:
    """Returns a read model like `Balance` with some attributes changed; None removes an attribute."""
    balance: Mapping[str, Any] = {
        "name": "test-declared",
        "source": Stream("balance", "FundsAdded"),
        "key": "customerId",
        "state": "BalanceState",
        "amount": SUM,
    }
    attributes = {name: value for name, value in {**balance, **changed}.items() if value is not None}
    return type("Declared", (ReadModel,), {"__module__": __name__, **attributes})


def keep(_model: ReadModel, state: Any, _event: Any) -> Any:
    return state


ADDED = Stream("balance", "FundsAdded")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"name": None}, "has no `name`"),
        ({"name": "Not a name"}, "a name consists of lower-case letters, digits and hyphens"),
        ({"source": "balance"}, "has a source that is not a Stream"),
        ({"source": Stream("balance")}, "has a source that is not a Stream of a topic and one or more records"),
        (
            {"source": ADDED.join(ADDED, on="id", take={"a": "b"})},  # type: ignore[arg-type]
            "joins Stream, which is neither a Table nor a Global",
        ),
        (
            {"source": ADDED.join(Table("players", "Player"), on="id", take=["name"])},  # type: ignore[arg-type]
            'takes [\'name\'] of a table: write `take={"column": "name"}`',
        ),
        (
            {"source": ADDED.by("id", record="JoinedFunds")},
            "continues by 'id' as `record='JoinedFunds'`: that is a joined record, and nothing is joined",
        ),
        (
            {"source": ADDED.by("id", Session)},  # type: ignore[arg-type]
            "continues by 'id' and Session: name the joined record with `record=Session`",
        ),
        (
            {"source": ADDED.join(Global("p", "Player"), on="id", take={"name": "n"}).by("id", "Joined")},
            "continues by 'id' and 'Joined', but joins: name the joined record, such as `record='Joined'`",
        ),
        ({"source": ADDED.by("id", "id")}, "continues by 'id' and 'id': name each column once"),
        ({"source": ADDED.by()}, "continues by no column"),
        ({"source": ADDED.by("id", "from")}, "but 'from' is a parameter of queries: rename the column"),
        (
            {"source": ADDED.by("id", "amount")},
            "continues by 'amount', which must be a string, int or long; FundsAdded",
        ),
        ({"key": ("customerId", "id")}, 'no topic has as its key: re-key the source, by `.by("customerId", "id")`'),
        ({"key": ("customerId", 1)}, "name a column, or a tuple of columns"),
        (
            {"source": ADDED.by("customerId", "id"), "key": ("id", "customerId")},
            "has the key 'id' and 'customerId', but its source continues by 'customerId' and 'id'",
        ),
        (
            {"source": ADDED.by("customerId", "id"), "key": None},
            "has states without its key: BalanceState has no string 'id'",
        ),
        (
            {"source": ADDED.by(["user", "page"])},  # type: ignore[arg-type]
            "continues by ['user', 'page']: `.by` takes the names of columns",
        ),
        (
            {"source": Stream("balance", "FundsLost")},
            "names the schema FundsLost: there is no FundsLost.avsc in ",
        ),
        (
            {"source": Stream("balance", "FundsAdded", tombstones=True)},
            "that allows no steps, and needs an `Upsert` or a `fold` of its own",
        ),
        ({"state": "Absent"}, "names the schema Absent"),
        ({"source": Stream("b", "Timed")}, "whose 'at' has time-millis, a type that events may not have"),
        ({"source": Stream("b", "Either")}, "whose 'what' has string | long, a type that events may not have"),
        ({"key": "customer"}, "has the key 'customer', which must be a string; FundsAdded has no such column"),
        ({"key": "occurredOn"}, "FundsAdded has one of type timestamp-millis"),
        (
            {"source": Stream("balance", "FundsAdded").select("amount", "amonut")},
            "selects 'amonut', but FundsAdded has no such column",
        ),
        ({"source": Stream("balance", "FundsAdded").select("id").select("amount")}, "selects columns twice"),
        (
            {"source": Stream("balance", "FundsAdded", "Player").select("amount"), "fold": keep, "amount": None},
            "selects no column of Player",
        ),
        (
            {
                "source": Stream("score-events", "ScoreEvent")
                .select("score")
                .join(Global("players", "Player"), on="player_id", take={"name": "playerName"})
                .join(Global("products", "Product"), on="product_id", take={"name": "gameName"})
                .by("product_id", record="ScoredGame"),
                "key": None,
            },
            "selects columns and joins: the joined record determines which columns are kept",
        ),
        ({"amount": None}, "has no fold"),
        ({"fold": keep}, "has both standard folds and a `fold` of its own"),
        ({"state": "Bare"}, "Bare has no string 'customerId'"),
        (
            {"more": Count("FundsAdded")},
            "has folds for ['more'], but the fields of BalanceState are ['customerId', 'amount']",
        ),
        ({"amount": None, "more": SUM}, "has folds for ['more'], but the fields of BalanceState are "),
        ({"amount": RunningSum("FundsAdded.sum")}, "FundsAdded has no such column; it has "),
        ({"amount": RunningSum("Lost.sum")}, "Lost is not a record of its source"),
        ({"amount": RunningSum("FundsAdded")}, "a count needs a record, any other fold a column"),
        ({"amount": RunningSum("FundsAdded.id")}, "a sum is one of numbers, not of string"),
        ({"amount": Count("FundsAdded")}, "a count is a long"),
        ({"state": "Narrow"}, "it is of type decimal(18,2), and decimal(38,2) keeps every digit"),
        ({"state": "Rounded"}, "it is of type decimal(38,1), and decimal(38,2) keeps every digit"),
        ({"state": "Counted"}, "a sum of decimal(18,2) is a decimal"),
        ({"amount": Latest("FundsAdded.occurredOn")}, "it is of type decimal(38,2), the column of timestamp-millis"),
        ({"amount": Top("FundsAdded.amount", 3)}, "a top is an array of records"),
        ({"amount": Top("FundsAdded.amount", 0)}, "a top keeps at least 1 event, not 0"),
        ({"amount": Top("FundsAdded.amount", -3)}, "a top keeps at least 1 event, not -3"),
        ({"amount": None, "state": "Stamped", "offset": SUM}, "called 'offset', which is a reserved name"),
        # Spark ignores case in names of columns.
        ({"emits": Emit("a"), "emit": keep, **AMOUNT}, "called 'Amount', which is a reserved name in upper and lower"),
        (
            {"source": Stream("notes", "Note"), "amount": RunningSum("Note.amount")},
            "called 'Note', which is a reserved",
        ),
        ({"source": Stream("notes", "Note").by("customerId"), "amount": Count("Note")}, "called 'Note', which is a"),
        (
            {"source": Stream("notes", "Note"), "emits": Emit("n"), **NO_STATE},
            "called 'Note', which is a reserved name",
        ),
        ({"source": Stream("twice", "Counted", "COUNTED"), "amount": Count()}, "called 'COUNTED', which is a reserved"),
        ({"fields": SUM}, "has a fold as its `fields`, which has another meaning: name it in `folds` instead"),
        ({"key": SUM}, "has a fold as its `key`"),
        (
            {"view": lambda _model, state: state},
            "has a view of its own, but neither `fields` that name the types in it nor a return annotation",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_declaration_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        define(**changed)()


SCORES = Stream("score-events", "ScoreEvent").by("player_id")
TAKEN = {"name": "playerName"}


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            Stream("balance", "FundsAdded", partitioner="CRC32"),  # type: ignore[arg-type]
            "has 'balance' with the partitioner 'CRC32': it must be one of murmur2, crc32, fnv1a, any",
        ),
        (
            Stream("balance", "FundsAdded", partitioner="any"),
            "folds 'balance', which has partitioner=\"any\", so events of one key may be on several partitions: re-key "
            "them first, with a `.by` the key's column in the source",
        ),
        (
            SCORES.join(Table("players", "Player", partitioner="crc32"), on="player_id", take=TAKEN),
            "joins the table 'players', which has partitioner=\"crc32\", with records that are re-keyed by murmur2, so "
            "a record and its row would be on different partitions: make it a Global",
        ),
        (
            SCORES.join(Global("players", "Player", partitioner="any"), on="player_id", take=TAKEN),
            "joins the table 'players', which has partitioner=\"any\", so rows of one key may be on several partitions",
        ),
    ],
    ids=["an unknown one", "any, not re-keyed", "a table by another", "a table by any"],
)
def test_a_model_that_would_look_for_a_key_on_another_partition_is_refused_at_import(source: Stream, why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        define(source=source)


@pytest.mark.parametrize("partitioner", ["murmur2", "crc32", "fnv1a", "any"])
def test_only_the_first_stage_reads_by_the_partitioner_of_its_source(partitioner: Partitioner) -> None:
    source = Stream("score-events", "ScoreEvent", partitioner=partitioner)

    model = define(source=source.by("product_id"), fold=keep, amount=None, key=None, state="HighScores", emits=None)

    assert [stage.partitioner for stage in model().stages] == [partitioner, "murmur2"]


def test_columns_that_the_declaration_names_are_read_even_if_not_selected() -> None:
    (stage,) = define(source=Stream("balance", "FundsAdded").select("id"))().stages
    assert stage.columns == frozenset({"id", "customerId", "amount"})

    sending = {"name": "test-sending", "source": Stream("pos", "PosInvoice").select("storeId")}
    home = Emit("home", where=col("deliveryType") == "HOME-DELIVERY")
    (stage,) = define(**sending, emits=home, key=None, state=None, amount=None)().stages
    assert stage.columns == frozenset({"storeId", "deliveryType"})


def test_a_field_that_may_have_no_value_must_be_nullable() -> None:
    source = Stream("balance", "FundsAdded", "Ended")

    with pytest.raises(ConfigurationError, match="Ended has no such column"):
        define(source=source)()
    with pytest.raises(ConfigurationError, match=r"may have no value of Scored\.paid for 'amount'"):
        define(
            source=Stream("g", "Scored", "Ended"),
            key="id",
            state=ship("Least1", {"id": "string", "amount": WIDE_MONEY}),
            amount=Greatest("Scored.paid"),
        )()


def test_a_field_may_be_called_as_a_record_in_another_case() -> None:
    assert define(**AMOUNT)().standard_folds == {"amount": Count("Amount")}


def test_a_field_of_any_name_may_be_folded() -> None:
    state = ship("Called", {"customerId": "string", "name": "string", "amount": WIDE_MONEY})

    called = define(name="test-called", state=state, folds={"name": Latest("FundsAdded.id")})()

    assert called.standard_folds == {"name": Latest("FundsAdded.id"), "amount": SUM}
    assert called.name == "test-called"


def test_a_read_model_describes_itself() -> None:
    assert Balance().description() == {
        "name": "balance",
        "source": "balance",
        "key": "customerId",
        "fields": {"amount": "decimal(38,2)"},
    }


def test_every_type_has_a_name_for_people() -> None:
    assert Summary().field_types["first"] == "Place{city string, since timestamp-millis?}?"
    assert Summary().field_types["latest"] == "map<long>?"
    assert Ranks().field_types["best"] == "array<Rank{score double, kind Kind(SMALL, LARGE), paid decimal(38,2)}>"


def test_one_fold_that_does_not_combine_makes_all_events_single() -> None:
    assert Balance().combine == {"amount": Combine.SUM}
    # NaN has no order.
    assert Peaks().combine is None
    assert Session().combine is None


class Kind(Enum):
    LARGE = "l"
    SMALL = "s"


@dataclass
class Shown:
    amount: Annotated[Decimal, scale(2)]
    kind: Kind
    note: str | None = None


class Told(TypedDict):
    amount: Annotated[Decimal, scale(2)]


class Digitless(TypedDict):
    amount: Decimal


def shown(_model: ReadModel, state: Any) -> Shown:
    return Shown(state["amount"], Kind.LARGE)


def told(_model: ReadModel, state: Any) -> Told:
    return {"amount": state["amount"]}


def digitless(_model: ReadModel, state: Any) -> Digitless:
    return {"amount": state["amount"]}


def untyped(_model: ReadModel, state: Any) -> dict[str, Any]:
    return {"amount": state["amount"]}


STATE = {"customerId": "ada", "amount": Decimal("1.50")}


def test_the_fields_of_a_view_are_those_of_the_dataclass_that_it_returns() -> None:
    model = define(view=shown)()

    assert model.field_types == {"amount": "decimal(38,2)", "kind": "Kind(LARGE, SMALL)", "note": "string?"}
    assert model.view_of(STATE) == {"amount": Decimal("1.50"), "kind": "LARGE", "note": None}


def test_the_fields_of_a_view_are_those_of_the_typed_dict_that_it_returns() -> None:
    model = define(view=told)()

    assert model.field_types == {"amount": "decimal(38,2)"}
    assert model.view_of(STATE) == {"amount": Decimal("1.50")}


def test_fields_that_are_given_go_before_the_annotation() -> None:
    assert define(view=shown, fields={"amount": "a number"})().field_types == {"amount": "a number"}


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (untyped, "has a view of its own, but neither `fields`"),
        (digitless, "cannot be a view: its field 'amount' is a Decimal without its digits after the point"),
    ],
)
def test_an_annotation_that_names_no_types_is_refused(view: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        define(view=view)()
