"""Restarts and failures: lost stores are restored, existing ones are reused, uncommitted events never count."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.engine.idempotency import REUSED
from balance_service.engine.inheritance import open_writer
from balance_service.engine.records import DeadLetter, TaskId
from balance_service.engine.task import Task, TaskState
from balance_service.errors import TaskMigratedError
from balance_service.kafka.topics import Topics
from tests.integration.engines import (
    balance,
    balance_stage,
    catch_up,
    counted,
    hosted,
    prepare,
    running_engine,
    settings_for,
    tasks_of,
)
from tests.support.kafka import Writer, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

CUSTOMERS = [f"c{n}" for n in range(40)]
TASK = TaskId("balance", 0)


def test_a_restart_reads_only_new_events_and_a_lost_store_is_restored(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer:
        with running_engine(settings) as engine:
            for customer in CUSTOMERS:
                writer.add(customer, "0.10", "0.20")
            catch_up(engine)
            positions = {t.task_id.partition: t.position for t in tasks_of(engine).all()}
        writer.add("c0", "1.00", "1.00", "1.00")
        with running_engine(settings) as engine:
            catch_up(engine)
            assert counted(engine, "read") == 3
            assert sum(t.snapshot().restored for t in tasks_of(engine).all()) == 0
            assert {t.snapshot().epoch for t in tasks_of(engine).all()} == {2}
            assert sum(t.position for t in tasks_of(engine).all()) == sum(positions.values()) + 3
    shutil.rmtree(settings.state_dir)
    with running_engine(settings) as engine:
        catch_up(engine)
        assert counted(engine, "read") == 0
        assert sum(t.snapshot().restored for t in tasks_of(engine).all()) >= len(CUSTOMERS)
        assert balance(engine, "c0") == Decimal("3.30")
        assert all(balance(engine, c) == Decimal("0.30") for c in CUSTOMERS[1:])


@pytest.mark.shows("exactly-once")
def test_aborted_transactions_never_count_and_do_not_delay_the_position(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    config = {"transactional.id": f"writer-{settings.topic}"}
    with running_engine(settings) as engine, Writer(stack, settings.topic, **config) as writer:
        writer.producer.init_transactions(10)
        for commit in (True, False, True, False):
            writer.producer.begin_transaction()
            writer.send("c", writer.frame("c", "1.00"))
            if commit:
                writer.producer.commit_transaction(10)
            else:
                writer.producer.flush(10)
                writer.producer.abort_transaction(10)
        catch_up(engine)
        assert balance(engine, "c") == Decimal("2.00")


def test_a_partition_without_new_records_is_not_committed(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add("c0", "1.00")
        catch_up(engine)
        changelog, partitions = balance_stage(settings).changelog, range(hosted(engine).source.partitions)
        before = engine.topics.offsets(changelog, partitions)
        writer.add("c0", "1.00")
        catch_up(engine)
        after = engine.topics.offsets(changelog, partitions)

    assert sum(before[partition] != after[partition] for partition in partitions) == 1


def test_a_fenced_task_commits_nothing_more_and_is_reopened_with_a_higher_epoch(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add("c", "1.00")
        catch_up(engine)
        task = next(t for t in tasks_of(engine).all() if t.view is not None and t.view.get(b"c") is not None)
        context = hosted(engine)
        usurper_dir = settings_for(stack, names, tmp_path / "usurper").state_dir
        usurper_context = replace(context, state_directory=cast("Any", _Elsewhere(usurper_dir)))
        usurper = Task(task.task_id, usurper_context)
        usurper.open()
        assert usurper.snapshot().epoch == 2
        writer.add("c", "1.00")
        eventually(lambda: task.state is TaskState.CLOSED, "the fenced task is closed")
        catch_up(engine)
        usurper.close(5)
        assert balance(engine, "c") == Decimal("2.00")
        reopened = tasks_of(engine).task(task.task_id.partition)
        assert reopened is not None
        assert reopened.snapshot().epoch == 3


def test_a_fenced_writer_reports_it_at_any_step(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    topics = Topics(settings)
    where = settings, balance_stage(settings), topics, prepare(topics, settings)
    letters = [DeadLetter(offset, 0, b"key", b"value", "cause") for offset in range(50)]
    for states in [[], [(b"key", b"state")] * 2_000] * 10:
        with closing(open_writer(TASK, *where)) as slept, closing(open_writer(TASK, *where)) as successor:
            slept.fence()
            successor.fence()
            with pytest.raises(TaskMigratedError, match="fenced"):
                slept.commit(states, letters, b"position", 0)


class _Elsewhere:
    def __init__(self, path: Path) -> None:
        self._path = path

    def store_path(self, task_id: TaskId) -> Path:
        return self._path / str(task_id)


def test_a_partition_waits_during_a_registry_outage_and_then_continues(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add("c", "1.00")
        catch_up(engine)
        schema = {"type": "record", "name": "Other", "namespace": "n", "fields": []}
        unseen = writer.register(f"{settings.topic}-n.Other", schema)
        stack.registry.stop()
        try:
            writer.send("c", b"\x00" + unseen.to_bytes(4, "big"))
            writer.producer.flush(10)
            eventually(lambda: any(t.state is TaskState.WAITING for t in tasks_of(engine).all()), "a task waits")
            assert balance(engine, "c") == Decimal("1.00")
        finally:
            stack.registry.start()
        catch_up(engine)
        eventually(lambda: counted(engine, "ignored") == 1, "the events are counted")
        assert counted(engine, "dead_lettered") == 0


@pytest.mark.shows("broker-outage")
def test_a_broker_kill_loses_nothing(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        for customer in CUSTOMERS:
            writer.add(customer, "0.10")
        catch_up(engine)
        stack.broker.kill()
        stack.broker.start()
        for customer in CUSTOMERS:
            writer.add(customer, "0.20")
        catch_up(engine)
        assert all(balance(engine, c) == Decimal("0.30") for c in CUSTOMERS)


@pytest.mark.shows("idempotency-key")
def test_an_event_sent_again_counts_once_also_after_the_store_was_lost(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer:

        def send(amount: str, *keys: bytes) -> None:
            headers = [("trace", b"t"), *(("idempotency-key", key) for key in keys)]
            writer.send("c", writer.frame("c", amount), headers=headers)
            writer.producer.flush(10)

        with running_engine(settings) as engine:
            send("1.00", b"k1")
            send("1.00", b"k1")
            send("2.00", b"k2", b"k1")
            send("4.00")
            send("4.00", b"")
            writer.add("c", "8.00")
            catch_up(engine)
            assert balance(engine, "c") == Decimal("19.00")
            eventually(lambda: counted(engine, "duplicates") == 1, "the events are counted")
        shutil.rmtree(settings.state_dir)
        with running_engine(settings) as engine:
            send("1.00", b"k1")
            send("3.00", b"k1")
            catch_up(engine)
            assert balance(engine, "c") == Decimal("19.00")
            assert (counted(engine, "duplicates"), counted(engine, "dead_lettered")) == (1, 1)
        (letter,) = read_topic(stack, balance_stage(settings).dead_letters)
        assert dict(letter.headers())["dead-letter-cause"] == REUSED.encode()
        assert letter.key() == b"c"
