"""The state directory of an instance: locked by one process, and written under one application id."""

from __future__ import annotations

import errno
import fcntl
import json
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.process.scratch import take_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TextIO

    from balance_service.engine.records import TaskId


FORMAT = 1
"""The format of the directory and of each store in it."""
_LOCK = ".lock"
_MARKER = "state-directory.json"
_NEW_MARKER = _MARKER + ".new"
_FULL = {errno.ENOSPC, errno.EDQUOT}
# ext4 creates it in the root of every volume.
_LOST_AND_FOUND = "lost+found"


class StateDirectory:
    """Locks the directory until it is closed or the process ends."""

    def __init__(self, path: Path, application_id: str) -> None:
        """Locks the directory and removes the temporary files of an earlier process.

        Raises:
            ConfigurationError: the directory cannot be written, is in use, or has other content.
        """
        self.path = path.absolute()
        self._refuse_strangers()
        self._lock = self._take_lock()
        try:
            self._check_marker(application_id)
            self.scratch = take_scratch(self.path)
        except ConfigurationError:
            self._lock.close()
            raise
        except OSError as error:
            self._lock.close()
            raise self._unusable("written", error) from error

    def store_path(self, task_id: TaskId) -> Path:
        return self.path / str(task_id)

    def stores(self) -> Iterator[tuple[str, Path]]:
        """Yields the stage and the path of each store of a task."""
        for path in self.path.iterdir():
            stage, _, partition = path.name.rpartition("_")
            if stage and partition.isdecimal():
                yield stage, path

    def suspects_path(self, task_id: TaskId) -> Path:
        """Returns the file that remembers at which records of a task Spark has failed."""
        return self.path / "suspects" / f"{task_id}.json"

    def table_path(self, topic: str, partition: int) -> Path:
        return self.path / "tables" / f"{topic}_{partition}"

    def close(self) -> None:
        """Unlocks the directory. Idempotent: another process may have locked it since."""
        if not self._lock.closed:
            self.scratch.close()
            self._lock.close()

    def _refuse_strangers(self) -> None:
        """Runs before the lock is taken, so that no lock file is left in somebody else's directory."""
        try:
            if not self.path.is_dir():
                return
            names = {p.name for p in self.path.iterdir()}
        except OSError as error:
            raise self._unusable("read", error) from error
        strangers = sorted(names - {_LOCK, _NEW_MARKER, _LOST_AND_FOUND})
        if strangers and _MARKER not in names:
            raise ConfigurationError(
                f"BALANCE_STATE_DIR {self.path} holds files that are not ours ({strangers[0]}, …); "
                "name an empty directory"
            )

    def _take_lock(self) -> TextIO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / _LOCK).open("w")
        except OSError as error:
            raise self._unusable("written", error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigurationError(
                f"BALANCE_STATE_DIR {self.path} is in use by another process; give each instance its own"
            ) from None
        return lock

    def _check_marker(self, application_id: str) -> None:
        marker = self.path / _MARKER
        try:
            if not marker.exists():
                # A rename is atomic, so a crash cannot leave half a marker.
                written_beside = self.path / _NEW_MARKER
                written_beside.write_text(json.dumps({"format": FORMAT, "application_id": application_id}))
                written_beside.replace(marker)
        except OSError as error:
            raise self._unusable("written", error) from error
        try:
            written = json.loads(marker.read_text())
            owner, version = written["application_id"], written["format"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ConfigurationError(
                f"{marker} cannot be read ({error}); remove the state directory to restore it from the changelog"
            ) from error
        if owner != application_id:
            raise ConfigurationError(
                f"BALANCE_STATE_DIR {self.path} was written by application id '{owner}', "
                f"not '{application_id}'; name another directory"
            )
        if version != FORMAT:
            raise ConfigurationError(
                f"BALANCE_STATE_DIR {self.path} has format {version}, this version knows {FORMAT}; "
                "run the version that wrote it, or name another directory"
            )

    def _unusable(self, done: str, error: OSError) -> ConfigurationError:
        way_out = "make room on its disk" if error.errno in _FULL else "name a directory this user may write"
        return ConfigurationError(f"BALANCE_STATE_DIR {self.path} cannot be {done}: {error.strerror}; {way_out}")
