"""Transactional producers like other applications: some transactions abort, and one record in a hundred is invalid.

Each thread has its own random generator, seeded from the round's seed. The recount counts the appended records, not
this module, because a producer does not always know the outcome of its transaction.
"""

from __future__ import annotations

import io
import json
import random
import struct
import threading
import time
import urllib.request
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, NamedTuple

import fastavro
from confluent_kafka import KafkaException, Producer

_SHIPPED = Path(__file__).parents[2] / "schemas" / "FundsAdded.avsc"
_UNKNOWN_SCHEMA_ID = 999_999
_CENT = Decimal("0.01")
_EXACT = Context(prec=60)
# A registration without an answer may have taken an id.
# Each generation of a rebuild takes some of the ids too.
_IDS_BEFORE_LATE, _LEFT_FREE = 500, 5
_NEWEST_SHARE = 0.5

HEALING = b"healing-"
"""Key prefix of events that may be dead letters for a while."""
POISON = (
    "key-null",
    "value-null",
    "frame-missing",
    "magic-byte-unknown",
    "schema-id-unknown",
    "schema-incompatible",
    "body-undecodable",
    "length",
    "values-too-many",
    "field-null",
    "decimal-loses-digits",
    "key-is-not-customer-id",
    "customer-id-malformed",
    "key-not-of-this-partition",
)


class Source(NamedTuple):
    """A record to append; without a partition, the key decides."""

    key: bytes | None
    value: bytes | None
    partition: int | None = None
    idempotency_key: str | None = None


class Frames:
    """Makes valid and invalid records; shares no code with the service. Thread-safe.

    Registers its schemas once for a topic. A frame is 0x00, the schema id in four bytes, big-endian, and the Avro body.
    """

    def __init__(self, registry_url: str, topic: str) -> None:
        shipped: dict[str, Any] = json.loads(_SHIPPED.read_text(encoding="utf-8"))
        funds_added = f"{shipped['namespace']}.{shipped['name']}"
        seen = {
            "type": "record",
            "name": "FundsSeen",
            "namespace": shipped["namespace"],
            "fields": [{"name": "who", "type": "string"}],
        }
        schemas = {
            "shipped": shipped,
            "wide": _with_amount(shipped, ["null", _decimal(38, 3)]),
            "inexact": _with_amount(shipped, "double"),
            "seen": seen,
            "nothing": _with_first(shipped, "nothing", _doubled(60)),
            "hostile": _with_first(shipped, "hostile", {"type": "array", "items": _wrapped(80)}),
        }
        self._schemas = {name: fastavro.parse_schema(schema) for name, schema in schemas.items()}
        self._registry_url = registry_url
        self._subject, self._shipped = f"{topic}-{funds_added}", shipped
        self._late = 0
        self._late_id = 0
        """The id of the schema that `late` uses, once it is registered."""
        self._last_id = 0
        self._skipped = 0
        self._releases: list[tuple[bytes, Any]] = []
        self._registering = threading.Lock()
        subjects = dict.fromkeys(schemas, f"{topic}-{funds_added}") | {"seen": f"{topic}-{seen['namespace']}.FundsSeen"}
        self._headers = {
            name: struct.pack(">bI", 0, _register(registry_url, subjects[name], schema))
            for name, schema in schemas.items()
        }

    def funds_added(self, customer: str, cents: int, schema: str = "shipped") -> bytes:
        """Returns a valid event; the schema `wide` holds more digits than the shipped one."""
        return self._frame(schema, customer, _EXACT.multiply(Decimal(cents), _CENT))

    def with_nothing(self, customer: str, cents: int) -> bytes:
        """Returns a valid event with a field of 2^60 values that take no bytes."""
        return self._headers["nothing"] + self.funds_added(customer, cents)[5:]

    def expect_late(self) -> None:
        """Makes `late` use an id whose schema is not registered yet; the ids below it are for `release`."""
        with self._registering:
            self._late += 1
            # The registry assigns ids in sequence.
            self._late_id = self._skip() + _IDS_BEFORE_LATE

    def register_late(self) -> None:
        """Registers the schema that `late` uses. No other client may register one at the same time."""
        with self._registering:
            while self._skip() < self._late_id - 1:
                pass
            given = _register(self._registry_url, self._subject, self._with_another(f"late{self._late}"))
            assert given == self._late_id, f"the late schema has id {given}, not {self._late_id}"
            self._last_id = given

    def late(self, customer: str, cents: int) -> bytes:
        """Returns an event whose schema is registered only later."""
        # The last field is null, the first branch of its union.
        return struct.pack(">bI", 0, self._late_id) + self.funds_added(customer, cents)[5:] + b"\0"

    def release(self, chooser: random.Random) -> None:
        """Registers another version of the event, as a producer's release does: more optional fields, another scale.

        Does nothing when only the id of `late` is left.
        """
        with self._registering:
            if self._last_id >= self._late_id - _LEFT_FREE:
                return
            name = f"release{len(self._releases)}"
            schema = self._with_another(name, chooser.randint(0, len(self._shipped["fields"])))
            for field in schema["fields"]:
                if field["name"] == "amount":
                    field["type"] = _decimal(38, chooser.randint(2, 5))
            self._last_id = _register(self._registry_url, self._subject, schema)
            parsed = fastavro.parse_schema(schema)
            self._releases.append((struct.pack(">bI", 0, self._last_id), parsed))

    def released(self, chooser: random.Random, customer: str, cents: int) -> bytes:
        """Returns a valid event under the newest version or an earlier one; under the shipped one before the first."""
        releases = self._releases[:]
        if not releases:
            return self.funds_added(customer, cents)
        header, schema = releases[-1] if chooser.random() < _NEWEST_SHARE else chooser.choice(releases)
        event = _event(customer, _EXACT.multiply(Decimal(cents), _CENT))
        for field in schema["fields"]:
            if field["name"].startswith("release"):
                event[field["name"]] = chooser.choice((None, f"build {chooser.randrange(10**6)}"))
        return _encoded(header, schema, event)

    def _skip(self) -> int:
        """Takes an id for a schema that no event uses, outside the topic's subjects; returns it."""
        self._skipped += 1
        subject, schema = f"skipped-{self._subject}", self._with_another(f"skipped{self._skipped}")
        self._last_id = _register(self._registry_url, subject, schema)
        return self._last_id

    def _with_another(self, name: str, at: int | None = None) -> dict[str, Any]:
        """Returns the shipped schema with another optional field; by default, the last one."""
        another = {"name": name, "type": ["null", "string"], "default": None}
        fields = [dict(field) for field in self._shipped["fields"]]
        fields.insert(len(fields) if at is None else at, another)
        return {**self._shipped, "fields": fields}

    def seen(self, customer: str) -> bytes:
        """Returns a record of another type, which no model folds."""
        return self._encode("seen", {"who": customer})

    def poison(self, cause: str, customer: str, elsewhere: int, cents: int) -> Source:
        """Returns a record that can never be applied.

        Args:
            cause: one of POISON.
            customer: the customer that the record names.
            elsewhere: a partition other than the customer's.
            cents: the amount.
        """
        key, good = customer.encode(), self.funds_added(customer, cents)
        match cause:
            case "key-null":
                return Source(None, good, elsewhere)
            case "value-null":
                return Source(key, None)
            case "frame-missing":
                return Source(key, good[:3])
            case "magic-byte-unknown":
                return Source(key, b"\x01" + good[1:])
            case "schema-id-unknown":
                return Source(key, struct.pack(">bI", 0, _UNKNOWN_SCHEMA_ID) + good[5:])
            case "schema-incompatible":
                return Source(key, self._frame("inexact", customer, cents / 100))
            case "body-undecodable":
                return Source(key, good[:9])
            case "length":
                # Announces a text of 16 MiB; the cause is `body-undecodable`.
                return Source(key, good[:5] + b"\x80\x80\x80\x10")
            case "values-too-many":
                items = b"\xc0\x9a\x0c" + bytes(100_000) + b"\0"
                return Source(key, self._headers["hostile"] + items + good[5:])
            case "field-null":
                return Source(key, self._frame("wide", customer, None))
            case "decimal-loses-digits":
                return Source(key, self._frame("wide", customer, Decimal("0.013")))
            case "key-is-not-customer-id":
                return Source(b"not-" + key, good)
            case "customer-id-malformed":
                return Source(key + b"\x07", self.funds_added(customer + "\x07", cents))
            case "key-not-of-this-partition":
                return Source(key, good, elsewhere)
        raise ValueError(cause)

    def _frame(self, schema: str, customer: str, amount: Decimal | float | None) -> bytes:
        return self._encode(schema, _event(customer, amount))

    def _encode(self, schema: str, record: dict[str, Any]) -> bytes:
        return _encoded(self._headers[schema], self._schemas[schema], record)


def _event(customer: str, amount: Decimal | float | None) -> dict[str, Any]:
    return {"id": "chaos", "occurredOn": datetime.now(UTC), "customerId": customer, "amount": amount}


def _encoded(header: bytes, schema: Any, record: dict[str, Any]) -> bytes:
    body = io.BytesIO()
    fastavro.schemaless_writer(body, schema, record)
    return header + body.getvalue()


def _decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def _with_first(schema: dict[str, Any], name: str, kind: Any) -> dict[str, Any]:
    return {**schema, "fields": [{"name": name, "type": kind}, *schema["fields"]]}


def _doubled(times: int) -> dict[str, Any]:
    """Returns the schema of a record with a power of two of values that take no byte."""
    kind: dict[str, Any] = {"type": "record", "name": "D0", "fields": [{"name": "a", "type": "null"}]}
    for level in range(1, times + 1):
        fields = [{"name": "a", "type": kind}, {"name": "b", "type": f"D{level - 1}"}]
        kind = {"type": "record", "name": f"D{level}", "fields": fields}
    return kind


def _wrapped(levels: int) -> Any:
    """Returns the schema of records within each other, with one number."""
    kind: Any = "int"
    for level in range(levels):
        kind = {"type": "record", "name": f"W{level}", "fields": [{"name": "a", "type": kind}]}
    return kind


def _with_amount(schema: dict[str, Any], amount: Any) -> dict[str, Any]:
    return {**schema, "fields": [*schema["fields"][:3], {"name": "amount", "type": amount}]}


def _register(registry_url: str, subject: str, schema: dict[str, Any]) -> int:
    request = urllib.request.Request(
        f"{registry_url}/subjects/{subject}/versions",
        json.dumps({"schema": json.dumps(schema), "schemaType": "AVRO"}).encode(),
        {"Content-Type": "application/vnd.schemaregistry.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(json.load(answer)["id"])


ABORTED_SHARE = 0.05
POISON_SHARE = 0.01
OTHER_TYPES_SHARE = 0.05
KEYED_SHARE = 0.08
HOT_SHARE = 0.2
LATE_SHARE = 0.03
RELEASED_SHARE = 0.3
_RELEASE_EVERY_SECONDS = 2.0
_HOT = 8
_RECORDS = (3, 24)
_BURST_RECORDS = 2_000
# Ten of these fit into a balance, eleven overflow it.
_WHALE_CENTS = 99 * 10**35
_TRANSACTION_TIMEOUT_MS = 10_000
_COMMIT_SECONDS = 10.0


class Customers:
    """Customer names, and the partitions that the producers' partitioner chose for them. Thread-safe."""

    def __init__(self, early: int, late: int, whales: int = 4) -> None:
        """Args:
        early, late: how many customers have events from the beginning on, and later.
        whales: how many have balances near the limit, so that some of their events overflow.
        """
        self.early = [f"customer-{n}" for n in range(early)]
        self.late = [f"late-{n}" for n in range(late)]
        self.whales = [f"whale-{n}" for n in range(whales)]
        self.strangers = [f"stranger-{n}" for n in range(8)]
        self.healing = [f"{HEALING.decode()}{n}" for n in range(40)]
        """Customers with events under a schema that is registered later; not queried until then."""
        self.hot = self.early[:_HOT]
        """Customers that are paid and queried often, so that queries frequently coincide with commits."""
        self.homes: dict[bytes, int] = {}

    @property
    def everybody(self) -> list[str]:
        """All customers that may get a balance, and some that never do."""
        return [*self.early, *self.late, *self.whales, *self.strangers]


class Workload:
    """Producer threads with a common rate. Started and stopped by one thread."""

    def __init__(
        self, bootstrap_servers: str, topic: str, partitions: int, frames: Frames, customers: Customers, seed: int
    ) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.topic = topic
        self.partitions = partitions
        self.frames = frames
        self.customers = customers
        self._seed = seed
        self._turn = 0
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.acked: dict[int, int] = {}
        """Partition → the offset after the last record that was certainly committed."""
        self.acks: list[tuple[float, int, int]] = []
        """(time, partition, offset after a committed record), in order of acknowledgement."""
        self.sends_late = False
        """Whether some events use the schema that is registered later."""
        self.sent = 0
        self.failures: list[str] = []

    def seed_customers(self) -> None:
        """Appends one event of each early customer, so that their partitions are known."""
        writer = _Writer(self, "seed", random.Random(f"{self._seed}-seed"))
        everybody = [Source(n.encode(), self.frames.funds_added(n, 1 + i)) for i, n in enumerate(self.customers.early)]
        whales = [
            Source(n.encode(), self.frames.funds_added(n, _WHALE_CENTS, "wide"))
            for n in self.customers.whales
            for _ in range(10)
        ]
        writer.transact([*everybody, *whales])
        assert self.sent, "the first transaction failed"

    def burst(self, records: int) -> None:
        """Appends `records` records as fast as possible."""
        writer = _Writer(self, "burst", random.Random(f"{self._seed}-burst-{self.sent}"))
        end = self.sent + records
        while self.sent < end:
            writer.transact([writer.draw() for _ in range(min(_BURST_RECORDS, end - self.sent))])

    def start(self, rate: float, producers: int = 3) -> None:
        """Starts to append `rate` records per second."""
        self._stopping.clear()
        self._turn += 1
        self._threads = [
            threading.Thread(target=self._run, args=(n, rate / producers), name=f"producer-{n}")
            for n in range(producers)
        ]
        self._threads.append(threading.Thread(target=self._release, name="releases"))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stops at the end of a transaction; leaves none open."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._threads = []
        assert not self.failures, self.failures

    def _release(self) -> None:
        """Registers versions of the event's schema, which the producers use from then on."""
        chooser = random.Random(f"{self._seed}-releases-{self._turn}")
        while not self._stopping.wait(_RELEASE_EVERY_SECONDS):
            with suppress(OSError):
                self.frames.release(chooser)

    def _run(self, number: int, rate: float) -> None:
        writer = _Writer(self, f"producer-{number}", random.Random(f"{self._seed}-{number}-{self._turn}"))
        due = time.monotonic()
        try:
            while not self._stopping.is_set():
                records = [writer.draw() for _ in range(writer.chooser.randint(*_RECORDS))]
                writer.transact(records, abort=writer.chooser.random() < ABORTED_SHARE)
                due = max(due + len(records) / rate, time.monotonic() - 1.0)
                self._stopping.wait(max(0.0, due - time.monotonic()))
            writer.settle()
        except Exception as error:
            self.failures.append(f"{threading.current_thread().name}: {error!r}")
            raise


class _Writer:
    """A producer with its own transactional id. Used by one thread."""

    def __init__(self, workload: Workload, name: str, chooser: random.Random) -> None:
        self._workload = workload
        self.chooser = chooser
        self._config: dict[str, Any] = {
            "bootstrap.servers": workload.bootstrap_servers,
            "transactional.id": f"{workload.topic}-{name}",
            "transaction.timeout.ms": _TRANSACTION_TIMEOUT_MS,
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "log_level": 0,
        }
        self._producer: Producer | None = None
        self._acks: dict[int, int] = {}
        self._keyed: deque[tuple[str, str, int]] = deque(maxlen=300)
        self._keys = 0

    def transact(self, records: list[Source], *, abort: bool = False) -> None:
        """Runs one transaction. If its outcome is unknown, the next one uses a new producer."""
        self._acks = {}
        try:
            producer = self._opened()
            producer.begin_transaction()
            for record in records:
                self._produce(producer, record)
            if abort:
                producer.flush(_COMMIT_SECONDS)
                producer.abort_transaction(_COMMIT_SECONDS)
                return
            producer.commit_transaction(_COMMIT_SECONDS)
        except (KafkaException, BufferError):
            self._drop()
            return
        for partition, end in self._acks.items():
            self._workload.acked[partition] = max(self._workload.acked.get(partition, 0), end)
            self._workload.acks.append((time.monotonic(), partition, end))
        self._workload.sent += len(records)

    def settle(self) -> None:
        """Ends a transaction that the last attempt may have left open."""
        self._opened()

    def draw(self) -> Source:
        """Draws a record."""
        chooser, frames, customers = self.chooser, self._workload.frames, self._workload.customers
        luck = chooser.random()
        name = chooser.choice(
            customers.late if luck < 0.05 else customers.hot if luck < 0.05 + HOT_SHARE else customers.early
        )
        luck = chooser.random()
        if luck < POISON_SHARE:
            name = chooser.choice(customers.early)
            elsewhere = (customers.homes[name.encode()] + 1) % self._workload.partitions
            return frames.poison(chooser.choice(POISON), name, elsewhere, self._cents())
        luck -= POISON_SHARE
        if luck < LATE_SHARE:
            name, cents = chooser.choice(customers.healing), self._cents()
            is_late = self._workload.sends_late and chooser.random() < 0.7
            return Source(name.encode(), frames.late(name, cents) if is_late else frames.funds_added(name, cents))
        luck -= LATE_SHARE
        if luck < OTHER_TYPES_SHARE:
            return Source(name.encode(), frames.seen(name))
        luck -= OTHER_TYPES_SHARE
        if luck < KEYED_SHARE:
            return self._draw_keyed(name)
        luck -= KEYED_SHARE
        if luck < 0.002 and customers.whales:
            whale = chooser.choice(customers.whales)
            cents = chooser.choice((_WHALE_CENTS, -_WHALE_CENTS, 1))
            return Source(whale.encode(), frames.funds_added(whale, cents, "wide"))
        if luck < 0.01:
            return Source(name.encode(), frames.funds_added(name, self._cents(), "wide"))
        if luck < 0.012:
            return Source(name.encode(), frames.with_nothing(name, self._cents()))
        return Source(name.encode(), self._valid(name, self._cents()))

    def _draw_keyed(self, name: str) -> Source:
        """Draws an event with an idempotency key: new, repeated, or with a key that belongs to another event."""
        cents, token = (
            self._cents(),
            f"{self._config['transactional.id']}-{self.chooser.getrandbits(32):x}-{self._keys}",
        )
        self._keys += 1
        if self._keyed and (luck := self.chooser.random()) < 0.4:
            name, token, first = self.chooser.choice(self._keyed)
            cents = first if luck < 0.35 else first + 1
        else:
            self._keyed.append((name, token, cents))
        return Source(name.encode(), self._valid(name, cents), None, token)

    def _valid(self, name: str, cents: int) -> bytes:
        frames, chooser = self._workload.frames, self.chooser
        is_released = chooser.random() < RELEASED_SHARE
        return frames.released(chooser, name, cents) if is_released else frames.funds_added(name, cents)

    def _cents(self) -> int:
        luck = self.chooser.random()
        if luck < 0.05:
            # More digits than a binary float holds.
            return self.chooser.randint(10**15, 10**17)
        return self.chooser.randint(-5_000, -1) if luck < 0.15 else self.chooser.randint(1, 100_000)

    def _produce(self, producer: Producer, record: Source) -> None:
        headers: Any = (
            None if record.idempotency_key is None else [("idempotency-key", record.idempotency_key.encode())]
        )
        where: dict[str, Any] = {} if record.partition is None else {"partition": record.partition}
        own = record.partition is None
        producer.produce(
            self._workload.topic,
            record.value,
            record.key,
            headers=headers,
            on_delivery=self._placed if own else self._delivered,
            **where,
        )
        producer.poll(0)

    def _placed(self, error: Any, message: Any) -> None:
        if error is None and message.key() is not None:
            self._workload.customers.homes[message.key()] = message.partition()
        self._delivered(error, message)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            self._acks[message.partition()] = max(self._acks.get(message.partition(), 0), message.offset() + 1)

    def _opened(self) -> Producer:
        """Returns a producer after `init_transactions`, which ends pending transactions; waits for the broker."""
        while self._producer is None:
            producer = Producer(self._config)
            try:
                producer.init_transactions(_COMMIT_SECONDS)
            except KafkaException:
                producer.purge()
                time.sleep(0.5)
            else:
                self._producer = producer
        return self._producer

    def _drop(self) -> None:
        if self._producer is not None:
            self._producer.purge()
            self._producer = None
