"""A schema registry: Apicurio with its schemas in a file, behind Confluent's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from balance_service.devtools.local.ports import HOST, accepts_connections, free_port, require_free
from balance_service.devtools.local.process import ChildProcess
from balance_service.devtools.local.server import Server
from balance_service.process.jars import REGISTRY_JAVA, java_executable, resolve_jars, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_FLAGS = (
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Djava.awt.headless=true",
    "-Dapicurio.storage.kind=sql",
    "-Dapicurio.storage.sql.kind=h2",
    # WRITE_DELAY=0: a schema id that was given out survives SIGKILL. Relative to the working
    # directory, because a semicolon in a path would end it.
    "-Dapicurio.datasource.url=jdbc:h2:file:./registry;WRITE_DELAY=0",
    f"-Dquarkus.http.host={HOST}",
    f"-Dquarkus.management.host={HOST}",
    # Nobody asks there; any free port will do.
    "-Dquarkus.management.port=0",
)


class Registry(Server):
    """The registry whose schemas lie in `folder`; they survive a stop, a kill and a change of port.

    `port` 0 picks a free one, kept for this object's life.
    """

    def __init__(self, folder: Path, log: Path, port: int = 0) -> None:
        self.port = port or free_port()
        self._folder = folder
        super().__init__(ChildProcess("schema registry", folder, log))

    @property
    def url(self) -> str:
        """Base address of Confluent's API."""
        return f"http://{HOST}:{self.port}/apis/ccompat/v7"

    def launch(self, held: Sequence[int] = ()) -> None:
        """Start the process."""
        java = str(java_executable(REGISTRY_JAVA, bundled=True))
        program = unpack(resolve_jars("registry")[0]) / "quarkus-run.jar"
        require_free(self.port, "schema registry", "--registry-port")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process.start([java, *_FLAGS, f"-Dquarkus.http.port={self.port}", "-jar", str(program)], held)

    def is_ready(self) -> bool:
        """Whether it answers now."""
        if not accepts_connections(self.port):
            return False
        try:
            return httpx.get(f"{self.url}/subjects", timeout=5, trust_env=False).is_success
        except httpx.HTTPError:
            return False
