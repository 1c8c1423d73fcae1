"""Scratch folders of a process, which the next start empties.

    <state directory>/scratch/          Spark's checkpoints, and files that its JVM spills and unpacks
    $XDG_RUNTIME_DIR/balance-<id>/      Unix sockets, whose paths must be short; in the folder for temporary files if
                                        the variable is not set. The id is derived from user and state directory

Only this user can access them. The process must hold the lock of the state directory.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCRATCH = "scratch"
# A Unix socket's path without its final zero byte: macOS allows 104 with it, Linux 108.
_MOST_PATH_BYTES = 103 - len(".999999")
_PRIVATE = 0o700
_OF_OTHERS = 0o077

# Folders in use by this process, which must not be emptied: the JVM outlives an engine.
_taken: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Scratch:
    files: Path
    sockets: Path

    def new_socket(self) -> Path:
        """A new path for Unix sockets: itself, and with a dot and a number of up to six digits appended.

        Raises:
            ConfigurationError: the path is too long, or another user can access the folder.
        """
        path = self.sockets / f"rows-{secrets.token_hex(4)}"
        if len(os.fsencode(path)) > _MOST_PATH_BYTES:
            raise ConfigurationError(
                f"the path {path} is too long for a socket; set XDG_RUNTIME_DIR or TMPDIR to a shorter one"
            )
        # A cleaner of temporary files removes folders that have not changed for days.
        _make_private(self.sockets)
        return path

    def new_folder(self) -> Path:
        """A new folder; the caller removes it."""
        return Path(tempfile.mkdtemp(prefix="checkpoint-", dir=self.files))

    def close(self) -> None:
        """Remove the folder for sockets, which is outside the state directory."""
        shutil.rmtree(self.sockets, ignore_errors=True)


def take_scratch(state_dir: Path) -> Scratch:
    """Create the scratch folders of a state directory, and remove the files that an earlier process left there.

    Raises:
        ConfigurationError: another user can access the folder for sockets, or the folder for files is a symbolic link.
        OSError: the state directory is not writable.
    """
    files = state_dir / _SCRATCH
    digest = hashlib.sha256(f"{os.geteuid()}\0{state_dir.resolve()}\0{state_dir.stat().st_ino}".encode())
    scratch = Scratch(files, _runtime_folder() / f"balance-{digest.hexdigest()[:16]}")
    if files.is_symlink():
        raise ConfigurationError(f"{files} is a link, whose target would be emptied at each start; remove the link")
    if files not in _taken:
        # The JVM of a killed process may still write while it ends; the next start removes these files.
        shutil.rmtree(files, ignore_errors=True)
        _make_private(scratch.sockets)
        for left in scratch.sockets.iterdir():
            left.unlink()
    files.mkdir(_PRIVATE, exist_ok=True)
    _make_private(scratch.sockets)
    _taken.add(files)
    return scratch


@contextmanager
def temporary_scratch() -> Iterator[Scratch]:
    """Scratch folders without a state directory, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="balance-", ignore_cleanup_errors=True) as folder:
        yield Scratch(Path(folder), Path(folder))


def _runtime_folder() -> Path:
    """The folder for short-lived files of this user. Source: XDG Base Directory Specification."""
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    if named and Path(named).is_absolute() and _is_private(Path(named)):
        return Path(named)
    return Path(tempfile.gettempdir())


def _is_private(folder: Path) -> bool:
    """Whether the path is a folder, not a link, that only this user can access."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OF_OTHERS


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(_PRIVATE)
    except FileExistsError:
        if not _is_private(folder):
            raise ConfigurationError(
                f"{folder}, the folder for sockets, is not a folder that only user {os.geteuid()} can access; "
                "remove it, or set XDG_RUNTIME_DIR to another"
            ) from None
    except OSError as error:
        raise ConfigurationError(
            f"{folder}, the folder for sockets, cannot be created ({error.strerror}); set XDG_RUNTIME_DIR or TMPDIR"
        ) from error
