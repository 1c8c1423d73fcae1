"""High watermarks: what lag is measured against, and how old that knowledge is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from balance_service.errors import RetriableError
from balance_service.kafka.watermarks import Watermarks
from tests.support.fakes import Clock

if TYPE_CHECKING:
    from collections.abc import Mapping


class Broker:
    """The source's ends, as long as it is up."""

    def __init__(self) -> None:
        self.ends: Mapping[int, int] = {0: 100, 1: 5}
        self.is_up = True

    def read(self) -> Mapping[int, int]:
        if not self.is_up:
            raise RetriableError("the broker is down")
        return self.ends


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watermarks(broker: Broker, clock: Clock) -> Watermarks:
    return Watermarks(broker.read, clock)


def test_lag_is_unknown_before_the_broker_was_asked(watermarks: Watermarks) -> None:
    assert watermarks.lag(0, 10) is None
    assert watermarks.age_seconds == float("inf")


def test_lag_is_the_end_less_the_position(watermarks: Watermarks) -> None:
    watermarks.refresh()

    assert (watermarks.lag(0, 90), watermarks.lag(1, 5)) == (10, 0)


def test_lag_is_never_negative(watermarks: Watermarks) -> None:
    watermarks.refresh()

    assert watermarks.lag(1, 6) == 0


def test_lag_of_a_task_without_a_position_is_unknown(watermarks: Watermarks) -> None:
    watermarks.refresh()

    assert watermarks.lag(0, -1) is None


def test_lag_of_an_unknown_partition_is_unknown(watermarks: Watermarks) -> None:
    watermarks.refresh()

    assert watermarks.lag(2, 0) is None


def test_watermarks_are_as_old_as_their_request(broker: Broker, clock: Clock) -> None:
    def slowly() -> Mapping[int, int]:
        clock.now += 2
        return broker.read()

    watermarks = Watermarks(slowly, clock)
    watermarks.refresh()
    clock.now += 1

    assert watermarks.age_seconds == 3


def test_a_silent_broker_leaves_the_last_watermarks_to_grow_old(
    watermarks: Watermarks, broker: Broker, clock: Clock
) -> None:
    watermarks.refresh()
    broker.is_up = False
    clock.now += 5
    watermarks.refresh()

    assert watermarks.lag(0, 90) == 10
    assert watermarks.age_seconds == 5
