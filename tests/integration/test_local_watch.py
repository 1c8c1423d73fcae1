"""`balance-service local`: a server that ends while it runs ends all of it, and is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.commands import assert_refused, started
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

_STOP_SECONDS = 60.0


@pytest.mark.parametrize(
    ("program", "name", "log"),
    [("kafka.Kafka", "Kafka broker", "broker.log"), ("quarkus-run.jar", "schema registry", "registry.log")],
)
def test_a_server_that_ends_unexpectedly_is_named_and_no_process_is_left(
    tmp_path: Path, program: str, name: str, log: str
) -> None:
    ports = ["--kafka-port", "0", "--registry-port", "0", "--data-dir", str(tmp_path / "data")]
    with started({}, "local", "--instances", "0", *ports) as local:
        eventually(lambda: local.process.poll() is not None or "ready; Ctrl-C" in local.stdout, "the stack is ready")
        children = psutil.Process(local.process.pid).children(recursive=True)
        (server,) = [c for c in children if c.name() == "java" and any(program in part for part in c.cmdline())]
        server.kill()
        done = local.wait(_STOP_SECONDS)

    assert_refused(done, 1, f"{name} ended unexpectedly", str(tmp_path / "data" / "logs" / log))
    assert not any(child.is_running() for child in children)
