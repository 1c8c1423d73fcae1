"""Sessions of Spark: their settings, from wherever they come, and Spark's user interface."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import psutil
import pytest

from balance_service.settings.spark import OWN_SETTINGS, VALUE_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FIRST_UI_PORT = 4040
_SECONDS = 60
# Spark and PySpark set these themselves.
_OF_SPARK = {"spark.sql.artifact.isolation.enabled", "spark.sql.warehouse.dir"}

_SESSION = """
import json, sys
from pathlib import Path
from balance_service.errors import ConfigurationError
from balance_service.process.scratch import Scratch
from balance_service.settings import load_settings
from balance_service.spark.session import start_spark

folder = Path(sys.argv[1])
try:
    spark = start_spark(load_settings(), Scratch(folder, folder), slots=1)
except ConfigurationError as error:
    sys.exit(str(error))
told = {
    "settings": dict(spark.conf.getAll),
    "ui": spark.sparkContext.uiWebUrl,
    "jvm": spark.sparkContext._gateway.proc.pid,
}
print(json.dumps(told), flush=True)
sys.stdin.read()
spark.stop()
"""


class Session(NamedTuple):
    settings: dict[str, str]
    ui: str | None
    jvm: int

    @property
    def listens_on(self) -> dict[int, str]:
        """The addresses of the JVM's ports."""
        connections = psutil.Process(self.jvm).net_connections("tcp")
        return {one.laddr.port: one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


def _start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    folder.mkdir()
    known = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    return subprocess.Popen(
        [sys.executable, "-c", _SESSION, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=known | environment,
        text=True,
    )


@contextmanager
def _sessions(*started: subprocess.Popen[str]) -> Iterator[list[Session]]:
    with ExitStack() as ends:
        for process in started:
            ends.callback(process.communicate, timeout=_SECONDS)
        told: list[dict[str, Any]] = []
        for process in started:
            assert process.stdout is not None
            # The log comes first.
            told.append(json.loads(next(line for line in process.stdout if line.startswith("{"))))
        yield [Session(**one) for one in told]


def _other_addresses() -> list[str]:
    """The addresses of this machine besides loopback; a machine without a network has none."""
    found = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    return [one.address for one in found if one.family == socket.AF_INET and not _is_loopback(one.address)]


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


@pytest.mark.shows("local-users")
def test_sparks_ui_is_off_by_default(tmp_path: Path) -> None:
    with _sessions(_start(tmp_path / "one")) as (session,):
        assert session.ui is None
        assert session.listens_on
        assert all(map(_is_loopback, session.listens_on.values()))


def test_sparks_ui_answers_on_loopback_only_and_each_instance_has_a_port(tmp_path: Path) -> None:
    # What would make Spark listen or be shown elsewhere.
    elsewhere = {"SPARK_LOCAL_IP": "0.0.0.0", "SPARK_PUBLIC_DNS": "spark.example.com"}
    two = [_start(tmp_path / name, BALANCE_SPARK_UI="true", **elsewhere) for name in ("one", "two")]

    with _sessions(*two) as sessions:
        ports = [httpx.URL(str(session.ui)).port for session in sessions]
        for session, port in zip(sessions, ports, strict=True):
            assert port is not None
            assert session.ui == f"http://127.0.0.1:{port}"
            assert _FIRST_UI_PORT <= port <= _FIRST_UI_PORT + 16
            for path in ("/jobs/", "/SQL/", "/environment/", "/api/v1/applications"):
                assert httpx.get(session.ui + path, timeout=_SECONDS).status_code == 200, path
            assert port in session.listens_on
            assert all(map(_is_loopback, session.listens_on.values()))
            for address in _other_addresses():
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((address, port), _SECONDS)
        assert len(set(ports)) == 2


def test_only_the_service_sets_what_can_change_a_value(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.memory.fraction 0.5\nspark.ui.retainedJobs 7\n")
    # Spark takes its defaults from these.
    elsewhere = {"SPARK_CONF_DIR": str(tmp_path), "SPARK_ANSI_SQL_MODE": "false", "TZ": "Asia/Tokyo"}

    with _sessions(_start(tmp_path / "one", **elsewhere)) as (session,):
        of_sql = {name: value for name, value in session.settings.items() if name.startswith("spark.sql.")}
        all_ours = {**VALUE_SETTINGS, **OWN_SETTINGS}
        ours = {name: value for name, value in all_ours.items() if name.startswith("spark.sql.")}
        assert {name: of_sql.get(name) for name in ours} == ours
        assert of_sql.keys() - ours.keys() == _OF_SPARK | {"spark.sql.ui.retainedExecutions"}
        assert session.settings["spark.memory.fraction"] == "0.5"
        assert session.settings["spark.ui.retainedJobs"] == "7"


def test_options_of_java_set_nothing_that_can_change_a_value(tmp_path: Path) -> None:
    options = {"JAVA_TOOL_OPTIONS": "-Dspark.sql.shuffle.partitions=3 -Dspark.sql.ansi.enabled=false"}
    process = _start(tmp_path / "one", **options)

    _, said = process.communicate(timeout=2 * _SECONDS)

    assert process.returncode == 1
    assert (
        "JAVA_TOOL_OPTIONS or JDK_JAVA_OPTIONS: spark.sql.ansi.enabled is set by the service; "
        "spark.sql.shuffle.partitions could change values"
    ) in said
