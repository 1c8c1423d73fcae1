"""The health check of the image, run as a container engine runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from balance_service.devtools.local.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "image" / "healthcheck.py"


@contextmanager
def answering(status: int) -> Iterator[int]:
    """The port of a server that answers all requests with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/live" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def check(**environment: str) -> int:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BALANCE_")}
    run = subprocess.run(
        [sys.executable, SCRIPT], env=clean | environment, capture_output=True, timeout=60, check=False
    )
    return run.returncode


@pytest.mark.parametrize(("status", "code"), [(200, 0), (500, 1)])
def test_the_exit_code_tells_whether_the_instance_is_live(status: int, code: int) -> None:
    with answering(status) as port:
        assert check(BALANCE_HTTP_PORT=str(port)) == code


def test_the_proxy_of_the_environment_is_not_used() -> None:
    with answering(200) as port:
        assert check(BALANCE_HTTP_PORT=str(port), http_proxy=f"http://127.0.0.1:{free_port()}", no_proxy="") == 0


def test_a_missing_server_is_unhealthy() -> None:
    assert check(BALANCE_HTTP_PORT=str(free_port())) == 1


def test_the_health_port_is_requested_without_tls() -> None:
    with answering(200) as port:
        assert check(BALANCE_HEALTH_PORT=str(port), BALANCE_TLS_CERTIFICATE="instance.pem") == 0
