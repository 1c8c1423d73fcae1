"""Which schemas an instance registers for what it reads: its own; others are their producers' to register."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from balance_service.avro.schemas import load_schema
from balance_service.hosting.hosted_stage import HostedStage
from balance_service.model.stage import Stage
from tests.support.fakes import FakeRegistry

_THEIRS = {"type": "record", "name": "OrderPlaced", "fields": [{"name": "customerId", "type": "string"}]}


class Registry(FakeRegistry):
    """Has one schema for every topic."""

    def schema_ids(self, _topic: str) -> list[int]:
        return [7]


def learned(schema: dict[str, Any]) -> tuple[list[str], set[int]]:
    """What is registered, and the ids that the decoder is told of, for a stage that reads records of a schema."""
    nobody: Any = None
    told: set[int] = set()
    decoder: Any = SimpleNamespace(resolve=told.update)
    stage = Stage(name="s", owner="s", source="topic", written_to="topic", schemas={schema["name"]: schema})
    others: dict[str, Any] = dict.fromkeys(("work", "source", "watermarks", "tasks", "feed", "source_check"))
    hosted = HostedStage(stage=stage, read_model=nobody, decoder=decoder, **others)
    registry = Registry()
    hosted.learn_schemas(registry)
    return [registered["name"] for registered in registry.schemas], told


def test_a_schema_of_ours_is_registered_and_learnt_with_those_that_there_are() -> None:
    assert learned(load_schema("FundsAdded")) == (["FundsAdded"], {1, 7})


def test_a_users_schema_is_not_registered_on_the_topic_of_its_producers() -> None:
    assert learned(_THEIRS) == ([], {7})


def test_a_users_version_of_a_schema_of_ours_is_not_either() -> None:
    changed = {**load_schema("FundsAdded"), "fields": load_schema("FundsAdded")["fields"][:3]}

    assert learned(changed) == ([], {7})
