"""The directory of instances: a compacted topic in which each says, every second, what it owns.

One thread follows the topic and publishes for this instance. What is known is in the `ServerTable`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from balance_service.cluster.record_signatures import FAREWELL, HEADER, UntrustedRecordError
from balance_service.errors import BalanceServiceError
from balance_service.kafka.clients import new_client, not_authorized
from balance_service.kafka.messages import headers_of, offset_of
from balance_service.kafka.producers import RecoveringProducer
from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from confluent_kafka import Message

    from balance_service.avro.codec import AvroCodec
    from balance_service.cluster.record_signatures import RecordSignatures
    from balance_service.cluster.server_table import PublishedModel, PublishedTask, ServerTable
    from balance_service.kafka.clients import ClientConfig

log = structlog.get_logger(__name__)

PUBLISH_EVERY_SECONDS = 1.0
_POLL_SECONDS = 0.2
_FLUSH_SECONDS = 2.0
# Each second there is a newer record. A backlog would come to peers, after an outage, as what is not of now.
_UNPUBLISHED_MS = 3_000
# Whoever writes what is refused may write a lot.
_WARN_EVERY_SECONDS = 60.0
_TOLD_CHARACTERS = 300


class Directory:
    """Publishes this instance and follows all. Owns its consumer and producer."""

    def __init__(
        self,
        *,
        consumer_config: ClientConfig,
        producer_config: ClientConfig,
        topic: str,
        address: str,
        incarnation: str,
        codec: AvroCodec,
        signatures: RecordSignatures,
        models: Sequence[PublishedModel],
        tasks: Callable[[], Sequence[PublishedTask]],
        table: ServerTable,
        on_round: Callable[[], None] = lambda: None,
        on_refused: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Args:
        incarnation: which run of the instance this is.
        signatures: by which records are told from what others write to the topic.
        models, tasks: what is published.
        table: takes in what all publish.
        on_round: called after each publication, on this directory's thread; must return at once.
        on_refused: told of each record that is ignored, and why.
        """
        self._on_round = on_round
        self._models = models
        self._topic = topic
        self._codec = codec
        self._tasks = tasks
        self._place = TopicPartition(topic, 0)
        self._consumer = new_client(Consumer, consumer_config)
        self._producer = RecoveringProducer({**producer_config, "message.timeout.ms": _UNPUBLISHED_MS})
        self._stopping = threading.Event()
        self._publish_now = threading.Event()
        self._incarnation = incarnation
        self._signatures = signatures
        self._on_refused = on_refused
        self._warned_at: dict[str, float] = {}
        self._told_of_sharing = False
        self.address = address
        self._forbidden: dict[str, str] = {}
        self._grants = {
            "Read": f"Read on topic '{topic}' and on group '{consumer_config['group.id']}'",
            "Write": f"Write on topic '{topic}'",
        }
        self.table = table
        # From which offset on records are said now: the topic's end, as far as it was known first.
        self._since: int | None = None
        self.is_read = False
        """Whether all that was there when it began to listen has been heard."""
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

    @property
    def shared_address_problem(self) -> str:
        """That another instance publishes under our address, and what to do; empty while none does."""
        if not self.table.is_shared(self.address):
            return ""
        return (
            f"another instance runs with BALANCE_APPLICATION_SERVER {self.address}, as this one does, so that "
            "peers ask one for what the other owns; give each an address of its own and restart it"
        )

    def status(self) -> list[dict[str, Any]]:
        """All instances, as far as they are known here, for people."""
        now = elapsed()
        return [
            {
                "applicationServer": server.address,
                "incarnation": server.incarnation,
                "suspect": server.is_suspect(now),
                "shared": server.is_shared,
                "models": [model.name for model in server.models],
                "tasks": [
                    {
                        "task": f"{t.stage}_{t.partition}",
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
            next_publish = 0.0
            while not self._stopping.is_set():
                now = elapsed()
                if now >= next_publish or self._publish_now.is_set():
                    self._publish_now.clear()
                    self._publish(self._codec.encode(self._record()))
                    next_publish = now + PUBLISH_EVERY_SECONDS
                    if self.is_read:
                        self._on_round()
                message = self._consumer.poll(_POLL_SECONDS)
                if message is not None:
                    self._follow(message)
        except Exception:
            log.exception("the directory failed")
            raise
        finally:
            self._publish(None)
            self._producer.flush(_FLUSH_SECONDS)
            self._consumer.close()

    def _follow(self, message: Message) -> None:
        """Take in one message."""
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                if self._since is None:
                    self._since = offset_of(message)
                self.is_read = True
                return
            log.warning("following the directory failed", error=error.str())
            self._note("Read", error)
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                # The topic was made anew, or lost its end. The consumer would not go on by itself.
                self._read_from_the_beginning()
            return
        self._note("Read", None)
        if self._since is None:
            # Where others publish all the time, the consumer never meets the end. With its first record it is told
            # where that is.
            _, self._since = self._consumer.get_watermark_offsets(self._place, cached=True)
        key, value, offset = message.key(), message.value(), offset_of(message)
        address, is_live = (key or b"").decode(errors="replace"), offset >= self._since
        try:
            signed_ms = self._signatures.check(address, value, dict(headers_of(message)).get(HEADER))
            record = None if value is None else self._codec.decode(value)
            self._signatures.check_order(address, record["incarnation"] if record else FAREWELL, signed_ms)
        except UntrustedRecordError as refusal:
            # What is from before says nothing anyway.
            if is_live:
                self._refuse(address, refusal)
        except BalanceServiceError as failure:
            log.warning("a record of the directory was passed over", address=address, error=str(failure))
        else:
            self.table.hear(address, record, live=is_live)
            self._tell_of_sharing()
        self.is_read = self.is_read or offset + 1 >= self._since

    def _tell_of_sharing(self) -> None:
        shared = self.shared_address_problem
        if shared and not self._told_of_sharing:
            log.error("another instance has the address of this one", problem=shared)
        elif self._told_of_sharing and not shared:
            log.info("no other instance has the address of this one any more", application_server=self.address)
        self._told_of_sharing = bool(shared)

    def _refuse(self, address: str, refusal: UntrustedRecordError) -> None:
        self._on_refused(refusal.reason)
        now = elapsed()
        if now - self._warned_at.get(refusal.reason, float("-inf")) >= _WARN_EVERY_SECONDS:
            self._warned_at[refusal.reason] = now
            log.warning(
                "a record of the directory was ignored", address=address[:_TOLD_CHARACTERS], reason=str(refusal)
            )

    def _read_from_the_beginning(self) -> None:
        self._since, self.is_read = None, False
        self._consumer.assign([TopicPartition(self._topic, 0, OFFSET_BEGINNING)])

    def _publish(self, value: bytes | None) -> None:
        try:
            headers = self._signatures.sign(self.address, value)
            self._producer.produce(
                self._topic, value, self.address, partition=0, headers=headers, on_delivery=self._published
            )
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
            "models": [{"name": model.name, "partitions": model.partitions} for model in self._models],
            "tasks": [
                {
                    "readModel": task.stage,
                    "partition": task.partition,
                    "role": task.role,
                    "state": task.state,
                    "epoch": task.epoch,
                    "position": task.position,
                }
                for task in self._tasks()
            ],
        }
