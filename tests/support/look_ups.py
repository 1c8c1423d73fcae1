"""Where a store is looked through: RocksDB steps over each deleted record there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.engine.store.store import StateStore

if TYPE_CHECKING:
    import pytest


def looks_from(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys from which any store is looked through from now on; it grows."""
    looked_from: list[bytes] = []
    keys = StateStore.keys

    def noted(store: StateStore, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        looked_from.append(start)
        return keys(store, start, stop, limit)

    monkeypatch.setattr(StateStore, "keys", noted)
    return looked_from
