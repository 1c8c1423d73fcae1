"""Schemas that exist only in the registry: found under every strategy, recorded once, pulled to files."""

from __future__ import annotations

import json
import uuid
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.schema_registry import Schema as RegistrySchema
from confluent_kafka.schema_registry import SchemaReference

from balance_service.avro.registry import SchemaRegistry
from balance_service.errors import ConfigurationError
from balance_service.model.binding import bind_models
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.settings import load_settings
from tests.support.commands import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.avro.schemas import Schema
    from balance_service.devtools.local.stack import LocalStack
    from balance_service.settings import Settings


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str]) -> Settings:
    return load_settings(
        bootstrap_servers=stack.bootstrap_servers, schema_registry_url=stack.schema_registry_url, **names
    )


@pytest.fixture
def registry(settings: Settings) -> Iterator[SchemaRegistry]:
    with closing(SchemaRegistry.from_settings(settings)) as made:
        yield made


@pytest.fixture
def topic() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


def order(name: str, *more: str) -> Schema:
    columns = [{"name": column, "type": "string", "default": ""} for column in ("customerId", *more)]
    return {"type": "record", "name": name, "namespace": "shop", "fields": columns}


def counting(topic: str, record: str, version: int = 1) -> type[ReadModel]:
    """Returns a model that counts orders, whose schema is in no file."""
    attributes: dict[str, Any] = {
        "__module__": __name__,
        "name": "orders",
        "source": Stream(topic, record),
        "key": "customerId",
        "state": "Activity",
        "version": version,
        "fold": lambda _model, state, _event: state,
    }
    return type("Counting", (ReadModel,), attributes)


def columns_of(model: ReadModel) -> list[str]:
    (schema,) = model.stages[0].schemas.values()
    return [field["name"] for field in schema["fields"]]


@pytest.mark.parametrize("strategy", ["{topic}-shop.{record}", "{topic}-value", "shop.{record}"])
def test_the_newest_schema_is_found_under_every_strategy(
    settings: Settings, registry: SchemaRegistry, topic: str, strategy: str
) -> None:
    record = f"Order{uuid.uuid4().hex[:8]}"
    for schema in (order(record), order(record, "note")):
        registry.register(strategy.format(topic=topic, record=record), schema)

    (model,) = bind_models([counting(topic, record)], settings)

    assert columns_of(model) == ["customerId", "note"]


def test_instances_use_the_schema_found_first_until_the_models_version_changes(
    settings: Settings, registry: SchemaRegistry, topic: str
) -> None:
    registry.register(f"{topic}-shop.Order", order("Order"))
    (first,) = bind_models([counting(topic, "Order")], settings)
    registry.register(f"{topic}-shop.Order", order("Order", "later"))

    (second,) = bind_models([counting(topic, "Order")], settings)
    (changed,) = bind_models([counting(topic, "Order", version=2)], settings)

    assert (columns_of(first), columns_of(second)) == (["customerId"], ["customerId"])
    assert columns_of(changed) == ["customerId", "later"]


def test_an_unregistered_record_is_refused_with_the_subjects_looked_up(
    settings: Settings, registry: SchemaRegistry, topic: str
) -> None:
    registry.register(f"{topic}-shop.Another", order("Another"))

    with pytest.raises(ConfigurationError) as refused:
        bind_models([counting(topic, "Order")], settings)

    assert f"has no record Order under the subjects {topic}-NAMESPACE.Order, {topic}-value or" in str(refused.value)


def test_a_schema_contains_those_that_it_refers_to(registry: SchemaRegistry, topic: str) -> None:
    money = {"type": "fixed", "name": "Money", "namespace": "acme", "size": 16, "logicalType": "decimal"}
    money |= {"precision": 38, "scale": 2}
    line = {"type": "record", "name": "Line", "namespace": "acme"}
    referring, complete = (line | {"fields": [{"name": "price", "type": kind}]} for kind in ("acme.Money", money))
    schema = order("Order", "note")
    schema["fields"] += [{"name": "lines", "type": {"type": "array", "items": "acme.Line"}}]
    of_money = refer(registry, f"{topic}-money", money)
    of_line = refer(registry, f"{topic}-line", referring, of_money)
    of_order = refer(registry, f"{topic}-shop.Order", schema, of_line)
    union_id = register(registry, f"{topic}-value", ["null", "shop.Order", "acme.Money"], of_order, of_money)

    written = registry.writer_schema(union_id)

    assert written is not None
    assert written.records == ("shop.Order",)
    null, own, other = json.loads(written.text)
    assert (null, other) == ("null", "acme.Money")
    assert own["fields"][-1]["type"] == {"type": "array", "items": complete}
    # A model reads the newest schema of a subject.
    newest = registry.newest(topic, "Order")
    assert newest is not None
    assert newest["fields"] == own["fields"]


def register(registry: SchemaRegistry, subject: str, schema: Any, *references: SchemaReference) -> int:
    text = json.dumps(schema)
    return int(registry.client.register_schema(subject, RegistrySchema(text, "AVRO", [*references])))


def refer(registry: SchemaRegistry, subject: str, schema: Any, *references: SchemaReference) -> SchemaReference:
    """Registers a schema, and returns a reference to it."""
    register(registry, subject, schema, *references)
    return SchemaReference(f"{schema['namespace']}.{schema['name']}", subject, 1)


def test_schemas_are_pulled_to_files_and_never_overwrite_others(
    stack: LocalStack, registry: SchemaRegistry, topic: str, tmp_path: Path
) -> None:
    at = {"BALANCE_SCHEMA_REGISTRY_URL": stack.schema_registry_url}
    registry.register(f"{topic}-shop.Order", order("Order"))
    registry.register(f"{topic}-shop.Return", order("Return"))

    first = run(at, "schemas", "pull", topic, "--to", str(tmp_path))
    again = run(at, "schemas", "pull", topic, "--to", str(tmp_path))
    registry.register(f"{topic}-shop.Order", order("Order", "later"))
    refused = run(at, "schemas", "pull", topic, "--to", str(tmp_path))
    unknown = run(at, "schemas", "pull", f"{topic}-x", "--to", str(tmp_path))

    assert (first.code, again.code, refused.code, unknown.code) == (0, 0, 2, 2), (first, again, refused, unknown)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["Order.avsc", "Return.avsc"]
    assert json.loads((tmp_path / "Order.avsc").read_text()) == order("Order")
    assert f"{tmp_path / 'Order.avsc'} contains another schema" in refused.stderr
    assert f"has no record under the subjects {topic}-x-NAMESPACE.NAME" in unknown.stderr


def test_subjects_of_a_deleted_topic_are_deleted_and_no_others(registry: SchemaRegistry, topic: str) -> None:
    ours = {f"{topic}-shop.{name}": registry.register(f"{topic}-shop.{name}", order(name)) for name in ("One", "Two")}
    other = f"{topic}-2-shop.One"
    registry.register(other, order("One"))

    registry.forget(topic)

    assert [subject for subject in registry.client.get_subjects() if subject.startswith(topic)] == [other]
    # A record that was written with it may still be read.
    assert all(registry.writer_schema(schema_id) is not None for schema_id in ours.values())
