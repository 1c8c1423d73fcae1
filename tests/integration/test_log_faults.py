"""What happens when the source is not the log it was: nothing is skipped, and the task says why it does not go on."""

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
from balance_service.hosting.rebuild import rebuild
from balance_service.kafka.partitioner import partition_of
from balance_service.read_models.balance import Balance
from tests.integration.engines import (
    balance,
    balance_stage,
    catch_up,
    counted,
    hosted,
    is_running,
    make_anew,
    prepare,
    problems,
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
# It is looked at every 5 s.
HALTS_WITHIN_SECONDS = 10


@pytest.fixture
def admin(stack: LocalStack) -> AdminClient:
    return AdminClient({"bootstrap.servers": stack.bootstrap_servers})


def delete_below(admin: AdminClient, topic: str, partition: int, offset: int) -> None:
    below = TopicPartition(topic, partition, offset)
    admin.delete_records([below])[below].result(10)


def let_go(engine: Engine) -> None:
    """As when the group takes every partition away."""
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


def test_records_deleted_below_the_position_are_not_missed(
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


def test_a_gap_above_the_position_halts_its_partition_and_no_other(
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
            eventually(lambda: balance(engine, IN_1) == Decimal("5.00"), "the other partition goes on")
            assert counted(engine, "applied") == 1


def test_a_source_deleted_and_made_anew_halts_and_names_the_rebuild(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        engine.topics.delete(settings.topic)
        prepare(engine.topics, engine.settings)
        assert "balance-service rebuild" in reason_of_halt(engine, 0)
    # A new producer: the old one's ids of partitions are those of the old topic.
    with Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "32.00")
    rebuild(settings, Balance(), lambda _at, _of: None)
    with running_engine(settings) as engine:
        catch_up(engine)
        assert balance(engine, IN_0) == Decimal("32.00")


@pytest.mark.parametrize("while_running", [True, False])
def test_a_changelog_that_is_lost_together_with_its_first_events_halts_until_a_rebuild(
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
            make_anew(engine, settings)
            writer.add(IN_0, "4.00")
            assert "first 1 offsets" in reason_of_halt(engine, 0)
        else:
            engine.topics.delete(changelog)

    # The store is still there, and so is what it knows.
    with running_engine(settings) as engine:
        reason = reason_of_halt(engine, 0)
    assert all(part in reason for part in (changelog, "first 1 offsets", "balance-service rebuild"))

    rebuild(settings, Balance(), lambda _at, _of: None)
    with running_engine(settings) as engine:
        catch_up(engine)
        assert balance(engine, IN_0) == Decimal("6.00" if while_running else "2.00")


def test_a_standby_of_a_source_that_was_made_anew_answers_nobody(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        let_go(engine)
        tasks_of(engine).stand_by([0])
        eventually(lambda: any(task.view is not None for task in tasks_of(engine).all()), "the standby answers")
        engine.topics.delete(settings.topic)
        prepare(engine.topics, engine.settings)
        assert "balance-service rebuild" in reason_of_halt(engine, 0)


def test_a_standby_that_has_nothing_yet_is_not_taken_for_one_that_missed_events(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        let_go(engine)
        make_anew(engine, settings)
        tasks_of(engine).stand_by([0])
        eventually(lambda: tasks_of(engine).answering().keys() == {0}, "the standby is open")
        SourceCheck(tasks_of(engine)).run_once()
        assert tasks_of(engine).source_problem == ""
        assert [(task.state, task.position) for task in tasks_of(engine).snapshots()] == [("TAILING", -1)]


def test_an_instance_without_tasks_says_that_the_source_is_gone_and_nothing_else(
    stack: LocalStack, admin: AdminClient, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine:
        catch_up(engine)
        # As the group does once the topic is gone, or others are to own its partitions.
        let_go(engine)
        tasks_of(engine).source_problem = "the broker was away"
        eventually(lambda: not tasks_of(engine).source_problem, "that is over", HALTS_WITHIN_SECONDS)
        admin.delete_topics([settings.topic])[settings.topic].result(10)
        eventually(
            lambda: "was deleted" in tasks_of(engine).source_problem, "the source is missed", HALTS_WITHIN_SECONDS
        )


def test_a_task_is_opened_though_the_topic_of_dead_letters_was_deleted(
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


def test_a_commit_while_the_broker_is_slow_to_tell_the_end_halts_nothing(
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
                eventually(lambda: task.position > found[0], "it is committed meanwhile")
                checked.append(found)
            return found

        monkeypatch.setattr(engine.topics, "offsets", late)
        eventually(lambda: len(checked) > 1, "the source was looked at")
        assert [task.state for task in tasks_of(engine).snapshots()] == ["RUNNING"]


def test_more_partitions_halt_all_and_the_way_out_is_named(
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


def test_an_open_transaction_holds_up_the_position_shows_as_lag_and_counts_once_committed(
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


def test_after_an_outage_of_the_broker_the_tasks_go_on_though_no_event_comes(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        catch_up(engine)
        stack.broker.stop()
        try:
            eventually(lambda: bool(problems(engine)) or not engine.membership.lease.holds, "it notices")
        finally:
            stack.broker.start()
        eventually(lambda: not problems(engine) and engine.membership.lease.holds, "it goes on")
        eventually(lambda: {t.state for t in tasks_of(engine).all()} == {TaskState.RUNNING}, "its tasks run")
        assert balance(engine, IN_0) == Decimal("1.00")
        with suppress(KafkaException):
            writer.add(IN_0, "1.00")
        catch_up(engine)
        assert balance(engine, IN_0) == Decimal("2.00")
