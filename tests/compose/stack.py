"""The compose file's stack: up, scaled, killed and taken down by the same commands as a person's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.errors import ConfigurationError
from tests.compose.images import ROOT
from tests.compose.programs import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SERVICE = "balance-service"
HOST = "127.0.0.1"
_PROJECT = "balance-compose-test"
_UP_SECONDS = 600
_REBUILD_SECONDS = 900


@dataclass(frozen=True)
class Replica:
    """One container of the service."""

    container: str
    port: int
    """Where it is reached from this machine."""

    @property
    def address(self) -> str:
        """What it advertises to its peers."""
        return f"{self.container[:12]}:5051"


@dataclass(frozen=True)
class Rebuilding:
    """What came of a rebuild in a container."""

    exit_code: int
    out_of_memory: bool
    memory: int
    """The most that it held, in bytes, as sampled."""
    said: str
    """Its last line."""


class Stack:
    """Owned by one thread."""

    def __init__(self, environment: Mapping[str, str], images: Mapping[str, str], ports: Mapping[str, str]) -> None:
        """Args:
        environment: in which `docker` reaches an engine.
        images: the compose file's variables that name images.
        ports: its variables that name ports of this machine.
        """
        self._environment = {**environment, **images, **ports, "COMPOSE_PROJECT_NAME": _PROJECT}
        self.bootstrap_servers = f"localhost:{ports['KAFKA_PORT']}"
        self.registry_url = f"http://{HOST}:{ports['REGISTRY_PORT']}/apis/ccompat/v7"
        self.prometheus_url = f"http://{HOST}:{ports['PROMETHEUS_PORT']}"
        self._compose = _compose_command(self._environment)

    @property
    def composed_by(self) -> str:
        """Which compose this is."""
        return self.compose("version", "--short").strip()

    def scale(self, replicas: int) -> None:
        """Bring everything up with so many replicas of the service; the others are left as they are."""
        self.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", f"{SERVICE}={replicas}")

    def monitor(self) -> None:
        """Bring Prometheus up, without Grafana, whose image is not needed to ask what its dashboard asks."""
        self.compose("up", "--detach", "--no-recreate", "--no-deps", "prometheus")

    def promtool(self, *arguments: str) -> str:
        """Run Prometheus' own tool where its configuration is mounted."""
        return self.compose("run", "--rm", "--no-deps", "-T", "--entrypoint", "promtool", "prometheus", *arguments)

    def rebuild(self) -> Rebuilding:
        """Rebuild in a container of the service, under its limits, while no replica runs."""
        container = f"{_PROJECT}-rebuild"
        self.compose("run", "--detach", "--no-deps", "--name", container, SERVICE, "rebuild")
        memory, deadline = 0, time.monotonic() + _REBUILD_SECONDS
        while (state := self.inspect([container])[0]["State"])["Running"] and time.monotonic() < deadline:
            memory = max(memory, self.memory(container))
        said = self._docker("logs", container).strip().rpartition("\n")[2]
        self._docker("rm", "--force", "--volumes", container)
        return Rebuilding(int(state["ExitCode"]), bool(state["OOMKilled"]), memory, said)

    def down(self) -> None:
        """Take everything down, volumes too."""
        self.compose("--profile", "monitoring", "down", "--volumes", "--remove-orphans", "--timeout", "20")

    def compose(self, *arguments: str) -> str:
        """Run compose."""
        return run([*self._compose, *arguments], _UP_SECONDS, environment=self._environment, folder=ROOT)

    def replicas(self) -> list[Replica]:
        """Those that run now."""
        identifiers = self._docker(
            "ps",
            "--no-trunc",
            "--quiet",
            f"--filter=label=com.docker.compose.project={_PROJECT}",
            f"--filter=label=com.docker.compose.service={SERVICE}",
        ).split()
        found = []
        for inspected in self.inspect(identifiers):
            ports = inspected["NetworkSettings"]["Ports"].get("5051/tcp") or []
            if ports:
                found.append(Replica(inspected["Id"], int(ports[0]["HostPort"])))
        return found

    def inspect(self, identifiers: Sequence[str]) -> list[dict[str, Any]]:
        """What the engine knows of containers; of those that are gone, nothing."""
        known: list[dict[str, Any]] = []
        for identifier in identifiers:
            try:
                known += json.loads(self._docker("inspect", "--type", "container", identifier))
            except ConfigurationError as error:
                # It was there when it was listed.
                if "No such container" not in str(error):
                    raise
        return known

    def inside(self, container: str, *command: str) -> str:
        """Run a command in a container."""
        return self._docker("exec", container, *command)

    def kill(self, replica: Replica) -> None:
        """SIGKILL to the container's first process, as the kernel does when memory is short.

        Not `docker kill`, after which the engine does not start it again.
        """
        os.kill(int(self.inspect([replica.container])[0]["State"]["Pid"]), signal.SIGKILL)

    def stop(self) -> list[int]:
        """SIGTERM to every replica; their exit codes."""
        containers = [replica.container for replica in self.replicas()]
        self.compose("stop", SERVICE)
        return [int(inspected["State"]["ExitCode"]) for inspected in self.inspect(containers)]

    def save_logs(self, log: Path) -> None:
        """Keep what the containers said."""
        log.write_text(self.compose("--profile", "monitoring", "logs", "--no-color"))

    def memory(self, container: str) -> int:
        """What a container holds now, in bytes, without the page cache, which the kernel takes back when it must."""
        for path, name in (("memory.stat", "anon"), ("memory/memory.stat", "total_rss")):
            try:
                lines = self.inside(container, "cat", f"/sys/fs/cgroup/{path}").splitlines()
            except ConfigurationError:
                continue
            return int(dict(line.split() for line in lines)[name])
        return 0

    def _docker(self, *arguments: str) -> str:
        return run(["docker", *arguments], 120, environment=self._environment)


def _compose_command(environment: Mapping[str, str]) -> list[str]:
    if chosen := environment.get("COMPOSE"):
        return chosen.split()
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    return ["docker", "compose"]
