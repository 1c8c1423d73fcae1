"""Fakes, spies and short cuts of the unit tests."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.cluster.membership import Membership, consumer_config
from balance_service.engine.dead_letters import Letters
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.store import StateStore
from balance_service.errors import ConfigurationError
from balance_service.kafka.topic_specs import FOREVER
from balance_service.kafka.topics import Topic
from balance_service.model.generations import Declaration, Generations
from balance_service.model.transform import ROW, Transform
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from balance_service.structs import Struct
from balance_service.testing.fakes import FakeRegistry, FakeWriter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from balance_service.cluster.membership import AssignmentListener, Partitions
    from balance_service.engine.hosted_stage import HostedStage

__all__ = [
    "DECLARED",
    "GUARDED",
    "SESSION_MS",
    "Clock",
    "FakeAnalysis",
    "FakeRegistry",
    "FakeWriter",
    "IdleInstance",
    "IgnoringListener",
    "InMemoryTopics",
    "alone",
    "balance_codec",
    "letters",
    "lone_member",
    "position_codec",
    "record_scan_starts",
    "refusal",
]


DECLARED = Declaration(1, "declared", "reads", '{"type": "record", "name": "Kept", "fields": []}', own_view=False)


def alone() -> HostedStage:
    """The stage of the only generation of a read model, for tasks that only fold."""
    generations = HostedGenerations(lambda: Generations("balance"))
    return cast("HostedStage", SimpleNamespace(stage=Balance().stages[-1], generations=generations))


@dataclass(frozen=True, slots=True)
class Details(Struct):
    """What an instance tells about itself, as far as the handlers read it."""

    application_server: str


class IdleInstance:
    """An instance without problems or metrics, with the given status."""

    def __init__(self, status: Mapping[str, object] | None = None) -> None:
        self._status = status or {}

    def unready(self) -> Sequence[str]:
        return []

    def problems(self) -> Sequence[str]:
        return []

    def status(self) -> Mapping[str, object]:
        return self._status

    def details(self) -> Any:
        return Details("localhost:5051")

    def metrics(self) -> bytes:
        return b"# nothing\n"


class Clock:
    """A clock that stands still until a test sets `now`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def position_codec(registry: FakeRegistry | None = None) -> AvroCodec:
    return AvroCodec(registry or FakeRegistry(), "positions", load_schema("Position"))


def balance_codec(registry: FakeRegistry | None = None) -> AvroCodec:
    return AvroCodec(registry or FakeRegistry(), "states", load_schema("BalanceState"))


def letters(registry: FakeRegistry | None = None, *, every_ms: int = 300_000, **more: Any) -> Letters:
    return Letters(
        codec=AvroCodec(registry or FakeRegistry(), "letters", load_schema("Letter")), every_ms=every_ms, **more
    )


SESSION_MS = 10_000


class IgnoringListener:
    """An assignment listener that does nothing."""

    def assigned(self, topic: str, partitions: Partitions) -> None: ...

    def revoked(self, topic: str, partitions: Partitions) -> None: ...

    def lost(self, topic: str, partitions: Partitions) -> None: ...


GUARDED = threading.Event()
"""Of a member whose instance the guard group has admitted."""
GUARDED.set()


def lone_member(
    listener: AssignmentListener | None = None, positions: Mapping[int, int] = MappingProxyType({})
) -> Membership:
    """Returns a group member that cannot reach a broker. The caller stops it."""
    return Membership(
        config=consumer_config({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "group", SESSION_MS),
        topic="topic",
        session_timeout_ms=SESSION_MS,
        listener=listener or IgnoringListener(),
        positions=lambda _topic: positions,
        guarded=GUARDED,
    )


def record_scan_starts(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns a list that grows by the start key of each range scan of any store.

    RocksDB steps over each deleted record that lies in a scanned range.
    """
    starts: list[bytes] = []
    keys = StateStore.keys

    def recorded(store: StateStore, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        starts.append(start)
        return keys(store, start, stop, limit)

    monkeypatch.setattr(StateStore, "keys", recorded)
    return starts


def refusal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """Returns the error text for invalid environment variables. Fails if the settings load."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    return str(caught.value)


class InMemoryTopics:
    """The topics of a broker, in memory."""

    DEFAULTS = MappingProxyType(
        {
            "message.timestamp.type": "CreateTime",
            "message.timestamp.before.max.ms": "9223372036854775807",
            "message.timestamp.after.max.ms": "3600000",
            "max.message.bytes": "1048588",
            "min.compaction.lag.ms": "0",
        }
    )

    def __init__(self, **partitions: int) -> None:
        """Args:
        partitions: by the name of a topic, with underscores in place of hyphens.
        """
        self.configs: dict[str, dict[str, str]] = {}
        self.partitions: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        for name, count in partitions.items():
            self.create(name.replace("_", "-"), count, FOREVER)

    def find(self, name: str) -> Topic | None:
        return Topic(name, name, self.partitions[name]) if name in self.partitions else None

    def find_patiently(self, name: str) -> Topic | None:
        return self.find(name)

    def create(self, name: str, partitions: int, config: Mapping[str, str]) -> Topic:
        self.configs[name] = {**self.DEFAULTS, **FOREVER, **config}
        self.partitions[name] = partitions
        return Topic(name, name, partitions)

    def config(self, name: str) -> dict[str, str]:
        return self.configs[name]

    def offsets(self, name: str, partitions: Iterable[int], *, earliest: bool = False) -> dict[int, int]:
        return dict.fromkeys(partitions, (self.starts if earliest else self.ends).get(name, 0))

    def brokers(self) -> int:
        return 1


class FakeAnalysis:
    """The analysis of a `transform` that changes nothing, without Spark."""

    multiplies = False
    explained = "== As written ==\nProject"

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    @classmethod
    def take_place(cls, monkeypatch: pytest.MonkeyPatch, fingerprint: str = "") -> None:
        """Has it be the analysis of all models with one source that are bound in a test."""

        def transform_of(_model: Any, schemas: Mapping[str, Any], _source: Any) -> Transform:
            (schema,) = schemas.values()
            return Transform({**schema, "name": ROW}, cls(fingerprint))

        monkeypatch.setattr("balance_service.model.stage_checks.transform_of", transform_of)

    def used(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(names)

    def untouched(self, name: str) -> str | None:
        return name

    def fingerprint(self, _names: Collection[str]) -> str:
        return self._fingerprint

    def apply(self, *_: Any) -> Any:
        raise AssertionError
