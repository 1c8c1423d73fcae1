"""Fail points that a specification arms, and the size of parts."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.store import StateStore
from balance_service.errors import ConfigurationError
from balance_service.process.failpoints import arm, failpoint, part_size
from tests.support.fakes import position_codec
from tests.support.waiting import PATIENCE_SECONDS, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that fail points send."""
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda _pid, number: sent.append(number))
    yield sent
    arm("")


def test_a_fail_point_fires_once_at_its_turn(struck: list[int]) -> None:
    arm("stored=kill@2")

    strikes = []
    for _ in range(4):
        failpoint("stored")
        failpoint("begun")
        strikes.append(len(struck))
    assert strikes == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "specification",
    ["stored", "stored=pause", "stored=kill@0", "elsewhere=kill", "parts", "parts=0", "stored/=kill", "stored@2=kill"],
)
def test_a_specification_without_a_known_fail_point_is_rejected(specification: str) -> None:
    with pytest.raises(ConfigurationError, match="BALANCE_FAILPOINTS"):
        arm(specification)


def test_a_fail_point_of_a_thread_counts_no_other_thread(struck: list[int]) -> None:
    arm("stored/rebuilds=kill@2")
    rebuilds = [threading.Thread(target=failpoint, args=("stored",), name="rebuilds") for _ in range(2)]

    strikes = []
    for thread in rebuilds:
        failpoint("stored")
        thread.start()
        thread.join()
        strikes.append(len(struck))
    assert strikes == [0, 1]


def test_parts_keep_their_size_unless_a_specification_reduces_it(struck: list[int]) -> None:
    arm("parts=7,stored=kill")
    assert (part_size(20_000), part_size(5)) == (7, 5)

    arm("stored=kill")
    assert part_size(20_000) == 20_000
    assert struck == []


def test_a_process_can_die_between_two_parts_of_a_write_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StateStore(tmp_path / "balance_0", position_codec())
    found = []

    def die(_pid: int, _signal: int) -> None:
        found.append((store.changelog_offset, store.written_up_to, store.get_many([b"0", b"3", b"4"])))

    monkeypatch.setattr("os.kill", die)
    arm("parts=2,part-stored=kill@2")
    store.write([(b"%d" % n, b"state") for n in range(6)], 9)
    arm("")

    # Two of three parts are written, and the store records that it is ahead of its complete offset.
    assert found == [(0, 9, [b"state", b"state", None])]
    assert (store.changelog_offset, store.written_up_to) == (9, 9)
    store.close()


def test_a_claimed_point_fires_from_its_turn_on_if_the_folder_contains_its_file(
    struck: list[int], tmp_path: Path
) -> None:
    arm(f"stored=kill@2,begun=kill,claims={tmp_path}")
    strikes = []
    for offered in ("", "stored", "", "stored"):
        if offered:
            (tmp_path / offered).touch()
        failpoint("stored")
        failpoint("begun")
        strikes.append(len(struck))

    # The first time is not its turn; after it has fired, it is disarmed and leaves the file to other processes.
    assert strikes == [0, 1, 1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["stored"]


_REACHES_REPEATEDLY = """
import pathlib, sys
from balance_service.process.failpoints import arm, failpoint
folder = pathlib.Path(sys.argv[1])
arm(f"begun=kill,claims={folder}")
print(flush=True)
while not (folder / "enough").exists():
    failpoint("begun")
"""


def test_a_claimed_point_fires_in_one_of_several_processes_that_reach_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _REACHES_REPEATEDLY, str(tmp_path)]
    with ExitStack() as opened:
        reaching = [opened.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for _ in range(4)]
        opened.callback((tmp_path / "enough").touch)
        for process in reaching:
            assert process.stdout is not None
            process.stdout.readline()
        (tmp_path / "begun").touch()
        eventually(lambda: any(process.poll() is not None for process in reaching), "the point fires in one of them")
        (tmp_path / "enough").touch()
        ends = sorted(process.wait(PATIENCE_SECONDS) for process in reaching)

    assert ends == [-signal.SIGKILL, 0, 0, 0]
