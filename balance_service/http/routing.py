"""Partition of the key → who owns it: this instance, a peer, or nobody for now.

Called on the event loop's thread only; what it asks answers from immutable snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from balance_service.cluster.partitioner import partition_of
from balance_service.state.records import Role
from balance_service.state.task_state import ANSWERING

if TYPE_CHECKING:
    from balance_service.cluster.directory import ApplicationServer, ServerTable
    from balance_service.cluster.membership import Lease
    from balance_service.cluster.watermarks import Watermarks
    from balance_service.state.records import Position
    from balance_service.state.store import StoreView

_ANSWERING = frozenset(state.value for state in ANSWERING)
_WATERMARK_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """A state as the local store has it, framed, with what is needed to say where it came from."""

    frame: bytes | None
    position: Position
    lag: int | None
    is_owner: bool


class Readable(Protocol):
    """A task, as far as it is read from."""

    @property
    def role(self) -> Role:
        """Whether it owns its partition; to be asked before `view`."""

    @property
    def view(self) -> StoreView | None:
        """States and position as of the last commit; None unless it answers."""


class ReadableTasks(Protocol):
    """The tasks of this instance."""

    def task(self, partition: int) -> Readable | None:
        """The task of a partition, in whichever role; None if there is none here."""


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
        """The state as this instance has it; None if it has none to answer from.

        It is the owner's answer if the task owns the partition and the lease holds. A standby's, and that of one whose
        lease has run out, is whole and true as of its position, but others may know more.

        Raises:
            StoreCorruptedError: the store is damaged there.
        """
        task = self._tasks.task(partition)
        if task is None:
            return None
        role, view = task.role, task.view
        if view is None or view.position is None:
            return None
        frame = view.get(key)
        # Checked after the read: a pause before this line may have outlasted the lease, or the partition's move.
        is_owner = role is Role.ACTIVE and self._membership.lease.holds and task.view is not None
        return LocalAnswer(frame, view.position, self._lag(partition, view.position.offset), is_owner)

    def has_copy(self, partition: int) -> bool:
        """Whether this instance has something to answer from, be it not recent enough."""
        task = self._tasks.task(partition)
        return task is not None and task.view is not None

    def owner(self, partition: int) -> ApplicationServer | None:
        """The peer that owns a partition, as far as is known; never this instance."""
        server = self._servers.owner(self._read_model, partition, _ANSWERING)
        return None if server is None or server.address == self._address else server

    def standbys(self, partition: int) -> list[ApplicationServer]:
        """The peers that stand by for a partition, the one that is furthest first; never this instance."""
        servers = self._servers.standbys(self._read_model, partition, _ANSWERING)
        return [server for server in servers if server.address != self._address]

    def _lag(self, partition: int, position: int) -> int | None:
        """Records between a position and the source's end; None if that is not known as of lately."""
        is_fresh = self._watermarks.age_seconds <= _WATERMARK_SECONDS
        return self._watermarks.lag(partition, position) if is_fresh else None
