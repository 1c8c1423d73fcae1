"""A source topic with a history, and its copy."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from balance_service.avro.registry import SchemaRegistry
from balance_service.devtools.produce import produce_load
from balance_service.devtools.topic_copy import Copied, copy_topic
from balance_service.errors import RetriableError
from balance_service.kafka.clients import producer_config
from balance_service.kafka.topics import Topics
from tests.integration.engines import settings_for
from tests.support.kafka import Writer, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from decimal import Decimal
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

CUSTOMERS = [f"c{n}" for n in range(30)]


class Application:
    """A source topic, the settings to copy it, and a name for the copy."""

    def __init__(self, stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
        self.stack = stack
        self.settings = settings_for(stack, names, tmp_path / "state")
        self.source = self.settings.topic
        self.target = f"{self.source}-copied"
        self.admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
        self.environment = {
            "BALANCE_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
            "BALANCE_SCHEMA_REGISTRY_URL": stack.schema_registry_url,
        }

    def create(self, name: str, partitions: int = 2, config: dict[str, str] | None = None) -> None:
        # The broker would delete the older events of these tests.
        topic = NewTopic(name, partitions, 1, config={"retention.ms": "-1", **(config or {})})
        self.admin.create_topics([topic])[name].result(10)
        eventually(lambda: name in self.admin.list_topics(timeout=10).topics, "the topic exists")

    def repartition(self, partitions: int) -> None:
        self.admin.create_partitions([NewPartitions(self.source, partitions)])[self.source].result(10)
        topics = Topics(self.settings)

        def is_done() -> bool:
            topic = topics.find(self.source)
            return topic is not None and topic.partitions == partitions

        eventually(is_done, "the partitions exist")

    def copy(self, partitions: int | None = None) -> Copied:
        return copy_topic(self.settings, self.source, self.target, partitions, ignore)

    def load(self, events: int) -> Decimal:
        registry = SchemaRegistry.from_settings(self.settings)
        try:
            config = producer_config(self.settings)
            return produce_load(config, registry, self.source, events, 200, None, lambda _: None)
        finally:
            registry.close()

    def ends(self, name: str) -> int:
        """Returns the number of offsets of a topic; 0 while it is being created."""
        topics = Topics(self.settings)
        found = topics.find(name)
        try:
            return sum(topics.offsets(name, range(found.partitions)).values()) if found else 0
        except RetriableError:
            return 0

    def read(self, name: str) -> list[Any]:
        return read_topic(self.stack, name)


def ignore(_at: int, _of: int) -> None:
    pass


def content(message: Any) -> tuple[Any, ...]:
    return message.key(), message.value(), message.headers(), message.timestamp()


def contents(messages: list[Any]) -> list[tuple[Any, ...]]:
    return sorted((content(m) for m in messages), key=repr)


class History:
    """Events of many customers, a millisecond apart. `sent` leaves out aborted ones."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._now = 1_700_000_000_000
        self.sent: dict[bytes, list[int]] = defaultdict(list)

    @contextmanager
    def transaction(self, *, commit: bool = True) -> Iterator[tuple[Writer, Any]]:
        """Opens a transaction; commits or aborts it at the end."""
        config = {"transactional.id": f"writer-{self._app.source}"}
        with Writer(self._app.stack, self._app.source, **config) as writer:
            writer.producer.init_transactions(10)
            writer.producer.begin_transaction()

            def send(key: str | bytes | None, value: bytes | None, **where: Any) -> None:
                self._now += 1
                if commit and key is not None:
                    self.sent[key.encode() if isinstance(key, str) else key].append(self._now)
                writer.send(key, value, timestamp=self._now, **where)

            yield writer, send
            writer.producer.flush(10)
            if commit:
                writer.producer.commit_transaction(10)
            else:
                writer.producer.abort_transaction(10)

    def add(self, rounds: int, *, commit: bool = True) -> None:
        """Sends one event of every customer in each round."""
        with self.transaction(commit=commit) as (writer, send):
            frames = {customer: writer.frame(customer, "1.25") for customer in CUSTOMERS}
            for _ in range(rounds):
                for customer, frame in frames.items():
                    send(customer, frame, headers=[("idempotency-key", f"{customer}-{self._now}".encode())])
