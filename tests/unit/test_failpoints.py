"""Fail points: what a specification arms, and how small it makes what goes in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from balance_service.errors import ConfigurationError
from balance_service.process.failpoints import arm, in_a_part, reach
from balance_service.state.store.store import StateStore
from tests.support.fakes import position_codec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that fail points have sent."""
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda _pid, number: sent.append(number))
    yield sent
    arm("")


def test_a_fail_point_strikes_once_at_its_turn(struck: list[int]) -> None:
    arm("stored=kill@2")

    strikes = []
    for _ in range(4):
        reach("stored")
        reach("begun")
        strikes.append(len(struck))
    assert strikes == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "specification", ["stored", "stored=pause", "stored=kill@0", "elsewhere=kill", "parts", "parts=0"]
)
def test_what_names_no_fail_point_is_refused(specification: str) -> None:
    with pytest.raises(ConfigurationError, match="BALANCE_FAILPOINTS"):
        arm(specification)


def test_parts_are_as_large_as_ever_unless_they_are_to_be_small(struck: list[int]) -> None:
    arm("parts=7,stored=kill")
    assert (in_a_part(20_000), in_a_part(5)) == (7, 5)

    arm("stored=kill")
    assert in_a_part(20_000) == 20_000
    assert struck == []


def test_between_two_parts_of_a_stores_write_a_process_can_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore(tmp_path / "balance_0", position_codec())
    found = []

    def die(_pid: int, _signal: int) -> None:
        found.append((store.changelog_offset, store.reaches, store.get_many([b"0", b"3", b"4"])))

    monkeypatch.setattr("os.kill", die)
    arm("parts=2,part-stored=kill@2")
    store.write([(b"%d" % n, b"state") for n in range(6)], 9)
    arm("")

    # Two parts of three are written, and the store says that it reaches further than it has all of.
    assert found == [(0, 9, [b"state", b"state", None])]
    assert (store.changelog_offset, store.reaches) == (9, 9)
    store.close()
