"""Shared fail points: their order, and the process that dies."""

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


def test_points_are_offered_one_at_a_time_in_the_order_of_the_round(tmp_path: Path) -> None:
    offers, found = _offers(tmp_path, ["stored", "begun", "begun"]), []
    for struck in ("stored", "begun", "begun"):
        offers.offer()
        offers.offer()
        found.append(_offered(tmp_path))
        (tmp_path / "offers" / struck).unlink()
        # An instance that starts before the strike is noticed must not bring the point back.
        offers.offer()
        found.append(_offered(tmp_path))
        offers.taken(Strike(struck, 0.0))

    offers.offer()
    assert [*found, _offered(tmp_path)] == [{"stored"}, set(), {"begun"}, set(), {"begun"}, set(), set()]
    assert offers.left == []


def test_instances_use_small_parts_until_the_point_between_two_parts_has_struck(tmp_path: Path) -> None:
    offers = _offers(tmp_path, ["begun", "part-stored"])

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
    offers = _offers(tmp_path, [point])
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


def _offers(folder: Path, points: Sequence[str]) -> Offers:
    return Offers(folder / "offers", points, random.Random(1))


def _offered(folder: Path) -> set[str]:
    return {file.name for file in (folder / "offers").iterdir()}
