"""Scratch folders: permissions, cleaning and sockets."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from balance_service.errors import ConfigurationError
from balance_service.process import scratch as module
from balance_service.process.scratch import take_scratch, temporary_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files, with a short path; XDG_RUNTIME_DIR is not set."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def as_another_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this process forget the folders that it uses."""
    return lambda: monkeypatch.setattr(module, "_taken", set())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.shows("local-users")
def test_only_this_user_can_access_both_folders_under_any_umask(state: Path) -> None:
    before = os.umask(0)
    try:
        scratch = take_scratch(state)
        folder = scratch.new_folder()
    finally:
        os.umask(before)

    assert scratch.files == state / "scratch"
    assert [mode(path) for path in (scratch.files, scratch.sockets, folder)] == [0o700] * 3


def test_files_of_a_killed_process_are_removed(state: Path, as_another_process: Callable[[], None]) -> None:
    killed = take_scratch(state)
    (killed.new_folder() / "offsets").mkdir()
    killed.new_socket().touch()
    as_another_process()

    scratch = take_scratch(state)

    assert scratch == killed
    assert list(scratch.files.iterdir()) == list(scratch.sockets.iterdir()) == []


def test_files_of_this_process_stay_when_it_takes_the_directory_again(state: Path) -> None:
    first = take_scratch(state)
    (first.files / "native.so").touch()
    first.close()

    assert list(take_scratch(state).files.iterdir()) == [first.files / "native.so"]


def test_a_link_instead_of_the_folder_is_not_followed(state: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    (state / "scratch").symlink_to(target)

    with pytest.raises(ConfigurationError, match="is a link"):
        take_scratch(state)

    assert (target / "kept").exists()


def test_each_state_directory_has_its_own_sockets_in_the_folder_for_temporary_files(
    state: Path, temporary: Path
) -> None:
    other = state.with_name("other")
    other.mkdir()

    first, second = take_scratch(state), take_scratch(other)

    assert first.sockets != second.sockets
    assert first.sockets.parent == second.sockets.parent == temporary


def test_sockets_are_in_the_runtime_folder_of_the_user_if_there_is_one(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))

    assert take_scratch(state).sockets.parent == runtime


def _open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


def _link(folder: Path) -> None:
    target = folder.with_name("target")
    target.mkdir(0o700)
    folder.symlink_to(target)


@pytest.mark.parametrize("make", [_open_to_others, _link, Path.touch])
def test_a_runtime_folder_that_others_can_access_is_not_used(
    state: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))

    assert take_scratch(state).sockets.parent == temporary


@pytest.mark.parametrize("make", [_open_to_others, _link, Path.touch])
def test_a_folder_for_sockets_that_others_can_access_is_rejected(
    state: Path, as_another_process: Callable[[], None], make: Callable[[Path], None]
) -> None:
    scratch = take_scratch(state)
    scratch.close()
    make(scratch.sockets)
    as_another_process()

    with pytest.raises(ConfigurationError, match=f"{scratch.sockets.name}, the folder for sockets, is not a folder"):
        take_scratch(state)


def test_a_folder_for_sockets_of_another_user_is_rejected(
    state: Path, as_another_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = take_scratch(state)
    as_another_process()
    own, found = os.geteuid(), Path.lstat

    def of_another(path: Path) -> os.stat_result:
        values = list(found(path))
        values[stat.ST_UID] = own + 1
        return os.stat_result(values)

    monkeypatch.setattr(Path, "lstat", of_another)

    with pytest.raises(ConfigurationError, match=f"that only user {own} can access"):
        take_scratch(state)
    assert scratch.sockets.exists()


def test_the_folder_for_sockets_is_recreated_after_a_cleaner_has_removed_it(state: Path) -> None:
    scratch = take_scratch(state)
    scratch.sockets.rmdir()

    assert mode(scratch.new_socket().parent) == 0o700


def test_a_temporary_scratch_is_removed(temporary: Path) -> None:
    with temporary_scratch() as scratch:
        scratch.new_folder()
        scratch.new_socket().touch()
        assert mode(scratch.sockets) == 0o700

    assert list(temporary.iterdir()) == []
