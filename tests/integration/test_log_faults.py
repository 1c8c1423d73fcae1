"""Faults of the source topic: nothing is skipped, and the task reports why it halts."""

from __future__ import annotations

import threading
from contextlib import suppress
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from balance_service.engine.source_watch import SourceCheck
from balance_service.engine.task import TaskState
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.hosting.offline_rebuild import rebuild
from balance_service.kafka.partitioner import partition_of
from balance_service.read_models.balance import Balance
from tests.integration.engines import (
    balance,
    balance_stage,
    catch_up,
    counted,
    hosted,
    is_running,
    prepare,
    problems,
    recreate_changelog,
    running_engine,
    settings_for,
    tasks_of,
)
from tests.support.kafka import Writer, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine

IN_0, IN_1 = (next(k for n in range(99) if partition_of((k := f"c{n}").encode(), 2) == p) for p in (0, 1))
# The source is checked every 5 s.
HALTS_WITHIN_SECONDS = 10


@pytest.fixture
def admin(stack: LocalStack) -> AdminClient:
    return AdminClient({"bootstrap.servers": stack.bootstrap_servers})


def delete_below(admin: AdminClient, topic: str, partition: int, offset: int) -> None:
    below = TopicPartition(topic, partition, offset)
    admin.delete_records([below])[below].result(10)


def revoke_all(engine: Engine) -> None:
    """Closes all tasks, as when the group revokes every partition."""
    for task in tasks_of(engine).dismiss([0, 1]):
        task.close(5)


def reason_of_halt(engine: Engine, partition: int) -> str:
    def is_halted() -> bool:
        task = tasks_of(engine).task(partition)
        return task is not None and task.state is TaskState.HALTED

    eventually(is_halted, f"partition {partition} is halted", HALTS_WITHIN_SECONDS)
    task = tasks_of(engine).task(partition)
    assert task is not None
    assert task.view is None
    return task.snapshot().reason


def test_records_deleted_below_the_position_are_irrelevant(
    stack: LocalStack, admin: AdminClient, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer:
        with running_engine(settings) as engine:
            writer.add(IN_0, "1.00", "2.00", "4.00")
            catch_up(engine)
            delete_below(admin, settings.topic, 0, 2)
            writer.add(IN_0, "8.00")
            catch_up(engine)
            assert balance(engine, IN_0) == Decimal("15.00")
        with running_engine(settings) as engine:
            writer.add(IN_0, "16.00")
            catch_up(engine)
            assert balance(engine, IN_0) == Decimal("31.00")


@pytest.mark.shows("changed-source")
def test_a_gap_above_the_position_halts_only_its_own_partition(
    stack: LocalStack, admin: AdminClient, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer:
        with running_engine(settings) as engine:
            writer.add(IN_0, "1.00")
            catch_up(engine)
        writer.add(IN_0, "2.00", "4.00", "8.00")
        delete_below(admin, settings.topic, 0, 3)
        with running_engine(settings) as engine:
            assert "events 1 to 2" in reason_of_halt(engine, 0)
            writer.add(IN_1, "5.00")
            eventually(lambda: balance(engine, IN_1) == Decimal("5.00"), "the other partition continues")
            # The state is seen before the commit is counted.
            eventually(lambda: counted(engine, "applied") == 1, "only the other partition's event is applied")


@pytest.mark.shows("changed-source")
def test_a_recreated_source_halts_and_names_the_rebuild(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        engine.topics.delete(settings.topic)
        prepare(engine.topics, engine.settings)
        assert "balance-service rebuild" in reason_of_halt(engine, 0)
    # A new producer: the old one caches partition ids of the old topic.
    with Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "32.00")
    rebuild(settings, Balance(), lambda _at, _of: None)
    with running_engine(settings) as engine:
        catch_up(engine)
        assert balance(engine, IN_0) == Decimal("32.00")


@pytest.mark.shows("lost-changelog")
@pytest.mark.parametrize("while_running", [True, False])
def test_a_changelog_lost_together_with_the_first_events_halts_until_a_rebuild(
    stack: LocalStack, admin: AdminClient, names: dict[str, str], tmp_path: Path, while_running: bool
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", allow_finite_retention=True)
    changelog = balance_stage(settings).changelog
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        writer.add(IN_0, "2.00")
        catch_up(engine)
        delete_below(admin, settings.topic, 0, 1)
        if while_running:
            recreate_changelog(engine, settings)
            writer.add(IN_0, "4.00")
            assert "first 1 offsets" in reason_of_halt(engine, 0)
        else:
            engine.topics.delete(changelog)

    # The store still exists, with all that it holds.
    with running_engine(settings) as engine:
        reason = reason_of_halt(engine, 0)
    assert all(part in reason for part in (changelog, "first 1 offsets", "balance-service rebuild"))

    rebuild(settings, Balance(), lambda _at, _of: None)
    with running_engine(settings) as engine:
        catch_up(engine)
        assert balance(engine, IN_0) == Decimal("6.00" if while_running else "2.00")


def test_a_standby_of_a_recreated_source_does_not_answer(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        revoke_all(engine)
        tasks_of(engine).stand_by([0])
        eventually(lambda: any(task.view is not None for task in tasks_of(engine).all()), "the standby answers")
        engine.topics.delete(settings.topic)
        prepare(engine.topics, engine.settings)
        assert "balance-service rebuild" in reason_of_halt(engine, 0)


def test_an_empty_standby_is_not_mistaken_for_one_that_missed_events(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        revoke_all(engine)
        recreate_changelog(engine, settings)
        tasks_of(engine).stand_by([0])
        eventually(lambda: tasks_of(engine).answering().keys() == {0}, "the standby is open")
        SourceCheck(tasks_of(engine)).run_once()
        assert tasks_of(engine).source_problem == ""
        assert [(task.state, task.position) for task in tasks_of(engine).snapshots()] == [("TAILING", -1)]


def test_an_instance_without_tasks_reports_that_the_source_was_deleted(
    stack: LocalStack, admin: AdminClient, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine:
        catch_up(engine)
        # Simulates the group's revocation after the topic is gone or others own its partitions.
        revoke_all(engine)
        tasks_of(engine).source_problem = "the broker was away"
        eventually(lambda: not tasks_of(engine).source_problem, "that is over", HALTS_WITHIN_SECONDS)
        admin.delete_topics([settings.topic])[settings.topic].result(10)
        eventually(
            lambda: "was deleted" in tasks_of(engine).source_problem, "the source is missed", HALTS_WITHIN_SECONDS
        )


def test_a_task_is_opened_although_the_dead_letter_topic_was_deleted(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        letters = balance_stage(settings).dead_letters
        engine.topics.delete(letters)
        task = tasks_of(engine).task(0)
        assert task is not None
        tasks_of(engine).failed(task, RetriableError("for the test"))
        writer.send(IN_0, b"poison")
        writer.add(IN_0, "2.00")
        catch_up(engine)
        assert balance(engine, IN_0) == Decimal("3.00")
        assert [letter.value() for letter in read_topic(stack, letters)] == [b"poison"]


def test_a_commit_during_a_slow_end_offset_request_halts_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        ask, checked = engine.topics.offsets, []

        def late(name: str, partitions: Iterable[int], **which: bool) -> dict[int, int]:
            found = ask(name, partitions, **which)
            task = tasks_of(engine).task(0)
            if threading.current_thread().name.startswith("source-check") and not which and task is not None:
                writer.add(IN_0, "1.00")
                eventually(lambda: task.position > found[0], "the event is committed")
                checked.append(found)
            return found

        monkeypatch.setattr(engine.topics, "offsets", late)
        eventually(lambda: len(checked) > 1, "the source was checked")
        assert [task.state for task in tasks_of(engine).snapshots()] == ["RUNNING"]


@pytest.mark.shows("changed-source")
def test_added_partitions_halt_all_tasks_and_name_the_remedy(
    stack: LocalStack, admin: AdminClient, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        admin.create_partitions([NewPartitions(settings.topic, 3)])[settings.topic].result(10)
        assert f"balance-service topics copy {settings.topic}" in reason_of_halt(engine, 0)
        assert "had 2 partitions and has 3" in reason_of_halt(engine, 1)
    with pytest.raises(ConfigurationError, match=f"balance-service topics copy {settings.topic}"):
        rebuild(settings, Balance(), lambda _at, _of: None)


@pytest.mark.shows("exactly-once")
def test_an_open_transaction_delays_the_position_shows_as_lag_and_counts_once_committed(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    hanging = {"transactional.id": f"hanging-{settings.topic}"}
    with (
        running_engine(settings) as engine,
        Writer(stack, settings.topic, **hanging) as held,
        Writer(stack, settings.topic) as writer,
    ):
        held.producer.init_transactions(10)
        held.producer.begin_transaction()
        held.send(IN_0, held.frame(IN_0, "1.00"))
        held.producer.flush(10)
        writer.add(IN_0, "2.00")
        eventually(lambda: hosted(engine).watermarks.lag(0, 0) == 2, "the lag shows")
        eventually(lambda: is_running(engine, 0), "the task runs")
        task = tasks_of(engine).task(0)
        assert task is not None
        assert (task.position, balance(engine, IN_0)) == (0, None)

        held.producer.commit_transaction(10)
        catch_up(engine)
        assert balance(engine, IN_0) == Decimal("3.00")


@pytest.mark.shows("broker-outage")
def test_tasks_continue_after_a_broker_outage_without_new_events(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        stack.broker.stop()
        try:
            eventually(
                lambda: bool(problems(engine)) or bool(engine.memberships.unconfirmed), "the engine notices the outage"
            )
        finally:
            stack.broker.start()
        eventually(lambda: not problems(engine) and not engine.memberships.unconfirmed, "the engine continues")
        eventually(lambda: {t.state for t in tasks_of(engine).all()} == {TaskState.RUNNING}, "its tasks run")
        assert balance(engine, IN_0) == Decimal("1.00")
        with suppress(KafkaException):
            writer.add(IN_0, "1.00")
        catch_up(engine)
        assert balance(engine, IN_0) == Decimal("2.00")
