"""Instances die at the steps of a rebuild, a switch and a drop, and a recount of all topics ends each test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.generation_story import DROP, Story, arcade

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalStack
    from tests.chaos.systems import SystemWorkload

pytestmark = pytest.mark.timeout(900)

# With the number of instances.
_REWARDS, _LEADERBOARD = pytest.param(("rewards", 2), id="rewards"), pytest.param(("leaderboard", 3), id="leaderboard")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalStack, SystemWorkload]]:
    with arcade(tmp_path_factory.mktemp("stack")) as machines:
        yield machines


@pytest.fixture(scope="module")
def story(machines: tuple[LocalStack, SystemWorkload], request: pytest.FixtureRequest) -> Iterator[Story]:
    with Story(*machines, *request.param) as story:
        yield story


@pytest.mark.shows("rebuild", "outputs-once")
@pytest.mark.parametrize("story", [_REWARDS], indirect=True)
def test_a_rebuild_survives_a_kill_at_each_step(story: Story) -> None:
    story.leave_one()
    before = story.statuses()
    rebuild: dict[str, Any] = {"verb": "rebuild", "switch": "never", "keepOld": 3600}

    story.die_at("generations-changed", **rebuild)
    assert story.statuses() == before
    story.die_at("generations-written", "compared", **rebuild)
    # The comparison of the next one that gets there.
    story.die_at("generations-changed")
    story.die_at("generations-written")

    assert story.make_ready() > max(before)
    story.check()


@pytest.mark.shows("rebuild", "outputs-once")
@pytest.mark.parametrize("story", [_REWARDS, _LEADERBOARD], indirect=True)
def test_a_switch_and_the_way_back_survive_a_kill_at_each_step(story: Story) -> None:
    second = story.make_ready()
    first = story.the("serving")
    # A running instance switches each of its partitions; one that starts does so as it opens them. The last step is in
    # the record that all partitions have switched.
    for to, *steps, last in (
        (second, "successor-held", "others-fenced", "generations-changed"),
        (first, "produced", "committed", "generations-written"),
        (second, "taken-over", "generations-written"),
    ):
        story.die_at("generations-changed", verb="switch", to=to)
        assert story.statuses()[to] != "serving"
        story.wait_ready()
        story.die_at(*steps, verb="switch", to=to)
        story.die_at(last)
        story.wait_switched(to)
    story.check()


@pytest.mark.shows("rebuild")
@pytest.mark.parametrize("story", [_REWARDS, _LEADERBOARD], indirect=True)
def test_a_drop_survives_a_kill_at_each_step(story: Story) -> None:
    number = story.another()
    story.die_at("generations-changed", verb="drop", generation=number)
    assert number in story.statuses()
    # An instance that starts after the drop removes its stores before it runs.
    story.wait_ready()
    story.die_at("generations-written", *DROP, verb="drop", generation=number)
    story.wait_gone(number)
    story.check()
