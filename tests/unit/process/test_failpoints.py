"""Fail points: what a specification arms, and how small it makes what goes in parts."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.store.store import StateStore
from balance_service.errors import ConfigurationError
from balance_service.process.failpoints import arm, in_a_part, reach
from tests.support.fakes import position_codec
from tests.support.waiting import PATIENCE_SECONDS, eventually

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


def test_a_claimed_point_strikes_from_its_turn_on_where_the_folder_has_its_file(
    struck: list[int], tmp_path: Path
) -> None:
    arm(f"stored=kill@2,begun=kill,claims={tmp_path}")
    strikes = []
    for offered in ("", "stored", "", "stored"):
        if offered:
            (tmp_path / offered).touch()
        reach("stored")
        reach("begun")
        strikes.append(len(struck))

    # The first time is not its turn; once it has struck, it strikes no more, and leaves the file to others.
    assert strikes == [0, 1, 1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["stored"]


_REACHES_UNTIL_TOLD = """
import pathlib, sys
from balance_service.process.failpoints import arm, reach
folder = pathlib.Path(sys.argv[1])
arm(f"begun=kill,claims={folder}")
print(flush=True)
while not (folder / "enough").exists():
    reach("begun")
"""


def test_a_claimed_point_strikes_one_of_several_processes_that_reach_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _REACHES_UNTIL_TOLD, str(tmp_path)]
    with ExitStack() as opened:
        reaching = [opened.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for _ in range(4)]
        opened.callback((tmp_path / "enough").touch)
        for process in reaching:
            assert process.stdout is not None
            process.stdout.readline()
        (tmp_path / "begun").touch()
        eventually(lambda: any(process.poll() is not None for process in reaching), "one of them is struck")
        (tmp_path / "enough").touch()
        ends = sorted(process.wait(PATIENCE_SECONDS) for process in reaching)

    assert ends == [-signal.SIGKILL, 0, 0, 0]
