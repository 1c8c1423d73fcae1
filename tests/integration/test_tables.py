"""A partition of a table on a broker: followed, restored, and never stopped by invalid rows."""

from __future__ import annotations

import itertools
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from balance_service.avro.codec import AvroReader
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.engine.misplaced import MisplacedKeys
from balance_service.engine.table_partition import TableContext, TablePartition
from balance_service.errors import RetriableError, StoreCorruptedError
from balance_service.kafka.partitioner import Partitioning
from balance_service.kafka.topics import Topics
from tests.integration.engines import settings_for
from tests.support.kafka import Rows, clean_eagerly, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

COMPACTED = {"cleanup.policy": "compact"}
A_DAY_MS = 24 * 60 * 60 * 1000
SECONDS = 30.0
# Lies outside the broker's clock, so that only the test sets timestamps.
NOON = 1_700_000_000_000


class KeysButOne(Partitioning):
    """Puts all keys on partition 0, except `elsewhere` by murmur2."""

    def of(self, key: bytes) -> int:
        return int(key == b"elsewhere" and self.partitioner == "murmur2")


class Players:
    """A topic of players with one partition, followed into a folder."""

    def __init__(self, stack: LocalStack, names: dict[str, str], path: Path) -> None:
        self.stack = stack
        self.settings = settings_for(stack, names, path)
        self.topics = Topics(self.settings)
        self.registry = SchemaRegistry.from_settings(self.settings)
        self.partitioning = KeysButOne(1, "murmur2")
        self.name = f"players-{uuid.uuid4().hex[:8]}"
        self.topic = self.topics.create(self.name, 1, COMPACTED)
        self.path = path / "players_0"
        self.rows = Rows(stack, self.name, "Player")
        self.codec = AvroReader(self.registry, load_schema("Player"))

    @contextmanager
    def followed(self) -> Iterator[TablePartition]:
        partition = TablePartition(
            TableContext(
                settings=self.settings,
                topics=self.topics,
                topic=self.topic,
                reader=self.codec,
                history_ms=A_DAY_MS,
                misplaced=MisplacedKeys(self.name, self.partitioning),
            ),
            0,
            self.path,
        )
        partition.start()
        try:
            yield partition
        finally:
            assert partition.stop(SECONDS)

    def put(self, key: str, name: str | None, timestamp_ms: int = NOON) -> None:
        fields = None if name is None else {"id": int(key), "name": name}
        self.rows.put(key, fields, timestamp=timestamp_ms)
        self.rows.flush()

    @property
    def end(self) -> int:
        return self.topics.offsets(self.name, [0], committed=True)[0]

    def read(self, partition: TablePartition) -> None:
        """Waits until the store holds all committed rows."""
        assert partition.wait_for(self.end, SECONDS, lambda: False), partition.snapshot()

    def name_of(self, partition: TablePartition, key: str, timestamp_ms: int = NOON) -> Any:
        """Returns the player's name as of a time; None if there is no such player."""
        version = partition.view.as_of(key.encode(), timestamp_ms)
        frame = None if version is None else version.frame
        return None if frame is None else self.codec.decode_foreign(frame)["name"]


@pytest.fixture
def players(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Iterator[Players]:
    made = Players(stack, names, tmp_path)
    yield made
    made.registry.close()
    made.rows.__exit__()


def test_rows_are_readable_as_of_a_time_once_waited_for(players: Players) -> None:
    with players.followed() as partition:
        for number in range(20):
            players.put("1", f"name {number}", NOON + number)
            players.read(partition)
            assert players.name_of(partition, "1", NOON + number) == f"name {number}"
        players.put("1", None, NOON + 20)
        players.read(partition)

        assert players.name_of(partition, "1", NOON + 20) is None
        assert players.name_of(partition, "1", NOON + 7) == "name 7"
        assert players.name_of(partition, "1", NOON - 7) == "name 0"
        assert players.name_of(partition, "2") is None
        eventually(lambda: partition.snapshot().is_whole, lambda: str(partition.snapshot()), SECONDS)


def test_a_row_older_than_a_joined_event_is_counted_as_late(players: Players) -> None:
    with players.followed() as partition:
        players.put("1", "known", NOON)
        players.read(partition)
        partition.note_joined(NOON + 10)
        players.put("1", "late", NOON + 5)
        players.put("1", "not late", NOON + 10)
        players.read(partition)

        assert partition.snapshot().late == 1
        assert players.name_of(partition, "1", NOON + 6) == "late"


def test_a_store_continues_where_it_was_and_a_lost_one_is_read_again(players: Players) -> None:
    with players.followed() as partition:
        players.put("1", "first", NOON)
        players.read(partition)
    players.put("1", "second", NOON + 1)
    with players.followed() as again:
        players.read(again)
        assert [players.name_of(again, "1", NOON + n) for n in (0, 1)] == ["first", "second"]
    for file in players.path.glob("*.sst"):
        file.write_bytes(b"damaged")
    for file in players.path.glob("MANIFEST-*"):
        file.unlink()
    with players.followed() as restored:
        players.read(restored)
        assert [players.name_of(restored, "1", NOON + n) for n in (0, 1)] == ["first", "second"]


@pytest.mark.shows("deleted-keys")
def test_a_store_that_missed_a_tombstone_before_its_compaction_is_read_again(players: Players) -> None:
    with players.followed() as partition:
        players.put("1", "deleted later")
        players.read(partition)
    clean_eagerly(players.settings.bootstrap_servers, players.name)
    players.put("1", None, NOON + 1)

    later = itertools.count(NOON, 1_000)

    def is_gone() -> bool:
        # The broker rolls a segment by the timestamps of its records.
        players.put("2", "continues", next(later))
        return all(message.key() != b"1" for message in read_topic(players.stack, players.name))

    eventually(is_gone, "the tombstone is removed")
    with players.followed() as partition:
        players.read(partition)
        eventually(lambda: players.name_of(partition, "2") == "continues", "the table is read")
        assert players.name_of(partition, "1", NOON + 1) is None


def test_a_store_that_is_read_again_does_not_answer_below_its_old_position(players: Players) -> None:
    with players.followed() as partition:
        for number in range(200):
            players.put("1", f"name {number}", NOON + number)
        players.read(partition)
        partition.report_damage(StoreCorruptedError("for this test"))

        refused, deadline = 0, time.monotonic() + SECONDS
        while not refused or partition.snapshot().position < players.end:
            assert time.monotonic() < deadline
            try:
                assert players.name_of(partition, "1", NOON + 199) == "name 199"
            except RetriableError:
                refused += 1

        assert players.name_of(partition, "1", NOON + 100) == "name 100"


@pytest.mark.shows("table-apart")
def test_invalid_rows_are_counted_by_cause_and_skipped(players: Players) -> None:
    with players.followed() as partition:
        players.rows.put_raw("1", b"abc")
        players.rows.put_raw("1", b"\x01abcdef")
        players.rows.put_raw("1", b"\x00\x7f\xff\xff\xff")
        players.rows.put_raw("1", b"\x00\x00\x00\x00\x01", headers=[("__value_schema_id", b"\x01" + bytes(16))])
        players.rows.put_raw(b"\xffkey", None)
        players.rows.put_raw("elsewhere", None)
        players.put("1", "a row")
        players.read(partition)

        assert players.name_of(partition, "1") == "a row"
        assert partition.snapshot().skipped == {
            "frame-missing": 1,
            "magic-byte-unknown": 1,
            "schema-id-unknown": 1,
            "schema-guid-unknown": 1,
            "key-reserved": 1,
            "key-not-of-this-partition": 1,
        }
        assert not partition.problem


def test_uncommitted_rows_are_neither_visible_nor_waited_for(stack: LocalStack, players: Players) -> None:
    config = {"bootstrap.servers": stack.bootstrap_servers, "transactional.id": players.name}
    with players.followed() as partition:
        players.put("1", "before")
        writer = Producer(config)
        writer.init_transactions(SECONDS)
        writer.begin_transaction()
        writer.produce(players.name, None, b"1", partition=0, timestamp=NOON)
        assert writer.flush(SECONDS) == 0
        players.read(partition)
        assert players.name_of(partition, "1") == "before"

        writer.commit_transaction(SECONDS)
        # The broker writes the marker of each partition shortly after it acknowledges the commit.
        eventually(lambda: players.name_of(partition, "1") is None, lambda: str(partition.snapshot()), SECONDS)


def test_a_recreated_topic_is_read_from_its_start(players: Players) -> None:
    with players.followed() as partition:
        players.put("1", "of the old topic")
        players.read(partition)

        players.topics.delete(players.name)
        players.topics.create(players.name, 1, COMPACTED)
        players.put("2", "of the new one")

        def is_new() -> bool:
            return not partition.problem and partition.wait_for(1, 0, lambda: False) and _is_of_new(players, partition)

        eventually(is_new, lambda: str(partition.snapshot()), SECONDS)
        assert players.name_of(partition, "1") is None


def _is_of_new(players: Players, partition: TablePartition) -> bool:
    try:
        return bool(players.name_of(partition, "2") == "of the new one")
    except RetriableError:
        return False


def test_a_table_is_read_again_by_another_partitioner(players: Players) -> None:
    players.rows.put("elsewhere", {"id": 1, "name": "a row by crc32"}, timestamp=NOON)
    players.put("1", "a row")
    with players.followed() as partition:
        players.read(partition)
        assert players.name_of(partition, "elsewhere") is None

    players.partitioning = KeysButOne(1, "crc32")
    with players.followed() as partition:
        players.read(partition)
        assert players.name_of(partition, "elsewhere") == "a row by crc32"
        assert players.name_of(partition, "1") == "a row"


def test_a_changed_partition_count_is_reported(players: Players) -> None:
    players.topic = type(players.topic)(players.name, players.topic.topic_id, 2)

    with players.followed() as partition:
        eventually(lambda: bool(partition.problem), "the problem is reported", SECONDS)

        assert partition.problem == (
            f"the topic '{players.name}' had 2 partitions and has 1; "
            "restart the instances, once all topics that it is joined with have as many"
        )
        assert not partition.wait_for(0, 0, lambda: False)
