"""An engine in this process, on the real stack, and what a test does with it."""

from __future__ import annotations

import json
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry import topic_record_subject_name_strategy as by_record_name
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from balance_service.avro.schemas import load_schema
from balance_service.engine import Engine
from balance_service.errors import RetriableError
from balance_service.metrics import Metrics
from balance_service.read_models.balance import Balance
from balance_service.settings import Settings, load_settings
from balance_service.state.records import Role, TaskId
from balance_service.state.state_directory import StateDirectory
from balance_service.state.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from balance_service.local.stack import LocalStack

SESSION_TIMEOUT_MS = 6_000
_PATIENCE_SECONDS = 60.0


def settings_for(stack: LocalStack, names: dict[str, str], state_dir: Path, **overrides: Any) -> Settings:
    """Settings of an instance on the stack."""
    return load_settings(
        bootstrap_servers=stack.bootstrap_servers,
        schema_registry_url=stack.schema_registry_url,
        state_dir=state_dir,
        session_timeout_ms=SESSION_TIMEOUT_MS,
        **names,
        **overrides,
    )


@contextmanager
def running_engine(settings: Settings) -> Iterator[Engine]:
    """An engine that has joined its group."""
    engine = Engine(settings, Balance(), Metrics())
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@contextmanager
def opened_standby(engine: Engine, path: Path, partition: int = 0) -> Iterator[Task]:
    """A standby of the engine's partition, opened, as another instance would keep it; nobody makes it tail yet."""
    with closing(StateDirectory(path, engine.settings.application_id)) as directory:
        context = replace(engine.tasks._context, state_directory=directory)
        task = Task(TaskId("balance", partition), context, Role.STANDBY)
        task.open()
        try:
            yield task
        finally:
            task.close(5)


def eventually(condition: Callable[[], bool], what: str, seconds: float = _PATIENCE_SECONDS) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def catch_up(engine: Engine) -> None:
    """Wait until every partition of the source is applied to its end."""
    partitions = range(engine.source.partitions)

    def caught_up() -> bool:
        try:
            ends = engine.topics.offsets(engine.source.name, partitions)
        except RetriableError:
            return False
        tasks = {p: engine.tasks.task(p) for p in partitions}
        return all(
            (task := tasks[p]) is not None and task.view is not None and task.position >= ends[p] for p in partitions
        )

    eventually(caught_up, f"caught up; {engine.tasks.snapshots()} {engine.stream.problem}")


def balance(engine: Engine, customer: str) -> Decimal | None:
    """A customer's balance as the engine's own stores have it."""
    for task in engine.tasks.all():
        view = task.view
        frame = view.get(customer.encode()) if view is not None else None
        if frame is not None:
            amount: Decimal = engine.state_codec.decode(frame)["amount"]
            return amount
    return None


def counted(engine: Engine, name: str) -> int:
    """A counter of the engine, summed over partitions."""
    text = engine._metrics.text().decode()  # what /metrics shows
    lines = [line for line in text.splitlines() if line.startswith(f"balance_events_{name}_total")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


class Writer:
    """Writes events as an application would, with whatever schema it likes."""

    def __init__(self, stack: LocalStack, topic: str, **config: Any) -> None:
        self.topic = topic
        self.registry = SchemaRegistryClient({"url": stack.schema_registry_url})
        self.producer = Producer(
            {
                "bootstrap.servers": stack.bootstrap_servers,
                "partitioner": "murmur2_random",
                "linger.ms": 5,
                **config,
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.producer.flush(10)
        self.registry.__exit__()

    def frame(self, customer: str, amount: str, schema: dict[str, Any] | None = None, **fields: Any) -> bytes:
        """A FundsAdded event under a schema; by default the shipped one."""
        serializer = AvroSerializer(
            self.registry,
            json.dumps(schema or load_schema("FundsAdded")),
            conf={"subject.name.strategy": by_record_name},
        )
        event = {
            "id": "e1",
            "occurredOn": datetime.now(UTC),
            "customerId": customer,
            "amount": Decimal(amount),
            **fields,
        }
        frame: bytes = serializer(event, SerializationContext(self.topic, MessageField.VALUE))
        return frame

    def register(self, subject: str, schema: dict[str, Any]) -> int:
        """The id of a schema."""
        return int(self.registry.register_schema(subject, Schema(json.dumps(schema), "AVRO")))

    def send(self, key: bytes | str | None, value: bytes | None, **where: Any) -> None:
        """Append one record."""
        self.producer.produce(self.topic, value, key, **where)
        self.producer.poll(0)

    def add(self, customer: str, *amounts: str) -> None:
        """Append FundsAdded events of a customer."""
        for amount in amounts:
            self.send(customer, self.frame(customer, amount))
        self.producer.flush(10)


def read_topic(stack: LocalStack, topic: str) -> list[Any]:
    """All committed records of a topic, by partition and offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": stack.bootstrap_servers,
            "group.id": "test-reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    partitions = set(consumer.list_topics(topic, timeout=10).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    records = []
    while partitions:
        message = consumer.poll(5)
        assert message is not None
        if message.error():
            partitions.discard(message.partition())
        else:
            records.append(message)
    consumer.close()
    return sorted(records, key=lambda m: (m.partition(), m.offset()))
