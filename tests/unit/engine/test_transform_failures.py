"""A `transform` that fails at most records halts its task, before it fills the topic of dead letters."""

from __future__ import annotations

import pytest

from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.records import DeadLetter
from balance_service.engine.transform_failures import TransformFailures
from balance_service.errors import TaskHaltedError
from balance_service.model.transform import TRANSFORM_FAILED, TRANSFORM_TOO_LARGE

SAID = "[CAST_INVALID_INPUT] The value 'secret' of the type \"STRING\" cannot be cast"


def batch(start: int, records: int, failed: int, cause: str = TRANSFORM_FAILED) -> TaskBatch:
    letters = [DeadLetter(start + n, 0, b"k", b"v", cause, SAID) for n in range(failed)]
    return TaskBatch(start, PartitionUpdates(start + records, applied=records - failed, dead_letters=letters))


def test_more_than_half_of_a_thousand_successive_records_halt_the_task_and_the_reason_quotes_no_event() -> None:
    failures = TransformFailures("points")
    for start in range(0, 900, 100):
        failures.require_few(batch(start, 100, 60), 0)

    with pytest.raises(TaskHaltedError, match=r"fails at 600 of 1,000 successive records") as halted:
        failures.require_few(batch(900, 100, 60), 0)

    assert "at last at offset 959 with [CAST_INVALID_INPUT]; correct it" in str(halted.value)
    assert "secret" not in str(halted.value)
    assert halted.value.key == b"k"


def test_half_of_the_records_and_other_causes_and_other_partitions_do_not() -> None:
    failures = TransformFailures("points")
    failures.require_few(batch(0, 2_000, 1_000), 0)
    failures.require_few(batch(0, 1_500, 0), 1)
    failures.require_few(batch(0, 5_000, 5_000, "body-undecodable"), 2)
    failures.require_few(batch(0, 999, 999), 3)


def test_a_batch_that_comes_again_counts_once() -> None:
    failures = TransformFailures("points")
    for _ in range(5):
        failures.require_few(batch(0, 300, 300), 0)
    failures.require_few(batch(300, 300, 0), 0)
    failures.require_few(batch(600, 400, 0), 0)


def test_records_before_the_last_thousand_are_forgotten() -> None:
    failures = TransformFailures("points")
    failures.require_few(batch(0, 900, 900), 0)
    with pytest.raises(TaskHaltedError):
        failures.require_few(batch(900, 100, 1), 0)

    failures = TransformFailures("points")
    failures.require_few(batch(0, 900, 450), 0)
    failures.require_few(batch(900, 10_000, 0), 0)
    failures.require_few(batch(10_900, 900, 500), 0)


def test_rows_that_are_too_many_count_and_a_stage_that_re_keys_needs_a_model_of_another_name() -> None:
    failures = TransformFailures("points-by-card", passes_on=True)

    with pytest.raises(TaskHaltedError, match=r"give the corrected model another `name`$"):
        failures.require_few(batch(0, 1_000, 501, TRANSFORM_TOO_LARGE), 0)


def test_a_model_that_makes_dead_letters_of_failures_never_halts() -> None:
    TransformFailures("points", is_on=False).require_few(batch(0, 5_000, 5_000), 0)
