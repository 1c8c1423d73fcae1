"""Signatures by the secret that all instances of an application share, and signed records of its control topics.

The topics of generations and of decisions about dead letters control what serves and what counts. A user that may write
to them is not necessarily an instance. The record header `signature` signs the topic, the record's key and its value,
which holds a number, or a dead letter and a time, and so occurs once. It has no time of its own: these records count
for ever. Source: RFC 2104, HMAC; with SHA-256.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, NamedTuple

import structlog

from balance_service.kafka.messages import offset_of, readable_headers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from confluent_kafka import Message

    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

HEADER = "signature"
_PURPOSE = b"balance-service control record 1"
_SAME = "give all instances the same BALANCE_PEER_SECRET, and name former secrets in BALANCE_PEER_SECRETS_FORMER"
UNSIGNED = f"it is unsigned, and the topic has signed records before it; {_SAME}"
WRONGLY_SIGNED = f"no known secret has signed it; {_SAME}"
REPEATED = "it repeats an earlier record"


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
        self.refused: Mapping[tuple[int, int], Refused] = {}
        """By partition and offset."""

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

    def headers(self, key: bytes, value: bytes) -> dict[str, bytes]:
        """Returns the headers of a record that this instance writes."""
        return {} if self._secret is None else {HEADER: self._sign(self._secret, key, value).encode()}

    def refuse(self, message: Message, reason: str) -> None:
        """Notes that a record does not count."""
        place = message.partition() or 0, offset_of(message)
        if place not in self.refused:
            self.refused = {**self.refused, place: Refused(message.key() or b"", reason)}
            log.error("a control record does not count", topic=self.topic, offset=place[1], reason=reason)

    def is_signed(self, signature: bytes, key: bytes, value: bytes) -> bool:
        """Whether a known secret has signed a record."""
        text = signature.decode("ascii", "replace")
        return any(one.has_signed(text, _PURPOSE, self.topic.encode(), key, value) for one in self._known)

    def _sign(self, secret: SharedSecret, key: bytes, value: bytes) -> str:
        return secret.sign(_PURPOSE, self.topic.encode(), key, value)

    @property
    def are_signed(self) -> bool:
        """Whether instances sign the records."""
        return self._secret is not None


class ControlReading:
    """Judges the records of a control topic, in the order of a reader that begins at the beginning."""

    def __init__(self, records: ControlRecords) -> None:
        self._records = records
        self._signed: set[int] = set()
        """The partitions that had a signed record."""
        self._seen: set[bytes] = set()

    def refusal(self, message: Message) -> str:
        """Returns why a record does not count, as far as its signature says; empty if it does.

        An unsigned record counts before its partition's first signed one: it was written before there was a secret.
        """
        if not self._records.are_signed:
            return ""
        signature = dict(readable_headers(message) or ()).get(HEADER)
        partition = message.partition() or 0
        if signature is None:
            return UNSIGNED if partition in self._signed else ""
        if not self._records.is_signed(signature, message.key() or b"", message.value() or b""):
            return WRONGLY_SIGNED
        if signature in self._seen:
            return REPEATED
        self._seen.add(signature)
        self._signed.add(partition)
        return ""
