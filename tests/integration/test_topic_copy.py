"""Copies of a topic: complete, exactly once, in order per key; refusals, and differences that the comparison finds."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.devtools.produce import produce_load
from balance_service.devtools.topic_comparison import compare
from balance_service.devtools.topic_copy import Copied, Copier, by_timestamp, copy_topic
from balance_service.errors import ConfigurationError, FatalError, RetriableError, TaskMigratedError
from balance_service.kafka.clients import producer_config, reader_config
from balance_service.kafka.log_reader import LogReader, reader_to_end
from balance_service.kafka.partitioner import partition_of
from balance_service.kafka.topic_specs import prepare_copy
from balance_service.kafka.topics import Topics
from tests.integration.engines import balance, catch_up, counted, running_engine, settings_for
from tests.support.commands import assert_refused, run, started
from tests.support.kafka import Writer, read_topic
from tests.support.recount import recount
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

CUSTOMERS = [f"c{n}" for n in range(30)]


class Application:
    """A source topic, the settings to copy it, and a name for the copy."""

    def __init__(self, stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
        self.stack = stack
        self.settings = settings_for(stack, names, tmp_path / "state")
        self.source = self.settings.topic
        self.target = f"{self.source}-copied"
        self.admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
        self.environment = {
            "BALANCE_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
            "BALANCE_SCHEMA_REGISTRY_URL": stack.schema_registry_url,
        }

    def create(self, name: str, partitions: int = 2, config: dict[str, str] | None = None) -> None:
        # The broker would delete the older events of these tests.
        topic = NewTopic(name, partitions, 1, config={"retention.ms": "-1", **(config or {})})
        self.admin.create_topics([topic])[name].result(10)
        eventually(lambda: name in self.admin.list_topics(timeout=10).topics, "the topic exists")

    def repartition(self, partitions: int) -> None:
        self.admin.create_partitions([NewPartitions(self.source, partitions)])[self.source].result(10)
        topics = Topics(self.settings)

        def is_done() -> bool:
            topic = topics.find(self.source)
            return topic is not None and topic.partitions == partitions

        eventually(is_done, "the partitions exist")

    def copy(self, partitions: int | None = None) -> Copied:
        return copy_topic(self.settings, self.source, self.target, partitions, ignore)

    def load(self, events: int) -> Decimal:
        registry = SchemaRegistry.from_settings(self.settings)
        try:
            config = producer_config(self.settings)
            return produce_load(config, registry, self.source, events, 200, None, lambda _: None)
        finally:
            registry.close()

    def ends(self, name: str) -> int:
        """Returns the number of offsets of a topic; 0 while it is being created."""
        topics = Topics(self.settings)
        found = topics.find(name)
        try:
            return sum(topics.offsets(name, range(found.partitions)).values()) if found else 0
        except RetriableError:
            return 0

    def read(self, name: str) -> list[Any]:
        return read_topic(self.stack, name)


def ignore(_at: int, _of: int) -> None:
    pass


def content(message: Any) -> tuple[Any, ...]:
    return message.key(), message.value(), message.headers(), message.timestamp()


def contents(messages: list[Any]) -> list[tuple[Any, ...]]:
    return sorted((content(m) for m in messages), key=repr)


class History:
    """Events of many customers, a millisecond apart. `sent` leaves out aborted ones."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._now = 1_700_000_000_000
        self.sent: dict[bytes, list[int]] = defaultdict(list)

    @contextmanager
    def transaction(self, *, commit: bool = True) -> Iterator[tuple[Writer, Any]]:
        """Opens a transaction; commits or aborts it at the end."""
        config = {"transactional.id": f"writer-{self._app.source}"}
        with Writer(self._app.stack, self._app.source, **config) as writer:
            writer.producer.init_transactions(10)
            writer.producer.begin_transaction()

            def send(key: str | bytes | None, value: bytes | None, **where: Any) -> None:
                self._now += 1
                if commit and key is not None:
                    self.sent[key.encode() if isinstance(key, str) else key].append(self._now)
                writer.send(key, value, timestamp=self._now, **where)

            yield writer, send
            writer.producer.flush(10)
            if commit:
                writer.producer.commit_transaction(10)
            else:
                writer.producer.abort_transaction(10)

    def add(self, rounds: int, *, commit: bool = True) -> None:
        """Sends one event of every customer in each round."""
        with self.transaction(commit=commit) as (writer, send):
            frames = {customer: writer.frame(customer, "1.25") for customer in CUSTOMERS}
            for _ in range(rounds):
                for customer, frame in frames.items():
                    send(customer, frame, headers=[("idempotency-key", f"{customer}-{self._now}".encode())])


_MORE = 120_000
# A timestamp in the year 2109.
_FAR_AHEAD = 1 << 42
_CONFIGURATION, _FAILED = 2, 1


@pytest.fixture
def app(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Application:
    return Application(stack, names, tmp_path)


def test_a_copy_of_a_repartitioned_topic_keeps_the_order_of_each_key_and_yields_every_balance(
    app: Application, stack: LocalStack, tmp_path: Path
) -> None:
    app.create(app.source, 2)
    history = History(app)
    history.add(20)
    history.add(3, commit=False)
    with history.transaction() as (writer, send):
        for partition in (0, 1):
            for n in range(3):
                send(None, b"no key %d" % n, partition=partition, headers=[("h", None), ("h", b""), ("é", b"\xff")])
        send("poison", b"\x00\x01")
        send("poison", b"")
        send("poison", None)
        send(b"", writer.frame("", "1"))
        send(b"\xffposition", b"x" * 100_000)
    app.repartition(3)
    history.add(20)
    history.add(3, commit=False)
    assert any(partition_of(c.encode(), 2) != partition_of(c.encode(), 3) for c in CUSTOMERS)

    copied = app.copy(5)
    compared = compare(app.settings, copied, ignore)
    compared.check(app.source, app.target)

    source, target = app.read(app.source), app.read(app.target)
    assert copied.records == len(source) == 40 * len(CUSTOMERS) + 11
    assert contents(target) == contents(source)
    assert compared.source == compared.target
    assert (compared.target.records, compared.target.events) == (len(source), 40 * len(CUSTOMERS) + 1)
    assert compared.target.amount == Decimal("1.25") * 40 * len(CUSTOMERS) + 1
    # Records without a key, and poison records, have no frame.
    assert (compared.target.others, compared.target.undecodable) == (0, 10)
    order: dict[bytes, list[int]] = defaultdict(list)
    for message in target:
        if message.key() is None:
            assert message.partition() in (0, 1)
            continue
        order[message.key()].append(message.timestamp()[1])
        assert message.partition() == partition_of(message.key(), 5)
    assert order == history.sent, "the events of each key are in their original order"
    for partition in (0, 1):
        values = [m.value() for m in target if m.key() is None and m.partition() == partition]
        assert values == [b"no key 0", b"no key 1", b"no key 2"]

    fresh = {"topic": app.target, "application_id": f"{app.settings.application_id}-fresh"}
    balances = recount(stack.bootstrap_servers, stack.schema_registry_url, app.target)
    with running_engine(settings_for(stack, fresh, tmp_path / "fresh")) as engine:
        catch_up(engine)
        assert {c: balance(engine, c) for c in CUSTOMERS} == {c: balances[c] for c in CUSTOMERS}
        assert {balances[c] for c in CUSTOMERS} == {Decimal("50.00")}
        eventually(lambda: counted(engine, "applied") == 40 * len(CUSTOMERS), "the events are counted")
        eventually(lambda: counted(engine, "dead_lettered") == 11, "the events are counted")


def test_a_copy_keeps_everything_forever_and_accepts_records_as_large_as_the_source_does(app: Application) -> None:
    app.create(app.source, 2, {"max.message.bytes": "3000000", "message.timestamp.after.max.ms": str(1 << 43)})
    with Writer(app.stack, app.source, **{"message.max.bytes": 3_000_000}) as writer:
        writer.send("large", os.urandom(2_900_000))
        writer.send("long ago", b"", timestamp=1)
        writer.send("of no time", b"", timestamp=-1)
        writer.send("far ahead", b"", timestamp=_FAR_AHEAD)

    compare(app.settings, app.copy(), ignore).check(app.source, app.target)

    assert contents(app.read(app.target)) == contents(app.read(app.source))
    resource = ConfigResource(ResourceType.TOPIC, app.target)
    config = app.admin.describe_configs([resource])[resource].result(10)
    wanted = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", "max.message.bytes": "3000000"}
    assert {name: config[name].value for name in wanted} == wanted


def test_a_copy_killed_repeatedly_is_exact_after_another_run(app: Application) -> None:
    app.create(app.source, 2)
    total = app.load(_MORE)
    kills = 0
    for share in (0.1, 0.4, 0.7):
        with started(app.environment, "topics", "copy", app.source, app.target, "--partitions", "3") as copying:
            eventually(lambda least=_MORE * share: app.ends(app.target) > least, "the copy is in its middle")  # type: ignore[misc]
            copying.process.send_signal(signal.SIGKILL)
            copying.wait(10)
        kills += len(app.read(app.target)) < _MORE
    assert kills > 0, "no kill interrupted the copy"

    done = run(app.environment, "topics", "copy", app.source, app.target)

    assert done.code == 0, done
    assert f"{_MORE} records, {_MORE} FundsAdded events with a total of {total}" in done.stdout
    assert f"'{app.target}' can replace '{app.source}'" in done.stdout
    source, target = app.read(app.source), app.read(app.target)
    assert contents(target) == contents(source)
    assert {m.partition() == partition_of(m.key(), 3) for m in target} == {True}


def test_a_second_run_copies_only_new_records(app: Application) -> None:
    app.create(app.source, 2)
    app.load(1_000)
    assert app.copy().records == 1_000
    app.load(300)
    app.repartition(4)
    app.load(300)

    done = run(app.environment, "topics", "copy", app.source, app.target)

    assert done.code == 0, done
    assert "copied 600 records to 2 partitions" in done.stdout
    assert contents(app.read(app.target)) == contents(app.read(app.source))
    assert app.copy().records == 0


def test_a_history_is_moved_to_another_partitioner(app: Application) -> None:
    app.create(app.source, 3)
    app.load(500)
    environment = {**app.environment, "BALANCE_TOPIC": app.source, "BALANCE_PARTITIONER": "crc32"}

    done = run(environment, "topics", "copy", app.source, app.target, "--partitioner", "fnv1a")

    assert done.code == 0, done
    assert "copied 500 records to 3 partitions by fnv1a" in done.stdout
    assert {m.partition() == partition_of(m.key(), 3, "fnv1a") for m in app.read(app.target)} == {True}
    assert contents(app.read(app.target)) == contents(app.read(app.source))
    # Without the option, the copy has the partitioner that is declared for the source.
    app.load(10)
    again = run(environment, "topics", "copy", app.source, app.target)
    assert_refused(again, 2, f"topic '{app.source}' was copied to '{app.target}' by fnv1a so far; continue with")
    done = run(environment, "topics", "copy", app.source, f"{app.target}-2")
    assert "copied 510 records to 3 partitions by crc32" in done.stdout
    assert {m.partition() == partition_of(m.key(), 3, "crc32") for m in app.read(f"{app.target}-2")} == {True}


@contextmanager
def _copier(app: Application) -> Iterator[tuple[Copier, list[Any]]]:
    """Opens the copier of a run; yields it with the records of the source."""
    topics = Topics(app.settings)
    source = topics.find(app.source)
    assert source is not None
    with reader_to_end(app.settings, topics, source) as reader:
        records = list(reader)
    target = prepare_copy(topics, app.settings, source, app.target, None)
    with Copier(app.settings, source, target, "murmur2") as copier:
        yield copier, records


def test_a_run_aborts_the_transaction_that_another_left_open(app: Application) -> None:
    app.create(app.source, 1)
    app.load(1_000)
    with _copier(app) as (hanging, records):
        hanging.write(records[:100], hanging.progress())
        hanging._producer.begin_transaction()
        for message in records[100:200]:
            hanging._produce(message, 0)
        hanging._producer.flush(10)
        noted = TopicPartition(app.source, 0, records[199].offset() + 1, f"{hanging._of_copy}200")
        hanging._producer.send_offsets_to_transaction([noted], hanging._group.consumer_group_metadata(), 10)

        assert app.copy().records == 900

        with pytest.raises(KafkaException, match="fenced"):
            hanging._producer.commit_transaction(10)
    assert contents(app.read(app.target)) == contents(app.read(app.source))


def test_the_later_of_two_concurrent_runs_fences_the_earlier(app: Application) -> None:
    app.create(app.source, 1)
    app.load(1_000)
    with _copier(app) as (earlier, records):
        done = earlier.progress()
        earlier.write(records[:100], done)
        assert app.copy().records == 900
        with pytest.raises(TaskMigratedError, match=r"another run .* took over"):
            earlier.write(records[100:200], done)
    assert contents(app.read(app.target)) == contents(app.read(app.source))


def test_partitions_with_very_different_timestamps_are_merged_in_bounded_memory(
    app: Application,
) -> None:
    app.create(app.source, 3)
    with Writer(app.stack, app.source) as writer:
        # The last partition is newer than all others; the middle one goes back in time once.
        for n in range(5_000):
            writer.send("a", b"", partition=0, timestamp=1_000 + 2 * n)
            writer.send("b", b"", partition=1, timestamp=1_001 + 2 * n if n != 700 else 1)
            writer.send("c", b"", partition=2, timestamp=1_000_000 + n)
    topics = Topics(app.settings)
    starts, ends = dict.fromkeys(range(3), 0), topics.offsets(app.source, range(3))
    with LogReader(reader_config(app.settings), app.source, starts, ends) as reader:
        read = [(m.partition(), m.offset()) for m in by_timestamp(reader, 50, 20)]

    expected = [(p, n) for n in range(5_000) for p in (0, 1)]
    went_back = expected.index((1, 700))
    # The record follows its predecessor at once, because the order within a partition takes precedence.
    expected[went_back - 1 : went_back + 1] = [(1, 700), (0, 700)]
    assert read == expected + [(2, n) for n in range(5_000)]


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
