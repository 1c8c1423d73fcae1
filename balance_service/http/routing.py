"""Partition of the key → who owns it: this instance, a peer, or nobody for now.

Called on the event loop's thread only; what it asks answers from immutable snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from balance_service.cluster.partitioner import partition_of
from balance_service.state.task_state import ANSWERING

if TYPE_CHECKING:
    from balance_service.cluster.directory import ApplicationServer, ServerTable
    from balance_service.cluster.membership import Lease
    from balance_service.cluster.watermarks import Watermarks
    from balance_service.state.records import Position
    from balance_service.state.store import StoreView

_ANSWERING = frozenset(state.value for state in ANSWERING)


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """A state as the local store has it, framed, with what is needed to say where it came from."""

    frame: bytes | None
    position: Position
    lag: int | None


class Readable(Protocol):
    """A task, as far as it is read from."""

    @property
    def view(self) -> StoreView | None:
        """States and position as of the last commit; None unless it answers."""


class ReadableTasks(Protocol):
    """The tasks of this instance."""

    def task(self, partition: int) -> Readable | None:
        """The task of a partition; None if the partition is not ours."""


class Leased(Protocol):
    """Whoever holds the lease of this instance."""

    @property
    def lease(self) -> Lease:
        """Until when it may answer as owner."""


class Routing:
    """Finds who may answer for a key of one read model."""

    def __init__(
        self,
        read_model: str,
        partitions: int,
        address: str,
        tasks: ReadableTasks,
        membership: Leased,
        watermarks: Watermarks,
        servers: ServerTable,
    ) -> None:
        self._read_model = read_model
        self._partitions = partitions
        self._address = address
        self._tasks = tasks
        self._membership = membership
        self._watermarks = watermarks
        self._servers = servers

    def partition_of(self, key: bytes) -> int:
        """The key's partition."""
        return partition_of(key, self._partitions)

    def read(self, partition: int, key: bytes) -> LocalAnswer | None:
        """The state as the owner has it; None if this instance is not the owner.

        Raises:
            StoreCorruptedError: the store is damaged there.
        """
        task = self._tasks.task(partition)
        view = None if task is None else task.view
        if view is None or view.position is None:
            return None
        frame = view.get(key)
        # Checked after the read: a pause before this line may have outlasted the lease.
        if not self._membership.lease.holds:
            return None
        return LocalAnswer(frame, view.position, self._watermarks.lag(partition, view.position.offset))

    def owner(self, partition: int) -> ApplicationServer | None:
        """The peer that owns a partition, as far as is known; never this instance."""
        server = self._servers.owner(self._read_model, partition, _ANSWERING)
        return None if server is None or server.address == self._address else server
