"""Which tasks stand still, and how long they report a problem."""

from __future__ import annotations

from balance_service.engine.progress import Progress, Seen
from balance_service.engine.records import STANDS_AFTER_SECONDS, TaskId
from tests.support.fakes import Clock

TASK = TaskId("balance", 3)
P = TASK.partition


class Watched:
    """The progress of one task, which is looked at every second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.progress = Progress(self.clock, lambda: int(self.clock.now * 1000))

    def look(self, position: int, lag: int | None = 5, *, seconds: int = 0, restores: bool = False) -> None:
        for _ in range(seconds or 1):
            self.progress.look({P: Seen(position, lag, restores)})
            self.clock.now += bool(seconds)

    def still(self, position: int) -> bool:
        stand = self.progress.stand(P, position)
        return stand is not None and stand.is_still

    def error(self, position: int) -> str:
        stand = self.progress.stand(P, position)
        return "" if stand is None else stand.error


MINUTE = int(STANDS_AFTER_SECONDS)


def test_a_task_with_records_to_apply_stands_still_after_a_minute_without_progress() -> None:
    watched = Watched()
    watched.look(7, seconds=MINUTE - 1)
    assert not watched.still(7)

    watched.look(7, seconds=1)
    assert watched.still(7)
    assert not watched.still(8)


def test_a_task_that_is_caught_up_does_not_stand_still_and_a_later_record_has_its_full_minute() -> None:
    watched = Watched()
    watched.look(7, 0, seconds=2 * MINUTE)
    watched.look(7, 1, seconds=MINUTE - 2)
    assert not watched.still(7)

    watched.look(7, 1, seconds=3)
    assert watched.still(7)


def test_a_task_that_is_opened_again_and_again_at_one_position_stands_still() -> None:
    watched = Watched()
    for _ in range(2 * MINUTE):
        watched.look(7, seconds=1)
        watched.look(-1, None, seconds=1)
        watched.look(7, seconds=1, restores=True)

    assert watched.still(7)
    # Between two tasks, the problem stays.
    assert watched.still(-1)


def test_a_restoration_does_not_count_as_standing_still() -> None:
    watched = Watched()
    watched.look(7, seconds=2)
    watched.look(7, seconds=10 * MINUTE, restores=True)
    watched.look(7, seconds=2)

    assert not watched.still(7)


def test_the_error_of_a_query_is_reported_until_the_position_has_moved() -> None:
    watched = Watched()
    watched.look(7)
    watched.progress.failed(P, 7, "Spark refuses the schema")
    watched.progress.reads(P)
    watched.look(7, seconds=3)
    assert watched.error(7) == "Spark refuses the schema"

    assert watched.error(8) == ""
    watched.look(8)
    assert watched.error(8) == ""


def test_the_error_of_an_idle_partition_is_reported_until_a_query_reads_it() -> None:
    watched = Watched()
    watched.progress.failed(P, 7, "the source is gone")
    watched.look(7, 0, seconds=3)
    assert watched.error(7) == "the source is gone"

    watched.progress.reads(P)
    watched.look(7, 0)
    assert watched.error(7) == ""


def test_a_partition_that_returns_has_its_full_minute() -> None:
    watched = Watched()
    watched.look(7, seconds=MINUTE)
    watched.progress.look({})
    watched.look(7, seconds=1)

    assert not watched.still(7)


def test_the_reason_names_task_partition_position_lag_time_and_error() -> None:
    watched = Watched()
    watched.clock.now = 1_767_225_600.0
    watched.look(7, 5)
    watched.progress.failed(P, 7, "it failed")
    watched.clock.now += MINUTE
    stand = watched.progress.stand(P, 7)

    assert stand is not None
    assert stand.told(TASK, stand.error) == (
        "balance_3 stands still: partition 3 has been at position 7 since 2026-01-01T00:00:00Z, and is 5 records "
        "behind: it failed"
    )
