"""Partition of the key → its owner: this instance, a peer, or none for now.

Called on the event loop's thread only; what it asks answers from immutable snapshots.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from balance_service.engine.records import Role
from balance_service.engine.task import ANSWERING
from balance_service.http.peers.trust import Peer
from balance_service.kafka.partitioner import partition_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.cluster.directory import ServerTable
    from balance_service.cluster.membership import Lease
    from balance_service.engine.records import Position
    from balance_service.engine.store import StoreView
    from balance_service.kafka.topics import Watermarks

_ANSWERING = frozenset(state.value for state in ANSWERING)
_WATERMARK_SECONDS = 3.0
HEADROOM_SECONDS = 0.1
"""What the last peer is given beyond the deadline, so that its own refusal arrives."""


class LocalAnswer(NamedTuple):
    """A state as the local store has it, framed, with what is needed to say where it came from."""

    frame: bytes | None
    position: Position
    lag: int | None
    is_owner: bool
    task: Readable


class Readable(Protocol):
    """A task, as far as it is read from."""

    @property
    def role(self) -> Role:
        """Whether it owns its partition; to be asked before `view`."""

    @property
    def view(self) -> StoreView | None:
        """States and position as of the last commit; None unless it answers."""


class Copy(NamedTuple):
    """All states of a partition as the local store has them; `was_owned` is of before they were looked at."""

    partition: int
    task: Readable
    view: StoreView
    position: Position
    was_owned: bool


class ReadableTasks(Protocol):
    """The tasks of this instance."""

    def task(self, partition: int) -> Readable | None:
        """The task of a partition, in whichever role; None if there is none here."""


class Leased(Protocol):
    """Holds the lease of this instance."""

    @property
    def lease(self) -> Lease:
        """Until when it may answer as owner."""


@dataclass(slots=True, eq=False, kw_only=True)
class Routing:
    """Finds the instances that may answer for a key of one read model."""

    read_model: str
    partitions: int
    """How many there are."""
    address: str
    tasks: ReadableTasks
    membership: Leased
    watermarks: Watermarks
    servers: ServerTable
    _doubted: dict[int, set[Peer]] = field(default_factory=dict, init=False)

    def partition_of(self, key: bytes) -> int:
        """The key's partition."""
        return partition_of(key, self.partitions)

    def read(self, copy: Copy, key: bytes, min_offset: int = 0) -> LocalAnswer:
        """The state as this instance has it.

        Below the least offset that will do there is no frame, whatever the store has: it is not read.

        It is the owner's answer if the task owns the partition and the lease holds. A standby's, and that of one whose
        lease has run out, is whole and true as of its position, but others may know more.

        Raises:
            StoreCorruptedError: the store is damaged there.
        """
        # A query that waits for a position comes here every few milliseconds.
        frame = copy.view.get(key) if copy.position.offset >= min_offset else None
        return LocalAnswer(frame, copy.position, self.lag_of(copy), self.is_owned(copy), copy.task)

    def copy(self, partition: int) -> Copy | None:
        """A partition as this instance has it; None if it has none to answer from."""
        task = self.tasks.task(partition)
        if task is None:
            return None
        role, view = task.role, task.view
        if view is None or view.position is None:
            return None
        return Copy(partition, task, view, view.position, role is Role.ACTIVE)

    def lag_of(self, copy: Copy) -> int | None:
        """Records between a copy and the source's end; None if that is not known as of lately."""
        is_fresh = self.watermarks.age_seconds <= _WATERMARK_SECONDS
        return self.watermarks.lag(copy.partition, copy.position.offset) if is_fresh else None

    def is_owned(self, copy: Copy) -> bool:
        """Whether what was read of a copy is the owner's answer; to be asked after the read.

        A pause during it may have outlasted the lease, or the partition's move.
        """
        return copy.was_owned and self.membership.lease.holds and copy.task.view is not None

    def owned(self) -> set[int]:
        """The partitions that this instance owns, whether or not they can be read now."""
        tasks = {partition: self.tasks.task(partition) for partition in range(self.partitions)}
        return {partition for partition, task in tasks.items() if task is not None and task.role is Role.ACTIVE}

    def has_copy(self, partition: int) -> bool:
        """Whether this instance has something to answer from, be it not recent enough."""
        task = self.tasks.task(partition)
        return task is not None and task.view is not None

    def candidates(self, partition: int, *, takes_standbys: bool) -> list[Peer]:
        """The peers that may answer for a partition, in the order in which to ask them.

        The owner, as far as it is known, is the one that claims the highest epoch. Others that claim the partition are
        asked after it, and those last that were asked and did not answer as its owner; so a claim that is not true
        stops nobody. Then, if they will do, the standbys, the one that is furthest first.
        """
        peers = self._owners(partition)
        if doubted := self._doubted.get(partition):
            peers.sort(key=doubted.__contains__)
        if takes_standbys:
            standbys = self.servers.standbys(self.read_model, partition, _ANSWERING)
            peers += [Peer(server.address, server.incarnation) for server in standbys]
        return [peer for peer in peers if peer.address != self.address]

    def in_turn(
        self, partition: int, deadline: float, *, takes_standbys: bool, is_all: bool = True
    ) -> Iterator[tuple[Peer, float, bool]]:
        """The same, each with the seconds to wait for it, and whether it is the last one; none after the deadline.

        Each gets half of the time left while something comes after it: another one, or what is not `is_all`.
        """
        peers = self.candidates(partition, takes_standbys=takes_standbys)
        for following, peer in zip(range(len(peers) - 1, -1, -1), peers, strict=True):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            yield peer, left + HEADROOM_SECONDS if is_all and not following else left / 2, not following

    def believe(self, partition: int, peer: Peer) -> None:
        """A peer has answered as the owner of a partition."""
        if doubted := self._doubted.get(partition):
            doubted.discard(peer)

    def doubt(self, partition: int, peer: Peer) -> None:
        """A peer was asked, and has not answered as the owner of a partition."""
        doubted = self._doubted.get(partition, set()) | {peer}
        self._doubted[partition] = doubted.intersection(self._owners(partition))

    def _owners(self, partition: int) -> list[Peer]:
        owners = self.servers.owners(self.read_model, partition, _ANSWERING)
        return [Peer(server.address, server.incarnation) for server in owners]
