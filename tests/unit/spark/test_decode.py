"""The schemas that an instance registers for its source: the shipped ones. Others are their producers' to register.

And the schemas that the JVM gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
from structlog.testing import capture_logs

from balance_service.avro.schemas import load_schema
from balance_service.errors import RetriableError
from balance_service.model.stage import Stage
from balance_service.read_models.balance import Balance
from balance_service.spark.decode import Decoder
from balance_service.testing.rows import driven_stages
from tests.support.fakes import FakeRegistry

if TYPE_CHECKING:
    from balance_service.avro.writer_schema import WriterSchema

_THEIRS = {"type": "record", "name": "OrderPlaced", "fields": [{"name": "customerId", "type": "string"}]}


class Registry(FakeRegistry):
    """Has one schema for every topic."""

    def schema_ids(self, _topic: str, _records: object) -> list[int]:
        return [7]


def resolved(schema: dict[str, Any]) -> tuple[list[str], set[int]]:
    """Returns the registered records and the resolved ids of a stage that reads records of a schema."""
    nobody: Any = None
    stage = Stage(
        name="s", owner="s", source="topic", written_to={"topic": (schema["name"],)}, schemas={schema["name"]: schema}
    )
    registry = Registry()
    ids = Decoder(nobody, None, stage, registry).resolve_all()
    return [registered["name"] for registered in registry.schemas], ids


def test_a_shipped_schema_is_registered_and_resolved_with_those_of_the_registry() -> None:
    assert resolved(load_schema("FundsAdded")) == (["FundsAdded"], {1, 7})


def test_records_of_several_topics_are_found_under_the_subjects_of_each() -> None:
    class Asked(Registry):
        def register(self, subject: str, schema: Any) -> int:
            asked.append(subject)
            return super().register(subject, schema)

        def schema_ids(self, topic: str, records: Any) -> list[int]:
            asked.append((topic, *records))
            return [7]

    asked: list[Any] = []
    nobody: Any = None
    funds = load_schema("FundsAdded")
    read = {"FundsAdded": funds, "OrderPlaced": _THEIRS}
    topics = {"balance": ("FundsAdded",), "orders": ("OrderPlaced",), "us": ("OrderPlaced", "FundsAdded")}
    stage = Stage(name="s", owner="s", source="topic", written_to=topics, schemas=read)

    assert Decoder(nobody, None, stage, Asked()).resolve_all() == {1, 7}
    name = "parts.code.balance.events.FundsAdded"
    assert asked == [
        f"balance-{name}",
        ("balance", name),
        ("orders", "OrderPlaced"),
        f"us-{name}",
        ("us", "OrderPlaced", name),
    ]


def test_a_users_schema_is_not_registered_on_its_producers_topic() -> None:
    assert resolved(_THEIRS) == ([], {7})


def test_a_users_version_of_a_shipped_schema_is_not_registered() -> None:
    changed = {**load_schema("FundsAdded"), "fields": load_schema("FundsAdded")["fields"][:3]}

    assert resolved(changed) == ([], {7})


def test_a_decoder_knows_the_schemas_whose_records_had_other_values_by_older_rules() -> None:
    spark, stage, registry = MagicMock(), Balance().stages[-1], FakeRegistry()
    spark._jvm.parts.code.balance.Resolving.return_value.tell.return_value = None
    funds = load_schema("FundsAdded")
    at = {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}
    fields = [{**field, "type": at} if field["name"] == "occurredOn" else field for field in funds["fields"]]
    ids = [registry.register("balance", schema) for schema in (funds, {**funds, "fields": fields})]
    decoder = Decoder(spark, Balance(), stage, registry)

    decoder.resolve(ids)

    assert decoder.rules == {ids[1]: 2}


def test_a_start_does_not_wait_for_a_schema_that_no_record_has_named() -> None:
    class Unavailable(Registry):
        def writer_schema(self, schema_id: int) -> WriterSchema | None:
            if schema_id == 7:
                raise RetriableError("no answer for this id")
            return super().writer_schema(schema_id)

    spark, balance = MagicMock(), Balance()
    spark._jvm.parts.code.balance.Resolving.return_value.tell.return_value = None
    decoder = Decoder(spark, balance, driven_stages(balance)[-1], Unavailable())

    with capture_logs() as logs:
        known = decoder.resolve_all()

    assert known == {1}
    assert [line["reason"] for line in logs] == ["no answer for this id"]
    with pytest.raises(RetriableError):
        decoder.resolve([7])


def test_an_error_of_the_jvm_is_no_verdict_about_a_schema() -> None:
    spark, stage, registry = MagicMock(), Balance().stages[-1], FakeRegistry()
    tell = spark._jvm.parts.code.balance.Resolving.return_value.tell
    tell.side_effect = [RuntimeError("java.lang.OutOfMemoryError"), None]
    schema_id = registry.register("balance", load_schema("FundsAdded"))
    decoder = Decoder(spark, Balance(), stage, registry)

    with pytest.raises(RetriableError, match="OutOfMemoryError"):
        decoder.resolve([schema_id])

    assert decoder.resolve([schema_id]) == {schema_id}
    assert decoder.resolve([schema_id]) == {schema_id}
    assert [call.args[0] for call in tell.call_args_list] == [schema_id] * 2
