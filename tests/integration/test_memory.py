"""What an instance holds on to: no more after many micro-batches than after a few."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from balance_service.events.micro_batch import MicroBatches
from tests.integration.engines import Writer, catch_up, running_engine, settings_for

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from pyspark.sql import DataFrame

    from balance_service.local.stack import LocalStack

BATCHES = 200
# Those since Python's garbage was collected last, and what is under way.
FEW = 80


def test_plans_of_micro_batches_are_let_go_of(
    stack: LocalStack,
    names: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", max_records_per_batch=10)
    plans: list[Any] = []
    process = MicroBatches.process

    def watched(batches: MicroBatches, rows: DataFrame, batch_id: int) -> None:
        frame: Any = rows
        plans.append(frame.sparkSession.sparkContext._jvm.java.lang.ref.WeakReference(frame._jdf))
        process(batches, rows, batch_id)

    monkeypatch.setattr(MicroBatches, "process", watched)
    # A serving process has it look for cycles only now and then.
    gc.disable()
    request.addfinalizer(gc.enable)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        for _ in range(BATCHES):
            writer.add("many", *["0.01"] * 10)
        catch_up(engine)
        jvm: Any = engine._spark.sparkContext._jvm
        jvm.java.lang.System.gc()

        assert len(plans) > 2 * FEW
        assert sum(plan.get() is not None for plan in plans) < FEW
