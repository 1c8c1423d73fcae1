"""Signatures by the secret that all instances of an application share, and signed records of its control topics.

The topics of generations and of decisions about dead letters control what serves and what counts. A user that may write
to them is not necessarily an instance. The record header `signature` signs the topic, the record's key and its value,
which holds a number, or a dead letter and a time, and so occurs once. It has no time of its own: these records count
permanently. Source: RFC 2104, HMAC; with SHA-256.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from typing import TYPE_CHECKING, NamedTuple

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from balance_service.avro.frames import SCHEMA_PREFIX
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.kafka.clients import by_remedy, new_client, producer_config
from balance_service.kafka.log_reader import reader_to_end
from balance_service.kafka.messages import offset_of, readable_headers
from balance_service.kafka.producers import wait_for_deliveries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from confluent_kafka import Message

    from balance_service.kafka.topics import Topic, Topics
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

HEADER = "signature"
_PURPOSE = b"balance-service control record 1"
_SAME = "give all instances the same BALANCE_PEER_SECRET, and name former secrets in BALANCE_PEER_SECRETS_FORMER"
UNSIGNED = f"it is unsigned, and the topic has signed records before it; {_SAME}"
WRONGLY_SIGNED = f"no known secret has signed it; {_SAME}"
REPEATED = "it repeats an earlier record"
REFUSED_BEFORE = "it did not count when the checkpoint behind it was written"
_CHECKPOINT = b""
"""The key of a record that vouches for others: neither a read model nor a dead letter has it."""
_WRITE_SECONDS = 15.0
_MOST_REFUSED = 1_000


class SharedSecret:
    """Signs, and verifies signatures. A signature for one purpose is invalid for any other."""

    def __init__(self, secret: str) -> None:
        self._keyed = hmac.new(secret.encode(), digestmod="sha256")

    def sign(self, purpose: bytes, *parts: bytes) -> str:
        """The signature of parts in this order, as 64 hexadecimal digits."""
        # A copy saves hashing the key again. The lengths make every list of parts a distinct message.
        keyed = self._keyed.copy()
        keyed.update(b"".join([b"%d:%b" % (len(part), part) for part in (purpose, *parts)]))
        return keyed.hexdigest()

    def has_signed(self, signature: str, purpose: bytes, *parts: bytes) -> bool:
        """Whether a signature is the one of these parts, in constant time."""
        return hmac.compare_digest(self.sign(purpose, *parts).encode(), signature.encode("utf-8", "surrogatepass"))


class ControlRecord(NamedTuple):
    """A record of a control topic, with its signature if it has one."""

    partition: int
    offset: int
    key: bytes
    value: bytes
    signature: bytes | None

    @staticmethod
    def of(message: Message) -> ControlRecord:
        """Reads a message's headers, which the client gives once."""
        signature = dict(readable_headers(message) or ()).get(HEADER)
        key, value = message.key() or b"", message.value() or b""
        return ControlRecord(message.partition() or 0, offset_of(message), key, value, signature)


class Refused(NamedTuple):
    """A record of a control topic that does not count."""

    key: bytes
    reason: str


class ControlRecords:
    """The signatures of one control topic, and its records that do not count. Any thread may use it.

    Without a secret, no record is signed, and each counts that its reader understands.
    """

    def __init__(self, topic: str, secret: SharedSecret | None = None, former: Sequence[SharedSecret] = ()) -> None:
        """Args:
        former: secrets that verify and never sign.
        """
        self.topic = topic
        self._secret = secret
        self._known = () if secret is None else (secret, *former)
        self._lock = threading.Lock()
        self.refused: Mapping[tuple[int, int], Refused] = {}
        """By partition and offset; the first thousand."""
        self.has_signed = False
        """Whether the topic has a record with a signature, right or wrong."""

    @staticmethod
    def of(settings: Settings, topic: str) -> ControlRecords:
        secret = settings.peer_secret
        former = [SharedSecret(one.get_secret_value()) for one in settings.peer_secrets_former]
        return ControlRecords(topic, None if secret is None else SharedSecret(secret.get_secret_value()), former)

    @property
    def problems(self) -> list[str]:
        """A sentence about each record that does not count."""
        return [self.problem(place) for place in sorted(self.refused)]

    def problem(self, place: tuple[int, int]) -> str:
        """Returns a sentence about a record that does not count, by its partition and offset."""
        partition, offset = place
        where = f"the record at offset {offset} of partition {partition} of topic '{self.topic}'"
        return f"{where} does not count: {self.refused[place].reason}"

    def refuse(self, record: ControlRecord, reason: str) -> None:
        """Notes that a record does not count."""
        place = record.partition, record.offset
        with self._lock:
            if place in self.refused or len(self.refused) >= _MOST_REFUSED:
                return
            self.refused = {**self.refused, place: Refused(record.key, reason)}
            log.error("a control record does not count", topic=self.topic, offset=record.offset, reason=reason)

    def unknown(self) -> list[tuple[int, int]]:
        """Returns the places of the records that no known secret has signed."""
        return [at for at, one in sorted(self.refused.items()) if one.reason == WRONGLY_SIGNED]

    def may_count(self, key: bytes) -> list[tuple[int, int]]:
        """Returns the places of the refused records of a key that an instance may have written.

        They are signed with an unknown secret, follow records that are gone, or have a schema that the registry lacks.
        """
        forged = (UNSIGNED, REPEATED, REFUSED_BEFORE)
        return [at for at, one in sorted(self.refused.items()) if one.key == key and one.reason not in forged]

    def require_secret(self) -> None:
        """Raises ConfigurationError if others sign the records of the topic, and this process has no secret."""
        if self._secret is None and self.has_signed:
            raise ConfigurationError(
                f"topic '{self.topic}' has signed records: set BALANCE_PEER_SECRET as all instances"
            )

    def require_all(self) -> None:
        """To be called once the topic was read.

        Raises:
            ConfigurationError: a record may be of this application, and cannot be verified here.
        """
        self.require_secret()
        if unknown := self.unknown():
            raise ConfigurationError(self.problem(unknown[0]))

    def headers(self, key: bytes, value: bytes) -> dict[str, bytes]:
        """Returns the headers of a record that this instance writes."""
        return {} if self._secret is None else {HEADER: self._secret.sign(*self._parts(key, value)).encode()}

    def judged(self, records: Sequence[ControlRecord]) -> Iterator[tuple[ControlRecord, str]]:
        """Yields each record with the reason why it does not count, as far as its signature says; empty if it counts.

        An unsigned record counts before its partition's first signed one: it was written before there was a secret.

        Args:
            records: of the topic, from its beginning on.
        """
        vouched = self._vouched(records)
        signed, seen = set[int](), set[bytes]()
        for record in records:
            self.has_signed = self.has_signed or record.signature is not None
            if record.key == _CHECKPOINT:
                if self._is_signed(record):
                    signed.add(record.partition)
                continue
            reason = ""
            if (known := vouched.get(record.partition)) is not None and record.offset < known.end:
                reason = REFUSED_BEFORE if record.offset in known.refused else ""
                signed.add(record.partition)
            elif self._secret is not None and record.signature is None:
                reason = UNSIGNED if record.partition in signed else ""
            elif self._secret is not None and not self._is_signed(record):
                reason = WRONGLY_SIGNED
            elif self._secret is not None:
                # Several tasks may write the same text of a schema.
                is_text = record.key.startswith(SCHEMA_PREFIX)
                reason = REPEATED if record.signature in seen and not is_text else ""
                signed.add(record.partition)
            if record.signature is not None:
                seen.add(record.signature)
            yield record, reason

    def checkpoints(self, records: Sequence[ControlRecord], partitions: int) -> list[ControlRecord]:
        """Returns a record for each partition that vouches for those which count now. Offsets of these are unset."""
        refused = {(one.partition, one.offset) for one, reason in self.judged(records) if reason}
        found, by_partition = [], _by_partition(records)
        for partition in range(partitions):
            part = by_partition.get(partition, [])
            end, digest = part[-1].offset + 1 if part else 0, _digest(part).hexdigest()
            offsets = [str(offset) for of, offset in sorted(refused) if of == partition]
            value = " ".join([str(end), digest, *offsets]).encode()
            found.append(ControlRecord(partition, -1, _CHECKPOINT, value, self.headers(_CHECKPOINT, value).get(HEADER)))
        return found

    def _vouched(self, records: Sequence[ControlRecord]) -> dict[int, _Checkpoint]:
        """Returns the valid checkpoint of each partition that vouches for the most records."""
        found: dict[int, _Checkpoint] = {}
        for partition, part in _by_partition(records).items():
            seen = set[bytes]()
            for at, record in enumerate(part):
                # A repeated one costs a digest of all before it, and says nothing new.
                if record.key != _CHECKPOINT or record.value in seen or not self._is_signed(record):
                    continue
                seen.add(record.value)
                end, digest, *refused = record.value.decode().split(" ")
                below = [one for one in part[:at] if one.offset < int(end)]
                is_greatest = partition not in found or int(end) >= found[partition].end
                if is_greatest and _digest(below).hexdigest() == digest:
                    found[partition] = _Checkpoint(int(end), frozenset(map(int, refused)))
        return found

    def _is_signed(self, record: ControlRecord) -> bool:
        signature, parts = (record.signature or b"").decode("ascii", "replace"), self._parts(record.key, record.value)
        return any(one.has_signed(signature, *parts) for one in self._known)

    def _parts(self, key: bytes, value: bytes) -> tuple[bytes, bytes, bytes, bytes]:
        return _PURPOSE, self.topic.encode(), key, value


class _Checkpoint(NamedTuple):
    """Vouches for the records below an offset, except for those that did not count when it was written."""

    end: int
    refused: frozenset[int]


def _by_partition(records: Sequence[ControlRecord]) -> dict[int, list[ControlRecord]]:
    found: dict[int, list[ControlRecord]] = {}
    for record in records:
        found.setdefault(record.partition, []).append(record)
    return found


def _digest(records: Sequence[ControlRecord]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for record in records:
        for part in (b"%d" % record.offset, record.key, record.value, record.signature or b""):
            digest.update(b"%d:%b" % (len(part), part))
    return digest


def vouch(settings: Settings, topics: Topics, name: str, *, leaves_out_unknown: bool = False) -> int:
    """Writes a checkpoint: a secret that signed earlier records may be forgotten, and no unsigned one counts later.

    Args:
        leaves_out_unknown: records that no known secret has signed never count, with any secret.

    Returns:
        The number of the records that count; 0 if the topic does not exist.

    Raises:
        ConfigurationError: no known secret has signed some records.
        RetriableError: the broker does not respond.
        NotAuthorizedError: the user may not write to the topic.
    """
    if (topic := topics.find(name)) is None:
        return 0
    records = ControlRecords.of(settings, name)
    read = _read(settings, topics, topic)
    judged = [*records.judged(read)]
    if (unknown := [one for one, reason in judged if reason == WRONGLY_SIGNED]) and not leaves_out_unknown:
        first = f"that at offset {unknown[0].offset} of partition {unknown[0].partition}"
        raise ConfigurationError(
            f"no known secret has signed {len(unknown)} records of topic '{name}', {first} among them: name former "
            "secrets in BALANCE_PEER_SECRETS_FORMER; or, if they are forged, repeat with --leave-out-unknown, and they "
            "never count"
        )
    _write(settings, name, records.checkpoints(read, topic.partitions))
    return sum(not reason for _, reason in judged)


def begin_to_sign(settings: Settings, topics: Topics, name: str) -> None:
    """Vouches for the records of a control topic when there is a secret for the first time. Raises as `vouch`.

    From then on no unsigned record counts, also in a topic that stays empty for long.
    """
    records, topic = ControlRecords.of(settings, name), topics.find(name)
    if settings.peer_secret is None or topic is None:
        return
    read = _read(settings, topics, topic)
    if all(one.signature is None for one in read):
        _write(settings, name, records.checkpoints(read, topic.partitions))


def _read(settings: Settings, topics: Topics, topic: Topic) -> list[ControlRecord]:
    with reader_to_end(settings, topics, topic, waits_for_open=True) as reader:
        return [ControlRecord.of(message) for message in reader]


def _write(settings: Settings, name: str, records: Sequence[ControlRecord]) -> None:
    doing, grant = f"writing to topic '{name}'", f"Write on topic '{name}'"
    producer = new_client(Producer, {**producer_config(settings), "message.timeout.ms": int(_WRITE_SECONDS * 1000)})
    try:
        refused: list[KafkaError] = []

        def report(error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                refused.append(error)

        for one in records:
            headers: dict[str, str | bytes | None] = {HEADER: one.signature}
            producer.produce(name, one.value, one.key, partition=one.partition, headers=headers, on_delivery=report)
        if wait_for_deliveries(producer, _WRITE_SECONDS):
            raise RetriableError(f"{doing}: the broker did not confirm in time")
        if refused:
            raise KafkaException(refused[0])
    except KafkaException as error:
        raise by_remedy(error, doing, grant) from error
