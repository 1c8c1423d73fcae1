"""`balance-service demo`: the whole story, on a stack of its own."""

from __future__ import annotations

import pytest

from tests.support.commands import run


# A minute on a machine of its own; each of its steps has a bound of its own.
@pytest.mark.timeout(600)
def test_the_demo_plays_to_its_end() -> None:
    done = run({}, "demo", seconds=560)

    assert done.code == 0, done
