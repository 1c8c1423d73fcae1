"""The project that the code of the documents continues in."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from balance_service.cli.init import write_project

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project of `balance-service init`, as the working directory."""
    write_project(tmp_path / "shop")
    monkeypatch.chdir(tmp_path / "shop")
    monkeypatch.syspath_prepend(tmp_path / "shop")
    yield tmp_path / "shop"
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]
