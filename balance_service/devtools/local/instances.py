"""Instances of the service as child processes, on a local stack."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import httpx

from balance_service.devtools.local.ports import HOST, free_port, require_free
from balance_service.devtools.local.process import ChildProcess
from balance_service.devtools.local.server import Server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

_HTTP_OK = 200
_ANSWER_SECONDS = 2.0


class LocalInstance(Server):
    """One instance; its state directory outlives a stop, a kill and a change of port.

    Port 0 picks a free one, kept for this object's life.
    """

    def __init__(
        self,
        number: int,
        stack: LocalStack,
        http_port: int = 0,
        environment: Mapping[str, str] | None = None,
        checkout: Path | None = None,
    ) -> None:
        """Args:
        environment: further BALANCE_* variables.
        checkout: run another checkout of this project, with its own .venv, instead of this one.
        """
        self.name = f"instance-{number}"
        self.port = http_port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.state_dir = stack.data_dir / self.name
        self.log = stack.data_dir / "logs" / f"{self.name}.log"
        self.environment = {
            "BALANCE_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
            "BALANCE_SCHEMA_REGISTRY_URL": stack.schema_registry_url,
            "BALANCE_HTTP_HOST": HOST,
            "BALANCE_HTTP_PORT": str(self.port),
            "BALANCE_APPLICATION_SERVER": f"{HOST}:{self.port}",
            "BALANCE_STATE_DIR": str(self.state_dir),
            **(environment or {}),
        }
        self._python = str(checkout / ".venv/bin/python") if checkout else sys.executable
        super().__init__(ChildProcess(f"service's {self.name}", checkout or stack.data_dir, self.log))

    def launch(self, held: Sequence[int] = ()) -> None:
        """Start the process."""
        require_free(self.port, f"service's {self.name}", "--http-port")
        self._process.start([self._python, "-m", "balance_service", "serve"], held, self.environment)

    def is_ready(self) -> bool:
        """Whether it wants queries now."""
        port = self.environment.get("BALANCE_HEALTH_PORT", self.port)
        try:
            answer = httpx.get(f"http://{HOST}:{port}/health/ready", timeout=_ANSWER_SECONDS, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == _HTTP_OK
