"""The page of change data capture: its models run, and do what its table says."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from balance_service import Debezium
from balance_service.testing import Driver, tombstone
from tests.support.documents import blocks

PAGE = "docs/how-to/change-data-capture.md"
CODE = "\n\n".join(block.text for block in blocks(PAGE) if block.language == "python")


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    # Annotations of dataclasses are looked up in their module.
    module = ModuleType("captured")
    monkeypatch.setitem(sys.modules, "captured", module)
    exec(compile(CODE, PAGE, "exec"), module.__dict__)
    return module.__dict__


def test_its_models_keep_the_newest_rows(code: dict[str, Any]) -> None:
    product, value, envelope = code["Product"], code["Value"], code["Envelope"]
    with Driver(code["Products"]) as products:
        products.given(product("a", "one"), product("a", "two"), product("b", "one"), tombstone("b"))
        assert (products.view("a"), products.view("b")) == ({"name": "two"}, None)

    placeholder = Debezium("Envelope").unavailable
    with Driver(code["Customers"]) as customers:
        customers.given(envelope(None, value(1, "a@example.org", "long"), "r"))
        customers.given(envelope(None, value(1, "new@example.org", placeholder), "u"))
        assert customers.view("1") == {"email": "new@example.org", "note": "long"}
        customers.given(envelope(value(1, None, None), None, "d"), tombstone("any"))
        assert customers.view("1") is None
