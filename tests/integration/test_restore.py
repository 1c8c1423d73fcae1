"""Restores of a store from its changelog: in parts while it does not answer, by transaction while it does."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from balance_service.engine.changelog_reader import ChangelogReader, Part
from balance_service.engine.changelog_writer import ChangelogWriter, Envelope
from balance_service.engine.records import POSITION_KEY, Position, TaskId
from balance_service.engine.store import StateStore
from balance_service.errors import TaskHaltedError, TaskMigratedError
from balance_service.kafka.clients import reader_config, transactional_config
from balance_service.kafka.topic_specs import prepare_changelog
from balance_service.kafka.topics import Topics
from balance_service.settings import Settings, load_settings
from tests.integration.engines import balance_stage, prepare, settings_for
from tests.support.fakes import position_codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.records import Record

CODEC = position_codec()
MANY = 70_000
KILLED_AFTER_PARTS = 2


class Changelog:
    """A changelog partition, and the contents that a store should have."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        topics = Topics(settings)
        source = prepare(topics, settings)
        self.topic = prepare_changelog(topics, balance_stage(settings), source).name
        self._topics = topics
        self._position = 0
        self._writer = ChangelogWriter(
            transactional_config(settings, f"{settings.application_id}-balance-0"),
            TaskId("balance", 0),
            self.topic,
            balance_stage(settings).dead_letters,
            Envelope("balance", source.name, 0, settings.application_id, 1 << 20),
        )
        self._writer.fence()
        self.expected: dict[bytes, bytes] = {}

    @property
    def end(self) -> int:
        return self._topics.offsets(self.topic, [0])[0]

    def commit(self, records: list[Record]) -> None:
        """Commits one transaction as the owner."""
        self._position += 1
        position = CODEC.encode(Position(self._position, 1, "t").record())
        self._writer.commit(records, [], position, 0)
        for key, value in [*records, (POSITION_KEY, position)]:
            if value is None:
                self.expected.pop(key, None)
            else:
                self.expected[key] = value

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    return settings_for(stack, names, tmp_path / "state", partitions=1)


@pytest.fixture
def changelog(settings: Settings) -> Iterator[Changelog]:
    written = Changelog(settings)
    yield written
    written.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "balance_0"


def states(first: int, count: int, value: bytes) -> list[Record]:
    return [(b"c%06d" % n, value) for n in range(first, first + count)]


class Restoring:
    """A store and a reader that replays into it. `parts` has the size of each write and if it ends a transaction."""

    def __init__(self, settings: Settings, path: Path, after_part: Callable[[int], None] = lambda _: None) -> None:
        self.store = StateStore(path, CODEC)
        self.parts: list[tuple[int, bool]] = []
        self._after_part = after_part
        self.start = self.store.changelog_offset
        self.reader = ChangelogReader(reader_config(settings), balance_stage(settings).changelog, 0, self.start)

    def apply(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self.parts.append((len(part.records), part.is_whole))
            self.store.apply(part.records, part.changelog_offset)
            self._after_part(len(self.parts))

    def contents(self) -> dict[bytes, bytes]:
        keys = [*self.store.keys(b"", b"\xff", 1_000_000), POSITION_KEY]
        found = zip(keys, self.store.get_many(keys), strict=True)
        return {key: value for key, value in found if value is not None}


@contextmanager
def restoring(settings: Settings, path: Path) -> Iterator[Restoring]:
    opened = Restoring(settings, path)
    yield opened
    opened.reader.close()
    opened.store.close()


def test_a_store_that_does_not_answer_is_restored_in_parts(
    settings: Settings, changelog: Changelog, path: Path
) -> None:
    changelog.commit(states(0, MANY, b"one"))
    changelog.commit([(b"c000001", b"two"), (b"c000002", None), (b"c000001", b"three")])
    changelog.commit(states(MANY, 10, b"four"))
    with restoring(settings, path) as restored:
        restored.apply(restored.reader.replay(changelog.end, lambda: False))

        assert restored.contents() == changelog.expected
        assert sum(records for records, _ in restored.parts) == MANY + 3 + 10 + 3
        assert len(restored.parts) > 2
        assert max(records for records, _ in restored.parts) < MANY / 2
        assert restored.parts[-1][1]
        position = restored.store.position
        assert position is not None
        assert position.offset == 3


def test_a_store_that_answers_is_restored_by_whole_transactions(
    settings: Settings, changelog: Changelog, path: Path
) -> None:
    changelog.commit(states(0, MANY, b"one"))
    changelog.commit([(b"c000002", None)])
    changelog.commit([])
    with restoring(settings, path) as restored:
        restored.apply(restored.reader.replay(changelog.end, lambda: False, answers=True))

        assert restored.parts == [(MANY + 1, True), (2, True), (1, True)]
        assert restored.contents() == changelog.expected


def test_a_restore_to_an_offset_within_a_transaction_ends_after_the_transaction(
    settings: Settings, changelog: Changelog, path: Path
) -> None:
    changelog.commit(states(0, 10, b"zero"))
    changelog.commit(states(0, MANY, b"one"))
    with restoring(settings, path) as restored:
        restored.apply(restored.reader.replay(MANY // 2, lambda: False, fenced=False))

        assert restored.contents() == changelog.expected
        assert restored.parts[-1][1]

        changelog.commit(states(0, MANY, b"two"))
        while restored.contents() != changelog.expected:
            restored.apply(restored.reader.tail())

        assert restored.parts[-1][1]


def test_a_cancelled_restore_continues_where_it_stopped(settings: Settings, changelog: Changelog, path: Path) -> None:
    changelog.commit(states(0, MANY, b"one"))
    with restoring(settings, path) as given_up, pytest.raises(TaskMigratedError):
        given_up.apply(given_up.reader.replay(changelog.end, lambda: len(given_up.parts) == 1))
    with restoring(settings, path) as restored:
        assert 0 < restored.start < changelog.end
        assert restored.store.position is None

        restored.apply(restored.reader.replay(changelog.end, lambda: False))

        assert sum(records for records, _ in restored.parts) < MANY
        assert restored.contents() == changelog.expected


def test_a_killed_restore_continues_where_it_stopped(settings: Settings, changelog: Changelog, path: Path) -> None:
    changelog.commit(states(0, 10, b"zero"))
    changelog.commit(states(0, MANY, b"one"))
    changelog.commit([(b"c000003", None)])
    overrides = settings.model_dump(include={"bootstrap_servers", "schema_registry_url", "application_id", "topic"})
    spawned = multiprocessing.get_context("spawn")
    killed = spawned.Process(target=_restore_and_be_killed, args=(overrides, path, changelog.end))
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL

    with restoring(settings, path) as restored:
        assert 0 < restored.start < changelog.end
        assert len(restored.contents()) < len(changelog.expected)

        restored.apply(restored.reader.replay(changelog.end, lambda: False))

        assert restored.contents() == changelog.expected
        assert restored.store.changelog_offset <= changelog.end


def _restore_and_be_killed(overrides: dict[str, Any], path: Path, end: int) -> None:
    def kill(parts: int) -> None:
        if parts == KILLED_AFTER_PARTS:
            os.kill(os.getpid(), signal.SIGKILL)

    restored = Restoring(load_settings(**overrides), path, kill)
    restored.apply(restored.reader.replay(end, lambda: False))


@pytest.mark.parametrize("foreign", [1, 20_000, MANY])
def test_states_without_a_position_halt_every_restore(
    settings: Settings, changelog: Changelog, path: Path, foreign: int
) -> None:
    changelog.commit(states(0, 10, b"one"))
    stranger = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for key, value in states(0, foreign, b"?"):
        stranger.produce(changelog.topic, value, key, 0)
    assert stranger.flush(30) == 0
    for _ in range(2):
        with restoring(settings, path) as restored, pytest.raises(TaskHaltedError, match="states without a position"):
            restored.apply(restored.reader.replay(changelog.end, lambda: False))
