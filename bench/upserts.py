"""Plain consumers with upserts into PostgreSQL, a common alternative. `python -m bench.upserts` runs one consumer.

There is a process for each partition. For each batch, it sums the amounts by customer; one transaction adds the sums to
the customers' rows and updates the position of the partition, so each event counts once.
"""

from __future__ import annotations

import io
import signal
import sys
from contextlib import suppress
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import fastavro
import psycopg
from confluent_kafka import Consumer, TopicPartition
from psycopg import sql

from balance_service.avro.schemas import load_schema
from balance_service.devtools.local.processes import ChildProcess
from bench.sides import POSTGRESQL, Progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import psutil
    from confluent_kafka import Message

    from balance_service.devtools.local.stack import LocalStack
    from bench.postgresql import Server

# Larger batches have more events per customer, but are slower if customers have few events.
_BATCH = 50_000
_WAIT_SECONDS = 0.1
_HEADER_BYTES = 5
_CONSUMER: dict[str, str | int | bool] = {
    "enable.auto.commit": False,
    "isolation.level": "read_committed",
    "queued.min.messages": 500_000,
    "queued.max.messages.kbytes": 256 << 10,
    "fetch.message.max.bytes": 4 << 20,
}
_TABLES = sql.SQL(
    """
    CREATE SCHEMA IF NOT EXISTS {schema};
    CREATE TABLE IF NOT EXISTS {schema}.balances (customer text PRIMARY KEY, cents bigint NOT NULL)
        WITH (fillfactor = 50);
    CREATE TABLE IF NOT EXISTS {schema}.positions (partition int PRIMARY KEY, position bigint NOT NULL);
    """
)
_BEGIN = sql.SQL("INSERT INTO {schema}.positions VALUES (%s, 0) ON CONFLICT DO NOTHING")
_POSITIONS = sql.SQL("SELECT partition, position FROM {schema}.positions")
_ADD = sql.SQL(
    "INSERT INTO {schema}.balances AS b SELECT * FROM unnest(%b::text[], %b::bigint[])"
    " ON CONFLICT (customer) DO UPDATE SET cents = b.cents + excluded.cents"
)
_MOVE = sql.SQL("UPDATE {schema}.positions SET position = %s WHERE partition = %s")
_CENTS = sql.SQL("SELECT cents FROM {schema}.balances WHERE customer = %s")


class UpsertsSide:
    """A consumer for each partition."""

    name = POSTGRESQL
    variant = ""

    def __init__(self, stack: LocalStack, server: Server) -> None:
        self._stack = stack
        self._server = server

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of the consumers and of the server."""
        consumers = {**{k: str(v) for k, v in _CONSUMER.items()}, "events per transaction, at most": str(_BATCH)}
        return {**consumers, **self._server.settings}

    def instance(self, number: int, topic: str, application_id: str) -> UpsertsInstance:
        """The consumer of one partition."""
        return UpsertsInstance(self._stack, self._server, number - 1, topic, application_id)


class UpsertsInstance:
    """A consumer; `application_id` is the database schema of its tables."""

    url = ""

    def __init__(self, stack: LocalStack, server: Server, partition: int, topic: str, application_id: str) -> None:
        self._partition = partition
        self._schema = application_id
        self._database = psycopg.connect(server.address, autocommit=True)
        self._database.execute(_named(_TABLES, application_id))
        command = [str(partition), server.address, application_id, stack.bootstrap_servers, topic]
        self._command = [sys.executable, "-m", "bench.upserts", *command]
        self._process = ChildProcess("consumer", stack.data_dir, stack.data_dir / "logs" / f"upserts-{partition}.log")

    def launch(self) -> None:
        self._process.run(self._command)

    def progress(self) -> Progress:
        positions = self.committed()
        return Progress(frozenset(positions), applied=positions)

    def committed(self) -> dict[int, int]:
        rows = self._database.execute(_named(_POSITIONS, self._schema))
        return {partition: position for partition, position in rows if partition == self._partition}

    def amount(self, customer: str) -> Decimal | None:
        row = self._database.execute(_named(_CENTS, self._schema), (customer,)).fetchone()
        return None if row is None else Decimal(row[0]).scaleb(-2)

    def process(self) -> psutil.Process | None:
        # Without the processes of the server, the figure would be incomplete.
        return None

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()

    def wipe(self) -> None:
        self._database.execute(_named(sql.SQL("DROP SCHEMA IF EXISTS {schema} CASCADE"), self._schema))


def consume(partition: int, address: str, schema: str, bootstrap_servers: str, topic: str) -> None:
    """Fold one partition until SIGTERM."""
    add, move, positions = (_named(text, schema) for text in (_ADD, _MOVE, _POSITIONS))
    with psycopg.connect(address) as database:
        database.execute(_named(_BEGIN, schema), (partition,))
        begin = {int(number): int(position) for number, position in database.execute(positions)}[partition]
        database.commit()
        consumer = Consumer({**_CONSUMER, "bootstrap.servers": bootstrap_servers, "group.id": schema})
        consumer.assign([TopicPartition(topic, partition, begin)])
        while True:
            messages = [m for m in consumer.consume(_BATCH, _WAIT_SECONDS) if m.error() is None]
            if messages:
                sums = _sums(messages)
                customers = sorted(sums)
                database.execute(add, (customers, [sums[customer] for customer in customers]))
                database.execute(move, ((messages[-1].offset() or 0) + 1, partition))
                database.commit()


def _sums(messages: Sequence[Message]) -> dict[str, int]:
    """Customer → cents."""
    sums: dict[str, int] = {}
    for message in messages:
        body = io.BytesIO(message.value() or b"")
        body.seek(_HEADER_BYTES)
        event: Any = fastavro.schemaless_reader(body, _SCHEMA, None)
        customer = event["customerId"]
        sums[customer] = sums.get(customer, 0) + int.from_bytes(event["amount"], "big", signed=True)
    return sums


def _plain(schema: Any) -> Any:
    """The schema without logical types, whose conversion would double the time."""
    if isinstance(schema, dict):
        return {name: _plain(value) for name, value in schema.items() if name != "logicalType"}
    return [_plain(part) for part in schema] if isinstance(schema, list) else schema


_SCHEMA = fastavro.parse_schema(_plain(load_schema("FundsAdded")))


def _named(text: sql.SQL, schema: str) -> sql.Composed:
    return text.format(schema=sql.Identifier(schema))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with suppress(KeyboardInterrupt):
        consume(int(sys.argv[1]), *sys.argv[2:])
