"""`balance-service demo`: the whole story, on a stack of its own."""

from __future__ import annotations

from tests.support.commands import run


def test_the_demo_plays_to_its_end() -> None:
    done = run({}, "demo", seconds=280)

    assert done.code == 0, done
