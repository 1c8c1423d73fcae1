"""A custom fold that fails: its task halts with place and reason, skips nothing, and other tasks continue."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

from balance_service.engine.task import TaskState
from balance_service.hosting.engine import Engine
from balance_service.kafka.partitioner import partition_of
from balance_service.model.placing import stages_of
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.observability.metrics import Metrics
from tests.integration.engines import balance, patience, settings_for, state_directory, tasks_of
from tests.support.kafka import Writer, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.task import Task
    from balance_service.model.events import Event, State

IN_0, IN_1 = (next(k for n in range(99) if partition_of((k := f"c{n}").encode(), 2) == p) for p in (0, 1))


class Superstitious(ReadModel):
    """The last amount, with a bug at 13."""

    name = "test-superstitious"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = "BalanceState"

    def fold(self, state: State | None, event: Event) -> State | None:
        """Fails at 13."""
        words = {amount: str(amount) for amount in range(20) if amount != 13}
        return {"customerId": event["customerId"], "amount": Decimal(words[int(event["amount"])])}


def task_of(engine: Engine, partition: int) -> Task:
    task = tasks_of(engine).task(partition)
    assert task is not None
    return task


def test_a_failing_fold_halts_only_its_own_partition_with_the_reason(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    engine = Engine(
        settings,
        state_directory(settings),
        stages_of(Superstitious(), settings),
        [Superstitious()],
        Metrics(),
        patience(),
    )
    engine.start()
    try:
        with Writer(stack, settings.topic) as writer:
            writer.add(IN_0, "12.00")
            eventually(lambda: balance(engine, IN_0) == Decimal("12.00"), "the first event is folded")
            writer.add(IN_0, "13.00", "14.00")
            eventually(lambda: task_of(engine, 0).state is TaskState.HALTED, "the task of the partition is halted")
            writer.add(IN_1, "14.00")
            eventually(lambda: balance(engine, IN_1) == Decimal("14.00"), "the other partition continues")

        assert task_of(engine, 0).snapshot().reason == (
            f"the code of the read model test-superstitious fails at offset 1 of {settings.topic}:0 with KeyError; "
            "correct it, and restart the instance"
        )
        assert task_of(engine, 0).position == 1
        assert read_topic(stack, f"{settings.topic}-dead-letters") == []
    finally:
        engine.stop()
