"""Finds the copies of a partition that can answer: the one here, the owner's, or a standby's.

Everything here runs on the event loop's thread and reads immutable snapshots.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from balance_service.engine.records import Role
from balance_service.engine.task import ANSWERING, TaskState
from balance_service.errors import RetriableError
from balance_service.http.peers.trust import Peer
from balance_service.kafka.lease import Lease
from balance_service.kafka.topics import Watermarks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from balance_service.cluster.directory import ApplicationServer
    from balance_service.engine.records import Position
    from balance_service.engine.store import StoreView
    from balance_service.engine.task import Watcher
    from balance_service.errors import StoreCorruptedError
    from balance_service.kafka.partitioner import Partitioning

_ANSWERING = frozenset(state.value for state in ANSWERING)
_OWNS = _ANSWERING | {TaskState.HALTED.value}
_WATERMARK_SECONDS = 3.0
ACTIVE, STANDBY, HALTED = "active", "standby", "halted"
HEADROOM_SECONDS = 0.1
"""Added to the last peer's time-out, so that its own refusal arrives before this instance gives up."""
_ASKING = ThreadPoolExecutor(4, "schemas")


async def asked(ask: Callable[[], object], seconds: float) -> None:
    """Makes the request of a `MustAskError`, on another thread. Raises RetriableError: it fails, or takes longer."""
    try:
        await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(_ASKING, ask), seconds)
    except TimeoutError:
        raise RetriableError(f"the schema registry did not answer within {seconds:.0f} s") from None


class ReadableTask(Protocol):
    """A task as queries read it."""

    @property
    def role(self) -> Role:
        """Must be read before `view`."""

    @property
    def view(self) -> StoreView | None:
        """States and position as of the last commit; None unless the task answers queries."""

    @property
    def frozen_view(self) -> StoreView | None:
        """The last view of a task that applies nothing more: one halted by the read model's own code, or closed."""

    def watch(self, watcher: Watcher | None) -> None:
        """Notifies a watcher of the owner's commits from now on; None: no watcher."""


class Servers(Protocol):
    """The instances that have partitions: a `ServerTable`, or those of several of its stages."""

    def owners(
        self, stage: str, partition: int, states: frozenset[str], *, suspects: bool = False
    ) -> list[ApplicationServer]: ...

    def standbys(
        self, stage: str, partition: int, states: frozenset[str], *, suspects: bool = False
    ) -> list[ApplicationServer]: ...

    def servers(self) -> Sequence[ApplicationServer]: ...


class LocalCopy(NamedTuple):
    """One partition in the local store. `was_owned` is as of before it was read.

    `is_frozen`: its task applies nothing, since it was halted or closed.
    """

    partition: int
    task: ReadableTask
    view: StoreView
    position: Position
    was_owned: bool
    is_frozen: bool

    @property
    def is_open(self) -> bool:
        """Whether the task still answers from the store."""
        return (self.task.frozen_view if self.is_frozen else self.task.view) is not None


class LocalState(NamedTuple):
    """The state of a key in the local store, framed, and where it came from. `lag` is in records, `age` in seconds."""

    frame: bytes | None
    position: Position
    lag: int | None
    age: float | None
    """How long ago the position was known to include all records of the partition; None if it is not known."""
    role: str
    """`active`: the owner's; `halted`: of an owner that the model's own code halted; `standby`: of any other copy."""
    is_frozen: bool
    task: ReadableTask


def _nothing(*_: object) -> Any:
    """For a stage that only peers host."""


@dataclass(slots=True, eq=False, kw_only=True)
class Routing:
    """The copies of the partitions of one stage, or of a read model's last stage.

    The fields with defaults are what this instance hosts of it: nothing, unless they are given.
    """

    read_model: str
    """The stage's name: of a last stage, `generation_name` of the model and the generation."""
    partitioning: Partitioning
    """Where the source's keys are."""
    address: str
    servers: Servers
    task: Callable[[int], ReadableTask | None] = _nothing
    """Returns this instance's task of a partition, active or standby."""
    left: Callable[[int], ReadableTask | None] = _nothing
    """Returns what a closed task of a partition left, until the next task runs."""
    view: Callable[[bytes], Any] = _nothing
    """Framed state → the value in the answer."""
    number: Callable[[str], Callable[[bytes], Any]] = _nothing
    """Field → framed state → the field's value in the view, which is cheaper than the whole view."""
    on_damage: Callable[[int, ReadableTask, StoreCorruptedError], None] = _nothing
    """Called with the partition and the task whose store is damaged."""
    lease: Lease = field(default_factory=lambda: Lease(0))
    watermarks: Watermarks = field(default_factory=lambda: Watermarks("", dict))
    answers_when_halted: bool = False
    """Whether a halted task answers queries that do not say how old the answer may be."""
    _doubted: dict[int, set[Peer]] = field(default_factory=dict, init=False)

    @property
    def partitions(self) -> int:
        return self.partitioning.partitions

    def partition_of(self, key: bytes) -> int:
        return self.partitioning.of(key)

    def copy(self, partition: int, *, takes_left: bool = False) -> LocalCopy | None:
        """Returns the local copy of a partition; None if its task does not answer queries.

        Args:
            takes_left: whether the view that a closed task left will do.
        """
        task = self.task(partition)
        if task is not None:
            role, view = task.role, task.view
            if view is not None:
                return _copy(partition, task, view, was_owned=role is Role.ACTIVE)
        if takes_left and (task is None or task.frozen_view is None):
            task = self.left(partition)
        if task is not None and (view := task.frozen_view) is not None:
            return _copy(partition, task, view, was_owned=task.role is Role.ACTIVE, is_frozen=True)
        return None

    def read(self, copy: LocalCopy, key: bytes, min_offset: int = 0, *, with_age: bool = False) -> LocalState:
        """Reads a state. Below `min_offset` it reads nothing and returns no frame.

        A standby's answer, and an owner's after its lease has expired, is consistent as of its position, but other
        instances may be ahead.

        Raises:
            StoreCorruptedError: the store is damaged.
        """
        # A query that waits for a position calls this every few milliseconds.
        frame = copy.view.get(key) if copy.position.offset >= min_offset else None
        age = self.watermarks.age(copy.partition, copy.position.offset) if with_age else None
        role = self.role_of(copy)
        return LocalState(frame, copy.position, self.lag_of(copy), age, role, copy.is_frozen, copy.task)

    def lag_of(self, copy: LocalCopy) -> int | None:
        """Records between a copy and the source's end; None if the watermark is stale."""
        is_fresh = self.watermarks.age_seconds <= _WATERMARK_SECONDS
        return self.watermarks.lag(copy.partition, copy.position.offset) if is_fresh else None

    def is_owned(self, copy: LocalCopy) -> bool:
        """Whether this instance owns the partition. Must be called after the read.

        A pause during the read may have outlasted the lease, or a move of the partition.
        """
        return copy.was_owned and not copy.is_frozen and self.lease.holds and copy.task.view is not None

    def role_of(self, copy: LocalCopy) -> str:
        """The role of a copy that answers, as `LocalState` has it. Must be called after the read."""
        if self.is_owned(copy):
            return ACTIVE
        is_halted_owner = copy.was_owned and copy.is_frozen and self.lease.holds and copy.is_open
        return HALTED if is_halted_owner else STANDBY

    def answers(self, role: str) -> bool:
        """Whether a copy in a role answers queries that do not say how old the answer may be."""
        return role == ACTIVE or (role == HALTED and self.answers_when_halted)

    def owned(self) -> set[int]:
        """The partitions that this instance owns, readable or not."""
        tasks = {partition: self.task(partition) for partition in range(self.partitions)}
        return {partition for partition, task in tasks.items() if task is not None and task.role is Role.ACTIVE}

    def candidates(
        self, partition: int, *, takes_standbys: bool, takes_halted: bool = False, takes_suspects: bool = False
    ) -> list[Peer]:
        """Returns the peers to ask about a partition, in order.

        The owner comes first: the peer that claims the highest epoch. Other claimants follow; those that were asked and
        did not answer as owner come last, so that a wrong claim blocks no query. If standbys are allowed, they come
        after all claimants, most recent first.

        Args:
            takes_halted: whether to ask owners that have halted; they know whether they may answer.
            takes_suspects: whether to ask, after all others, peers that have been silent, as all are while the broker
                is away, and all that host the read model: each may still have what its tasks left.
        """
        peers: list[Peer] = []
        doubted = self._doubted.get(partition, set())
        for suspects in (False, True)[: 1 + takes_suspects]:
            owners = self._owners(partition, _OWNS if takes_halted else _ANSWERING, suspects=suspects)
            peers += sorted(owners, key=doubted.__contains__)
            if takes_standbys:
                standbys = self.servers.standbys(self.read_model, partition, _ANSWERING, suspects=suspects)
                peers += _peers(standbys)
        if takes_suspects:
            hosts = [server for server in self.servers.servers() if server.hosts(self.read_model)]
            peers = [*dict.fromkeys((*peers, *_peers(hosts)))]
            # An owner that has died claims its partitions as long as the broker is away.
            peers.sort(key=doubted.__contains__)
        return [peer for peer in peers if peer.address != self.address]

    def in_turn(
        self,
        partition: int,
        deadline: float,
        *,
        takes_standbys: bool,
        takes_halted: bool = False,
        takes_suspects: bool = False,
        last_gets_rest: bool = True,
    ) -> Iterator[tuple[Peer, float, bool]]:
        """Yields each candidate with its time-out in seconds, and whether it is the last one; stops at the deadline.

        Args:
            last_gets_rest: whether the last candidate gets all of the remaining time. The others get half of it each.
        """
        peers = self.candidates(
            partition, takes_standbys=takes_standbys, takes_halted=takes_halted, takes_suspects=takes_suspects
        )
        for following, peer in zip(range(len(peers) - 1, -1, -1), peers, strict=True):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            yield peer, left + HEADROOM_SECONDS if last_gets_rest and not following else left / 2, not following

    def believe(self, partition: int, peer: Peer) -> None:
        """Records that a peer has answered as the owner of a partition."""
        if doubted := self._doubted.get(partition):
            doubted.discard(peer)

    def doubt(self, partition: int, peer: Peer) -> None:
        """Records that a peer was asked and did not answer as the owner of a partition."""
        doubted = self._doubted.get(partition, set()) | {peer}
        # A peer that was started again is another one.
        self._doubted[partition] = doubted.intersection(_peers(self.servers.servers()))

    def _owners(self, partition: int, states: frozenset[str], *, suspects: bool = False) -> list[Peer]:
        return _peers(self.servers.owners(self.read_model, partition, states, suspects=suspects))


def _peers(servers: Iterable[ApplicationServer]) -> list[Peer]:
    return [Peer(server.address, server.incarnation) for server in servers]


def _copy(
    partition: int, task: ReadableTask, view: StoreView, *, was_owned: bool, is_frozen: bool = False
) -> LocalCopy | None:
    position = view.position
    return None if position is None else LocalCopy(partition, task, view, position, was_owned, is_frozen)
