"""The read models that a command binds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from balance_service.cli.models import models_of_topic, with_shipped
from balance_service.model import stage_checks
from balance_service.settings import load_settings

if TYPE_CHECKING:
    import pytest


def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def analyse(*_: object) -> NoReturn:
        raise AssertionError("Spark is needed")

    monkeypatch.setattr(stage_checks, "transform_of", analyse)


def test_no_spark_is_needed_to_know_the_models_that_peers_may_host(monkeypatch: pytest.MonkeyPatch) -> None:
    without_spark(monkeypatch)

    assert {"balance", "activity", "leaderboard", "symbols"} <= {model.name for model in with_shipped([])}


def test_no_spark_is_needed_to_produce_to_a_topic_that_a_hosted_model_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    without_spark(monkeypatch)
    settings = load_settings(models=("balance",))

    assert [model.name for model in models_of_topic(settings, settings.topic)] == ["balance"]
