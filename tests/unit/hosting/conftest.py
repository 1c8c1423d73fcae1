"""What the changelogs of generations say, without Kafka."""

from __future__ import annotations

import pytest

from tests.unit.hosting.rebuilding import Written


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All instances know at once which generation serves."""
    monkeypatch.setattr("balance_service.hosting.online_rebuilds._SPREAD_SECONDS", 0.0)


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The owners that the positions in dropped changelogs name."""
    owners = {"balance-service\0rewards.g2"}
    monkeypatch.setattr("balance_service.hosting.dropped_changelogs.owners_of", lambda *_: owners)
    return owners


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    written = Written()
    monkeypatch.setattr("balance_service.hosting.rebuild_checks.last_positions", written.last_positions)
    return written
