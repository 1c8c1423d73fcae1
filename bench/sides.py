"""The sides, through one interface: an application is a side's name for its group, an instance one process of it.

Used by one thread each, `process` apart, which the meter's thread may call too.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
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
from balance_service.settings import PREFIX
from bench.machine import commit_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.devtools.local.stack import LocalStack

PATH = "/api/customers.getBalance"
OURS = "balance-service"
THEIRS = "Kafka Streams"
BEFORE = "before"
POSTGRESQL = "PostgreSQL"
QUIX = "Quix Streams"
STATUS_SECONDS = 5.0
ADMIN_SECONDS = 20.0
_THIS_CHECKOUT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Progress:
    """What an instance says of itself."""

    running: frozenset[int]
    """Partitions whose stores are open, so that folding begins."""
    restored: int = 0
    """Records read from the changelog."""
    applied: Mapping[int, int] = field(default_factory=dict)
    """Partition → source offset up to which everything is folded, committed or not."""


class Instance(Protocol):
    """One process with a state directory and an address of its own."""

    url: str

    def launch(self) -> None:
        """Start it; returns at once."""

    def progress(self) -> Progress | None:
        """What it says of itself now; None if it does not answer."""

    def committed(self) -> Mapping[int, int]:
        """Partition → source offset up to which everything is durably committed in Kafka."""

    def amount(self, customer: str) -> Decimal | None:
        """A balance; None if it does not answer."""

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
        self._http = httpx.Client(timeout=STATUS_SECONDS, trust_env=False)
        self.wipe()

    def launch(self) -> None:
        self._process = None
        self._instance.launch()

    def progress(self) -> Progress | None:
        tasks = self._tasks()
        if tasks is None:
            return None
        running = frozenset(int(t["partition"]) for t in tasks if t["role"] == "active" and t["state"] == "RUNNING")
        return Progress(running, sum(int(t["restored"]) for t in tasks), _positions(tasks))

    def committed(self) -> Mapping[int, int]:
        # A task's position moves once the transaction that holds it is committed, never before.
        return _positions(self._tasks() or ())

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

    def _tasks(self) -> list[dict[str, Any]] | None:
        try:
            tasks: list[dict[str, Any]] = self._http.get(f"{self.url}/api/status").json()["tasks"]
        except (httpx.HTTPError, ValueError):
            return None
        return tasks


def _positions(tasks: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    return {int(t["partition"]): int(t["position"]) for t in tasks if t["role"] == "active"}


def new_application_id(what: str) -> str:
    """One that nobody has used, so that everything begins at offset 0."""
    return f"bench-{what}-{uuid.uuid4().hex[:8]}"


def offsets_of_group(admin: AdminClient, group: str, topic: str) -> dict[int, int]:
    """Partition → the group's committed offset. The broker shows what a transaction commits once that has ended."""
    found = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(ADMIN_SECONDS)
    partitions: list[TopicPartition] = found.topic_partitions
    return {p.partition: p.offset for p in partitions if p.topic == topic and p.offset > 0}


def asked(client: httpx.Client, url: str, customer: str) -> Decimal | None:
    """A balance, exactly; None if the answer is no 200."""
    answer = client.get(url + PATH, params={"customerId": customer})
    return amount_of(answer.text) if answer.status_code == httpx.codes.OK else None


def amount_of(body: str | bytes) -> Decimal:
    """The amount of an answer, exactly."""
    answer: Mapping[str, Decimal] = json.loads(body, parse_float=Decimal, parse_int=Decimal)
    return answer["amount"]


def delete_internal_topics(stack: LocalStack, application_id: str) -> None:
    """Make room: what an application that is over has kept in Kafka."""
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    # Quix Streams puts something before the name, the others behind it.
    topics = [t for t in admin.list_topics(timeout=ADMIN_SECONDS).topics if f"{application_id}-" in t]
    if topics:
        for deleted in admin.delete_topics(topics).values():
            deleted.result(ADMIN_SECONDS)
