"""Fixtures that tests of several parts of `http` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.querying import Instance
from tests.unit.http.streaming import Owner

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    """Owns the partition PARTITION, without states."""
    return Instance(tmp_path / "store")


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path / "store")
