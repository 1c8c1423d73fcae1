"""Fail points that are offered to all instances: how many at a time, until when, and to whom."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from balance_service.process.failpoints import arm, reach
from tests.chaos.cluster import Strike
from tests.chaos.offers import Offers
from tests.chaos.plan import POINTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def test_as_many_points_are_offered_at_a_time_as_may_be_in_the_order_of_the_round(tmp_path: Path) -> None:
    offers, found = _offers(tmp_path, ["stored", "letters-read", "fenced"], at_once=2), []
    for struck in ("letters-read", "stored", "fenced"):
        offers.offer()
        found.append(_offered(tmp_path))
        offers.taken(Strike(struck, 0.0))
        (tmp_path / "offers" / struck).unlink()

    offers.offer()
    assert [*found, _offered(tmp_path)] == [{"stored", "letters-read"}, {"stored", "fenced"}, {"fenced"}, set()]
    assert offers.left == []


def test_a_point_that_is_to_strike_twice_is_offered_again_once_it_has_struck(tmp_path: Path) -> None:
    offers = _offers(tmp_path, ["begun", "begun"], at_once=2)

    offers.offer()
    assert offers.left == ["begun", "begun"]
    offers.taken(Strike("begun", 0.0))
    (tmp_path / "offers" / "begun").unlink()
    assert offers.left == ["begun"]
    offers.offer()
    assert _offered(tmp_path) == {"begun"}


def test_instances_write_in_parts_until_the_point_between_two_parts_has_struck(tmp_path: Path) -> None:
    offers = _offers(tmp_path, ["begun", "part-stored"], at_once=1)

    for struck, in_parts in (("begun", True), ("part-stored", True)):
        offers.offer()
        assert offers.in_parts is in_parts
        offers.taken(Strike(struck, 0.0))
    assert not offers.in_parts


@pytest.mark.parametrize("point", POINTS)
def test_an_instance_that_reaches_an_offered_point_dies_there_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    struck: list[int] = []
    monkeypatch.setattr("os.kill", lambda _pid, number: struck.append(number))
    offers = _offers(tmp_path, [point], at_once=2)
    arm(offers.specification())
    try:
        for _ in range(16):
            reach(point)
        assert not struck
        offers.offer()
        reach(point)
    finally:
        arm("")

    assert len(struck) == 1
    assert _offered(tmp_path) == set()


def _offers(folder: Path, points: Sequence[str], at_once: int) -> Offers:
    return Offers(folder / "offers", points, at_once, random.Random(1))


def _offered(folder: Path) -> set[str]:
    return {file.name for file in (folder / "offers").iterdir()}
