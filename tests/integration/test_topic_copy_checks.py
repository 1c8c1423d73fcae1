"""Refusals of a copy, and differences that the comparison finds."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from balance_service.avro.schemas import load_schema
from balance_service.devtools.topic_comparison import compare
from balance_service.devtools.topic_copy import Copied
from balance_service.errors import ConfigurationError, FatalError, RetriableError
from balance_service.kafka.topics import Topics
from tests.integration.copying import Application, ignore
from tests.support.commands import assert_refused, run
from tests.support.kafka import Writer

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

# A timestamp in the year 2109.
_FAR_AHEAD = 1 << 42
_CONFIGURATION, _FAILED = 2, 1


@pytest.fixture
def app(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Application:
    return Application(stack, names, tmp_path)


def test_a_source_that_grew_during_the_copy_is_reported(app: Application) -> None:
    app.create(app.source, 2)
    app.load(100)
    copied = app.copy()
    app.load(7)

    compared = compare(app.settings, copied, ignore)

    assert compared.source == compared.target
    with pytest.raises(RetriableError, match=r"grown by 7 records .* stop its writers and run this again"):
        compared.check(app.source, app.target)


def test_an_open_transaction_on_the_source_is_reported_instead_of_waited_for(app: Application) -> None:
    app.create(app.source, 1)
    app.load(100)
    with Writer(app.stack, app.source, **{"transactional.id": f"open-{app.source}"}) as writer:
        writer.producer.init_transactions(10)
        writer.producer.begin_transaction()
        writer.send("c", writer.frame("c", "1"))
        writer.producer.flush(10)

        done = run(app.environment, "topics", "copy", app.source, app.target)

        assert_refused(done, _FAILED, "open transaction", "its last 1 offsets", "run this again")
        assert "100 records" in done.stdout
        writer.producer.commit_transaction(10)
    assert app.copy().records == 1


def test_a_foreign_record_in_the_copy_is_found(app: Application) -> None:
    app.create(app.source, 2)
    app.load(100)
    copied = app.copy()
    record = app.read(app.source)[0]
    with Writer(app.stack, app.target) as writer:
        writer.send(record.key(), record.value(), timestamp=record.timestamp()[1])

    compared = compare(app.settings, copied, ignore)

    assert compared.target.records == compared.source.records + 1
    assert compared.target.digest != compared.source.digest
    with pytest.raises(FatalError, match="is not a copy of"):
        compared.check(app.source, app.target)


@pytest.mark.parametrize("field", ["key", "value", "headers", "timestamp"])
def test_a_record_that_differs_in_any_part_changes_the_digest(app: Application, field: str) -> None:
    app.create(app.source, 1)
    app.create(app.target, 1)
    record: dict[str, Any] = {"key": b"k", "value": b"v", "headers": [("h", b"1")], "timestamp": 5}
    other: dict[str, Any] = {"key": None, "value": b"", "headers": [("h", None)], "timestamp": 6}
    for topic, sent in ((app.source, record), (app.target, record | {field: other[field]})):
        with Writer(app.stack, topic) as writer:
            writer.send(partition=0, **sent)
    topics = Topics(app.settings)
    source, target = topics.find(app.source), topics.find(app.target)
    assert source is not None
    assert target is not None

    compared = compare(app.settings, Copied(source, target, {0: 1}, 1, 1.0), ignore)

    assert compared.source.digest != compared.target.digest


def test_a_copy_that_is_impossible_is_refused_with_a_remedy(app: Application) -> None:
    app.create(app.source, 2)
    app.load(10)

    def refused(source: str, target: str, *named: str, partitions: str = "2") -> None:
        done = run(app.environment, "topics", "copy", source, target, "--partitions", partitions)
        assert_refused(done, _CONFIGURATION, *named)

    refused("missing", app.target, "topic 'missing' does not exist", "correct its name")
    refused(app.source, app.source, "cannot be copied to itself", "name a topic that does not exist yet")
    refused(app.source, "no/topic", "'no/topic' cannot be the name of a topic")
    assert app.ends(app.target) == 0
    app.copy()
    refused(app.source, app.target, "has 2 partitions, not 3", "leave --partitions out", partitions="3")
    with Writer(app.stack, app.target) as writer:
        writer.send("other", b"")
    refused(app.source, app.target, "holds 1 records that this copy did not write", "does not exist yet, or delete")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"cleanup.policy": "compact"}, "is compacted"),
        ({"retention.ms": "1000"}, "finite retention.ms"),
        ({"message.timestamp.type": "LogAppendTime"}, "message.timestamp.type=CreateTime"),
        ({"max.message.bytes": "1000"}, "max.message.bytes=1048588 or more"),
    ],
)
def test_a_target_that_would_lose_records_is_refused(app: Application, config: dict[str, str], sentence: str) -> None:
    app.create(app.source)
    app.create(app.target, 2, config)

    with pytest.raises(ConfigurationError, match=sentence):
        app.copy()


def test_a_record_that_the_target_rejects_stops_the_copy_until_the_cause_is_removed(app: Application) -> None:
    limit = "message.timestamp.after.max.ms"
    app.create(app.source, 1, {limit: str(1 << 43)})
    app.create(app.target, 1, {limit: "1000"})
    with Writer(app.stack, app.source) as writer:
        writer.send("c", b"", timestamp=_FAR_AHEAD)

    with pytest.raises(RetriableError, match=r"Invalid timestamp.* remove the cause and run this again"):
        app.copy()

    lifted = ConfigEntry(limit, str(1 << 43), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, app.target, incremental_configs=[lifted])
    app.admin.incremental_alter_configs([resource])[resource].result(10)
    compare(app.settings, app.copy(), ignore).check(app.source, app.target)


def test_funds_are_summed_by_writer_schemas_and_undecodable_records_are_counted(app: Application) -> None:
    app.create(app.source, 1)
    shipped = load_schema("FundsAdded")
    fields = {field["name"]: field for field in shipped["fields"]}
    wide = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 6}
    other = {"type": "record", "name": "Other", "namespace": "n", "fields": []}
    recursive = {**shipped, "fields": [*shipped["fields"], {"name": "cause", "type": ["null", "FundsAdded"]}]}
    inexact = {**shipped, "fields": [{"name": "amount", "type": "double"}]}
    with Writer(app.stack, app.source) as writer:
        with_wide = {**shipped, "fields": [*shipped["fields"][:3], {**fields["amount"], "type": wide}]}
        writer.send("c", writer.frame("c", "1.25"))
        writer.send("c", writer.frame("c", "12345678901234567890123456789012.000001", with_wide))
        ids = [writer.register(f"{app.source}-{n}", s) for n, s in enumerate((other, recursive, inexact))]
        for schema_id, body in zip(ids, (b"", b"\x00\x00\x00\x00\x02" * 100_000, b"\x00" * 8), strict=True):
            writer.send("c", b"\x00" + schema_id.to_bytes(4, "big") + body)
        for value in (None, b"\x00", b"\x01" * 9, b"\x00\x7f\xff\xff\xff", writer.frame("c", "1")[:-1]):
            writer.send("c", value)

    compared = compare(app.settings, app.copy(), ignore)

    compared.check(app.source, app.target)
    found = compared.source
    assert (found.records, found.events, found.others, found.undecodable) == (10, 2, 1, 7)
    assert found.amount == Decimal("12345678901234567890123456789013.250001")


def test_a_deleted_target_is_copied_again_and_a_recreated_source_is_refused(app: Application) -> None:
    app.create(app.source, 1)
    app.load(50)
    assert app.copy().records == 50
    Topics(app.settings).delete(app.target)
    assert app.copy().records == 50
    compare(app.settings, app.copy(), ignore).check(app.source, app.target)

    Topics(app.settings).delete(app.source)
    app.create(app.source, 1)
    with pytest.raises(ConfigurationError, match=f"or delete '{app.target}' first"):
        app.copy()


def test_events_deleted_before_they_were_copied_are_reported(app: Application) -> None:
    app.create(app.source, 1)
    app.load(50)
    app.copy()
    app.load(50)
    app.admin.delete_records([TopicPartition(app.source, 0, 70)])[TopicPartition(app.source, 0, 70)].result(10)

    with pytest.raises(ConfigurationError, match=f"events 50 to 69 of {app.source}-0 are deleted"):
        app.copy()
