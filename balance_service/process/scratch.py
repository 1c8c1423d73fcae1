"""Scratch: what a process writes for itself alone, and the next start removes.

Layout:

    <state directory>/scratch/          Spark's checkpoints, what its JVM spills and unpacks
    $XDG_RUNTIME_DIR/balance-<id>/      Unix sockets, whose paths have to be short; without that variable, in the
                                        folder for temporary files. The id is of the user and the state directory

Both are for this user alone. The process that takes the scratch of a state directory holds that directory's lock.
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
# Of the path of a Unix socket, without its last zero byte: macOS has 104, Linux 108.
_MOST_PATH_BYTES = 103
_PRIVATE = 0o700
_OF_OTHERS = 0o077

# This process' own files lie in these: its JVM outlives an engine.
_taken: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Scratch:
    """The two folders of one process."""

    files: Path
    sockets: Path

    def new_socket(self) -> Path:
        """A path for a Unix socket that nothing has yet.

        Raises:
            ConfigurationError: the path is too long, or the folder is not this user's alone.
        """
        path = self.sockets / f"rows-{secrets.token_hex(4)}"
        if len(os.fsencode(path)) > _MOST_PATH_BYTES:
            raise ConfigurationError(
                f"the path {path} is too long for a socket; set XDG_RUNTIME_DIR or TMPDIR to a shorter one"
            )
        # Cleaners of temporary files remove a folder that has not changed for days.
        _make_private(self.sockets)
        return path

    def new_folder(self) -> Path:
        """A new folder; the caller removes it.

        Raises:
            OSError: it cannot be made.
        """
        return Path(tempfile.mkdtemp(prefix="checkpoint-", dir=self.files))

    def close(self) -> None:
        """Remove the folder of the sockets, which lies outside the state directory."""
        shutil.rmtree(self.sockets, ignore_errors=True)


def take_scratch(state_dir: Path) -> Scratch:
    """The scratch of a state directory; what an earlier process has left there is removed.

    Raises:
        ConfigurationError: the sockets' folder is another user's, or the folder of files is a link.
        OSError: the state directory cannot be written.
    """
    files = state_dir / _SCRATCH
    digest = hashlib.sha256(f"{os.geteuid()}\0{state_dir.resolve()}\0{state_dir.stat().st_ino}".encode())
    scratch = Scratch(files, _runtime_folder() / f"balance-{digest.hexdigest()[:16]}")
    if files.is_symlink():
        raise ConfigurationError(f"{files} is a link, and its contents would be removed at each start; remove the link")
    if files not in _taken:
        # The JVM of a killed process may be ending still, and writing; the next start removes what it writes now.
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
    """A scratch without a state directory, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="balance-", ignore_cleanup_errors=True) as folder:
        yield Scratch(Path(folder), Path(folder))


def _runtime_folder() -> Path:
    """Where short-lived files of this user belong (XDG Base Directory Specification)."""
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    if named and Path(named).is_absolute() and _is_private(Path(named)):
        return Path(named)
    return Path(tempfile.gettempdir())


def _is_private(folder: Path) -> bool:
    """Whether it is a folder, no link to one, that this user alone may enter."""
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
                f"{folder}, the folder for sockets, is not a folder that user {os.geteuid()} alone may enter; "
                "remove it, or set XDG_RUNTIME_DIR to another"
            ) from None
    except OSError as error:
        raise ConfigurationError(
            f"{folder}, the folder for sockets, cannot be made ({error.strerror}); set XDG_RUNTIME_DIR or TMPDIR"
        ) from error
