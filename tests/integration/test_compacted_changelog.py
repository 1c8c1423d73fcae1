"""Changelogs after log compaction: old states, expired markers and their tombstones are removed."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.records import RESERVED_PREFIX
from tests.integration.engines import (
    balance_stage,
    catch_up,
    is_running,
    opened_standby,
    running_engine,
    settings_for,
    standing_by,
    tasks_of,
)
from tests.support.kafka import Writer, clean_eagerly, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.task import Task
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings

STATES = (b"", RESERVED_PREFIX)
MARKERS = (RESERVED_PREFIX + b"once", RESERVED_PREFIX + b"oncf")
WINDOW_SECONDS = 60.0
CUSTOMERS = [f"c{n}" for n in range(40)]


class Application:
    """A source with expiring idempotency keys, and the changelog of its only partition."""

    def __init__(self, stack: LocalStack, settings: Settings, writer: Writer) -> None:
        self.settings = settings
        self.changelog = balance_stage(settings).changelog
        self._stack = stack
        self._writer = writer
        self._time_ms = int(time.time() * 1000) - 3_600_000
        self._sent = 0

    def add(self, rounds: int) -> None:
        """Sends rounds, ten seconds of event time apart: one event per customer, each with its own idempotency key."""
        for _ in range(rounds):
            self._time_ms += 10_000
            for customer in CUSTOMERS:
                self._sent += 1
                headers = [("idempotency-key", f"k{self._sent}".encode())]
                frame = self._writer.frame(customer, "0.01")
                self._writer.send(customer, frame, headers=headers, timestamp=self._time_ms)
        self._writer.producer.flush(10)

    def clean(self, engine: Engine) -> None:
        """Runs log compaction until no record of the current changelog is left, including tombstones."""
        clean_eagerly(self.settings.bootstrap_servers, self.changelog)
        catch_up(engine)
        end = engine.topics.offsets(self.changelog, [0])[0]

        def is_clean() -> bool:
            # Each round replaces every state and expires markers, so that compaction removes all older records.
            self.add(1)
            catch_up(engine)
            return all(message.offset() >= end for message in read_topic(self._stack, self.changelog))

        eventually(is_clean, "the cleaner has compacted the old records")


@pytest.fixture
def application(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Iterator[Application]:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1, idempotency_window_seconds=WINDOW_SECONDS)
    with Writer(stack, settings.topic) as writer:
        yield Application(stack, settings, writer)


@contextmanager
def engine_of(application: Application, state_dir: Path | None = None) -> Iterator[Engine]:
    """Runs an engine and its task on the application's state directory, or on another one."""
    update = {} if state_dir is None else {"state_dir": state_dir}
    with running_engine(application.settings.model_copy(update=update)) as engine:
        eventually(lambda: is_running(engine), "the task runs")
        yield engine


def kept(task: Task | None) -> dict[bytes, bytes]:
    """Returns the states and markers in a task's store."""
    assert task is not None
    store = task.replica.store
    assert store is not None
    keys = [key for start, stop in (STATES, MARKERS) for key in store.keys(start, stop, 100_000)]
    return {key: value for key, value in zip(keys, store.get_many(keys), strict=True) if value is not None}


def owned(engine: Engine) -> dict[bytes, bytes]:
    """Returns the states and markers in the store of the engine's task."""
    return kept(tasks_of(engine).task(0))


@pytest.mark.shows("equal-copies")
def test_a_store_restored_from_a_compacted_changelog_equals_its_owners(
    application: Application, tmp_path: Path
) -> None:
    with engine_of(application) as engine:
        application.add(30)
        application.clean(engine)
        with opened_standby(engine, tmp_path / "standby") as standby:
            assert kept(standby) == owned(engine)
            assert standby.view is not None
        before = owned(engine)
    shutil.rmtree(application.settings.state_dir)
    with engine_of(application) as engine:
        assert owned(engine) == before


@pytest.mark.shows("equal-copies")
def test_a_standby_equals_its_owner_during_compaction(application: Application, tmp_path: Path) -> None:
    with engine_of(application) as engine, standing_by(engine, tmp_path / "standby") as standby:
        application.add(30)
        application.clean(engine)

        owner = tasks_of(engine).task(0)
        assert owner is not None
        eventually(lambda: standby.position == owner.position, "the standby has caught up")
        assert kept(standby) == owned(engine)
        assert standby.view is not None


@pytest.mark.shows("deleted-keys")
def test_a_store_that_missed_tombstones_before_their_compaction_keeps_no_deleted_state(
    application: Application, tmp_path: Path
) -> None:
    with engine_of(application) as engine:
        application.add(3)
        catch_up(engine)
        left_behind = owned(engine)
    with engine_of(application, tmp_path / "other") as engine:
        application.add(30)
        application.clean(engine)
        expected = owned(engine)
    assert left_behind.keys() - expected.keys()

    with engine_of(application) as engine:
        assert owned(engine) == expected
