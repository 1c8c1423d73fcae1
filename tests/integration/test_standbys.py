"""Standbys: they show whole commits of the owner, and continue from there when promoted."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.completeness import Completeness
from balance_service.engine.inheritance import open_writer
from balance_service.engine.records import POSITION_KEY, Role, TaskId
from balance_service.engine.task import TaskState
from tests.integration.engines import (
    balance_stage,
    catch_up,
    hosted,
    is_running,
    observed,
    opened_standby,
    running_engine,
    settings_for,
    standing_by,
    tasks_of,
)
from tests.support.kafka import Writer, read_topic
from tests.support.waiting import SHARED, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.task import Task

CUSTOMERS = [f"c{n}" for n in range(40)]
ANSWERS_WITHIN_SECONDS = 2.0 * SHARED
# Events are produced in lots; each lot takes several commits.
LOT, LOTS = 400, 10


@contextmanager
def followed(stack: LocalStack, names: dict[str, str], path: Path) -> Iterator[tuple[Writer, Task]]:
    """Runs a source with one applied event and a tailing standby."""
    settings = settings_for(stack, names, path / "state", partitions=1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add("c", "1.00")
        catch_up(engine)
        with standing_by(engine, path / "standby") as standby:
            yield writer, standby


def contents(task: Task) -> dict[bytes, bytes]:
    """Returns all states of a task's store and its position."""
    store = task.replica.store
    assert store is not None
    keys = [*store.keys(b"", b"\xff", 100_000), POSITION_KEY]
    return {key: value for key, value in zip(keys, store.get_many(keys), strict=True) if value is not None}


@pytest.mark.shows("takeover")
def test_a_standby_follows_the_owner_and_is_promoted_without_restoring(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        for customer in CUSTOMERS:
            writer.add(customer, "0.10")
        catch_up(engine)
        owner = tasks_of(engine).task(0)
        assert owner is not None
        with standing_by(engine, tmp_path / "standby") as standby:
            assert standby.state is TaskState.TAILING
            assert standby.snapshot().restored >= len(CUSTOMERS)
            for customer in CUSTOMERS:
                writer.add(customer, "0.20")
            catch_up(engine)
            eventually(lambda: standby.position == owner.position, "the standby has caught up")
            assert contents(standby) == contents(owner)
            view = standby.view
            assert view is not None
            assert view.position is not None
            assert view.position.epoch == 1

            began = time.monotonic()
            standby.promote()

            assert time.monotonic() - began < ANSWERS_WITHIN_SECONDS
            assert (standby.role, standby.state) == (Role.ACTIVE, TaskState.RUNNING)
            assert (standby.snapshot().restored, standby.snapshot().epoch) == (0, 2)
            assert standby.view is not None


def test_a_standby_never_shows_part_of_a_transaction(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1, max_records_per_batch=2 * len(CUSTOMERS))
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        frames = {customer: writer.frame(customer, "1.00") for customer in CUSTOMERS}
        eventually(lambda: is_running(engine), "the task runs")
        with (
            standing_by(engine, tmp_path / "standby") as standby,
            observed(engine, CUSTOMERS, lambda: standby.view) as seen,
        ):
            for lot in range(1, LOTS + 1):
                for customer in CUSTOMERS * (LOT // len(CUSTOMERS)):
                    writer.send(customer, frames[customer])
                writer.producer.flush(10)
                eventually(partial(seen.issuperset, {lot * LOT}), "the standby has caught up and was read")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the staleness limit from ten minutes to four seconds."""
    monkeypatch.setattr("balance_service.engine.completeness.WHOLE_FOR_SECONDS", 4.0)
    monkeypatch.setattr("balance_service.engine.completeness._LOOK_AFTER_SECONDS", 0.5)
    monkeypatch.setattr("balance_service.engine.completeness._LOOK_AGAIN_SECONDS", 0.2)


@pytest.mark.shows("max-lag")
@pytest.mark.usefixtures("impatient")
def test_an_idle_standby_continues_to_answer(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    with followed(stack, names, tmp_path) as (writer, standby):
        time.sleep(8.0)
        writer.add("c", "1.00")
        while standby.position < 2:
            assert standby.view is not None


@pytest.mark.shows("max-lag")
@pytest.mark.usefixtures("impatient")
def test_a_standby_that_never_reaches_the_end_continues_to_answer(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with followed(stack, names, tmp_path) as (writer, standby):
        # Simulates a load with commits at intervals below half a second.
        monkeypatch.setattr(Completeness, "met_end", lambda _self: None)
        frame, until = writer.frame("c", "1.00"), time.monotonic() + 10.0
        while time.monotonic() < until:
            writer.send("c", frame)
            assert standby.view is not None
            time.sleep(0.02)
        assert standby.position > 100


def test_a_standby_without_a_store_restores_the_whole_changelog(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add("c", "1.00", "2.00")
        catch_up(engine)
        with standing_by(engine, tmp_path / "standby") as standby:
            latest = {record.key(): record.value() for record in read_topic(stack, balance_stage(settings).changelog)}

            assert contents(standby) == latest


def test_a_standby_restores_only_what_its_store_lacks(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        for customer in CUSTOMERS:
            writer.add(customer, "0.10")
        catch_up(engine)
        path = tmp_path / "standby"
        with standing_by(engine, path) as standby:
            assert standby.state is TaskState.TAILING
        writer.add("c0", "1.00")
        catch_up(engine)
        with standing_by(engine, path) as standby:
            # The state and the position record.
            assert standby.snapshot().restored == 2


def test_a_standby_does_not_wait_for_a_transaction_that_its_owner_left_open(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add("c", "1.00")
        catch_up(engine)
        context = hosted(engine)
        where = context.settings, context.stage, context.topics, context.source
        with closing(open_writer(TaskId("balance", 0), *where)) as owner:
            owner.fence()
            producer = owner._open_producer()
            producer.begin_transaction()
            producer.produce(balance_stage(settings).changelog, b"", b"c", 0)
            producer.flush(10)
            began = time.monotonic()
            with opened_standby(engine, tmp_path / "standby") as standby:
                assert time.monotonic() - began < ANSWERS_WITHIN_SECONDS
                assert standby.state is TaskState.TAILING

                standby.promote()

                assert time.monotonic() - began < 2 * ANSWERS_WITHIN_SECONDS
                assert (standby.state, standby.position) == (TaskState.RUNNING, 1)
                assert contents(standby).keys() == {b"c", POSITION_KEY}
                assert hosted(engine).state(contents(standby)[b"c"])["amount"] == Decimal("1.00")
