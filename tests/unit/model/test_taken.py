"""The records that a topic takes, by the declarations of read models."""

from __future__ import annotations

import pytest

from balance_service.avro.schemas import load_schema
from balance_service.errors import ConfigurationError
from balance_service.model.placing import records_of_topic
from balance_service.settings import load_settings
from tests.support.shipped import MODELS


def test_a_topic_takes_tombstones_if_its_stream_does() -> None:
    assert records_of_topic("symbols", MODELS, load_settings()).tombstones
    assert not records_of_topic("balance", MODELS, load_settings()).tombstones


def test_the_records_of_a_topic_are_found_by_its_configured_name() -> None:
    settings = load_settings(topic="funds", models=("activity",))

    assert records_of_topic("funds", MODELS, settings).records["FundsAdded"] == load_schema("FundsAdded")
    with pytest.raises(ConfigurationError, match=r"no read model reads topic 'balance'; name one of .*funds"):
        records_of_topic("balance", MODELS, settings)
