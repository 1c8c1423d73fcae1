"""Controls the stack of the compose file with the commands that a user would type."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.errors import ConfigurationError
from tests.compose.docker import ROOT, run

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
    """A container of the service."""

    container: str
    port: int
    """The port on this machine."""

    @property
    def address(self) -> str:
        """The address that the replica advertises to its peers."""
        return f"{self.container[:12]}:5051"


@dataclass(frozen=True)
class Rebuilding:
    """The result of a rebuild in a container."""

    exit_code: int
    out_of_memory: bool
    memory: int
    """The highest sampled use, in bytes."""
    said: str
    """The last line of the log."""


class Stack:
    """The compose project. Used by one thread."""

    def __init__(self, environment: Mapping[str, str], images: Mapping[str, str], ports: Mapping[str, str]) -> None:
        """Args:
        environment: variables for `docker` to reach an engine.
        images: the variables of the compose file that name images.
        ports: the variables that name ports of this machine.
        """
        self._environment = {**environment, **images, **ports, "COMPOSE_PROJECT_NAME": _PROJECT}
        self.bootstrap_servers = f"localhost:{ports['KAFKA_PORT']}"
        self.registry_url = f"http://{HOST}:{ports['REGISTRY_PORT']}/apis/ccompat/v7"
        self.prometheus_url = f"http://{HOST}:{ports['PROMETHEUS_PORT']}"
        self._compose = _compose_command(self._environment)

    @property
    def composed_by(self) -> str:
        """The version of compose."""
        return self.compose("version", "--short").strip()

    def scale(self, replicas: int) -> None:
        """Starts everything, with `replicas` replicas of the service; keeps running containers."""
        self.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", f"{SERVICE}={replicas}")

    def monitor(self) -> None:
        """Starts Prometheus without Grafana, which the test does not need."""
        self.compose("up", "--detach", "--no-recreate", "--no-deps", "prometheus")

    def promtool(self, *arguments: str) -> str:
        """Runs promtool in the Prometheus image, with its configuration mounted."""
        return self.compose("run", "--rm", "--no-deps", "-T", "--entrypoint", "promtool", "prometheus", *arguments)

    def rebuild(self) -> Rebuilding:
        """Runs a rebuild in a container of the service, under its limits. No replica may run."""
        container = f"{_PROJECT}-rebuild"
        self.compose("run", "--detach", "--no-deps", "--name", container, SERVICE, "rebuild", "--offline")
        memory, deadline = 0, time.monotonic() + _REBUILD_SECONDS
        while (state := self.inspect([container])[0]["State"])["Running"] and time.monotonic() < deadline:
            memory = max(memory, self.memory(container))
        said = self._docker("logs", container).strip().rpartition("\n")[2]
        self._docker("rm", "--force", "--volumes", container)
        return Rebuilding(int(state["ExitCode"]), bool(state["OOMKilled"]), memory, said)

    def down(self) -> None:
        """Removes everything, volumes included."""
        self.compose("--profile", "monitoring", "down", "--volumes", "--remove-orphans", "--timeout", "20")

    def compose(self, *arguments: str) -> str:
        return run([*self._compose, *arguments], _UP_SECONDS, environment=self._environment, folder=ROOT)

    def replicas(self) -> list[Replica]:
        """Returns the running replicas."""
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
        """Returns the engine's data about containers; skips those that are gone."""
        known: list[dict[str, Any]] = []
        for identifier in identifiers:
            try:
                known += json.loads(self._docker("inspect", "--type", "container", identifier))
            except ConfigurationError as error:
                # The container ended after it was listed.
                if "No such container" not in str(error):
                    raise
        return known

    def inside(self, container: str, *command: str) -> str:
        """Runs a command in a container."""
        return self._docker("exec", container, *command)

    def kill(self, replica: Replica) -> None:
        """Sends SIGKILL to the first process of the container, as the kernel does when memory is short.

        After `docker kill` the engine would not restart it.
        """
        os.kill(int(self.inspect([replica.container])[0]["State"]["Pid"]), signal.SIGKILL)

    def stop(self) -> list[int]:
        """Stops every replica with SIGTERM; returns their exit codes."""
        containers = [replica.container for replica in self.replicas()]
        self.compose("stop", SERVICE)
        return [int(inspected["State"]["ExitCode"]) for inspected in self.inspect(containers)]

    def save_logs(self, log: Path) -> None:
        """Writes the logs of the containers to a file."""
        log.write_text(self.compose("--profile", "monitoring", "logs", "--no-color"))

    def memory(self, container: str) -> int:
        """Returns the memory of a container in bytes, without the page cache, which the kernel can reclaim."""
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
