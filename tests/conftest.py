"""One real broker and registry for the whole run; new names for each test."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from typing import TYPE_CHECKING

import hypothesis
import pytest

from balance_service.devtools.local.processes import share_ports
from balance_service.devtools.local.stack import LocalStack

if TYPE_CHECKING:
    from collections.abc import Iterator

_SLOWEST = 30

# The duration of an example depends on the machine more than on the code.
hypothesis.settings.register_profile("developers", deadline=None)
# In CI, results must be reproducible; new examples are generated on developers' machines.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "developers")
# A server that restarts in one lane of `tests.lanes` must not lose its port to another lane.
if place := os.environ.get("TESTS_LANE"):
    share_ports(*map(int, place.split("/")))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def names() -> dict[str, str]:
    """A topic and an application id that no other test uses, as settings."""
    suffix = uuid.uuid4().hex[:8]
    return {"topic": f"balance-{suffix}", "application_id": f"app-{suffix}"}


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables of the service from the environment."""
    for name in os.environ:
        if name.upper().startswith("BALANCE_"):
            monkeypatch.delenv(name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the seconds of the slowest files. `tests.lanes` distributes files by their minutes."""
    spent = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[report.nodeid.partition("::")[0]] += round(report.duration * 1000)
    if len(spent) > 1:
        terminalreporter.section("slowest files")
        for path, milliseconds in spent.most_common(_SLOWEST):
            terminalreporter.write_line(f"{milliseconds / 1000:7.1f} s {path}")
