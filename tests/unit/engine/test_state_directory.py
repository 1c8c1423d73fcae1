"""The state directory: one process, one application id, one format."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.records import TaskId
from balance_service.engine.state_directory import FORMAT, StateDirectory
from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MARKER = "state-directory.json"
HOLDER = """
import sys
from pathlib import Path
from balance_service.engine.state_directory import StateDirectory
held = StateDirectory(Path(sys.argv[1]), "app")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_missing_directory_is_created(path: Path) -> None:
    StateDirectory(path / "deep" / "down", "app").close()

    assert (path / "deep" / "down" / MARKER).exists()


def test_each_task_has_a_store_of_its_own(path: Path) -> None:
    directory = StateDirectory(path, "app")

    assert directory.store_path(TaskId("balance", 1)) == path / "balance_1"
    assert directory.store_path(TaskId("leaderboard", 1)) != directory.store_path(TaskId("balance", 1))
    directory.close()


def test_a_directory_can_be_taken_again_by_the_same_application(path: Path) -> None:
    StateDirectory(path, "app").close()
    (path / "balance_0").mkdir()

    StateDirectory(path, "app").close()


def test_the_directory_of_another_application_is_rejected(path: Path) -> None:
    StateDirectory(path, "other").close()

    with pytest.raises(ConfigurationError, match="'other', not 'app'"):
        StateDirectory(path, "app")


def test_a_directory_locked_by_another_process_is_rejected(path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"BALANCE_STATE_DIR .* is in use by another process"):
        StateDirectory(path, "app")


def test_a_killed_process_leaves_the_directory_unlocked(path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()

    StateDirectory(path, "app").close()


def test_a_directory_locked_in_this_process_is_rejected_until_it_is_closed(path: Path) -> None:
    first = StateDirectory(path, "app")
    with pytest.raises(ConfigurationError):
        StateDirectory(path, "app")
    first.close()

    StateDirectory(path, "app").close()


def test_a_rejected_directory_is_not_kept_locked(path: Path) -> None:
    StateDirectory(path, "other").close()
    with pytest.raises(ConfigurationError):
        StateDirectory(path, "app")

    StateDirectory(path, "other").close()


def test_an_unwritable_path_is_rejected(tmp_path: Path) -> None:
    # Below a regular file no user can make a directory, not even root.
    (tmp_path / "file").touch()

    with pytest.raises(ConfigurationError, match=r"BALANCE_STATE_DIR .* cannot be written: Not a directory"):
        StateDirectory(tmp_path / "file" / "state", "app")


def test_a_path_to_a_file_is_rejected(path: Path) -> None:
    path.touch()

    with pytest.raises(ConfigurationError, match=r"BALANCE_STATE_DIR .* cannot be written"):
        StateDirectory(path, "app")


@pytest.mark.parametrize("name", ["is_dir", "iterdir", "exists"])
def test_an_unreadable_directory_is_rejected(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # By a patch, for nothing is forbidden to root.
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    path.mkdir()
    monkeypatch.setattr(f"pathlib.Path.{name}", forbidden)

    with pytest.raises(
        ConfigurationError, match=r"BALANCE_STATE_DIR .* cannot be (read|written): Permission denied; name a directory"
    ):
        StateDirectory(path, "app")


def test_a_directory_on_a_full_disk_is_rejected_and_not_kept_locked(path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pathlib.Path.write_text", full)
        with pytest.raises(ConfigurationError, match="cannot be written: No space left on device; make room"):
            StateDirectory(path, "app")

    StateDirectory(path, "app").close()


def test_a_directory_of_a_newer_format_is_rejected(path: Path) -> None:
    path.mkdir()
    (path / MARKER).write_text(json.dumps({"format": FORMAT + 1, "application_id": "app"}))

    with pytest.raises(ConfigurationError, match=f"format {FORMAT + 1}, this version knows {FORMAT}"):
        StateDirectory(path, "app")


def test_a_directory_with_other_files_is_rejected_and_left_unchanged(path: Path) -> None:
    path.mkdir()
    (path / "thesis.doc").write_text("five years")

    with pytest.raises(ConfigurationError, match=r"not ours \(thesis\.doc"):
        StateDirectory(path, "app")

    assert [p.name for p in path.iterdir()] == ["thesis.doc"]


def test_the_root_of_a_new_volume_counts_as_empty(path: Path) -> None:
    (path / "lost+found").mkdir(parents=True)

    StateDirectory(path, "app").close()

    assert (path / MARKER).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '"x"', "null"])
def test_an_unreadable_marker_is_rejected_with_a_remedy(path: Path, content: str) -> None:
    path.mkdir()
    (path / MARKER).write_text(content)

    with pytest.raises(ConfigurationError, match="remove the state directory"):
        StateDirectory(path, "app")


def test_a_directory_without_a_complete_marker_after_a_crash_is_accepted(path: Path) -> None:
    path.mkdir()
    (path / ".lock").touch()
    (path / f"{MARKER}.new").write_text('{"form')

    StateDirectory(path, "app").close()

    assert json.loads((path / MARKER).read_text()) == {"format": FORMAT, "application_id": "app"}
