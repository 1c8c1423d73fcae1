"""A changelog that is replaced: balances are folded again, and none is lost silently."""

from __future__ import annotations

from contextlib import suppress
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.changelog_reader import Part
from balance_service.engine.inheritance import open_writer
from balance_service.engine.records import POSITION_KEY, Position, TaskId
from balance_service.engine.task import TaskState
from balance_service.errors import ConfigurationError, RetriableError, StoreCorruptedError, TaskMigratedError
from balance_service.hosting.offline_rebuild import rebuild
from balance_service.kafka.partitioner import partition_of
from balance_service.kafka.topics import Topics
from balance_service.model.stage import Stage
from balance_service.read_models.balance import Balance
from tests.integration.engines import (
    balance,
    balance_stage,
    catch_up,
    hosted,
    opened_standby,
    recreate_changelog,
    running_engine,
    settings_for,
    tasks_of,
)
from tests.support.kafka import Writer, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.task import Task
    from balance_service.hosting.engine import Engine

CUSTOMERS = [k for n in range(99) if partition_of((k := f"c{n}").encode(), 2) == 0]

_TAILS = 200


def give_one_each(engine: Engine, writer: Writer) -> None:
    for customer in CUSTOMERS:
        writer.add(customer, "1.00")
    catch_up(engine)


def end_of(engine: Engine, topic: str) -> int:
    while True:
        # A new topic has no leader yet.
        with suppress(RetriableError):
            return engine.topics.offsets(topic, [0])[0]


def tail(standby: Task) -> None:
    for _ in range(_TAILS):
        standby.tail()


def balances(engine: Engine) -> dict[str, Decimal | None]:
    return {customer: balance(engine, customer) for customer in CUSTOMERS}


@pytest.mark.shows("lost-changelog")
def test_a_changelog_recreated_under_a_running_task_is_refilled_without_losing_a_balance(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer:
        with running_engine(settings) as engine:
            give_one_each(engine, writer)
            recreate_changelog(engine, settings)

            writer.add(CUSTOMERS[0], "0.50")
            catch_up(engine)

            eventually(lambda: None not in balances(engine).values(), "all balances exist")
            (epoch,) = {task.epoch for task in tasks_of(engine).snapshots() if task.task_id.partition == 0}
            assert epoch > 1, "the epoch rises, so that peers accept the owner"
            expected = dict.fromkeys(CUSTOMERS, Decimal("1.00")) | {CUSTOMERS[0]: Decimal("1.50")}
            assert balances(engine) == expected
        with running_engine(settings_for(stack, names, tmp_path / "another")) as engine:
            catch_up(engine)
            assert balances(engine) == expected


@pytest.mark.shows("lost-changelog")
def test_a_new_changelog_never_holds_only_part_of_the_states(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer, running_engine(settings) as engine:
        give_one_each(engine, writer)
        recreate_changelog(engine, settings)
        for _ in range(3):
            writer.add(CUSTOMERS[0], "0.50")
        catch_up(engine)
        eventually(lambda: balance(engine, CUSTOMERS[0]) == Decimal("2.50"), "the events are folded")

        keys = {
            bytes(m.key() or b"") for m in read_topic(stack, balance_stage(settings).changelog) if m.partition() == 0
        }
        assert {customer.encode() for customer in CUSTOMERS} <= keys


def test_a_standby_that_missed_the_replacement_applies_nothing_from_the_new_changelog(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer, running_engine(settings) as engine:
        give_one_each(engine, writer)
        with opened_standby(engine, tmp_path / "standby") as standby:
            assert standby.state is TaskState.TAILING
            stands_at = end_of(engine, balance_stage(settings).changelog)
            recreate_changelog(engine, settings)
            while end_of(engine, balance_stage(settings).changelog) <= stands_at + len(CUSTOMERS):
                writer.add(CUSTOMERS[0], "0.50")
                catch_up(engine)

            # Detected by the offset if librdkafka has seen the end of the shorter topic, otherwise by the topic id.
            with pytest.raises((StoreCorruptedError, RetriableError), match="changelog"):
                tail(standby)


@pytest.mark.parametrize("slept_seconds", [0, 1_800])
def test_a_standby_stops_at_a_position_of_another_changelog(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, slept_seconds: int
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine:
        catch_up(engine)
        with opened_standby(engine, tmp_path / "standby") as standby:
            standby.replica.completeness._as_of -= slept_seconds
            stranger = Position(1, 1, hosted(engine).source.topic_id, changelog_topic_id="another")
            record = (POSITION_KEY, hosted(engine).processor.position_codec.encode(stranger.record()))

            with pytest.raises(RetriableError, match="recreated"):
                standby._apply([Part([record], 100, is_whole=True)])


def test_a_standby_is_not_promoted_on_another_changelog(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with running_engine(settings) as engine:
        catch_up(engine)
        with opened_standby(engine, tmp_path / "standby") as standby:
            recreate_changelog(engine, settings)

            with pytest.raises(RetriableError, match="recreated"):
                standby.promote()


def test_a_former_owner_does_not_fence_its_successor(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    with Writer(stack, settings.topic) as writer, running_engine(settings) as engine:
        writer.add(CUSTOMERS[0], "1.00")
        catch_up(engine)
        context = hosted(engine)
        where = context.settings, context.stage, context.topics, context.source
        late = open_writer(TaskId("balance", 0), *where)

        with pytest.raises(TaskMigratedError):
            late.fence(lambda: True)

        late.close()
        writer.add(CUSTOMERS[0], "2.00")
        catch_up(engine)
        (task,) = tasks_of(engine).snapshots()
        assert (task.epoch, balance(engine, CUSTOMERS[0])) == (1, Decimal("3.00"))


@pytest.mark.shows("own-changelog")
def test_another_application_whose_names_make_the_same_changelog_takes_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    topics, stage = Topics(settings), balance_stage(settings)
    with Writer(stack, settings.topic) as writer, running_engine(settings) as engine:
        give_one_each(engine, writer)
    end = topics.offsets(stage.changelog, [0, 1])

    with monkeypatch.context() as other:
        other.setattr(Stage, "mark", f"{settings.application_id}-eu\0balance")
        elsewhere = settings.model_copy(update={"state_dir": tmp_path / "other"})
        with running_engine(elsewhere) as engine:
            tasks = engine.stages["balance"]
            halted = {TaskState.HALTED.value}
            eventually(lambda: {task.state for task in tasks.snapshots()} == halted, lambda: str(tasks.snapshots()))
            reasons = {task.reason for task in tasks.snapshots()}
        with pytest.raises(ConfigurationError, match="belongs to 'balance' of application id"):
            rebuild(elsewhere, Balance(), lambda _at, _of: None)

    assert topics.offsets(stage.changelog, [0, 1]) == end
    assert all(f"belongs to 'balance' of application id '{settings.application_id}'" in one for one in reasons)
    with running_engine(settings) as engine:
        catch_up(engine)
        assert balances(engine) == dict.fromkeys(CUSTOMERS, Decimal("1.00"))
