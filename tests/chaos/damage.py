"""Damage to the stores of a stopped instance: deleted directories, flipped bytes, truncated logs."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from pathlib import Path

_FLIPS = 24
_FOOTER_BYTES = 64
_IN_USE_SECONDS = 5.0


def delete_store(state_dir: Path, chooser: random.Random) -> str | None:
    """Deletes one store; returns its name, or None if there is none."""
    stores = _in_use(state_dir)
    if not stores:
        return None
    store = chooser.choice(stores)
    shutil.rmtree(store)
    return store.name


def damage_store(state_dir: Path, chooser: random.Random) -> str | None:
    """Flips bytes in a table file, or truncates a write-ahead log; returns a description, or None without a file."""
    stores = _in_use(state_dir)
    tables = [path for store in stores for path in store.glob("*.sst") if path.stat().st_size > 200]
    if tables and chooser.random() < 0.7:
        table = chooser.choice(sorted(tables))
        _flip(table, chooser)
        return f"{_FLIPS} bytes flipped in {table.parent.name}/{table.name}"
    logs = [path for store in stores for path in store.glob("*.log") if path.stat().st_size > 10]
    if not logs:
        return None
    log = chooser.choice(sorted(logs))
    size = log.stat().st_size
    with log.open("r+b") as file:
        file.truncate(chooser.randint(size // 4, size - 1))
    return f"{log.parent.name}/{log.name} truncated"


def _in_use(state_dir: Path) -> list[Path]:
    """Returns the most recently written store directories: those of departed tasks are unused."""
    written = {
        store: max((path.stat().st_mtime for path in store.iterdir()), default=0.0)
        for store in sorted(state_dir.glob("balance_*"))
        if store.is_dir()
    }
    latest = max(written.values(), default=0.0)
    return [store for store, at in written.items() if at > latest - _IN_USE_SECONDS]


def _flip(table: Path, chooser: random.Random) -> None:
    content = bytearray(table.read_bytes())
    for _ in range(_FLIPS):
        content[chooser.randrange(max(1, len(content) - _FOOTER_BYTES))] ^= chooser.randint(1, 255)
    table.write_bytes(content)
