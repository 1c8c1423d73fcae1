"""Fixtures that tests of several parts of `http` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from balance_service.http.server.tls import TlsFiles, load_tls
from tests.support.credentials import Authority
from tests.support.querying import Instance
from tests.unit.http.streaming import Owner

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.http.server.tls import Tls


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    """Owns the partition PARTITION, without states."""
    return Instance(tmp_path / "store")


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    """The contexts of a server and of its clients."""
    authority = Authority(tmp_path)
    return load_tls(TlsFiles(*authority.issue("server"), ca=authority.certificate))


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path / "store")
