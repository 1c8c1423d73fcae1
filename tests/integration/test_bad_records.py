"""Invalid records become dead letters, and a failing fold halts only its own task."""

from __future__ import annotations

import struct
import uuid
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from structlog.testing import capture_logs

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.engine.task import TaskState
from balance_service.errors import ConfigurationError
from balance_service.hosting.engine import Engine
from balance_service.kafka.partitioner import partition_of
from balance_service.kafka.topics import Topics
from balance_service.model.placing import stages_of
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.observability.metrics import Metrics
from balance_service.spark import gathering
from tests.integration.engines import (
    balance,
    balance_stage,
    catch_up,
    counted,
    prepare,
    queries,
    running_engine,
    settings_for,
    startup_retries,
    state_directory,
    tasks_of,
)
from tests.support.kafka import Writer, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.task import Task
    from balance_service.model.events import Event, State


def _wide(scale: int) -> dict[str, Any]:
    schema = load_schema("FundsAdded")
    amount = {
        "name": "amount",
        "type": {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": scale},
    }
    return {**schema, "fields": [*schema["fields"][:3], amount]}


def _frame_of(writer: Writer, customer_id: bytes) -> bytes:
    """Returns a frame with a customer id that is not valid text."""
    stand_in = "x" * len(customer_id)
    return writer.frame(stand_in, "1.00").replace(stand_in.encode(), customer_id)


@pytest.mark.shows("dead-letter")
def test_every_kind_of_bad_record_becomes_one_dead_letter_and_stops_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    long_id = "x" * 257
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        good = writer.frame("good", "1.00")
        elsewhere = 1 - partition_of(b"misplaced", 2)
        not_utf8 = writer.frame("aa", "1.00").replace(b"\x04aa", b"\x04\xff\xfe")
        # A reader of the last 64 bits alone decodes this as 1.00.
        too_long = writer.frame("w", "1.00").removesuffix(b"\x02\x64") + b"\x12\x01" + (100).to_bytes(8, "big")
        # Avro would allocate a string of a gigabyte before it checks the length.
        too_large = good[:5] + b"\x80\x80\x80\x80\x08" + good[5:]
        in_header = {"headers": [("__value_schema_id", b"\x01" + bytes(16))]}
        bad: dict[str, tuple[bytes | None, bytes | None, dict[str, Any]]] = {
            "key-null": (None, good, {"partition": 0}),
            "value-null": (b"v", None, {}),
            "frame-missing": (b"f", b"\x00\x00", {}),
            "magic-byte-unknown": (b"m", b"\x01" + good[1:], {}),
            # A value without a frame may look like a frame.
            "schema-guid-unknown": (b"good", good, in_header),
            "schema-id-unknown": (b"s", struct.pack(">bI", 0, 999_999) + good[5:], {}),
            "body-undecodable": (b"b", good[:7], {}),
            "key-is-not-customer-id": (b"other", good, {}),
            "customer-id-malformed": (long_id.encode(), writer.frame(long_id, "1"), {}),
            "key-reserved": (b"\xffposition", _frame_of(writer, b"\xffposition"), {}),
            "decimal-loses-digits": (b"d", writer.frame("d", "0.123", _wide(3)), {}),
            "key-not-of-this-partition": (
                b"misplaced",
                writer.frame("misplaced", "1"),
                {"partition": elsewhere},
            ),
        }
        writer.add("good", "0.10")
        for key, value, where in bad.values():
            writer.send(key, value, **where)
        writer.send(b"", writer.frame("", "1"))
        writer.send(b"a\x07", writer.frame("a\x07", "1"))
        writer.send(b"\xff\xfe", not_utf8)
        writer.send(b"w", too_long)
        writer.send(b"good", too_large)
        writer.add("good", "0.20")
        catch_up(engine)

        assert balance(engine, "good") == Decimal("0.30")
        assert balance(engine, "misplaced") is None
        eventually(lambda: counted(engine, "applied") == 2, "the events are counted")
        eventually(lambda: counted(engine, "dead_lettered") == len(bad) + 5, "the events are counted")
        letters = read_topic(stack, balance_stage(settings).dead_letters)
        source = {(m.partition(), m.offset()): m for m in read_topic(stack, settings.topic)}
    by_cause: dict[str, Any] = {}
    for letter in letters:
        headers = {name: value.decode() for name, value in letter.headers()}
        by_cause[headers["dead-letter-cause"]] = letter
        origin = source[int(headers["dead-letter-partition"]), int(headers["dead-letter-offset"])]
        assert (letter.key(), letter.value()) == (origin.key(), origin.value())
        assert headers["dead-letter-topic"] == settings.topic
        assert int(headers["dead-letter-timestamp"]) == origin.timestamp()[1]
    assert by_cause.keys() == bad.keys()
    assert len(letters) == len(bad) + 5


def test_an_event_whose_schema_a_header_names_counts_once_the_registry_knows_it(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", retry_every_seconds=1)
    known: dict[str, int] = {}
    # The registry of the local stack has no GUIDs.
    monkeypatch.setattr(SchemaRegistry, "id_of", lambda _registry, guid: known.get(guid))
    guid = uuid.uuid4()
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        frames = [writer.frame("h", amount) for amount in ("1.00", "0.20", "0.03")]
        writer.send("h", frames[0][5:], headers=[("a", b"1"), ("__value_schema_id", frames[0][:5])])
        writer.send("h", frames[1][5:], headers=[("__value_schema_id", b"\x01" + guid.bytes)])
        writer.send("h", frames[2])
        writer.producer.flush(10)
        catch_up(engine)
        assert balance(engine, "h") == Decimal("1.03")

        known[str(guid)] = int.from_bytes(frames[1][1:5])
        eventually(lambda: balance(engine, "h") == Decimal("1.23"), "the dead letter is applied", 60)

    (letter,) = read_topic(stack, balance_stage(settings).dead_letters)
    assert dict(letter.headers())["dead-letter-cause"] == b"schema-guid-unknown"


def test_bad_records_in_a_backlog_are_found_although_spark_commits_them_with_good_ones(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", max_records_per_batch=20)
    prepare(Topics(settings), settings)
    with Writer(stack, settings.topic) as writer:
        for n in range(600):
            writer.add(f"c{n % 7}", "0.01")
            if n in (150, 151, 400):
                writer.send(b"a\x07", writer.frame("a\x07", "1"))
    with running_engine(settings) as engine:
        catch_up(engine)

        counts = [len(range(c, 600, 7)) for c in range(7)]
        assert [balance(engine, f"c{c}") for c in range(7)] == [Decimal(count) / 100 for count in counts]
        eventually(lambda: counted(engine, "applied") == 600, "the events are counted")
        letters = read_topic(stack, balance_stage(settings).dead_letters)
    assert [dict(letter.headers())["dead-letter-cause"] for letter in letters] == [b"customer-id-malformed"] * 3


def test_an_event_that_overflows_a_balance_is_the_only_one_lost(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    almost_all = str(10**36 - 1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        for amount in (almost_all, "5.00", "0.99", "-1.00"):
            writer.send("rich", writer.frame("rich", amount, _wide(2)))
        writer.add("poor", "0.01")
        catch_up(engine)
        assert balance(engine, "rich") == Decimal("9" * 35 + "8.99")
        assert balance(engine, "poor") == Decimal("0.01")
        (letter,) = read_topic(stack, balance_stage(settings).dead_letters)
        assert dict(letter.headers())["dead-letter-cause"] == b"balance-overflow"


def test_an_event_that_overflows_a_gathered_backlog_is_the_only_one_lost(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Combined parts do not keep their events.
    monkeypatch.setattr(gathering, "_PART_ROWS", 1_000)
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with Writer(stack, settings.topic) as writer:
        with running_engine(settings) as engine:
            writer.send("rich", writer.frame("rich", str(10**36 - 1), _wide(2)))
            writer.producer.flush(10)
            catch_up(engine)
        poor, more = writer.frame("poor", "0.01"), writer.frame("rich", "0.99")
        for n in range(20_000):
            writer.send("poor", poor)
            if n == 5_000:
                writer.send("rich", writer.frame("rich", "5.00"))
        writer.send("rich", more)
        assert writer.producer.flush(30) == 0
        with running_engine(settings) as engine:
            catch_up(engine)
            assert balance(engine, "rich") == Decimal("9" * 36 + ".99")
            assert balance(engine, "poor") == Decimal("200.00")
            assert queries(engine, 0, "single events") > 0
            eventually(lambda: counted(engine, "applied") == 20_001, "the events are counted")
    (letter,) = read_topic(stack, balance_stage(settings).dead_letters)
    assert dict(letter.headers())["dead-letter-cause"] == b"balance-overflow"


def test_writer_schemas_of_several_versions_and_types_fold_in_one_batch(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    schema = load_schema("FundsAdded")
    added = {
        **schema,
        "fields": [*schema["fields"], {"name": "note", "type": ["null", "string"], "default": None}],
    }
    other = {"type": "record", "name": "FundsSeen", "namespace": "parts.code.balance.events", "fields": []}
    with Writer(stack, settings.topic) as writer:
        other_id = writer.register(f"{settings.topic}-parts.code.balance.events.FundsSeen", other)
        elsewhere_id = writer.register(f"{settings.topic}-elsewhere.FundsAdded", schema | {"namespace": "elsewhere"})
        with running_engine(settings) as engine, capture_logs() as logs:
            writer.send("c", writer.frame("c", "1.00"))
            writer.send("c", writer.frame("c", "0.10", added, note="hello"))
            writer.send("c", writer.frame("c", "99999999999999999999.01", _wide(2)))
            writer.send("c", writer.frame("c", "0.0200", _wide(4)))
            for schema_id in (other_id, other_id, elsewhere_id):
                writer.send("c", struct.pack(">bI", 0, schema_id))
            writer.producer.flush(10)
            catch_up(engine)
            assert balance(engine, "c") == Decimal("100000000000000000000.13")
            eventually(lambda: counted(engine, "applied") == 4, "the events are counted")
            eventually(lambda: counted(engine, "ignored") == 3, "the events are counted")
            metrics = engine.metrics.text().decode()
            for record, count in (("parts.code.balance.events.FundsSeen", 2), ("elsewhere.FundsAdded", 1)):
                series = f'balance_records_ignored_total{{read_model="balance",record="{record}"}} {count}.0'
                assert series in metrics
            assert counted(engine, "dead_lettered") == 0
    told = [(line["record"], line["log_level"]) for line in logs if line["event"].startswith("records ")]
    assert sorted(told) == [("elsewhere.FundsAdded", "warning"), ("parts.code.balance.events.FundsSeen", "info")]


def test_the_registry_lists_the_newest_schemas_of_the_records_of_a_topic(
    stack: LocalStack, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balance_service.avro.registry._MOST_VERSIONS", 2)
    topic = names["topic"]
    with Writer(stack, topic) as writer, closing(SchemaRegistry(stack.schema_registry_url)) as registry:
        assert registry.schema_ids(topic, ["n.Other"]) == []
        ids = [writer.register(f"{topic}-n.Other", _other(fields)) for fields in ("a", "ab", "abc")]
        of_value = writer.register(f"{topic}-value", _other("abcd"))
        writer.register(f"{topic}-n.Another", _other("abcde"))

        assert registry.schema_ids(topic, ["n.Other"]) == sorted([*ids[1:], of_value])


def _other(fields: str) -> dict[str, Any]:
    nullable = [{"name": name, "type": ["null", "string"], "default": None} for name in fields]
    return {"type": "record", "name": "Other", "namespace": "n", "fields": nullable}


@pytest.mark.shows("dead-letter")
def test_an_oversized_dead_letter_is_stored_without_its_value(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    for topic, largest in ((settings.topic, 2 << 20), (balance_stage(settings).dead_letters, 1 << 20)):
        config = {"retention.ms": "-1", "max.message.bytes": str(largest)}
        admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(10)
    value, key = b"x" * (1 << 20), b"k" * (1 << 20)
    with (
        running_engine(settings) as engine,
        Writer(stack, settings.topic, **{"message.max.bytes": 4 << 20}) as writer,
    ):
        writer.send("c1", value)
        writer.send(key, b"y")
        writer.add("c1", "1.00")
        catch_up(engine)

        assert balance(engine, "c1") == Decimal("1.00")
        by_value, by_key = read_topic(stack, balance_stage(settings).dead_letters)
    assert (by_value.key(), by_value.value()) == (b"c1", None)
    assert dict(by_value.headers())["dead-letter-value-bytes"] == str(len(value)).encode()
    assert (by_key.key(), by_key.value()) == (None, None)
    assert dict(by_key.headers())["dead-letter-key-bytes"] == str(len(key)).encode()


@pytest.mark.parametrize(
    ("partitions", "config", "said"),
    [(1, {}, "has 1 partitions and the source 2"), (2, {"max.message.bytes": "1000"}, "set its max.message.bytes=")],
)
def test_an_unsuitable_dead_letter_topic_is_refused_at_start(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, partitions: int, config: dict[str, str], said: str
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    topic = balance_stage(settings).dead_letters
    admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(10)

    with pytest.raises(ConfigurationError, match=said):
        prepare(Topics(settings), settings)


IN_0, IN_1 = (next(k for n in range(99) if partition_of((k := f"c{n}").encode(), 2) == p) for p in (0, 1))


class Superstitious(ReadModel):
    """The last amount, with a bug at 13."""

    name = "test-superstitious"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = "BalanceState"

    def fold(self, state: State | None, event: Event) -> State | None:
        """Fails at 13."""
        words = {amount: str(amount) for amount in range(20) if amount != 13}
        return {"customerId": event["customerId"], "amount": Decimal(words[int(event["amount"])])}


def task_of(engine: Engine, partition: int) -> Task:
    task = tasks_of(engine).task(partition)
    assert task is not None
    return task


@pytest.mark.shows("own-code")
def test_a_failing_fold_halts_only_its_own_partition_with_the_reason(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    engine = Engine(
        settings,
        state_directory(settings),
        stages_of(Superstitious(), settings),
        [Superstitious()],
        Metrics(),
        startup_retries(),
    )
    engine.start()
    try:
        with Writer(stack, settings.topic) as writer:
            writer.add(IN_0, "12.00")
            eventually(lambda: balance(engine, IN_0) == Decimal("12.00"), "the first event is folded")
            writer.add(IN_0, "13.00", "14.00")
            eventually(lambda: task_of(engine, 0).state is TaskState.HALTED, "the task of the partition is halted")
            writer.add(IN_1, "14.00")
            eventually(lambda: balance(engine, IN_1) == Decimal("14.00"), "the other partition continues")

        assert task_of(engine, 0).snapshot().reason == (
            f"the code of the read model test-superstitious fails at offset 1 of {settings.topic}:0 with KeyError; "
            "correct it, and restart the instance"
        )
        assert task_of(engine, 0).position == 1
        assert read_topic(stack, f"{settings.topic}-dead-letters") == []
    finally:
        engine.stop()
