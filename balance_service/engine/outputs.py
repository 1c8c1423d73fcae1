"""What a stage sends to other topics, and how it says where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.engine.records import Output
from balance_service.errors import PoisonRecordError

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


def sender_of(stage: str, source_topic_id: str) -> str:
    """What names a stage, by its full name, and the very topic that it reads: `<application id>-<stage>:<topic id>`."""
    return f"{stage}:{source_topic_id}"


def origin_prefix(topic: str, partition: int) -> str:
    """What the origins of one partition's records begin with."""
    return f"{topic}:{partition}:"


class Sender:
    """Makes the records for a target of what one partition of a source comes to."""

    def __init__(self, target: Target, source: str, partition: int) -> None:
        """Args:
        source: the topic.
        """
        self._target = target
        self._origin = origin_prefix(source, partition)
        self._sent_by = SENDER_HEADER, target.sender.encode()
        # Without a key there is no order to keep; any partition will do, but the same one if the event is read again.
        self._without_key = partition % target.partitions

    def output(
        self,
        offset: int,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> Output:
        """A record that comes of the source's at an offset.

        Args:
            headers: that it has besides those that say so.

        Raises:
            PoisonRecordError: the topic would refuse it for ever: it is too large, or lacks a key.
        """
        target = self._target
        if key is None and target.is_compacted:
            raise PoisonRecordError(
                UNFIT, f"a record without a key does not fit into '{target.topic}', which is compacted"
            )
        size = len(key or b"") + len(value or b"")
        for name, of in headers:
            size += len(name) + len(of or b"")
        if size + ENVELOPE_BYTES > target.largest_bytes:
            raise PoisonRecordError(UNFIT, f"a record of {size} bytes is too large for topic '{target.topic}'")
        partition = self._without_key if key is None else OF_THE_KEY
        origin = ORIGIN_HEADER, f"{self._origin}{offset}".encode()
        return Output(offset, target.topic, partition, key, value, timestamp_ms, [*headers, origin, self._sent_by])


def encoded(codec: AvroCodec, record: Mapping[str, Any]) -> bytes:
    """The frame of a record to be sent. Raises PoisonRecordError: its schema does not allow it."""
    try:
        return codec.encode(record)
    except Exception as error:  # fastavro raises whatever its writer trips over
        raise PoisonRecordError(UNFIT, f"what is to be sent does not fit its schema: {error}") from error


def passed_on(headers: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, bytes | None]]:
    """The headers of a record that go along where it is passed on; of its own way, the record before it tells."""
    return [(header["key"], header["value"]) for header in headers or () if header["key"] not in _OF_ONE_HOP]
