"""Tasks pull their own events: none is lost or counted twice when queries end, and partitions are independent."""

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
from balance_service.spark import row_query, shared_queries
from balance_service.spark.row_query import PartitionStream
from tests.integration.engines import (
    Load,
    Progress,
    assert_counted_once,
    balance,
    balance_stage,
    catch_up,
    counted,
    customers_in,
    hosted,
    is_running,
    problems,
    queries,
    running_engine,
    settings_for,
    tasks_of,
)
from tests.support.kafka import Writer, read_topic
from tests.support.waiting import SHARED, eventually

if TYPE_CHECKING:
    from collections.abc import Iterable, Sized
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.batch import TaskBatch
    from balance_service.engine.commit import Committed
    from balance_service.hosting.engine import Engine

IN_0, IN_1 = customers_in(0), customers_in(1)
LAG_WITHIN_SECONDS = 15
PAUSE_SECONDS = 1.5 * SHARED
HEAP_BYTES = 512 << 20


# The position at the end of a source that ends with a transaction marker


@pytest.mark.parametrize("ends_with", ["commit", "abort"])
def test_the_lag_reaches_zero_after_transactions_and_commits_stop(
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
        # The broker may write a transaction's marker shortly after it acknowledges the commit.
        eventually(
            lambda: engine.topics.offsets(changelog, [0]) == engine.topics.offsets(changelog, [0], committed=True),
            "no transaction is open",
        )
        before = engine.topics.offsets(changelog, [0])
        time.sleep(3)
        assert engine.topics.offsets(changelog, [0]) == before
        plain.add("c", "0.25")
        assert_counted_once(stack, engine)


@pytest.mark.parametrize("moment", ["before the end offset request", "after the end offset response"])
def test_a_position_never_skips_a_record_that_arrives_during_the_end_offset_request(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    transactional = {"transactional.id": f"writer-{settings.topic}"}
    taken: list[TaskBatch] = []
    process = Task.process

    def recorded(task: Task, batch: TaskBatch) -> Committed:
        done = process(task, batch)
        taken.append(batch)
        return done

    monkeypatch.setattr(Task, "process", recorded)
    with (
        running_engine(settings) as engine,
        Writer(stack, settings.topic, **transactional) as writer,
        Writer(stack, settings.topic) as plain,
    ):
        catch_up(engine)
        ask, arrived = engine.topics.offsets, list[int]()

        def offsets(name: str, partitions: Iterable[int], **which: bool) -> dict[int, int]:
            looks = which.get("committed", False) and threading.current_thread().name.startswith("task-")
            if looks and moment == "before the end offset request":
                plain.add("c", "0.01")
            found = ask(name, partitions, **which)
            if looks and moment == "after the end offset response":
                plain.add("c", "0.01")
            if looks:
                arrived.append(found[0])
            return found

        monkeypatch.setattr(engine.topics, "offsets", offsets)
        writer.producer.init_transactions(10)
        for turn, outcome in enumerate(("commit", "abort", "commit", "abort")):
            _transact(writer, ["c"] * 3, outcome)
            eventually(partial(_has_more_than, arrived, turn), "the task has requested the end offset")
            catch_up(engine)
        assert_counted_once(stack, engine)
        starts, ends = [batch.start for batch in taken], [batch.end for batch in taken]
        assert starts == [0, *ends[:-1]]
        moved = [range(batch.start, batch.end) for batch in taken if not batch.updates.applied]
        assert bool(moved) == (moment == "after the end offset response")
        records = {message.offset() for message in read_topic(stack, settings.topic)}
        assert records.isdisjoint(offset for offsets in moved for offset in offsets)


def _replaced(engine: Engine) -> list[int]:
    return [queries(engine, partition, "replaced") for partition in (0, 1)]


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


def test_every_partition_is_read_with_more_partitions_than_processors(
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
        assert len(engine.spark.streams.active) == 1
        assert all(balance(engine, customer) == 2 for (customer,) in homes.values())


@pytest.mark.shows("exactly-once")
def test_ended_spark_batches_lose_and_double_nothing_under_load(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The minimum that Spark accepts.
    monkeypatch.setattr(row_query, "_BATCH", "5 seconds")
    # How long Spark takes to end the query after the batch does not matter.
    monkeypatch.setattr(row_query, "_END_SECONDS", 0.001)
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        with Load(writer, [*IN_0, *IN_1], per_second=300) as load:
            ended = [0, 0]

            def have_ended() -> bool:
                assert not problems(engine), "an ended batch is no failure"
                ended[:] = [queries(engine, partition, "batch ended") for partition in (0, 1)]
                return min(ended) >= 3

            eventually(have_ended, "three batches have ended")
        assert_counted_once(stack, engine, load.events)
        assert [queries(engine, partition, "failed") for partition in (0, 1)] == [0, 0]


@pytest.mark.parametrize("what", ["a connection breaks", "Spark ends it"])
def test_a_query_that_ends_midway_is_replaced_and_loses_and_doubles_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    connected: list[socket.socket] = []
    accept = PartitionStream._accepted

    def recorded(stream: PartitionStream, timeout_seconds: float) -> socket.socket | None:
        connection = accept(stream, timeout_seconds)
        if connection is not None:
            connected.append(connection)
        return connection

    monkeypatch.setattr(PartitionStream, "_accepted", recorded)
    chooser = random.Random(what)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        with Load(writer, [*IN_0, *IN_1], per_second=500) as load:
            eventually(lambda: len(connected) >= 2, "both partitions are read")
            for _ in range(6):
                time.sleep(chooser.uniform(0.2, 1.5))
                before = len(connected)
                if what == "a connection breaks":
                    connected[-1].shutdown(socket.SHUT_RDWR)
                else:
                    engine.spark.streams.active[0].stop()
                eventually(partial(_has_more_than, connected, before), "a new query is started")
        assert_counted_once(stack, engine, load.events)
        eventually(lambda: is_running(engine) and not problems(engine), "the engine has no problems")


def test_queries_that_replace_others_under_load_lose_and_double_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_queries, "_SETTLE_SECONDS", 2.0)
    monkeypatch.setattr(shared_queries, "_MOST_AGE_SECONDS", 1.0)
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        with Load(writer, [*IN_0, *IN_1], per_second=500) as load:
            eventually(lambda: min(_replaced(engine)) >= 1, "the first queries are started and replaced")
            enough = max(_replaced(engine)) + 3
            with Progress(engine, 0) as progress:
                eventually(lambda: min(_replaced(engine)) >= enough, "three more queries have replaced others")
        assert_counted_once(stack, engine, load.events)
        assert progress.longest_pause < PAUSE_SECONDS
        assert [queries(engine, partition, "failed") for partition in (0, 1)] == [0, 0]


def test_a_partition_that_leaves_fails_no_other_and_its_query_is_replaced(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_queries, "_SETTLE_SECONDS", 1.0)
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        with Load(writer, [*IN_0, *IN_1], per_second=300):
            eventually(lambda: counted(engine, "applied") > 300, "events are read")
            # If the partitions asked for rows one after the other, a query over both replaces two.
            eventually(
                lambda: tasks_of(engine).have_begun and len(engine.spark.streams.active) == 1,
                "one query reads both partitions",
            )
            replaced = queries(engine, 0, "replaced")
            with Progress(engine, 0) as stays:
                for task in tasks_of(engine).dismiss([1]):
                    task.close(5)
                eventually(
                    lambda: queries(engine, 0, "replaced") > replaced, "a query without the partition replaces it"
                )
                eventually(lambda: len(engine.spark.streams.active) == 1, "the replaced query is stopped")
                tasks_of(engine).assign([1])
                eventually(lambda: is_running(engine), "the partition returns")
        assert_counted_once(stack, engine)
        assert stays.states == {TaskState.RUNNING}
        assert stays.longest_pause < PAUSE_SECONDS
        assert queries(engine, 0, "failed") == 0


def test_a_query_whose_sender_thread_dies_is_replaced_without_new_events(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add("c", "1.00")
        catch_up(engine)
        jvm: Any = engine.spark._jvm
        senders = [t for t in jvm.java.lang.Thread.getAllStackTraces().keySet() if t.getName().startswith("handover-")]
        # The thread has received a request and waits for rows.
        eventually(lambda: [str(t.getState()) for t in senders] == ["WAITING"], "the partition is idle")

        senders[0].interrupt()

        eventually(lambda: queries(engine, 0, "failed") == 1, "a new query is started")
        writer.add("c", "1.00")
        assert_counted_once(stack, engine)


# Delays of a single partition


def test_a_new_schema_costs_no_query(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0[0], "1.00")
        with Load(writer, IN_1, per_second=50) as load:
            eventually(lambda: counted(engine, "applied") > 50, "the engine is warm")
            with Progress(engine, 1) as other:
                writer.send(IN_0[0], writer.frame(IN_0[0], "0.10", _with_note(), note="new"))
                eventually(lambda: balance(engine, IN_0[0]) == Decimal("1.10"), "the event counts")
                time.sleep(1)
        assert_counted_once(stack, engine, load.events + 2)
        assert other.longest_pause < PAUSE_SECONDS
        writer.send(IN_1[0], writer.frame(IN_1[0], "0.10", _with_note(), note="known"))
        assert writer.producer.flush(10) == 0
        assert_counted_once(stack, engine, load.events + 3)
        assert len(engine.spark.streams.active) == 1
        assert [queries(engine, partition, "opened") for partition in (0, 1)] == [1, 1]


def test_a_retry_under_another_new_schema_counts_once(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add("c", "1.00")
        catch_up(engine)
        # Frames first: all records arrive together, with neighbours under a known schema.
        known, once = writer.frame("c", "1.00"), {"headers": [("idempotency-key", b"k")]}
        unknown = [writer.frame("c", "0.10", _with_note(name), **{name: "new"}) for name in ("a", "b")]
        for frame in unknown:
            for _ in range(40):
                writer.send("c", known)
            writer.send("c", frame, **once)
        writer.producer.flush(10)
        catch_up(engine)

        assert balance(engine, "c") == Decimal("81.10")
        assert counted(engine, "dead_lettered") == 0


def test_a_registry_outage_delays_only_partitions_with_unknown_schemas(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0[0], "1.00")
        with Load(writer, IN_1, per_second=50) as load:
            eventually(lambda: counted(engine, "applied") > 50, "the engine is warm")
            eventually(lambda: balance(engine, IN_0[0]) == 1, "the first event counts")
            waiting = tasks_of(engine).task(0)
            assert waiting is not None
            unseen = writer.frame(IN_0[0], "0.10", _with_note(), note="unseen")
            known = writer.frame(IN_0[0], "0.01")
            stack.registry.stop()
            try:
                with Progress(engine, 1) as other:
                    for frame in (unseen, known):
                        writer.send(IN_0[0], frame)
                    eventually(lambda: waiting.state is TaskState.WAITING, "the task waits")
                    time.sleep(5)
                    assert balance(engine, IN_0[0]) == 1
            finally:
                stack.registry.start()
            assert other.states == {TaskState.RUNNING}
            assert other.longest_pause < PAUSE_SECONDS
            eventually(lambda: balance(engine, IN_0[0]) == Decimal("1.11"), "the task continues without intervention")
        assert_counted_once(stack, engine, load.events + 3)


def _with_note(name: str = "note") -> dict[str, Any]:
    schema = load_schema("FundsAdded")
    note = {"name": name, "type": ["null", "string"], "default": None}
    return {**schema, "fields": [*schema["fields"], note]}


# Large volumes


def test_half_megabyte_events_pass_through_a_heap_of_512_megabytes(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    half = 250
    with Writer(stack, settings.topic) as writer:
        large = [writer.frame(c, "1.00", _with_note(), note="x" * 500_000) for c in (IN_0[0], IN_1[0])]

        def send(events: int) -> None:
            for n in range(events):
                # Half of the events have an idempotency key, so that Spark hands over the record as well.
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
