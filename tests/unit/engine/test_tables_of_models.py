"""What the stages of several read models share: their tables."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass

import pytest

from balance_service import ConfigurationError, Count, Global, ReadModel, Stream
from balance_service.engine.tables import table_contexts
from balance_service.model.placing import stages_of
from balance_service.settings import load_settings
from balance_service.testing.fakes import FakeRegistry


@dataclass
class Bought:
    customerId: str  # noqa: N815


@dataclass
class InCity:
    city: str


@dataclass
class Cities:
    city: str
    bought: int


def model_of(name: str, row: type) -> type[ReadModel]:
    source = Stream("bought", Bought).join(Global("customers", row), on="customerId", take={"city": "city"})
    return type(
        "Declared",
        (ReadModel,),
        {
            "name": name,
            "source": source.by("city", record=InCity),
            "state": Cities,
            "bought": Count("InCity"),
            "__module__": __name__,
        },
    )


def test_a_table_that_two_models_declare_by_classes_that_differ_is_refused() -> None:
    first, second = (
        make_dataclass("Customer", [("city", str)]),
        make_dataclass("Customer", [("city", str), ("tier", int)]),
    )
    settings = load_settings()
    models = [model_of("test-first", first)(), model_of("test-second", second)()]
    stages = [stage for model in models for stage in stages_of(model, settings)]

    with pytest.raises(ConfigurationError, match="'customers' is declared to hold Customer by classes that differ"):
        table_contexts(settings, object(), FakeRegistry(), {}, stages)  # type: ignore[arg-type]
