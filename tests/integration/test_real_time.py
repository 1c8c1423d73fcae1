"""Each task pulls events of its own: none is lost or counted twice, whatever becomes of a query, and what happens to
one partition holds up no other.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.schemas import load_schema
from balance_service.engine.task import Task, TaskState
from balance_service.spark import row_query
from balance_service.spark.row_query import RowQuery
from tests.integration.engines import (
    balance,
    balance_stage,
    catch_up,
    counted,
    hosted,
    is_running,
    problems,
    running_engine,
    settings_for,
    tasks_of,
)
from tests.integration.loads import Load, Progress, assert_counted_once, customers_in, queries
from tests.support.kafka import Writer, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable, Sized
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.commit import Committed
    from balance_service.engine.records import TaskBatch

IN_0, IN_1 = customers_in(0), customers_in(1)
LAG_WITHIN_SECONDS = 15
PAUSE_SECONDS = 1.5
HEAP_BYTES = 512 << 20


# The position, where the source ends with what is no record


@pytest.mark.parametrize("ends_with", ["commit", "abort"])
def test_the_lag_reaches_zero_after_transactions_and_nothing_is_committed_from_then_on(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, ends_with: str
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    transactional = {"transactional.id": f"writer-{settings.topic}"}
    with (
        running_engine(settings) as engine,
        Writer(stack, settings.topic, **transactional) as writer,
        Writer(stack, settings.topic) as plain,
    ):
        writer.producer.init_transactions(10)
        plain.add("c", "0.50")
        for outcome in ("commit", "abort", "abort", "commit", ends_with):
            _transact(writer, ["c"] * 20, outcome)

        catch_up(engine, LAG_WITHIN_SECONDS)

        task = tasks_of(engine).task(0)
        assert task is not None
        eventually(lambda: hosted(engine).watermarks.lag(0, task.position) == 0, "the lag is zero")
        assert balance(engine, "c") == Decimal(60 if ends_with == "commit" else 40) + Decimal("0.50")
        changelog = balance_stage(settings).changelog
        # A transaction's marker may come a moment after its commit is told.
        eventually(
            lambda: engine.topics.offsets(changelog, [0]) == engine.topics.offsets(changelog, [0], committed=True),
            "no transaction is open",
        )
        before = engine.topics.offsets(changelog, [0])
        time.sleep(3)
        assert engine.topics.offsets(changelog, [0]) == before
        plain.add("c", "0.25")
        assert_counted_once(stack, engine)


@pytest.mark.parametrize("moment", ["before the end is asked for", "after the end is told"])
def test_a_position_is_never_moved_over_a_record_that_arrives_while_it_is_looked_at_what_is_there(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    transactional = {"transactional.id": f"writer-{settings.topic}"}
    taken: list[TaskBatch] = []
    process = Task.process

    def noted(task: Task, batch: TaskBatch) -> Committed:
        done = process(task, batch)
        taken.append(batch)
        return done

    monkeypatch.setattr(Task, "process", noted)
    with (
        running_engine(settings) as engine,
        Writer(stack, settings.topic, **transactional) as writer,
        Writer(stack, settings.topic) as plain,
    ):
        catch_up(engine)
        ask, arrived = engine.topics.offsets, list[int]()

        def offsets(name: str, partitions: Iterable[int], **which: bool) -> dict[int, int]:
            looks = which.get("committed", False) and threading.current_thread().name.startswith("task-")
            if looks and moment == "before the end is asked for":
                plain.add("c", "0.01")
            found = ask(name, partitions, **which)
            if looks and moment == "after the end is told":
                plain.add("c", "0.01")
            if looks:
                arrived.append(found[0])
            return found

        monkeypatch.setattr(engine.topics, "offsets", offsets)
        writer.producer.init_transactions(10)
        for turn, outcome in enumerate(("commit", "abort", "commit", "abort")):
            _transact(writer, ["c"] * 3, outcome)
            eventually(partial(_has_more_than, arrived, turn), "what lies behind the position is looked at")
            catch_up(engine)
        assert_counted_once(stack, engine)
        starts, ends = [batch.start for batch in taken], [batch.end for batch in taken]
        assert starts == [0, *ends[:-1]]
        moved = [range(batch.start, batch.end) for batch in taken if not batch.applied]
        assert bool(moved) == (moment == "after the end is told")
        records = {message.offset() for message in read_topic(stack, settings.topic)}
        assert records.isdisjoint(offset for offsets in moved for offset in offsets)


def _has_more_than(found: Sized, count: int) -> bool:
    return len(found) > count


def _transact(writer: Writer, customers: list[str], outcome: str) -> None:
    writer.producer.begin_transaction()
    frames = {customer: writer.frame(customer, "1.00") for customer in customers}
    for customer in customers:
        writer.send(customer, frames[customer])
    if outcome == "commit":
        writer.producer.commit_transaction(10)
    else:
        writer.producer.flush(10)
        writer.producer.abort_transaction(10)


# Queries that start, end and fail


def test_every_partition_is_read_though_there_are_more_than_processors(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    partitions = (os.cpu_count() or 1) + 3
    settings = settings_for(stack, names, tmp_path / "state", partitions=partitions)
    homes = {partition: customers_in(partition, partitions, 1) for partition in range(partitions)}
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        for _ in range(2):
            for (customer,) in homes.values():
                writer.add(customer, "1.00")
            assert_counted_once(stack, engine)
        assert [queries(engine, partition, "opened") for partition in homes] == [1] * partitions
        assert all(balance(engine, customer) == 2 for (customer,) in homes.values())


def test_where_batches_of_spark_end_nothing_is_lost_or_doubled_though_events_keep_coming(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Spark takes no less.
    monkeypatch.setattr(row_query, "_BATCH", "5 seconds")
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        with Load(writer, [*IN_0, *IN_1], per_second=300) as load:
            ended = [0, 0]

            def have_ended() -> bool:
                assert not problems(engine), "that is no failure"
                ended[:] = [queries(engine, partition, "batch ended") for partition in (0, 1)]
                return min(ended) >= 3

            eventually(have_ended, "batches end")
        assert_counted_once(stack, engine, load.events)
        assert [queries(engine, partition, "failed") for partition in (0, 1)] == [0, 0]


@pytest.mark.parametrize("what", ["its connection breaks", "Spark ends it"])
def test_a_query_that_ends_in_the_middle_is_followed_by_another_with_nothing_lost_or_doubled(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    entered: list[RowQuery] = []
    enter = RowQuery.__enter__

    def noted(query: RowQuery) -> RowQuery:
        enter(query)
        entered.append(query)
        return query

    monkeypatch.setattr(RowQuery, "__enter__", noted)
    chooser = random.Random(what)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        with Load(writer, [*IN_0, *IN_1], per_second=500) as load:
            eventually(lambda: len(entered) >= 2, "both are read")
            for _ in range(6):
                time.sleep(chooser.uniform(0.2, 1.5))
                before = len(entered)
                if what == "its connection breaks":
                    connection = entered[-1]._connection
                    assert connection is not None
                    connection.shutdown(socket.SHUT_RDWR)
                else:
                    engine.spark.streams.active[0].stop()
                eventually(partial(_has_more_than, entered, before), "another query is started")
        assert_counted_once(stack, engine, load.events)
        eventually(lambda: is_running(engine) and not problems(engine), "all is well again")


def test_where_the_thread_that_sends_the_rows_dies_another_query_is_started_though_no_event_comes(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add("c", "1.00")
        catch_up(engine)
        jvm: Any = engine.spark._jvm
        senders = [t for t in jvm.java.lang.Thread.getAllStackTraces().keySet() if t.getName().startswith("handover-")]
        # It has been asked, and waits for rows.
        eventually(lambda: [str(t.getState()) for t in senders] == ["WAITING"], "the partition is idle")

        senders[0].interrupt()

        eventually(lambda: queries(engine, 0, "failed") == 1, "another query is started")
        writer.add("c", "1.00")
        assert_counted_once(stack, engine)


# What holds up one partition alone


def test_a_schema_registered_meanwhile_costs_its_partition_another_query_and_the_other_no_pause(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0[0], "1.00")
        with Load(writer, IN_1, per_second=50) as load:
            eventually(lambda: counted(engine, "applied") > 50, "all is warm")
            with Progress(engine, 1) as other:
                writer.send(IN_0[0], writer.frame(IN_0[0], "0.10", _with_note(), note="new"))
                eventually(lambda: balance(engine, IN_0[0]) == Decimal("1.10"), "the event counts")
                time.sleep(1)
        assert_counted_once(stack, engine, load.events + 2)
        assert [queries(engine, partition, "new schema") for partition in (0, 1)] == [1, 0]
        assert other.longest_pause < PAUSE_SECONDS
        # Each plan learns of it when it has to.
        writer.send(IN_1[0], writer.frame(IN_1[0], "0.10", _with_note(), note="new"))
        writer.send(IN_0[0], writer.frame(IN_0[0], "0.10", _with_note(), note="known"))
        assert writer.producer.flush(10) == 0
        assert_counted_once(stack, engine, load.events + 4)
        assert [queries(engine, partition, "new schema") for partition in (0, 1)] == [1, 1]


def test_while_the_registry_is_away_only_a_partition_with_an_unknown_schema_waits(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0[0], "1.00")
        with Load(writer, IN_1, per_second=50) as load:
            eventually(lambda: counted(engine, "applied") > 50, "all is warm")
            waiting = tasks_of(engine).task(0)
            assert waiting is not None
            unseen = writer.frame(IN_0[0], "0.10", _with_note(), note="unseen")
            known = writer.frame(IN_0[0], "0.01")
            stack.registry.stop()
            try:
                with Progress(engine, 1) as other:
                    for frame in (unseen, known):
                        writer.send(IN_0[0], frame)
                    eventually(lambda: waiting.state is TaskState.WAITING, "its task waits")
                    time.sleep(5)
                    assert balance(engine, IN_0[0]) == 1
            finally:
                stack.registry.start()
            assert other.states == {TaskState.RUNNING}
            assert other.longest_pause < PAUSE_SECONDS
            eventually(lambda: balance(engine, IN_0[0]) == Decimal("1.11"), "it goes on by itself")
        assert_counted_once(stack, engine, load.events + 3)


def _with_note() -> dict[str, Any]:
    schema = load_schema("FundsAdded")
    note = {"name": "note", "type": ["null", "string"], "default": None}
    return {**schema, "fields": [*schema["fields"], note]}


# Much at once


def test_events_of_half_a_megabyte_pass_through_a_heap_of_512_megabytes(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    half = 250
    with Writer(stack, settings.topic) as writer:
        large = [writer.frame(c, "1.00", _with_note(), note="x" * 500_000) for c in (IN_0[0], IN_1[0])]

        def send(events: int) -> None:
            for n in range(events):
                # Of every other one the record itself is handed over too.
                headers = {"headers": [("idempotency-key", f"{id(large)}-{events}-{n}".encode())]} if n % 4 < 2 else {}
                writer.send((IN_0, IN_1)[n % 2][0], large[n % 2], **headers)
                if n % 50 == 49:
                    assert writer.producer.flush(60) == 0

        with running_engine(settings) as engine:
            jvm: Any = engine.spark.sparkContext._jvm
            assert jvm.java.lang.Runtime.getRuntime().maxMemory() <= HEAP_BYTES
            catch_up(engine)
        send(half)
        with running_engine(settings) as engine:
            send(half + 1)
            catch_up(engine, 120)
            assert_counted_once(stack, engine, 2 * half + 1)
            assert [queries(engine, partition, "failed") for partition in (0, 1)] == [0, 0]
