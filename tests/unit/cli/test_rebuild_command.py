"""`balance-service rebuild`: which read models it rebuilds, and what it says of the others."""

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
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The read models that the engine was told to rebuild."""
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


def test_all_that_keep_states_are_rebuilt_and_the_others_named(rebuilt: list[str]) -> None:
    done = run()

    assert (done.exit_code, rebuilt) == (0, ["balance", "symbols"])
    assert "purchases keeps no states: there is nothing to rebuild" in done.stdout
    assert "balance rebuilt: 3 events applied, 2 records of other types ignored, 1 duplicates" in done.stdout


def test_one_that_keeps_none_is_refused_where_it_is_named(rebuilt: list[str]) -> None:
    done = run("purchases")

    assert isinstance(done.exception, ConfigurationError)
    assert rebuilt == []


def test_a_model_of_ones_own_is_named_by_its_name_or_as_in_the_setting(rebuilt: list[str]) -> None:
    own = "tests.support.models:Summary"

    by_name, by_place = run("test-summary", hosted=f"balance,{own}"), run(own, hosted="balance")

    assert (by_name.exit_code, by_place.exit_code) == (0, 0), (by_name.output, by_place.output)
    assert rebuilt == ["test-summary", "test-summary"]
