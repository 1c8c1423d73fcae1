"""Assigns standbys to instances by rendezvous hashing: all instances compute the same without coordination.

Source: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from balance_service.cluster.directory import SUSPECT_AFTER_SECONDS
from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from balance_service.cluster.directory import ServerTable

# So that a short silence of an instance does not cost another one a restore.
_KEEP_SECONDS = 15.0


def chosen(task: str, addresses: Iterable[str], owner: str | None, replicas: int) -> list[str]:
    """The addresses that rank highest for a task, without its owner.

    When an instance joins or leaves, only its own tasks move.
    """
    others = (address for address in addresses if address != owner)
    return sorted(others, key=lambda address: (_rank(task, address), address), reverse=True)[:replicas]


class StandbyChooser:
    """Chooses the partitions of a read model whose standbys this instance runs. One thread calls it once a second."""

    def __init__(
        self,
        *,
        table: ServerTable,
        read_model: str,
        partitions: int,
        address: str,
        replicas: int,
        clock: Callable[[], float] = elapsed,
    ) -> None:
        self._table = table
        self._read_model = read_model
        self._partitions = partitions
        self._address = address
        self._replicas = replicas
        self._clock = clock
        self._wanted_at: dict[int, float] = {}
        self._called_at = self._last_deaf_at = float("-inf")

    def partitions(self) -> frozenset[int]:
        """The partitions that this instance is chosen for, or was in the last 15 seconds."""
        now = self._clock()
        live = {s.address for s in self._table.servers() if s.hosts(self._read_model) and not s.is_suspect(now)}
        if self._has_listened(live, now):
            self._choose(live, now)
        else:
            # It has just started, was paused, or cannot reach the brokers: instances that it does not hear may be up.
            self._wanted_at = dict.fromkeys(self._wanted_at, now)
        return frozenset(self._wanted_at)

    def _has_listened(self, live: Collection[str], now: float) -> bool:
        """Whether it has heard itself without a gap for long enough to have heard all instances that are up."""
        # After a pause, it may first read its own records from before the pause.
        was_paused = now - self._called_at > SUSPECT_AFTER_SECONDS
        if was_paused or self._address not in live:
            self._last_deaf_at = now
        self._called_at = now
        return now - self._last_deaf_at > SUSPECT_AFTER_SECONDS

    def _choose(self, live: Collection[str], now: float) -> None:
        for partition in range(self._partitions if self._replicas else 0):
            server = self._table.assigned(self._read_model, partition)
            owner = None if server is None else server.address
            task = f"{self._read_model}_{partition}"
            if owner == self._address:
                self._wanted_at.pop(partition, None)
            elif self._address in chosen(task, live, owner, self._replicas):
                self._wanted_at[partition] = now
        self._wanted_at = {p: at for p, at in self._wanted_at.items() if now - at < _KEEP_SECONDS}


def _rank(task: str, address: str) -> bytes:
    return hashlib.blake2b(f"{task} {address}".encode(), digest_size=16).digest()
