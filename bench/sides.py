"""The common interface of the compared systems: an application is a consumer group, an instance one of its processes.

For one thread, except `process`, which other threads can call.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import psutil
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from balance_service.devtools.local.stack import LocalInstance
from balance_service.errors import BalanceServiceError
from balance_service.settings import PREFIX
from bench.machine import commit_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from balance_service.devtools.local.stack import LocalStack

PATH = "/api/customers.getBalance"
OURS = "balance-service"
THEIRS = "Kafka Streams"
BEFORE = "before"
POSTGRESQL = "PostgreSQL"
QUIX = "Quix Streams"
AVRO = "this service, Avro"
STATUS_SECONDS = 5.0
ADMIN_SECONDS = 20.0
_THIS_CHECKOUT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an instance. A partition counts if the instance has it for every hosted model."""

    running: frozenset[int]
    """Partitions whose stores are open."""
    restored: int = 0
    """Records read from the changelog."""
    applied: Mapping[int, int] = field(default_factory=dict)
    """Partition → source offset below which all events are folded, committed or not."""


class Instance(Protocol):
    """A process with its own state directory and address."""

    url: str

    def launch(self) -> None:
        """Start the process and return at once."""

    def progress(self) -> Progress | None:
        """The present progress; None if the instance does not answer."""

    def committed(self) -> Mapping[int, int]:
        """Partition → source offset below which all events are durably committed in Kafka."""

    def amount(self, customer: str) -> Decimal | None:
        """A balance; None if the instance does not answer."""

    def process(self) -> psutil.Process | None:
        """The parent of all its processes; None before the start."""

    def stop(self) -> None:
        """Stop the process by SIGTERM."""

    def kill(self) -> None:
        """Kill the process by SIGKILL."""

    def wipe(self) -> None:
        """Delete the state directory of a stopped instance."""


class Side(Protocol):
    """One of the compared systems."""

    name: str
    variant: str
    """Which of its settings, where several are tried."""

    @property
    def settings(self) -> Mapping[str, str]:
        """The commit, and settings that differ from the defaults."""

    def instance(self, number: int, topic: str, application_id: str) -> Instance:
        """An instance that is not started."""


class OurSide:
    """This service, as `balance-service serve`, with default settings and BALANCE_* of the environment.

    Runs from this checkout, or from an earlier checkout `before` with its own .venv.
    """

    variant = ""

    def __init__(
        self, stack: LocalStack, before: Path | None = None, models: Sequence[str] = ("balance",), name: str = ""
    ) -> None:
        """Args:
        models: the hosted read models.
        name: in figures; by default, the one of this service, or of an earlier checkout.
        """
        self.name = name or (OURS if before is None else BEFORE)
        self._models = models
        self._stack = stack
        self._before = before
        # Read at start, because files can change during a long run.
        self._commit = commit_of(before or _THIS_CHECKOUT)

    @property
    def settings(self) -> Mapping[str, str]:
        """BALANCE_* of the environment, and the commit."""
        given = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        return {"commit": self._commit, **given}

    def instance(self, number: int, topic: str, application_id: str) -> OurInstance:
        """An instance that is not started."""
        environment = {
            "BALANCE_TOPIC": topic,
            "BALANCE_APPLICATION_ID": application_id,
            "BALANCE_MODELS": ",".join(self._models),
            # One client alone gets three quarters of the streams, and the listeners are one.
            "BALANCE_MAX_STREAMS": "2000",
        }
        instance = LocalInstance(number, self._stack, environment=environment, checkout=self._before)
        return OurInstance(instance, len(self._models))


class OurInstance:
    """Models of one stage each, for the methods that tell its progress."""

    def __init__(self, instance: LocalInstance, models: int) -> None:
        self._instance = instance
        self._models = models
        self.url = self._instance.url
        self._process: psutil.Process | None = None
        self._http = httpx.Client(timeout=STATUS_SECONDS, trust_env=False)
        self.wipe()

    def launch(self) -> None:
        self._process = None
        self._instance.launch()

    def progress(self) -> Progress | None:
        tasks = self._tasks()
        if tasks is None:
            return None
        opened = Counter(int(t["partition"]) for t in tasks if t["role"] == "active" and t["state"] == "RUNNING")
        running = frozenset(partition for partition, count in opened.items() if count == self._models)
        return Progress(running, sum(int(t["restored"]) for t in tasks), self._positions(tasks))

    def committed(self) -> Mapping[int, int]:
        # The position of a task advances only after its transaction is committed.
        return self._positions(self._tasks() or ())

    def amount(self, customer: str) -> Decimal | None:
        return asked(self._http, self.url, customer)

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

    def run(self, *arguments: str) -> str:
        """Run a command with the settings of the instance; returns what it prints."""
        command = [sys.executable, "-m", "balance_service", *arguments]
        environment = {**os.environ, **self._instance.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BalanceServiceError(f"`{' '.join(arguments)}` failed: {done.stderr or done.stdout}")
        return done.stdout

    def _tasks(self) -> list[dict[str, Any]] | None:
        try:
            tasks: list[dict[str, Any]] = self._http.get(f"{self.url}/api/status").json()["tasks"]
        except (httpx.HTTPError, ValueError):
            return None
        return tasks

    def _positions(self, tasks: Iterable[Mapping[str, Any]]) -> dict[int, int]:
        positions: dict[int, list[int]] = defaultdict(list)
        for task in tasks:
            if task["role"] == "active":
                positions[int(task["partition"])].append(int(task["position"]))
        return {partition: min(some) for partition, some in positions.items() if len(some) == self._models}


def new_application_id(what: str) -> str:
    """A new application id, so that the replay begins at offset 0."""
    return f"bench-{what}-{uuid.uuid4().hex[:8]}"


def offsets_of_group(admin: AdminClient, group: str, topic: str) -> dict[int, int]:
    """Partition → committed offset of the group, which is visible when its transaction has ended."""
    found = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(ADMIN_SECONDS)
    partitions: list[TopicPartition] = found.topic_partitions
    return {p.partition: p.offset for p in partitions if p.topic == topic and p.offset > 0}


def asked(client: httpx.Client, url: str, customer: str) -> Decimal | None:
    """The exact balance; None if the status is not 200."""
    answer = client.get(url + PATH, params={"customerId": customer})
    return amount_of(answer.text) if answer.status_code == httpx.codes.OK else None


def amount_of(body: str | bytes) -> Decimal:
    """The exact amount of an answer."""
    answer: Mapping[str, Decimal] = json.loads(body, parse_float=Decimal, parse_int=Decimal)
    return answer["amount"]


def delete_internal_topics(stack: LocalStack, application_id: str) -> None:
    """Delete the topics of a finished application, to free disk space."""
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    # Quix Streams adds a prefix to the name, the others a suffix.
    topics = [t for t in admin.list_topics(timeout=ADMIN_SECONDS).topics if f"{application_id}-" in t]
    if topics:
        for deleted in admin.delete_topics(topics).values():
            deleted.result(ADMIN_SECONDS)
