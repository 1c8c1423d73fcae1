"""Fixtures of the tests of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.http.streaming import Owner

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path / "store")
