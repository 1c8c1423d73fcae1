"""Stalls, outages and lost changelogs around a switch: a recount of all topics ends each test."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.generation_story import STALLS, Story, arcade

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(900)

_OUTAGE_SECONDS = 2.0


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with arcade(tmp_path_factory.mktemp("stack")) as machines, Story(*machines, "rewards", 2, stalls=True) as story:
        yield story


@pytest.mark.shows("rebuild", "outputs-once")
@pytest.mark.parametrize("point", STALLS)
def test_a_switch_during_which_an_owner_stalls_is_made_once(story: Story, point: str) -> None:
    to = story.another()
    stalled = story.stall(point, "switch", to=to)
    # The other instance owns all partitions now, and has switched them.
    story.wait_switched(to)

    stalled.signal_all(signal.SIGCONT)
    story.check()
    # Records that it may have written count when tasks are opened.
    story.restart()
    story.check()


@pytest.mark.shows("rebuild", "outputs-once", "broker-outage")
def test_a_switch_goes_on_after_an_outage_of_the_broker(story: Story) -> None:
    to = story.another()
    stalled = story.stall("begun/rebuilds", "switch", to=to)

    story.stack.broker.kill()
    stalled.signal_all(signal.SIGCONT)
    time.sleep(_OUTAGE_SECONDS)
    story.stack.broker.start()

    story.wait_switched(to)
    story.check()


@pytest.mark.shows("outputs-once", "lost-changelog")
def test_a_generation_that_loses_its_changelog_sends_nothing_twice(story: Story) -> None:
    second = story.another()
    first = story.the("serving")
    for to in (second, first):
        # So that it has sent nothing itself.
        story.workload.stop()
        story.ask("switch", to=to)
        story.wait_switched(to)
        story.workload.start()
        story.lose_changelog(to)
        story.check()
    # It is folded again, and is silent until it serves.
    story.lose_changelog(second)
    story.check()
    story.ask("switch", to=second)
    story.wait_switched(second)
    story.check()
