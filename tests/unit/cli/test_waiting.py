"""Commands that wait for Kafka or the registry say so."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest
from click.testing import CliRunner

from balance_service.cli.main import cli
from balance_service.cli.waiting import telling


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balance_service.cli.waiting.TELL_AFTER_SECONDS", 0.05)


def test_a_wait_that_lasts_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with telling("Kafka at k:9092"):
        time.sleep(0.5)

    assert capsys.readouterr().err == "waiting for Kafka at k:9092 …\n"


def test_a_wait_that_is_over_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with telling("Kafka at k:9092") as answered:
        answered()
        time.sleep(0.2)
    with telling("Kafka at k:9092"):
        pass
    time.sleep(0.2)

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [["schemas", "pull", "orders"], ["schemas", "types", "orders"]])
def test_a_command_that_asks_the_registry_says_for_what_it_waits(command: list[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        def end() -> None:
            connection, _ = silent.accept()
            time.sleep(0.5)
            connection.close()

        threading.Thread(target=end, daemon=True).start()
        done = CliRunner(env={"BALANCE_SCHEMA_REGISTRY_URL": url}).invoke(cli, command)

    assert done.stderr.splitlines()[0] == f"waiting for the schema registry at {url} …"
    assert done.exit_code != 0
