"""The sides, through one interface: an application is a side's name for its group, an instance one process of it.

Used by one thread each, `process` apart, which the meter's thread may call too.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import psutil
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from balance_service.errors import ConfigurationError
from balance_service.settings import PREFIX
from balance_service.tools.local.instances import LocalInstance
from bench.load import PARTITIONS
from bench.machine import commit_of
from bench.peer import KafkaStreams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.tools.local.stack import LocalStack

PATH = "/api/customers.getBalance"
OURS = "balance-service"
THEIRS = "Kafka Streams"
BEFORE = "before"
EVERYTHING = frozenset(range(PARTITIONS))
COMMIT_INTERVAL_MS = 100
"""Kafka Streams' own default where it processes exactly once."""
_STATUS_SECONDS = 5.0
_ADMIN_SECONDS = 20.0
_THIS_CHECKOUT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Progress:
    """What an instance says of itself. `running`: the partitions whose stores are open, so that folding begins."""

    running: frozenset[int]
    restored: int


class Instance(Protocol):
    """One process with a state directory and an address of its own."""

    url: str

    def launch(self) -> None:
        """Start it; returns at once."""

    def progress(self) -> Progress | None:
        """What it says of itself now; None if it does not answer."""

    def committed(self) -> Mapping[int, int]:
        """Partition → source offset up to which everything is durably committed in Kafka."""

    def process(self) -> psutil.Process | None:
        """Its first process, none before it is there; what it runs on is below that."""

    def stop(self) -> None:
        """Shut it down in good order."""

    def kill(self) -> None:
        """SIGKILL, as a crash would."""

    def wipe(self) -> None:
        """Remove the state directory of a stopped instance."""


class Side(Protocol):
    """One of the systems that are compared."""

    name: str
    variant: str
    """Which of its settings, where several are tried."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What was not left at its default, and which commit it is."""

    def instance(self, number: int, topic: str, application_id: str) -> Instance:
        """One instance, not started."""


class OurSide:
    """This service, as `balance-service serve`. Settings are the defaults, and BALANCE_* of the environment.

    It runs from this checkout, or from another one, `before`, which has its own .venv.
    """

    variant = ""

    def __init__(self, stack: LocalStack, before: Path | None = None, model: str = "balance") -> None:
        """Args:
        model: the read model that it hosts.
        """
        self.name = OURS if before is None else BEFORE
        self._model = model
        self._stack = stack
        self._before = before
        # Read now, because files may be edited while a long run goes on.
        self._commit = commit_of(before or _THIS_CHECKOUT)

    @property
    def settings(self) -> Mapping[str, str]:
        """BALANCE_* of the environment, and the commit."""
        given = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        return {"commit": self._commit, **given}

    def instance(self, number: int, topic: str, application_id: str) -> Instance:
        """One instance, not started."""
        environment = {
            "BALANCE_TOPIC": topic,
            "BALANCE_APPLICATION_ID": application_id,
            "BALANCE_MODELS": self._model,
        }
        return _Ours(LocalInstance(number, self._stack, environment=environment, checkout=self._before))


class _Ours:
    def __init__(self, instance: LocalInstance) -> None:
        self._instance = instance
        self.url = self._instance.url
        self._process: psutil.Process | None = None
        self._http = httpx.Client(timeout=_STATUS_SECONDS, trust_env=False)
        self.wipe()

    def launch(self) -> None:
        self._process = None
        self._instance.launch()

    def progress(self) -> Progress | None:
        tasks = self._tasks()
        if tasks is None:
            return None
        running = frozenset(int(t["partition"]) for t in tasks if t["role"] == "active" and t["state"] == "RUNNING")
        return Progress(running, sum(int(t["restored"]) for t in tasks))

    def committed(self) -> Mapping[int, int]:
        # A task's position moves once the transaction that holds it is committed, never before.
        return {int(t["partition"]): int(t["position"]) for t in self._tasks() or () if t["role"] == "active"}

    def process(self) -> psutil.Process | None:
        if self._process is None:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    serves = process.cmdline()[1:] == ["-m", "balance_service", "serve"]
                    if serves and process.environ().get("BALANCE_HTTP_PORT") == str(self._instance.port):
                        self._process = process
        return self._process

    def stop(self) -> None:
        self._instance.stop()

    def kill(self) -> None:
        self._instance.kill()

    def wipe(self) -> None:
        shutil.rmtree(self._instance.state_dir, ignore_errors=True)

    def _tasks(self) -> list[dict[str, Any]] | None:
        try:
            tasks: list[dict[str, Any]] = self._http.get(f"{self.url}/api/status").json()["tasks"]
        except (httpx.HTTPError, ValueError):
            return None
        return tasks


class TheirSide:
    """Kafka Streams, as `bench/kafka_streams`, with as many stream threads as there are cores."""

    name = THEIRS

    def __init__(
        self,
        stack: LocalStack,
        *,
        cache_bytes: int,
        commit_interval_ms: int = COMMIT_INTERVAL_MS,
        program: str = "BalanceStreams",
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        program: which of those in `bench/kafka_streams`.
        more: further options of that program.
        """
        self._stack = stack
        self._cache_bytes = cache_bytes
        self._commit_interval_ms = commit_interval_ms
        self._program = program
        self._more = more
        self._threads = os.cpu_count() or 1
        interval = "" if commit_interval_ms == COMMIT_INTERVAL_MS else f", commits every {commit_interval_ms:,} ms"
        self.variant = ("cache on" if cache_bytes else "cache off") + interval

    @property
    def settings(self) -> Mapping[str, str]:
        """As given to the program; what it sets besides is in its source."""
        return {"record cache, bytes": str(self._cache_bytes), "stream threads": str(self._threads)}

    def instance(self, number: int, topic: str, application_id: str) -> Instance:
        """One instance, not started."""
        folder = self._stack.data_dir / f"kafka-streams-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        program = KafkaStreams(
            self._stack,
            topic,
            application_id,
            folder,
            stream_threads=self._threads,
            cache_bytes=self._cache_bytes,
            commit_interval_ms=self._commit_interval_ms,
            program=self._program,
            more=self._more,
        )
        return _Theirs(program, self._stack, topic, application_id, folder)


class _Theirs:
    def __init__(self, program: KafkaStreams, stack: LocalStack, topic: str, application_id: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._topic = topic
        self._application_id = application_id
        self._admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
        self._http = httpx.Client(timeout=_STATUS_SECONDS, trust_env=False)
        self.url = program.url

    def launch(self) -> None:
        self._program.start()

    def progress(self) -> Progress | None:
        # With a client that lasts: one for each look would take as much processor time as it measures.
        try:
            status = self._http.get(f"{self.url}/status").json()
        except (httpx.HTTPError, ValueError):
            return None
        running = map(int, status["positions"]) if status["state"] == "RUNNING" else ()
        return Progress(frozenset(running), int(status["restored"]))

    def committed(self) -> Mapping[int, int]:
        # Offsets that a pending transaction would commit are not among them: the broker shows them once it ends.
        wanted = [ConsumerGroupTopicPartitions(self._application_id)]
        found = self._admin.list_consumer_group_offsets(wanted)[self._application_id].result(_ADMIN_SECONDS)
        partitions: list[TopicPartition] = found.topic_partitions
        return {p.partition: p.offset for p in partitions if p.topic == self._topic and p.offset > 0}

    def process(self) -> psutil.Process | None:
        with suppress(psutil.NoSuchProcess, ConfigurationError):
            return psutil.Process(self._program.pid)
        return None

    def stop(self) -> None:
        self._program.stop()

    def kill(self) -> None:
        self._program.kill()

    def wipe(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def new_application_id(what: str) -> str:
    """One that nobody has used, so that everything begins at offset 0."""
    return f"bench-{what}-{uuid.uuid4().hex[:8]}"


def delete_internal_topics(stack: LocalStack, application_id: str) -> None:
    """Make room: what an application that is over has kept in Kafka."""
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    topics = [t for t in admin.list_topics(timeout=_ADMIN_SECONDS).topics if t.startswith(f"{application_id}-")]
    if topics:
        for deleted in admin.delete_topics(topics).values():
            deleted.result(_ADMIN_SECONDS)
