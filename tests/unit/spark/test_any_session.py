"""The Spark session that analyses a `transform`: with the settings of the instance that hosts the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import SparkSession

from balance_service import Count, ReadModel, Stream
from balance_service.model.binding import bind_models
from balance_service.settings import Settings, load_settings
from balance_service.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass
class Sold:
    item: str


@dataclass
class Number:
    item: str
    sold: int


class Sales(ReadModel):
    name = "sales"
    source = Stream("sales", Sold)
    key = "item"
    state = Number
    sold = Count()

    def transform(self, events: DataFrame) -> DataFrame:
        return events


class StartedError(Exception): ...


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of each Spark that would have started."""
    found: list[Settings] = []

    def start(settings: Settings, *_: Any) -> None:
        found.append(settings)
        raise StartedError

    monkeypatch.setattr(SparkSession, "_instantiatedSession", None)
    monkeypatch.setattr(session, "start_spark", start)
    return found


@pytest.mark.usefixtures("no_environment")
def test_an_embedded_instance_analyses_with_its_own_settings(started: list[Settings]) -> None:
    settings = load_settings(spark_driver_memory="700m")

    with pytest.raises(StartedError):
        bind_models([Sales], settings)
    with pytest.raises(StartedError):
        Sales()

    assert started == [settings, load_settings()]
