"""What is known of the instances: what each hosts and works on, and which may be asked for what.

An immutable mapping, replaced whole; any thread may look up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

SUSPECT_AFTER_SECONDS = 3.0
ACTIVE, STANDBY = "ACTIVE", "STANDBY"
_FORGET_AFTER_SECONDS = 3600.0
# Of one that is only known from the past. Those that are up say so every second, on a busy machine a little later.
_FORGET_UNHEARD_AFTER_SECONDS = 60.0
# A record that was in flight when its instance was killed may arrive after the first one of the successor. Several that
# arrive together prove no more than one.
_LEAST_RETURNS = 3
_RETURNS_SPAN_SECONDS = 2.0
# Records may be forged, where instances have no secret.
_MOST_RUNS = 8


@dataclass(frozen=True, slots=True)
class PublishedTask:
    """One task, as its instance published it."""

    stage: str
    partition: int
    role: str
    state: str
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A read model that an instance hosts, and how many partitions its source has."""

    name: str
    partitions: int


@dataclass(frozen=True, slots=True)
class ApplicationServer:
    """One instance, as it was last heard of. Times are of our own clock; `heard_at` is -inf for never."""

    address: str
    incarnation: str
    models: tuple[PublishedModel, ...]
    tasks: tuple[PublishedTask, ...]
    heard_at: float
    read_at: float
    is_shared: bool = False
    """Whether two running instances publish under this address."""

    @property
    def was_heard(self) -> bool:
        """Whether it has said something since we began to listen."""
        return self.heard_at > float("-inf")

    def hosts(self, read_model: str) -> bool:
        """Whether it works on partitions of a read model."""
        return any(model.name == read_model for model in self.models)

    def is_suspect(self, now: float) -> bool:
        """Whether it has been silent for so long that it must not be routed to."""
        return now - self.heard_at > SUSPECT_AFTER_SECONDS


class _Runs:
    """The runs of instances that have published under one address in the last seconds.

    A restart replaces one run by another, and the first publishes no more. A run that publishes again, time after time,
    after another one did, proves that both are alive. The listener's own clock alone counts.
    """

    def __init__(self) -> None:
        self._heard_at: dict[str, float] = {}
        """By incarnation, the one that was heard last at the end."""
        self._returned_at: list[float] = []
        """When a run was heard again after another one."""

    def hear(self, incarnation: str, now: float) -> bool:
        """Take in a record; returns whether two instances share the address."""
        runs = {i: at for i, at in self._heard_at.items() if now - at <= SUSPECT_AFTER_SECONDS}
        is_latest = next(reversed(runs), incarnation) == incarnation
        returns = incarnation in runs and not is_latest
        runs.pop(incarnation, None)
        self._heard_at = dict([*runs.items(), (incarnation, now)][-_MOST_RUNS:])
        if not runs:
            self._returned_at = []
        elif returns:
            # Only the first ones and the latest count.
            self._returned_at = [*self._returned_at[: _LEAST_RETURNS - 1], now]
        at = self._returned_at
        return len(at) == _LEAST_RETURNS and at[-1] - at[0] >= _RETURNS_SPAN_SECONDS


class ServerTable:
    """Who said what, when. Pure but for its clock; the directory's thread writes, any thread reads."""

    def __init__(self, clock: Callable[[], float] = elapsed) -> None:
        self._clock = clock
        self._servers: Mapping[str, ApplicationServer] = {}
        self._runs: dict[str, _Runs] = {}

    def hear(self, address: str, record: Mapping[str, Any] | None, *, live: bool) -> None:
        """Take in one record of the topic.

        Args:
            address: under which peers reach it; the record's key.
            record: what the instance said; None is its farewell.
            live: whether it was said since we began to listen. What is older says nothing about now.
        """
        now = self._clock()
        servers = {
            a: s
            for a, s in self._servers.items()
            if now - s.read_at < (_FORGET_AFTER_SECONDS if s.was_heard else _FORGET_UNHEARD_AFTER_SECONDS)
        }
        if record is None:
            servers.pop(address, None)
            self._runs.pop(address, None)
        else:
            tasks = tuple(
                PublishedTask(t["readModel"], t["partition"], t["role"], t["state"], t["epoch"], t["position"])
                for t in record["tasks"]
            )
            models = tuple(PublishedModel(m["name"], m["partitions"]) for m in record["models"])
            heard_at, incarnation = now if live else float("-inf"), record["incarnation"]
            is_shared = live and self._runs.setdefault(address, _Runs()).hear(incarnation, now)
            servers[address] = ApplicationServer(address, incarnation, models, tasks, heard_at, now, is_shared)
        self._runs = {a: runs for a, runs in self._runs.items() if a in servers}
        self._servers = servers

    def is_shared(self, address: str) -> bool:
        """Whether two running instances publish under an address, so that peers ask one for what the other owns."""
        server = self._servers.get(address)
        return server is not None and server.is_shared

    def servers(self) -> Sequence[ApplicationServer]:
        """All that is known, suspects included, by address."""
        return [server for _, server in sorted(self._servers.items())]

    def claims(self, stage: str, partition: int) -> list[tuple[ApplicationServer, PublishedTask]]:
        """The instances that say that they own a partition, with that task; the highest epoch first.

        The highest epoch is the owner's. A lower one is a predecessor's that does not know it yet, unless a higher one
        is not to be believed: an owner knows by its lease that it is one, and nobody else can. A suspect claims
        nothing.
        """
        now = self._clock()
        claims = [
            (server, task)
            for server, task in self._tasks_of(stage, partition)
            if task.role == ACTIVE and task.epoch > 0 and not server.is_suspect(now)
        ]
        return sorted(claims, key=lambda claim: claim[1].epoch, reverse=True)

    def owners(self, stage: str, partition: int, states: frozenset[str]) -> list[ApplicationServer]:
        """Those of them that can answer."""
        return [server for server, task in self.claims(stage, partition) if task.state in states]

    def assigned(self, stage: str, partition: int) -> ApplicationServer | None:
        """The instance that has a partition: its owner or, where nobody claims it yet, the one that is opening it."""
        now = self._clock()
        claims = self.claims(stage, partition)
        # While it restores it has no epoch.
        opening = [
            server
            for server, task in self._tasks_of(stage, partition)
            if task.role == ACTIVE and not server.is_suspect(now)
        ]
        return claims[0][0] if claims else min(opening, key=lambda server: server.address, default=None)

    def standbys(self, stage: str, partition: int, states: frozenset[str]) -> list[ApplicationServer]:
        """The instances that stand by and can answer, the one that is furthest first."""
        now = self._clock()
        able = [
            (task.position, server.address, server)
            for server, task in self._tasks_of(stage, partition)
            if task.role == STANDBY and task.state in states and not server.is_suspect(now)
        ]
        return [server for _, _, server in sorted(able, reverse=True)]

    def _tasks_of(self, stage: str, partition: int) -> Iterator[tuple[ApplicationServer, PublishedTask]]:
        for server in self._servers.values():
            for task in server.tasks:
                if (task.stage, task.partition) == (stage, partition):
                    yield server, task
