"""One real broker and registry for the whole run; fresh names for each test."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import hypothesis
import pytest

from balance_service.devtools.local import ports
from balance_service.devtools.local.stack import LocalStack

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long an example takes says more of the machine than of the code.
hypothesis.settings.register_profile("people", deadline=None)
# What lands must not depend on luck; new examples are found on people's machines.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "people")
# What is down for a moment in one lane must not lose its port to the other: see `tests.lanes`.
if place := os.environ.get("TESTS_LANE"):
    lane, lanes = map(int, place.split("/"))
    ports._PORTS = ports._PORTS[lane::lanes]


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Broker and registry, up."""
    with LocalStack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def names() -> dict[str, str]:
    """A topic and an application id that no other test uses, as settings."""
    suffix = uuid.uuid4().hex[:8]
    return {"topic": f"balance-{suffix}", "application_id": f"app-{suffix}"}


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the service's variables, but those that a test sets."""
    for name in os.environ:
        if name.upper().startswith("BALANCE_"):
            monkeypatch.delenv(name)
