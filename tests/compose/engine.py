"""Finds a running Docker engine, or starts a private one with its own data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from tests.compose.programs import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Program → Debian package.
_PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
}
_START_SECONDS = 60
_INSTALL_SECONDS = 900


@contextmanager
def engine(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment in which `docker` and `docker-compose` reach an engine.

    Args:
        folder: the data of a private engine, whose images are kept for the next run.

    Raises:
        ConfigurationError: no engine runs, and none can be started.
    """
    environment = {**os.environ, "BUILDKIT_PROGRESS": "plain"}
    if _answers(environment):
        yield environment
        return
    _require_means()
    folder.mkdir(parents=True, exist_ok=True)
    socket = folder / "docker.sock"
    environment["DOCKER_HOST"] = f"unix://{socket}"
    if _answers(environment):
        yield environment
        return
    with (folder / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                "dockerd",
                f"--data-root={folder / 'data'}",
                f"--exec-root={folder / 'exec'}",
                f"--pidfile={folder / 'pid'}",
                f"--host=unix://{socket}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal would otherwise end the daemon before the containers are removed.
            start_new_session=True,
        )
    try:
        _wait_for(daemon, environment, folder)
        yield environment
    finally:
        daemon.terminate()
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(30)
        daemon.kill()


def _answers(environment: dict[str, str]) -> bool:
    if not shutil.which("docker"):
        return False
    asked = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return asked.returncode == 0


def _require_means() -> None:
    missing = sorted({package for program, package in _PACKAGES.items() if not shutil.which(program)})
    if os.geteuid() != 0:
        also = f", with the packages {', '.join(missing)} installed" if missing else ""
        raise ConfigurationError(
            f"no Docker engine answers, and only root can start one: start one, or run this as root{also}"
        )
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise ConfigurationError(f"no Docker engine answers, and this is no Debian: install {', '.join(missing)}")
    sys.stderr.write(f"installing {', '.join(missing)} …\n")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update"], _INSTALL_SECONDS, environment=environment)
    run(["apt-get", "install", "--yes", "--no-install-recommends", *missing], _INSTALL_SECONDS, environment=environment)


def _wait_for(daemon: subprocess.Popen[bytes], environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(environment):
        if daemon.poll() is not None or time.monotonic() > deadline:
            end = (folder / "dockerd.log").read_text(errors="replace").splitlines()[-8:]
            raise ConfigurationError(
                "the Docker engine did not start; it needs control groups, network namespaces, iptables and an overlay "
                "file system, which a container without privileges does not have. Its log ends with:\n" + "\n".join(end)
            )
        time.sleep(0.5)
