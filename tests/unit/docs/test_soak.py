"""The checks of `make soak`: what levels off passes, and what grows beyond its bound is found."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.chaos.mutants import mutated
from tests.soak.__main__ import _PROJECT, LEAK
from tests.soak.plot import plot
from tests.soak.slopes import HORIZON_HOURS, judged, slope_of, windows

if TYPE_CHECKING:
    from tests.soak.slopes import Verdict

_STEP = 1 / 720


def verdict_of(an_hour: float, *, noise: float = 0.0, saw: float = 0.0, hours: float = 1.0) -> Verdict:
    """The verdict about 400 MiB that grow, with noise and a garbage collector; the capacity is 568 MiB."""
    chooser = random.Random(7)
    samples = []
    for number in range(round(hours / _STEP)):
        at = number * _STEP
        garbage = saw * (number % 17) / 17
        samples.append((at, 400 + an_hour * at + garbage + abs(chooser.gauss(0, noise))))
    return judged("memory", "MiB", samples, 568.0, hours / 24, hours / 3)


def test_a_level_with_noise_and_garbage_levels_off() -> None:
    verdict = verdict_of(0.0, noise=5.0, saw=80.0)

    assert verdict.levels_off
    assert verdict.bound == pytest.approx((568.0 - verdict.level) / HORIZON_HOURS)
    assert verdict.line().endswith("levels off")


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_a_leak_beyond_the_bound_is_found_below_noise_and_garbage(noise: float) -> None:
    verdict = verdict_of(20.0, noise=noise, saw=80.0)

    assert not verdict.levels_off
    assert verdict.slope.least > verdict.bound
    assert verdict.line().endswith("GROWS")


def test_growth_within_the_bound_levels_off() -> None:
    assert verdict_of(0.5).levels_off
    assert not verdict_of(1.5).levels_off


def test_what_may_fill_its_capacity_must_stay_within_it() -> None:
    samples = [(n * _STEP, 10.0 + n / 10) for n in range(720)]

    assert judged("memtables", "MiB", samples, 82.0, 1 / 24, 1 / 3, fills=True).levels_off
    beyond = judged("memtables", "MiB", samples, 81.0, 1 / 24, 1 / 3, fills=True)
    assert not beyond.levels_off
    assert beyond.line().endswith("81.9 of 81.0: GROWS")


def test_what_grows_while_it_warms_up_does_not_count() -> None:
    samples = [(n * _STEP, 400.0 + min(n, 200)) for n in range(720)]

    assert judged("memory", "MiB", samples, 700.0, 1 / 24, 1 / 3).levels_off
    assert judged("memory", "MiB", samples, 700.0, 1 / 24, 0.0).slope.most > 0.0


def test_a_window_has_its_least_sample_and_the_last_one_is_left_out() -> None:
    samples = [(0.0, 5.0), (0.5, 3.0), (1.0, 9.0), (1.9, 8.0), (2.0, 1.0)]

    assert windows(samples, 1.0) == [(0.5, 3.0), (1.5, 8.0)]


def test_the_interval_of_a_slope_holds_it_and_too_few_points_are_refused() -> None:
    least, middle, most = slope_of([(0, 0.0), (1, 1.1), (2, 1.9), (3, 3.2), (4, 3.9), (5, 5.1)])

    assert least < middle < most
    assert middle == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ValueError, match="2 windows are too few"):
        slope_of([(0, 0.0), (1, 1.0)])


def test_the_plot_has_a_panel_for_each_measure() -> None:
    verdict = verdict_of(20.0)

    drawn = plot({"memory": [(0.0, 400.0), (1.0, 420.0)]}, [verdict])

    assert "memory, MiB: +20.00 an hour" in drawn
    assert drawn.count("<polyline") == 1


def test_the_leak_that_must_be_found_can_be_planted() -> None:
    assert "kept" in mutated(LEAK, _PROJECT / LEAK.file)
