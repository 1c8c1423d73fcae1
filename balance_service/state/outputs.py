"""What a stage sends to other topics, and how it says where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.errors import PoisonRecordError
from balance_service.state.records import Output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.avro.codec import AvroCodec

ORIGIN_HEADER = "origin"
"""Names the record of a source that another one came of: `topic:partition:offset`."""
SENDER_HEADER = "sent-by"
"""Names the stage that has sent a record, and the topic that it reads: see `sender_of`. Several may send to one."""
_OF_ONE_HOP = frozenset({ORIGIN_HEADER, SENDER_HEADER})
UNFIT = "output-does-not-fit"
OF_THE_KEY = -1
ENVELOPE_BYTES = 2 << 10
"""What a batch with nothing else in it takes at most, besides value, headers and the key of an output."""


@dataclass(frozen=True, slots=True)
class Target:
    """A topic that outputs of a stage go to, with what it takes."""

    topic: str
    partitions: int
    largest_bytes: int
    """Of a batch."""
    is_compacted: bool
    """Whether it refuses what has no key."""
    sender: str
    """What names the stage in its records, as `sender_of` has it."""

    @property
    def header(self) -> tuple[str, bytes]:
        """What says so."""
        return SENDER_HEADER, self.sender.encode()


@dataclass(frozen=True, slots=True)
class Origin:
    """The record that an output comes of."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int

    @property
    def header(self) -> tuple[str, bytes]:
        """What names it."""
        return ORIGIN_HEADER, f"{origin_prefix(self.topic, self.partition)}{self.offset}".encode()


def sender_of(stage: str, source_topic_id: str) -> str:
    """What names a stage, by its full name, and the very topic that it reads: `<application id>-<stage>:<topic id>`."""
    return f"{stage}:{source_topic_id}"


def origin_prefix(topic: str, partition: int) -> str:
    """What the origins of one partition's records begin with."""
    return f"{topic}:{partition}:"


def output_of(
    target: Target,
    key: bytes | None,
    value: bytes | None,
    origin: Origin,
    headers: Sequence[tuple[str, bytes | None]] = (),
) -> Output:
    """A record for a topic.

    Args:
        headers: that it has besides its origin's.

    Raises:
        PoisonRecordError: the topic would refuse it for ever: it is too large, or lacks a key.
    """
    if key is None and target.is_compacted:
        raise PoisonRecordError(UNFIT, f"a record without a key does not fit into '{target.topic}', which is compacted")
    size = len(key or b"") + len(value or b"") + sum(len(name) + len(of or b"") for name, of in headers)
    if size + ENVELOPE_BYTES > target.largest_bytes:
        raise PoisonRecordError(UNFIT, f"a record of {size} bytes is too large for topic '{target.topic}'")
    # Without a key there is no order to keep; any partition will do, but the same one if the event is read again.
    partition = origin.partition % target.partitions if key is None else OF_THE_KEY
    return Output(
        origin.offset,
        target.topic,
        partition,
        key,
        value,
        origin.timestamp_ms,
        [*headers, origin.header, target.header],
    )


def encoded(codec: AvroCodec, record: Mapping[str, Any]) -> bytes:
    """The frame of a record to be sent. Raises PoisonRecordError: its schema does not allow it."""
    try:
        return codec.encode(record)
    except Exception as error:  # fastavro raises whatever its writer trips over
        raise PoisonRecordError(UNFIT, f"what is to be sent does not fit its schema: {error}") from error


def passed_on(headers: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, bytes | None]]:
    """The headers of a record that go along where it is passed on; of its own way, the record before it tells."""
    return [(header["key"], header["value"]) for header in headers or () if header["key"] not in _OF_ONE_HOP]
