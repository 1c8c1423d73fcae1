"""The directory of instances: a compacted topic in which each says, every second, what it owns.

One thread follows the topic and publishes for this instance; any thread may look up. What is known crosses as
an immutable mapping, replaced whole.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition

from balance_service.clock import elapsed
from balance_service.errors import BalanceServiceError
from balance_service.kafka.clients import not_authorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from confluent_kafka import Message

    from balance_service.avro.codec import AvroCodec
    from balance_service.kafka.clients import ClientConfig

log = structlog.get_logger(__name__)

PUBLISH_EVERY_SECONDS = 1.0
SUSPECT_AFTER_SECONDS = 3.0
ACTIVE, STANDBY = "ACTIVE", "STANDBY"
_POLL_SECONDS = 0.2
_FLUSH_SECONDS = 2.0
_FORGET_AFTER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class PublishedTask:
    """One task, as its instance published it."""

    read_model: str
    partition: int
    role: str
    state: str
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class ApplicationServer:
    """One instance, as it was last heard of. `heard_at` is of our own clock, -inf for never."""

    address: str
    incarnation: str
    tasks: tuple[PublishedTask, ...]
    heard_at: float

    def is_suspect(self, now: float) -> bool:
        """Whether it has been silent for so long that it must not be routed to."""
        return now - self.heard_at > SUSPECT_AFTER_SECONDS


class ServerTable:
    """Who said what, when. Pure but for its clock; the directory's thread writes, any thread reads."""

    def __init__(self, clock: Callable[[], float] = elapsed) -> None:
        self._clock = clock
        self._servers: Mapping[str, ApplicationServer] = {}

    def hear(self, address: str, record: Mapping[str, Any] | None, *, live: bool) -> None:
        """Take in one record of the topic.

        Args:
            address: under which peers reach it; the record's key.
            record: what the instance said; None is its farewell.
            live: whether it was said since we began to listen. What is older says nothing about now.
        """
        now = self._clock()
        servers = {a: s for a, s in self._servers.items() if now - s.heard_at < _FORGET_AFTER_SECONDS or not live}
        if record is None:
            servers.pop(address, None)
        else:
            tasks = tuple(
                PublishedTask(t["readModel"], t["partition"], t["role"], t["state"], t["epoch"], t["position"])
                for t in record["tasks"]
            )
            heard_at = now if live else float("-inf")
            servers[address] = ApplicationServer(address, record["incarnation"], tasks, heard_at)
        self._servers = servers

    def servers(self) -> Sequence[ApplicationServer]:
        """All that is known, suspects included, by address."""
        return [server for _, server in sorted(self._servers.items())]

    def claim(self, read_model: str, partition: int) -> tuple[ApplicationServer, PublishedTask] | None:
        """The instance whose active task has the highest epoch, and that task; None if there is none.

        Only the highest epoch counts: when its holder is silent, an older one is not the owner instead.
        """
        claims = [(s, t) for s, t in self._tasks_of(read_model, partition) if t.role == ACTIVE and t.epoch > 0]
        return max(claims, key=lambda claim: claim[1].epoch, default=None)

    def owner(self, read_model: str, partition: int, states: frozenset[str]) -> ApplicationServer | None:
        """The owner, if it can answer; None if it is unknown or suspect."""
        claim = self.claim(read_model, partition)
        if claim is None or claim[0].is_suspect(self._clock()) or claim[1].state not in states:
            return None
        return claim[0]

    def standbys(self, read_model: str, partition: int, states: frozenset[str]) -> list[ApplicationServer]:
        """The instances that stand by and can answer, the one that is furthest first."""
        now = self._clock()
        able = [
            (task.position, server.address, server)
            for server, task in self._tasks_of(read_model, partition)
            if task.role == STANDBY and task.state in states and not server.is_suspect(now)
        ]
        return [server for _, _, server in sorted(able, reverse=True)]

    def _tasks_of(self, read_model: str, partition: int) -> Iterator[tuple[ApplicationServer, PublishedTask]]:
        for server in self._servers.values():
            for task in server.tasks:
                if (task.read_model, task.partition) == (read_model, partition):
                    yield server, task


class Directory:
    """Publishes this instance and follows all. Owns its consumer and producer."""

    def __init__(
        self,
        consumer_config: ClientConfig,
        producer_config: ClientConfig,
        topic: str,
        address: str,
        codec: AvroCodec,
        tasks: Callable[[], Sequence[PublishedTask]],
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        tasks: what is published.
        on_round: called after each publication, on this directory's thread; must return at once.
        """
        self._on_round = on_round
        self._topic = topic
        self._codec = codec
        self._tasks = tasks
        self._consumer = Consumer(consumer_config)
        self._producer = Producer(producer_config)
        self._stopping = threading.Event()
        self._publish_now = threading.Event()
        self._incarnation = uuid.uuid4().hex
        self.address = address
        self._forbidden: dict[str, str] = {}
        self._grants = {
            "Read": f"Read on topic '{topic}' and on group '{consumer_config['group.id']}'",
            "Write": f"Write on topic '{topic}'",
        }
        self.table = ServerTable()
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)

    def start(self) -> None:
        """Begin to follow and to publish; returns at once."""
        self._thread.start()

    def publish_soon(self) -> None:
        """Something about our tasks has changed. Any thread."""
        self._publish_now.set()

    @property
    def problem(self) -> str:
        """What the brokers do not allow; empty while all is well."""
        return next(filter(None, self._forbidden.values()), "")

    def status(self) -> list[dict[str, Any]]:
        """All instances, as far as they are known here, for people."""
        now = elapsed()
        return [
            {
                "applicationServer": server.address,
                "incarnation": server.incarnation,
                "suspect": server.is_suspect(now),
                "tasks": [
                    {
                        "task": f"{t.read_model}_{t.partition}",
                        "partition": t.partition,
                        "role": t.role.lower(),
                        "state": t.state,
                        "epoch": t.epoch,
                        "position": t.position,
                    }
                    for t in server.tasks
                ],
            }
            for server in self.table.servers()
        ]

    def stop(self, timeout_seconds: float) -> None:
        """Say farewell, so that nobody routes here any more."""
        self._stopping.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            self._read_from_the_beginning()
            live, next_publish = False, 0.0
            while not self._stopping.is_set():
                now = elapsed()
                if now >= next_publish or self._publish_now.is_set():
                    self._publish_now.clear()
                    self._publish(self._codec.encode(self._record()))
                    next_publish = now + PUBLISH_EVERY_SECONDS
                    if live:
                        self._on_round()
                message = self._consumer.poll(_POLL_SECONDS)
                if message is not None:
                    live = self._follow(message, live=live)
        except Exception:
            log.exception("the directory failed")
            raise
        finally:
            self._publish(None)
            self._producer.flush(_FLUSH_SECONDS)
            self._consumer.close()

    def _follow(self, message: Message, *, live: bool) -> bool:
        """Take in one message; returns whether those that follow are said now."""
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                return True
            log.warning("following the directory failed", error=error.str())
            self._note("Read", error)
            if error.code() != KafkaError._AUTO_OFFSET_RESET:
                return live
            # The topic was made anew, or lost its end. The consumer would not go on by itself.
            self._read_from_the_beginning()
            return False
        self._note("Read", None)
        key, value = message.key(), message.value()
        address = (key or b"").decode(errors="replace")
        try:
            record = None if value is None else self._codec.decode(value)
        except BalanceServiceError as failure:
            log.warning("a record of the directory was passed over", address=address, error=str(failure))
            return live
        self.table.hear(address, record, live=live)
        return live

    def _read_from_the_beginning(self) -> None:
        self._consumer.assign([TopicPartition(self._topic, 0, OFFSET_BEGINNING)])

    def _publish(self, value: bytes | None) -> None:
        try:
            self._producer.produce(self._topic, value, self.address, partition=0, on_delivery=self._published)
            self._producer.poll(0)
        except (KafkaException, BufferError) as error:
            log.warning("publishing to the directory failed", error=str(error))

    def _published(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            log.warning("publishing to the directory failed", error=error.str())
        self._note("Write", error)

    def _note(self, operation: str, error: KafkaError | None) -> None:
        forbidden = error and not_authorized(error, "using the directory of instances", self._grants[operation])
        self._forbidden = {**self._forbidden, operation: str(forbidden or "")}

    def _record(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "incarnation": self._incarnation,
            "tasks": [
                {
                    "readModel": task.read_model,
                    "partition": task.partition,
                    "role": task.role,
                    "state": task.state,
                    "epoch": task.epoch,
                    "position": task.position,
                }
                for task in self._tasks()
            ],
        }
