"""A temporary PostgreSQL server, if PostgreSQL is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psycopg

from balance_service.devtools.local.processes import HOST, ChildProcess, free_port
from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

_INIT_SECONDS = 60
_USER = "bench"
# A crash can lose the last transactions, including positions; they are repeated from the topic, so each event counts
# once. Kafka does not wait for its disk either.
_SETTINGS = {
    "synchronous_commit": "off",
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "15min",
    "wal_buffers": "64MB",
    "wal_compression": "on",
}


class Server:
    """A context manager; deletes its data at the end. Runs as another user if this process is root."""

    def __init__(self) -> None:
        """Raises:
        ConfigurationError: PostgreSQL is not installed, or cannot run.
        """
        self._programs = _programs()
        self._as = _other_user()
        self._folder = Path(tempfile.mkdtemp(prefix="balance-bench-postgresql-"))
        self._port = free_port()
        self._process = ChildProcess("PostgreSQL server", self._folder, self._folder / "server.log")
        self.address = f"host={HOST} port={self._port} user={_USER} dbname=postgres"

    @property
    def settings(self) -> Mapping[str, str]:
        """The version, and the settings that differ from the defaults."""
        told = subprocess.run([self._programs / "postgres", "--version"], capture_output=True, text=True, check=True)
        return {"version": told.stdout.strip(), **_SETTINGS}

    def __enter__(self) -> Self:
        data = self._folder / "data"
        try:
            prefix = []
            if self._as is not None:
                os.chown(self._folder, self._as.pw_uid, self._as.pw_gid)
                ids = ("--reuid", str(self._as.pw_uid), "--regid", str(self._as.pw_gid))
                prefix = ["setpriv", *ids, "--clear-groups", "--"]
            init = [str(self._programs / "initdb"), "-D", str(data), "-U", _USER, "--auth=trust", "--encoding=UTF8"]
            subprocess.run([*prefix, *init], cwd=self._folder, capture_output=True, timeout=_INIT_SECONDS, check=True)
            settings = {**_SETTINGS, "port": str(self._port), "listen_addresses": HOST, "unix_socket_directories": ""}
            options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
            self._process.run([*prefix, str(self._programs / "postgres"), "-D", str(data), *options])
            self._process.wait_until(self._answers)
        except (OSError, subprocess.SubprocessError) as error:
            self.__exit__()
            raise ConfigurationError(f"PostgreSQL cannot be set up: {error}") from error
        except ConfigurationError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.address, connect_timeout=1).close()
        except psycopg.OperationalError:
            return False
        return True


def _programs() -> Path:
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    folders = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    newest = max(folders, key=lambda path: float(path.parts[-3]), default=None)
    if newest is None:
        raise ConfigurationError("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    return newest.parent


def _other_user() -> pwd.struct_passwd | None:
    """The user of the server; None for the user of this process."""
    if os.geteuid():
        return None
    names = {user.pw_name: user for user in pwd.getpwall()}
    user = names.get("postgres") or names.get("nobody")
    if user is None or shutil.which("setpriv") is None:
        raise ConfigurationError("PostgreSQL refuses to run as root, and there is no setpriv or no other user")
    return user
