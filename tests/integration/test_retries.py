"""Other producers' dead letters on a broker: each is sent when due, unchanged and exactly once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from balance_service.kafka import topic_specs
from balance_service.kafka.topics import Topics
from balance_service.spark.combine import PartitionRows
from balance_service.spark.decode import Decoder
from tests.integration.engines import running_engine, settings_for
from tests.support.kafka import Writer, read_topic
from tests.support.shipped import stages_in
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from confluent_kafka import Message

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings

pytestmark = pytest.mark.timeout(600)
_CATCH_UP_SECONDS = 150.0
_LONG_AGO_MS = 1_600_000_000_000
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Orders(Writer):
    """A producer of orders with a dead-letter topic of finite retention."""

    def __init__(self, stack: LocalStack, settings: Settings, partitions: int = 1) -> None:
        (topic,) = settings.retry_topics
        self._stack = stack
        self._retries = settings.retries_topic
        config = {"cleanup.policy": "delete", "retention.bytes": str(1 << 30)}
        Topics(settings).create(topic, partitions, config)
        super().__init__(stack, topic)

    def fail(self, key: bytes | None, value: bytes | None, *headers: tuple[str, bytes | None], **where: Any) -> None:
        """Appends a record to the dead-letter topic."""
        refused: list[Any] = []
        self.send(key, value, headers=[*headers], on_delivery=lambda error, _: refused.append(error), **where)
        assert self.producer.flush(10) == 0
        assert refused == [None]

    def received(self) -> list[Message]:
        """Returns what a consumer of the retry topic has received."""
        return read_topic(self._stack, self._retries)

    def wait_until_received(self, engine: Engine, count: int) -> list[Message]:
        """Waits until the consumer has received `count` records."""
        eventually(
            lambda: len(self.received()) >= count,
            lambda: f"{count} received: {len(self.received())}; {letters(engine)[-9:]}; {engine.problems}",
            _CATCH_UP_SECONDS,
        )
        return self.received()

    def drop_below(self, end: int) -> None:
        """Deletes records below an offset, as the topic's retention does."""
        admin = AdminClient({"bootstrap.servers": self._stack.bootstrap_servers})
        admin.delete_records([TopicPartition(self.topic, 0, end)])[TopicPartition(self.topic, 0)].result(10)


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    return settings_for(
        stack,
        names,
        tmp_path / "state",
        partitions=1,
        retry_every_seconds=1,
        retry_topics=(f"orders-{names['application_id']}-dead-letters",),
    )


def values(messages: Sequence[Message]) -> list[bytes | None]:
    return sorted((message.value() for message in messages), key=lambda value: value or b"")


def letters(engine: Engine) -> list[tuple[int, str, str]]:
    """Returns offset, cause and status of each dead letter of the stage."""
    (tasks,) = (tasks for tasks in engine.stages.values() if tasks.hosted.stage.retries)
    views = [task.view for task in tasks.all()]
    found = [letter for view in views if view for letter in tasks.hosted.processor.letters.page(view, 0, 1_000)]
    return [(letter.offset, letter.cause, letter.status.value) for letter in found]


def test_a_record_with_any_bytes_is_sent_unchanged_when_due(stack: LocalStack, settings: Settings) -> None:
    large = bytes(range(256)) * 2_000
    records: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = [
        (b"k", b"no frame", [("trace", b"\xff"), ("trace", None), ("empty", b"")]),
        (None, b"no key", []),
        (b"no value", None, [("retry-attempt", b"1")]),
        (None, None, [("retry-attempt", b"two")]),
        (b"\xffposition", b"\0\0\0\0\1", [("origin", b"orders:0:1"), ("sent-by", b"orders")]),
        (b"large", large, []),
        (b"", b"", [("retry-attempt", b"2")]),
        *((b"%d" % n, b"of many %d" % n, []) for n in range(1_500)),
    ]
    with Orders(stack, settings, partitions=3) as orders, running_engine(settings) as engine:
        for number, (key, value, headers) in enumerate(records):
            orders.send(key, value, headers=headers, timestamp=_LONG_AGO_MS + number)
        orders.fail(b"parked", b"parked", ("retry-attempt", b"10"))

        received = orders.wait_until_received(engine, len(records))
        eventually(lambda: "parked" in {status for *_, status in letters(engine)}, lambda: str(letters(engine)))

        assert len(received) == len(records)
        source = {f"{m.topic()}:{m.partition()}:{m.offset()}": m for m in read_topic(stack, orders.topic)}
        for message in received:
            original = source.pop(last_of(message, "origin", b"").decode())
            assert (message.key(), message.value(), message.timestamp()) == (
                original.key(),
                original.value(),
                original.timestamp(),
            )
            own = ("retry-attempt", "key-format", "origin", "sent-by")
            kept = [(name, value) for name, value in headers_of(original) if name not in own]
            assert headers_of(message)[: len(kept)] == kept
            # The key of a record that a stage has sent is in the form of its store.
            is_ours = last_of(original, "sent-by", b"") != b""
            added = [name for name in own if not (is_ours and name == "key-format")]
            assert [name for name, _ in headers_of(message)[len(kept) :]] == added
            before = last_of(original, "retry-attempt", b"0")
            assert last_of(message, "retry-attempt", b"") == b"%d" % (int(before) + 1 if before.isdigit() else 1)
        assert [message.value() for message in source.values()] == [b"parked"]

        assert Topics(settings).find(f"{orders.topic}-dead-letters") is None
        assert [*engine.models] == ["balance"]
        sent = engine.topics.config(settings.retries_topic)
        assert topic_specs.FOREVER.items() <= sent.items()
        retries = engine.topics.find(settings.retries_topic)
        assert retries is not None
        assert retries.partitions == 3


def test_the_commit_of_a_traced_record_belongs_to_its_trace(stack: LocalStack, settings: Settings) -> None:
    traced = f"00-{'a' * 32}-{'b' * 16}-01"
    records = pa.table(
        {
            "offset": pa.array([0, 1], pa.int64()),
            "timestamp": pa.array([0, 1_000], pa.timestamp("us", "UTC")),
            "key": pa.array([None, b"k"], pa.binary()),
            "value": pa.array([b"v", None], pa.binary()),
            "headers": pa.array([None, [{"key": "traceparent", "value": traced.encode()}]], _HEADERS),
            "partition": pa.array([0, 0], pa.int32()),
        }
    )
    with Orders(stack, settings), running_engine(settings) as engine:
        stage = next(stage for stage in stages_in(settings) if stage.retries)
        decoder = Decoder(engine.spark, None, stage, engine.registry, with_traces=True)
        rows = PartitionRows(decoder.updates(engine.spark.createDataFrame(records)).toArrow())

    assert rows.traceparents() == [traced]
    assert rows.uncombined().applied == 2
    assert rows.updates.sort_by("offset").select(["offset", "key", "timestamp", "value"]).to_pylist() == [
        {"offset": 0, "key": None, "timestamp": 0, "value": b"v"},
        {"offset": 1, "key": b"k", "timestamp": 1, "value": None},
    ]


def test_the_delay_of_a_record_depends_on_its_attempts(stack: LocalStack, settings: Settings) -> None:
    with Orders(stack, settings) as orders, running_engine(settings) as engine:
        orders.fail(b"k", b"first")
        orders.wait_until_received(engine, 1)
        now_ms = int(time.time() * 1000)
        orders.fail(b"k", b"in 8 s", ("retry-attempt", b"3"), timestamp=now_ms)
        orders.fail(b"k", b"in 1 s", timestamp=now_ms)

        assert values(orders.wait_until_received(engine, 2)) == [b"first", b"in 1 s"]
        assert time.time() * 1000 >= now_ms + 1_000
        assert values(orders.wait_until_received(engine, 3)) == [b"first", b"in 1 s", b"in 8 s"]
        assert time.time() * 1000 >= now_ms + 8_000


def test_a_record_deleted_before_it_is_due_is_reported_and_stops_nothing(stack: LocalStack, settings: Settings) -> None:
    with Orders(stack, settings) as orders:
        with running_engine(settings) as engine:
            orders.fail(b"k", b"gone", ("retry-attempt", b"3"))
            orders.fail(b"k", b"there", ("retry-attempt", b"3"))
            eventually(lambda: len(letters(engine)) == 2, lambda: str(letters(engine)), _CATCH_UP_SECONDS)
            orders.drop_below(1)

            assert values(orders.wait_until_received(engine, 1)) == [b"there"]
            assert letters(engine) == [(0, "record-gone", "waiting"), (1, "retry", "applied")]
        # Records deleted before they were read.
        for value in (b"never read", b"never read either", b"last"):
            orders.fail(b"k", value)
        orders.drop_below(4)
        with running_engine(settings) as engine:
            assert values(orders.wait_until_received(engine, 2)) == [b"last", b"there"]
            assert [task.reason for task in engine.stages[f"retries-{orders.topic}"].snapshots()] == [""]


def test_a_stage_that_lost_its_changelog_sends_only_what_it_has_not_sent(stack: LocalStack, settings: Settings) -> None:
    with Orders(stack, settings) as orders:
        with running_engine(settings) as engine:
            orders.fail(b"k", b"later", ("retry-attempt", b"4"))
            orders.fail(b"k", b"parked", ("retry-attempt", b"10"))
            orders.fail(b"k", b"soon")
            assert values(orders.wait_until_received(engine, 1)) == [b"soon"]
            stage = engine.stages[f"retries-{orders.topic}"].hosted.stage
        Topics(settings).delete(stage.changelog)
        with running_engine(settings) as engine:
            orders.fail(b"k", b"last", ("retry-attempt", b"4"))
            assert values(orders.wait_until_received(engine, 3)) == [b"last", b"later", b"soon"]
            assert [status for *_, status in letters(engine)] == ["applied", "parked", "applied", "applied"]


def headers_of(message: Message) -> list[tuple[str, bytes | None]]:
    headers: Any = message.headers()
    return headers or []


def last_of(message: Message, name: str, default: bytes) -> bytes:
    """Returns the value of the last header with a name."""
    return next((value or b"" for of, value in reversed(headers_of(message)) if of == name), default)
