"""`balance-service local`, and what a command ends with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from balance_service.cli import main as module
from balance_service.cli.init import write_project
from balance_service.cli.main import cli, main
from balance_service.errors import (
    BalanceServiceError,
    ConfigurationError,
    InvalidInputError,
    RetriableError,
    StoreCorruptedError,
    UnreadableRecordError,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_environment")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each local stack, which is not really started."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("balance_service.devtools.local.run.run_local", lambda *given, **_: calls.append(given))
    return calls


@pytest.mark.parametrize("option", ["--kafka-port", "--registry-port", "--http-port"])
@pytest.mark.parametrize("port", ["-1", "65536", "99999"])
def test_a_port_out_of_range_is_rejected(started: list[tuple[Any, ...]], option: str, port: str) -> None:
    done = CliRunner().invoke(cli, ["local", option, port])

    assert (done.exit_code, started) == (2, [])
    assert f"{port} is not in the range 0<=x<=65535" in done.stderr


def test_the_port_of_the_last_instance_is_in_range(started: list[tuple[Any, ...]]) -> None:
    rejected = CliRunner().invoke(cli, ["local", "--http-port", "65534", "--instances", "3"])
    accepted = CliRunner().invoke(cli, ["local", "--http-port", "65533", "--instances", "3"])

    assert rejected.exit_code == 2
    assert "--http-port 65534 leaves no ports for 3 instances; use 65533 at most" in rejected.stderr
    assert accepted.exit_code == 0
    assert [given[:4] for given in started] == [(3, 9092, 8081, 65533)]


@pytest.mark.parametrize(("port", "instances"), [("0", "16"), ("65535", "1"), ("65535", "0")])
def test_free_ports_and_unused_ports_are_accepted(started: list[tuple[Any, ...]], port: str, instances: str) -> None:
    assert CliRunner().invoke(cli, ["local", "--http-port", port, "--instances", instances]).exit_code == 0
    assert len(started) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError, 2),
        (InvalidInputError, 2),
        # A registry that has lost its data.
        (UnreadableRecordError, 2),
        (StoreCorruptedError, 1),
        (RetriableError, 1),
    ],
)
def test_a_command_ends_with_the_sentence_of_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[BalanceServiceError], code: int
) -> None:
    def fails() -> None:
        raise error("the schema registry has lost its data")

    monkeypatch.setattr(module, "cli", fails)

    with pytest.raises(SystemExit) as ended:
        main()

    assert (ended.value.code, capsys.readouterr().err) == (code, "Error: the schema registry has lost its data\n")


_ORDERS = """
from dataclasses import dataclass

from balance_service import Count, ReadModel, Stream

@dataclass
class Counted:
    customerId: str
    orders: {kind}

class Orders(ReadModel):
    name = "orders"
    source = Stream("orders", "{record}")
    key = "customerId"
    state = Counted
    orders = Count("{record}")
"""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Modules with models in the working directory; the schema of the valid one's events is in no file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orders_of_set.py").write_text(_ORDERS.format(kind="set[str]", record="OrderPlaced"))
    (tmp_path / "orders_to_host.py").write_text(_ORDERS.format(kind="int", record="OrderSent"))
    placed = {"type": "record", "name": "OrderPlaced", "fields": [{"name": "customerId", "type": "string"}]}
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "OrderPlaced.avsc").write_text(json.dumps(placed))


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BALANCE_MODELS", "nowhere.orders", "nowhere"),
        ("BALANCE_MODELS", "orders_to_host:Order", "has no class Order; it defines Orders"),
        ("BALANCE_MODELS", "orders_of_set:Orders", "its field 'orders' is of type set"),
        ("BALANCE_MODLES", "a", "BALANCE_MODLES is no setting: correct it to BALANCE_MODELS, or remove it"),
    ],
)
def test_no_local_stack_starts_if_its_instances_could_not(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)

    done = CliRunner().invoke(cli, ["local"])

    assert isinstance(done.exception, ConfigurationError)
    assert said in str(done.exception)
    assert started == []


@pytest.mark.usefixtures("written")
def test_a_local_stack_starts_with_models_whose_schemas_only_the_registry_has(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BALANCE_MODELS", "balance,orders_to_host:Orders")

    assert CliRunner().invoke(cli, ["local"]).exit_code == 0
    assert len(started) == 1


@pytest.mark.parametrize("has_begun_with_registry", [False, True])
def test_a_local_stack_of_json_topics_has_no_registry_unless_it_began_with_one(
    started: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun_with_registry: bool
) -> None:
    write_project(tmp_path / "of_json", "json")
    monkeypatch.syspath_prepend(tmp_path / "of_json")
    monkeypatch.setenv("BALANCE_MODELS", "of_json.orders:Orders")
    data = tmp_path / "data"
    if has_begun_with_registry:
        (data / "registry").mkdir(parents=True)

    assert CliRunner().invoke(cli, ["local", "--data-dir", str(data)]).exit_code == 0
    assert [given[2] for given in started] == [8081 if has_begun_with_registry else None]
