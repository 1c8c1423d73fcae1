"""Stages in an application: their names, and the records of a topic."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

import pytest

from balance_service.avro.schemas import load_schema
from balance_service.errors import ConfigurationError
from balance_service.model.placing import hosted_stages, records_of_topic, stages_of, written_by
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.read_models.balance import Balance
from balance_service.read_models.purchases import Purchases
from balance_service.read_models.rewards import Rewards
from balance_service.settings import load_settings
from tests.support.record_keys import Labels, OrdersById
from tests.support.shipped import MODELS


def test_a_topic_takes_tombstones_if_its_stream_does() -> None:
    assert records_of_topic("symbols", MODELS, load_settings()).tombstones
    assert not records_of_topic("balance", MODELS, load_settings()).tombstones


def test_the_records_of_a_topic_are_found_by_its_configured_name() -> None:
    settings = load_settings(topic="funds", models=("activity",))

    assert records_of_topic("funds", MODELS, settings).records["FundsAdded"] == load_schema("FundsAdded")
    with pytest.raises(ConfigurationError, match=r"no read model reads topic 'balance'; name one of .*funds"):
        records_of_topic("balance", MODELS, settings)


def test_a_record_that_two_models_declare_has_the_fields_of_both_classes() -> None:
    first, second, third = (
        make_dataclass("Sold", [("customerId", str), *more])
        for more in ([("amount", int)], [("fee", int)], [("fee", str)])
    )

    def model(name: str, owner: type) -> ReadModel:
        given = {"name": name, "source": Stream("sold", owner), "key": "customerId", "state": owner}
        declared = type("Declared", (ReadModel,), {**given, "fold": lambda _self, _state, event: event})
        found: ReadModel = declared()
        return found

    settings, known = load_settings(), [model("test-first", first), model("test-second", second)]
    (schema,) = records_of_topic("sold", known, settings).records.values()

    assert [field["name"] for field in schema["fields"]] == ["customerId", "amount", "fee"]
    with pytest.raises(
        ConfigurationError, match="by classes that no event fits: 'fee' is a long there and a string here"
    ):
        records_of_topic("sold", [*known, model("test-third", third)], settings)


def test_the_setting_names_the_partitioner_of_the_shipped_topic() -> None:
    settings = load_settings(topic="funds", partitioner="crc32")

    partitioners = {model.name: stages_of(model, settings)[0].partitioner for model in MODELS}

    assert partitioners == dict.fromkeys(partitioners, "murmur2") | {"balance": "crc32", "activity": "crc32"}
    assert records_of_topic("funds", MODELS, settings).partitioner == "crc32"
    assert records_of_topic("players", MODELS, settings).partitioner == "murmur2"


def test_tools_write_a_topic_by_the_partitioner_that_a_model_declares_for_it() -> None:
    class RoundRobin(ReadModel):
        name = "test-round-robin"
        source = Stream("pos", "PosInvoice", partitioner="any")

    class Crc(ReadModel):
        name = "test-crc"
        source = Stream("orders", "PosInvoice", partitioner="crc32")

    settings = load_settings(topic="funds", partitioner="fnv1a")
    models = [RoundRobin, Crc, Balance]

    found = {topic: written_by(topic, models, settings) for topic in ("funds", "orders", "pos", "unknown")}

    assert found == {"funds": "fnv1a", "orders": "crc32", "pos": "murmur2", "unknown": "murmur2"}


def test_a_declaration_that_the_setting_contradicts_is_refused() -> None:
    class Sarama(Balance):
        name = "test-sarama"
        source = Stream("balance", "FundsAdded", partitioner="fnv1a")

    assert stages_of(Sarama(), load_settings(partitioner="fnv1a"))[0].partitioner == "fnv1a"
    with pytest.raises(ConfigurationError, match="BALANCE_PARTITIONER is crc32, and the read model 'test-sarama'"):
        stages_of(Sarama(), load_settings(partitioner="crc32"))


def test_stages_are_named_after_the_topics_that_they_write() -> None:
    first, last = stages_of(Rewards(), load_settings(application_id="app"))

    assert first.name == "rewards-by-customerCardNo"
    assert first.rekeyed == last.source == "app-rewards-by-customerCardNo"
    assert first.changelog == "app-rewards-by-customerCardNo-changelog"
    assert first.transactional_id(1) == "app-rewards-by-customerCardNo-1"
    assert (first.targets, last.targets) == (("app-rewards-by-customerCardNo",), ("notifications",))
    (only,) = stages_of(Purchases(), load_settings(application_id="app"))
    assert only.targets == ("shipments", "hadoop")


def test_two_stages_of_one_name_are_refused() -> None:
    class Taken(ReadModel):
        """Has the name of a stage of the other model."""

        name = "test-taken-by-id"
        source = Stream("balance", "FundsAdded").by("id")
        state = "BalanceState"

        def fold(self, state: Any, event: Any) -> Any:
            return state

    class Takes(ReadModel):
        """Has a stage of that name."""

        name = "test-taken"
        source = Stream("balance", "FundsAdded").by("id")
        state = "BalanceState"

        def fold(self, state: Any, event: Any) -> Any:
            return state

    with pytest.raises(ConfigurationError, match="both have a stage 'test-taken-by-id'; rename one"):
        hosted_stages([Taken(), Takes()], load_settings())


def test_the_keys_of_a_topic_have_the_form_that_a_model_names() -> None:
    settings, models = load_settings(), [OrdersById(), Labels(), Balance()]

    topics = ("own-orders", "day-labels", "balance")
    assert [records_of_topic(topic, models, settings).key_format for topic in topics] == ["long", "long", "string"]
