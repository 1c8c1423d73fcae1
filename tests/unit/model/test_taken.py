"""The records that a topic takes, by the declarations of read models."""

from __future__ import annotations

import pytest

from balance_service.avro.schemas import load_schema
from balance_service.errors import ConfigurationError
from balance_service.model.taken import taken_by
from balance_service.settings import load_settings
from tests.support.shipped import MODELS


def test_a_topic_takes_tombstones_if_its_stream_does() -> None:
    assert taken_by("symbols", MODELS, load_settings()).tombstones
    assert not taken_by("balance", MODELS, load_settings()).tombstones


def test_the_records_of_a_topic_are_found_by_its_configured_name() -> None:
    settings = load_settings(topic="funds", models=("activity",))

    assert taken_by("funds", MODELS, settings).records["FundsAdded"] == load_schema("FundsAdded")
    with pytest.raises(ConfigurationError, match=r"no read model reads topic 'balance'; name one of .*funds"):
        taken_by("balance", MODELS, settings)
