"""Compares changelog, dead letters and stores with the recount."""

from __future__ import annotations

import hashlib
import io
import re
import struct
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

import fastavro
from confluent_kafka import Consumer, KafkaError, TopicPartition
from rocksdict import AccessType, Options, Rdict

from tests.chaos.checks import Violation
from tests.chaos.cluster import stage_in
from tests.chaos.recount import Poison
from tests.support.recount import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.chaos.recount import Recount

RESERVED = b"\xff"
POSITION_KEY = RESERVED + b"position"
_CHANGELOG_OFFSET_KEY = RESERVED + b"changelog-offset"
_LOCAL_KEYS = (RESERVED + b"identity", RESERVED + b"reaches", _CHANGELOG_OFFSET_KEY)
_MARKER_BY_NAME = RESERVED + b"once-by-name"
_MARKER_BY_TIME = RESERVED + b"once-by-time"
_READ_SECONDS = 60.0
_EXACT = Context(prec=80)

Content = dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Logged:
    """A committed record."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes]


def read_committed(bootstrap_servers: str, topic: str, partitions: int) -> list[list[Logged]]:
    """Returns all committed records of a topic up to its present end, by partition and offset."""
    consumer = _consumer(bootstrap_servers)
    records: list[list[Logged]] = [[] for _ in range(partitions)]
    try:
        ends = _ends(consumer, topic, partitions)
        consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
        stands_at = dict.fromkeys(range(partitions), 0)
        deadline = time.monotonic() + _READ_SECONDS
        while any(stands_at[p] < end for p, end in enumerate(ends)):
            assert time.monotonic() < deadline, f"{topic} was not read to {ends}: a transaction is open"
            for message in consumer.consume(10_000, timeout=0.1):
                error, partition, offset = message.error(), message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                if error is None:
                    headers: Any = dict(message.headers() or ())
                    records[partition].append(Logged(offset, message.key(), message.value(), headers))
                    stands_at[partition] = offset + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    stands_at[partition] = max(stands_at[partition], offset)
    finally:
        consumer.close()
    return records


def is_of_letter(key: bytes | None) -> bool:
    """Whether a changelog key belongs to a dead letter."""
    return key is not None and key.startswith(RESERVED + b"letter-")


def stable_ends(bootstrap_servers: str, topic: str, partitions: int) -> list[int]:
    """Returns the last stable offset of each partition."""
    consumer = _consumer(bootstrap_servers)
    try:
        return _ends(consumer, topic, partitions)
    finally:
        consumer.close()


def _consumer(bootstrap_servers: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "chaos-reader",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )


def _ends(consumer: Consumer, topic: str, partitions: int) -> list[int]:
    return [consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=10)[1] for p in range(partitions)]


def compacted(records: Iterable[Logged], below: int | None = None) -> Content:
    """Returns the last value of each key below an offset, without keys whose last record is a tombstone."""
    content: Content = {}
    for record in records:
        if below is not None and record.offset >= below:
            break
        assert record.key is not None
        if record.value is None:
            content.pop(record.key, None)
        else:
            content[record.key] = record.value
    return content


def is_marker(key: bytes) -> bool:
    """Whether a changelog key is the marker of an idempotency key; each has one."""
    return key.startswith(_MARKER_BY_NAME)


def states(content: Content) -> Content:
    """Returns the states of customers, without internal records."""
    return {key: value for key, value in content.items() if not key.startswith(RESERVED)}


def digest(content: Content) -> str:
    """Returns the start of a SHA-256 over keys and values in key order."""
    sha = hashlib.sha256()
    for key, value in sorted(content.items()):
        sha.update(struct.pack(">II", len(key), len(value)) + key + value)
    return sha.hexdigest()[:16]


def read_store(path: Path) -> tuple[int, Content]:
    """Returns a store's changelog offset and its changelog contents. The instance must be stopped."""
    db = Rdict(str(path), options=Options(raw_mode=True), access_type=AccessType.read_only())
    try:
        raw: Any = db.items()
        content: Content = dict(raw)
    finally:
        db.close()
    offset = int.from_bytes(content.get(_CHANGELOG_OFFSET_KEY, b""), "big")
    return offset, {key: value for key, value in content.items() if key not in _LOCAL_KEYS}


class Decoder:
    """Decodes frames with the schemas of the registry."""

    def __init__(self, registry_url: str) -> None:
        self._registry_url = registry_url
        self._schemas: dict[int, Any] = {}

    def decode(self, frame: bytes) -> dict[str, Any]:
        (schema_id,) = struct.unpack(">I", frame[1:5])
        if schema_id not in self._schemas:
            self._schemas[schema_id] = fastavro.parse_schema(schema_of(self._registry_url, schema_id))
        record: Any = fastavro.schemaless_reader(io.BytesIO(frame[5:]), self._schemas[schema_id], None)
        assert isinstance(record, dict)
        return record

    def living(self, content: Content, window_ms: int) -> Content:
        """Drops expired idempotency keys: the time of their removal depends on commits."""
        now = self.decode(content[POSITION_KEY])["streamTime"]

        def has_expired(key: bytes, value: bytes) -> bool:
            if is_marker(key):
                at_ms = self.decode(value)["timestamp"]
            elif key.startswith(_MARKER_BY_TIME):
                at_ms = int.from_bytes(key[len(_MARKER_BY_TIME) :][:8], "big")
            else:
                return False
            return bool(at_ms + window_ms <= now)

        return {key: value for key, value in content.items() if not has_expired(key, value)}

    def cents(self, frame: bytes) -> tuple[str, int]:
        """Returns customer and balance of a state."""
        state = self.decode(frame)
        return state["customerId"], int(_EXACT.multiply(state["amount"], Decimal(100)))


_COUNTER = re.compile(
    r'^balance_events_(applied|ignored|duplicates|dead_lettered)_total\{.*partition="(\d+)".*\} (\S+)$', re.MULTILINE
)
_SHOWN = 3

Logs = list[list[Logged]]


class Audit:
    """The service's topics, read at a moment without pending work."""

    def __init__(
        self,
        bootstrap_servers: str,
        registry_url: str,
        topic: str,
        application_id: str,
        partitions: int,
        stage: str = "balance",
    ) -> None:
        """Args:
        stage: the generation of the read model.
        """
        self._decoder = Decoder(registry_url)
        self._bootstrap_servers = bootstrap_servers
        self._application_id = application_id
        self.stage = stage
        self.changelog: Logs = read_committed(bootstrap_servers, f"{application_id}-{stage}-changelog", partitions)
        self.letters: Logs = read_committed(bootstrap_servers, f"{topic}-dead-letters", partitions)

    def balances(self, recount: Recount) -> Iterator[Violation]:
        """Checks that each balance in the changelog, and the total, equals the recount, with the same customers."""
        held = {}
        for records in self.changelog:
            for key, frame in states(compacted(records)).items():
                customer, cents = self._decoder.cents(frame)
                if customer.encode() != key:
                    yield Violation("wrong", f"the state of {key!r} names customer {customer}")
                held[key] = cents
        counted = {key: history.total for key, history in recount.histories.items() if history.sums}
        for key in held.keys() | counted.keys():
            has, should = held.get(key), counted.get(key)
            if has != should:
                kind = "doubled" if has is not None and should is not None and has > should else "lost"
                yield Violation(kind, f"{key!r} has {has} cents in the changelog, {should} by the recount")
        if sum(held.values()) != sum(counted.values()):
            yield Violation("wrong", f"the total is {sum(held.values())}, by the recount {sum(counted.values())}")

    def dead_letters(self, recount: Recount) -> Iterator[Violation]:
        """Checks that each poison record has exactly one dead letter of this application, with cause, key and value.

        An event whose schema was unknown at first has at most one, with that cause.
        """
        for partition, (records, count) in enumerate(zip(self.letters, recount.partitions, strict=True)):
            found: dict[int, list[Poison]] = defaultdict(list)
            for record in records:
                if record.headers["dead-letter-application-id"] == self._application_id.encode():
                    cause = record.headers["dead-letter-cause"].decode()
                    found[int(record.headers["dead-letter-offset"])].append(Poison(cause, record.key, record.value))
            for offset in count.healed & found.keys():
                if [letter.cause for letter in found[offset]] == ["schema-id-unknown"]:
                    del found[offset]
            for offset in sorted(count.poison.keys() | found.keys()):
                wanted = [count.poison[offset]] if offset in count.poison else []
                if found[offset] != wanted:
                    kind = "doubled" if len(found[offset]) > len(wanted) else "lost"
                    yield Violation(kind, f"the dead letters of {partition}:{offset} are {found[offset]}, not {wanted}")

    def positions(self, recount: Recount) -> Iterator[Violation]:
        """Checks that positions and epochs never decrease, and that the last position is the end of the source.

        A repeated position is valid for an opened task, which has a new epoch, for a commit of dead letters, and for a
        switch.
        """
        for partition, (records, count) in enumerate(zip(self.changelog, recount.partitions, strict=True)):
            last, has_letters, had_inherited = (-1, -1), False, None
            for record in records:
                has_letters |= is_of_letter(record.key)
                if record.key == POSITION_KEY and record.value is not None:
                    fields = self._decoder.decode(record.value)
                    (position,) = fields["offsets"].values()
                    now, inherited = (fields["epoch"], position), fields["inherited"]
                    may_repeat = has_letters or inherited != had_inherited
                    if now[0] < last[0] or now[1] < last[1] or (now == last and not may_repeat):
                        where = f"changelog {partition}:{record.offset} of {self.stage}"
                        yield Violation("backwards", f"{where} has epoch and position {now} after {last}")
                    last, has_letters, had_inherited = now, False, inherited
            if last[1] != count.end:
                stands = f"partition {partition} of {self.stage} stands at {last[1]}"
                yield Violation("lost", f"{stands}, the source ends at {count.end}")

    def sends(self) -> list[bool]:
        """Returns by partition whether the generation serves, and sends the outputs since the record that says so."""
        model, _, number = self.stage.partition(".g")
        (control,) = read_committed(self._bootstrap_servers, f"{self._application_id}-generations", 1)
        *_, newest = (record.value for record in control if record.key == model.encode() and record.value is not None)
        now = self._decoder.decode(newest)
        positions = [self._decoder.decode(compacted(records)[POSITION_KEY]) for records in self.changelog]
        return [now["serving"] == int(number or 1) and one["inherited"] >= now["servingSince"] for one in positions]

    def markers(self, recount: Recount) -> Iterator[Violation]:
        """Checks that the changelog holds exactly the idempotency keys that have not expired."""
        for partition, (records, count) in enumerate(zip(self.changelog, recount.partitions, strict=True)):
            living = self._decoder.living(compacted(records), recount.window_ms)
            has, should = sum(map(is_marker, living)), len(count.living(recount.window_ms))
            if has != should:
                detail = f"partition {partition} remembers {has} idempotency keys, by the recount {should}"
                yield Violation("lost" if has < should else "doubled", detail)

    def stores(self, paths: Sequence[Path], copies: int) -> Iterator[Violation]:
        """Checks that each store equals the changelog up to its offset; `copies` stores per partition are complete.

        Args:
            paths: of the stores of all generations.
        """
        complete: Counter[int] = Counter()
        final = [digest(states(compacted(records))) for records in self.changelog]
        for path in (path for path in paths if stage_in(path.name) == self.stage):
            partition = int(path.name.rpartition("_")[2])
            name = f"{path.parent.name}/{path.name}"
            records = self.changelog[partition]
            offset, content = read_store(path)
            before = next((r for r in reversed(records) if r.offset < offset), None)
            if before is not None and before.key != POSITION_KEY:
                yield Violation("digest", f"{name} ends at {offset}, within a transaction")
            should = compacted(records, offset)
            if digest(content) != digest(should):
                differing = [k for k in content.keys() | should.keys() if content.get(k) != should.get(k)]
                detail = f"{name} at {offset} differs from the changelog in {len(differing)} keys"
                yield Violation("digest", f"{detail}, such as {differing[:_SHOWN]}")
            complete[partition] += digest(states(content)) == final[partition]
        for partition, _ in enumerate(self.changelog):
            if complete[partition] < copies:
                yield Violation(
                    "digest",
                    f"partition {partition} of {self.stage} has {complete[partition]} complete copies, not {copies}",
                )

    def same_states(self, rebuilt: Audit, window_ms: int) -> Iterator[Violation]:
        """Checks that a fresh fold of the source yields the same states and living idempotency keys, byte for byte.

        Leaves out dead letters, whose timestamps differ.
        """
        for partition, (ours, theirs) in enumerate(zip(self.changelog, rebuilt.changelog, strict=True)):
            mine, fresh = (
                {
                    key: value
                    for key, value in self._decoder.living(compacted(records), window_ms).items()
                    if not is_of_letter(key)
                }
                for records in (ours, theirs)
            )
            for content in (mine, fresh):
                del content[POSITION_KEY]
            if digest(mine) != digest(fresh):
                differing = [k for k in mine.keys() | fresh.keys() if mine.get(k) != fresh.get(k)]
                detail = f"partition {partition} of {self.stage} differs from a fresh fold in {differing[:_SHOWN]}"
                yield Violation("digest", detail)


def check_counters(metrics: str, recount: Recount) -> Iterator[Violation]:
    """Checks that the event counters of a fresh fold equal the recount, per partition."""
    counted: Mapping[tuple[str, int], int] = {
        (name, int(partition)): int(float(value)) for name, partition, value in _COUNTER.findall(metrics)
    }
    for partition, count in enumerate(recount.partitions):
        should = {
            "applied": count.applied,
            "ignored": count.ignored,
            "duplicates": count.duplicates,
            "dead_lettered": len(count.poison),
        }
        has = {name: counted.get((name, partition), 0) for name in should}
        if has != should:
            yield Violation("lost", f"a fresh fold of partition {partition} counted {has}, the recount {should}")
