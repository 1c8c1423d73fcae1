"""`balance-service local` and `rebuild`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from balance_service.cli.main import cli
from balance_service.engine.commit import Committed
from balance_service.errors import ConfigurationError
from balance_service.hosting import rebuild as hosting
from balance_service.hosting.rebuild import Rebuilt

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.model.read_model import ReadModel

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


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the rebuilt read models."""
    names: list[str] = []

    def rebuild(_settings: object, read_model: ReadModel, _progress: Callable[[int, int], None]) -> Rebuilt:
        if not read_model.has_states():
            raise ConfigurationError("it keeps no states")
        names.append(read_model.name)
        return Rebuilt(Committed(3, 2, 1, 0), 1.0)

    monkeypatch.setattr(hosting, "rebuild", rebuild)
    return names


def run(*models: str, hosted: str = "balance,purchases,symbols") -> Any:
    return CliRunner(env={"BALANCE_MODELS": hosted}).invoke(cli, ["rebuild", *models])


def test_all_models_with_states_are_rebuilt_and_the_others_named(rebuilt: list[str]) -> None:
    done = run()

    assert (done.exit_code, rebuilt) == (0, ["balance", "symbols"])
    assert "purchases keeps no states: there is nothing to rebuild" in done.stdout
    assert "balance rebuilt: 3 events applied, 2 records of other types ignored, 1 duplicates skipped" in done.stdout


def test_a_named_model_without_states_is_rejected(rebuilt: list[str]) -> None:
    done = run("purchases")

    assert isinstance(done.exception, ConfigurationError)
    assert rebuilt == []


def test_a_model_of_another_package_is_named_by_its_name_or_as_in_the_setting(rebuilt: list[str]) -> None:
    reference = "tests.support.models:Summary"

    by_name, by_reference = run("test-summary", hosted=f"balance,{reference}"), run(reference, hosted="balance")

    assert (by_name.exit_code, by_reference.exit_code) == (0, 0), (by_name.output, by_reference.output)
    assert rebuilt == ["test-summary", "test-summary"]
