"""Copies of a repartitioned topic: complete, exactly once, in order per key."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import ConfigResource, ResourceType

from balance_service.devtools.topic_comparison import compare
from balance_service.devtools.topic_copy import Copier, by_timestamp
from balance_service.errors import TaskMigratedError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader, reader_to_end
from balance_service.kafka.partitioner import partition_of
from balance_service.kafka.topic_specs import prepare_copy
from balance_service.kafka.topics import Topics
from tests.integration.copying import CUSTOMERS, Application, History, contents, ignore
from tests.integration.engines import balance, catch_up, counted, running_engine, settings_for
from tests.support.commands import run, started
from tests.support.kafka import Writer
from tests.support.recount import recount
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

_MORE = 120_000
# A timestamp in the year 2109.
_FAR_AHEAD = 1 << 42


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

    anew = {"topic": app.target, "application_id": f"{app.settings.application_id}-anew"}
    balances = recount(stack.bootstrap_servers, stack.schema_registry_url, app.target)
    with running_engine(settings_for(stack, anew, tmp_path / "anew")) as engine:
        catch_up(engine)
        assert {c: balance(engine, c) for c in CUSTOMERS} == {c: balances[c] for c in CUSTOMERS}
        assert {balances[c] for c in CUSTOMERS} == {Decimal("50.00")}
        assert counted(engine, "applied") == 40 * len(CUSTOMERS)
        assert counted(engine, "dead_lettered") == 11


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


@contextmanager
def _copier(app: Application) -> Iterator[tuple[Copier, list[Any]]]:
    """Opens the copier of a run; yields it with the records of the source."""
    topics = Topics(app.settings)
    source = topics.find(app.source)
    assert source is not None
    with reader_to_end(app.settings, topics, source) as reader:
        records = list(reader)
    target = prepare_copy(topics, app.settings, source, app.target, None)
    with Copier(app.settings, source, target) as copier:
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
        noted = TopicPartition(app.source, 0, records[199].offset() + 1, f"{hanging._topic_ids}200")
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
