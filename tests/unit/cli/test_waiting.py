"""Commands that wait for Kafka or the registry say so."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, NoReturn

import pytest
from click.testing import CliRunner

from balance_service.cli.main import cli
from balance_service.cli.waiting import telling
from balance_service.errors import RetriableError

if TYPE_CHECKING:
    from click.testing import Result


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


def waited_for(command: list[str], **environment: str) -> tuple[str, Result]:
    """Runs a command with a registry that is silent, then closes the connection. Returns its URL and the result."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        def end() -> None:
            connection, _ = silent.accept()
            time.sleep(0.5)
            connection.close()

        threading.Thread(target=end, daemon=True).start()
        return url, CliRunner(env={"BALANCE_SCHEMA_REGISTRY_URL": url, **environment}).invoke(cli, command)


@pytest.mark.parametrize("command", [["schemas", "pull", "orders"], ["schemas", "types", "orders"]])
def test_a_command_that_asks_the_registry_says_for_what_it_waits(command: list[str]) -> None:
    url, done = waited_for(command)

    assert done.stderr.splitlines()[0] == f"waiting for the schema registry at {url} …"
    assert done.exit_code != 0


def test_add_funds_says_that_it_waits_while_it_registers_the_schema() -> None:
    _, done = waited_for(["add-funds", "ada", "1.00"], BALANCE_BOOTSTRAP_SERVERS="127.0.0.1:1")

    assert done.stderr.splitlines()[0] == "waiting for Kafka at 127.0.0.1:1 or the schema registry …"
    assert done.exit_code != 0


@pytest.mark.parametrize(
    ("command", "bound_by", "server"),
    [
        (["produce", "orders"], "kafka.models_of_topic", "Kafka at 127.0.0.1:1 or the schema registry"),
        (["topics", "create"], "kafka.hosted_models", "Kafka at 127.0.0.1:1 or the schema registry"),
        (["schemas", "register"], "kafka.hosted_models", "the schema registry at http://r:1"),
        (["rebuild", "--offline"], "models.chosen_models", "Kafka at 127.0.0.1:1 or the schema registry"),
    ],
)
def test_a_command_whose_models_wait_for_the_registry_says_so(
    monkeypatch: pytest.MonkeyPatch, command: list[str], bound_by: str, server: str
) -> None:
    def bind(*_: object) -> NoReturn:
        time.sleep(0.3)
        raise RetriableError("the registry does not answer")

    monkeypatch.setattr(f"balance_service.cli.{bound_by}", bind)
    environment = {"BALANCE_BOOTSTRAP_SERVERS": "127.0.0.1:1", "BALANCE_SCHEMA_REGISTRY_URL": "http://r:1"}

    done = CliRunner(env=environment).invoke(cli, command)

    assert done.stderr.splitlines()[:1] == [f"waiting for {server} …"]
    assert str(done.exception) == "the registry does not answer"


def test_load_says_that_it_waits_while_it_registers_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    def produce(*_: object) -> NoReturn:
        time.sleep(0.3)
        raise RetriableError("the registry does not answer")

    monkeypatch.setattr("balance_service.kafka.topic_specs.prepare_topics", lambda *_: {})
    monkeypatch.setattr("balance_service.devtools.produce.produce_load", produce)

    environment = {"BALANCE_BOOTSTRAP_SERVERS": "127.0.0.1:1", "BALANCE_SCHEMA_REGISTRY_URL": "http://r:1"}
    done = CliRunner(env=environment).invoke(cli, ["load", "--events", "1", "--customers", "1"])

    assert "waiting for Kafka at 127.0.0.1:1 or the schema registry …" in done.stderr.splitlines()
    assert str(done.exception) == "the registry does not answer"
