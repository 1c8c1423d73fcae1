"""Which instances stand by for a partition: all agree without talking, by rendezvous hashing.

Source: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from balance_service.cluster.server_table import SUSPECT_AFTER_SECONDS
from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from balance_service.cluster.server_table import ServerTable

# An instance that is silent for a moment should not cost another one a restore.
_KEEP_SECONDS = 15.0


def chosen(task: str, addresses: Iterable[str], owner: str | None, replicas: int) -> list[str]:
    """The addresses that stand by for a task: those that rank highest with it, its owner aside.

    When an instance comes or goes, only its own tasks change hands.
    """
    others = (address for address in addresses if address != owner)
    return sorted(others, key=lambda address: (_rank(task, address), address), reverse=True)[:replicas]


class StandbyChooser:
    """The partitions of a read model that this instance stands by for. Called by one thread, about once a second."""

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
        self._asked_at = self._deaf_at = float("-inf")

    def partitions(self) -> frozenset[int]:
        """The partitions this instance is chosen for, or was a moment ago."""
        now = self._clock()
        live = {s.address for s in self._table.servers() if s.hosts(self._read_model) and not s.is_suspect(now)}
        if self._has_listened(live, now):
            self._choose(live, now)
        else:
            # It has just started, or was paused, or the brokers are away: whom it does not hear may well be up.
            self._wanted_at = dict.fromkeys(self._wanted_at, now)
        return frozenset(self._wanted_at)

    def _has_listened(self, live: Collection[str], now: float) -> bool:
        """Whether it has heard itself, without a gap, for as long as it takes to hear all others that are up."""
        # After a pause it may hear first what it said before that.
        was_paused = now - self._asked_at > SUSPECT_AFTER_SECONDS
        if was_paused or self._address not in live:
            self._deaf_at = now
        self._asked_at = now
        return now - self._deaf_at > SUSPECT_AFTER_SECONDS

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
