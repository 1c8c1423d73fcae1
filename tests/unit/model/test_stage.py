"""The stages that a read model declares, and invalid sources and outputs."""

from __future__ import annotations

from typing import Any

import pytest

from balance_service.avro.schemas import fields_of
from balance_service.errors import ConfigurationError
from balance_service.model.conditions import col
from balance_service.model.events import LAST, Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.read_models.balance import Balance
from balance_service.read_models.rewards import Rewards
from tests.support.shipped import declared

PRIME = col("customerType") == "PRIME"
POS = Stream("pos", "PosInvoice")


def test_a_source_without_a_re_key_is_one_stage_with_the_models_name() -> None:
    (only,) = declared("balance", Balance.source)

    assert (only.name, only.source, only.records, only.by) == ("balance", "balance", ("FundsAdded",), None)
    assert not only.reads_rekeyed


def test_each_re_key_ends_a_stage_that_the_next_one_reads() -> None:
    twice = POS.where(PRIME).by("storeId").where(col("deliveryType") == "X").by("customerCardNo")

    first, second, last = declared("m", twice)

    assert (first.name, first.source, first.by, first.key) == ("m-by-storeId", "pos", ("storeId",), None)
    assert (second.name, second.source, second.by, second.key) == (
        "m-by-customerCardNo",
        "m-by-storeId",
        ("customerCardNo",),
        ("storeId",),
    )
    assert (last.name, last.source, last.by, last.key) == ("m", "m-by-customerCardNo", None, ("customerCardNo",))
    assert [[str(c) for c in stage.conditions] for stage in (first, second, last)] == [
        ["customerType = PRIME"],
        ["deliveryType = X"],
        [],
    ]


def test_selected_columns_are_read_with_those_that_the_stream_needs() -> None:
    source = POS.where(PRIME).by("customerCardNo").select("totalAmount")

    for stage in declared("m", source):
        (wanted,) = stage.wanted_schemas.values()
        assert [*fields_of(wanted)] == ["customerCardNo", "customerType", "totalAmount"]
        assert len(fields_of(stage.event_schemas["parts.code.balance.events.PosInvoice"])) == 9
    (alone,) = declared("m", POS.select("totalAmount"), ["storeId"])
    assert alone.columns == frozenset({"storeId", "totalAmount"})


def test_a_step_leaves_the_original_stream_unchanged() -> None:
    POS.by("storeId")

    assert POS.steps == ()


def test_the_key_of_a_re_keyed_model_is_the_column_of_its_re_key() -> None:
    assert Rewards().key == "customerCardNo"


def define(**changed: Any) -> type[ReadModel]:
    attributes: dict[str, Any] = {
        "name": "test-flow",
        "source": POS.by("customerCardNo"),
        "state": "Rewards",
        "emits": Emit("sent", "Notification"),
        "fold": lambda _model, _state, _event: None,
        "emit": lambda _model, _state, _event: None,
        **changed,
    }
    kept = {name: value for name, value in attributes.items() if value is not None}
    return type("Flowing", (ReadModel,), {"__module__": __name__, **kept})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"source": POS.by("nothing")},
            "continues by 'nothing', which must be a string, int or long; PosInvoice has no such column",
        ),
        ({"source": POS.by("totalAmount")}, r"PosInvoice has one of type decimal\(18,2\)"),
        ({"source": POS.by("storeId").by("storeId")}, "continues by the same column twice"),
        ({"key": "storeId"}, "has the key 'storeId', but its source continues by 'customerCardNo'"),
        ({"source": POS.where(col("nothing") == "x").by("storeId")}, "has a condition on 'nothing', but PosInvoice"),
        ({"source": POS.where(col("totalAmount") == "1").by("storeId")}, "'totalAmount' is of type decimal"),
        ({"source": POS.where(col("storeId") == 1).by("storeId")}, "'storeId' is of type string, and 1 is one of"),
        ({"emits": None}, "has an `emit`, but `emits` names no topic"),
        ({"emit": None}, "a record type needs `fields` or an `emit`, and these need a record"),
        ({"emits": Emit("sent")}, "a record type needs `fields` or an `emit`, and these need a record"),
        ({"emits": Emit("sent", "Unheard")}, "there is no Unheard.avsc in "),
        ({"emits": (Emit("a", "Notification"), Emit("b", "Notification"))}, "has states and more than one output"),
        (
            {"emits": Emit("sent", "Notification", where=PRIME)},
            "with `make`, `of` or `where`, which only models without",
        ),
        ({"state": None}, "has no `state`, so it cannot have a fold, an `emit` or `queries`"),
        (
            {"state": None, "fold": None, "emit": None},
            "name both a record type and `fields`, `of` or `make`, or neither",
        ),
        (
            {"state": None, "fold": None, "emit": None, "emits": Emit("sent", each=LAST)},
            "emits the last state of a key to 'sent', but has no states",
        ),
        (
            {
                "state": None,
                "fold": None,
                "emit": None,
                "emits": Emit("sent", "HadoopRecord", make=list, where=col("nothing") == "x"),
            },
            "has a condition on 'nothing', but PosInvoice has no such column",
        ),
    ],
)
def test_an_invalid_source_or_output_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        define(**changed)()


def test_a_model_may_be_declared_with_the_name_of_another_models_stage() -> None:
    define()
    define(name="test-flow-by-customerCardNo".lower(), source=POS.by("storeId"))
