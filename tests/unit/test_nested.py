"""What Avro may resolve by itself: the values of one type as another, where they mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from balance_service.events.nested import check_resolvable, nested_type, widened
from tests.support.models import KIND, MONEY, PLACE, WHEN

FIXED = {"type": "fixed", "name": "F", "logicalType": "decimal", "precision": 5, "scale": 1}
NAMED: Any = {"type": "record", "name": "Outer", "namespace": "n", "fields": [{"name": "at", "type": PLACE}]}


def array(items: Any) -> Any:
    return {"type": "array", "items": items}


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (array("int"), array("long")),
        (array("string"), array(["null", "string"])),
        (["null", array("string")], array("string")),
        (array({**MONEY, "precision": 9}), array(MONEY)),
        ({"type": "map", "values": "float"}, {"type": "map", "values": "double"}),
        ("Place", PLACE),
        ("n.Outer", NAMED),
        (KIND, KIND),
        (PLACE, {**PLACE, "fields": [*PLACE["fields"], {"name": "zip", "type": "string", "default": ""}]}),
    ],
    ids=repr,
)
def test_a_type_may_be_read_as_one_that_holds_all_of_it(written: Any, wanted: Any) -> None:
    check_resolvable(written, wanted, NAMED)


@pytest.mark.parametrize(
    ("written", "wanted", "why"),
    [
        (array("long"), array("int"), "long would be taken for int"),
        (array(WHEN), array("long"), "timestamp-millis would be taken for long"),
        (
            array({**MONEY, "scale": 4}),
            array(MONEY),
            "decimal of scale 4, in bytes would be taken for decimal of scale 2",
        ),
        (array("string"), {"type": "map", "values": "string"}, "array would be taken for map"),
        ("string", PLACE, "string would be taken for record"),
        (NAMED, PLACE, "Place lacks 'city'"),
    ],
    ids=repr,
)
def test_a_type_is_not_read_as_one_that_means_something_else(written: Any, wanted: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        check_resolvable(written, wanted, NAMED)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (array(MONEY), "array<decimal(38,2)>"),
        ({"type": "map", "values": ["null", {**FIXED, "size": 16}]}, "map<string,decimal(38,1)>"),
        # Of 8 bytes Spark sees all, and of 12 there are no 38 digits.
        (array({**FIXED, "size": 8}), "array<decimal(5,1)>"),
        (array({**FIXED, "size": 12}), "array<decimal(28,1)>"),
        (PLACE, "struct<`city`:string,`since`:timestamp>"),
        (array(KIND), "array<string>"),
    ],
    ids=repr,
)
def test_a_nested_decimal_is_read_with_all_the_digits_it_may_have(kind: Any, expected: str) -> None:
    assert nested_type(widened(kind)) == expected
