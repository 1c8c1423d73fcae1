"""What a stage sends to other topics, and how it says where it came from."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.avro.codec import frame_header, opened
from balance_service.engine.processor import OwnCodeFailedError, made_by_own
from balance_service.engine.records import Output
from balance_service.errors import PoisonRecordError, TaskHaltedError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader
from balance_service.kafka.messages import headers_of
from balance_service.model.outputs import Each

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.records import KeyedUpdate, Position, TaskBatch
    from balance_service.kafka.messages import Headers
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.event import Event, State
    from balance_service.model.outputs import Emit
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """How a read model emits; the same for all its tasks."""

    read_model: ReadModel
    emit: Emit
    target: Target
    codec: AvroCodec
    """Of what is sent."""
    source: str
    """The topic that it folds."""

    def of_batch(self, batch: TaskBatch, partition: int, stands_at: Position) -> BatchEmission:
        """The same for one batch of a task."""
        sender = Sender(self.target, self.source, partition)
        return BatchEmission(self, batch, sender, stands_at.emitted_up_to)


@dataclass(frozen=True, slots=True)
class BatchEmission:
    """What one batch emits, but nothing of events of which it was sent before."""

    emission: Emission
    batch: TaskBatch
    sender: Sender
    sent_before: int

    @property
    def takes_each_frame(self) -> bool:
        """Whether `of_event` sends the state itself."""
        return self.emission.emit.each is Each.EVENT and self.emission.emit.record is None

    def of_event(
        self, update: KeyedUpdate, event: Event | None, state: State | None, frame: bytes | None
    ) -> Sequence[Output]:
        """What is sent of an event, with the state after it.

        Args:
            event: what the update is of, where the read model's own code is told of it; None of a tombstone.
            frame: of the state, where that is sent itself.

        Raises:
            PoisonRecordError: that cannot be sent, so the event is not applied.
        """
        if self.emission.emit.each is not Each.EVENT:
            return ()
        # Made in either case: whether an event is applied must not depend on what was sent before.
        made = self._made(update, event, state, frame)
        return made if self.batch.is_to_be_sent(update.offset, self.sent_before) else ()

    def of_last(self, update: KeyedUpdate, state: State | None, frame: bytes | None) -> Sequence[Output]:
        """What is sent of a key after all its events of a batch, of which this is the last.

        Raises:
            OwnCodeFailedError: that cannot be sent.
        """
        if self.emission.emit.each is not Each.LAST or not self.batch.is_to_be_sent(update.offset, self.sent_before):
            return ()
        try:
            return self._made(update, None, state, frame)
        except OwnCodeFailedError:
            raise
        except PoisonRecordError as error:
            raise OwnCodeFailedError(error) from error

    def _made(
        self, update: KeyedUpdate, event: Event | None, state: State | None, frame: bytes | None
    ) -> Sequence[Output]:
        emission, at = self.emission, (update.offset, update.timestamp_ms, update.key)
        if emission.emit.record is None:
            # The schema is that of the states, and may have another id there.
            value = None if frame is None else frame_header(emission.codec.schema_id) + opened(frame)[1]
            return (self.sender.output(*at, value),)
        sent = made_by_own(emission.read_model.sent, state, event)
        return [self.sender.output(*at, encoded(emission.codec, record)) for record in sent]


START_ANEW = (
    "start anew with another BALANCE_APPLICATION_ID, which reads everything from the first topic again, and sends it "
    "again"
)
"""What is left to do where what a stage read has been purged."""


def sent_up_to(settings: Settings, topics: Topics, stage: Stage, source: Topic, partition: int) -> int:
    """The offset after the last record of a partition of a stage's source of which something was sent; 0 if none was.

    Raises as `sent_of`.
    """
    return max(sent_of(settings, topics, stage, source, partition), default=-1) + 1


def sent_of(settings: Settings, topics: Topics, stage: Stage, source: Topic, partition: int) -> Iterator[int]:
    """The offset of the record, for each that was sent of a partition of a stage's source; in no order.

    Of this source: what was sent of another topic that had its name before does not count.

    What the predecessor has left open is to be ended before. Reads those topics from the first to the last record.

    Raises:
        RetriableError: the broker does not answer.
        TaskHaltedError: the topic that the stage passes records on to has been purged.
    """
    origins = origin_prefix(stage.source, partition).encode()
    sender = sender_of(stage.full_name, source.topic_id).encode()
    for name in stage.targets:
        topic = topics.find(name)
        if topic is None:
            continue
        partitions = range(topic.partitions)
        # To the very end, beyond what others have open: behind it, there may be something of ours.
        ends = topics.offsets(name, partitions)
        starts = topics.offsets(name, partitions, earliest=True)
        if stage.passes_on and any(starts.values()) and not _has_begun(topics, stage):
            raise TaskHaltedError(
                f"the changelog '{stage.changelog}' is gone, and so are records of '{name}' that were applied "
                f"(BALANCE_PURGE_REKEYED), so that nobody knows what was passed on; {START_ANEW}"
            )
        with LogReader(reader_config(settings), name, starts, ends) as reader:
            for message in reader:
                # What we send has headers that can be read.
                with suppress(PoisonRecordError):
                    yield from _origins(headers_of(message), sender, origins)


def _has_begun(topics: Topics, stage: Stage) -> bool:
    """Whether a task of a stage has written to its changelog: then that is not lost, and this partition is new."""
    changelog = topics.find(stage.changelog)
    return changelog is not None and any(topics.offsets(changelog.name, range(changelog.partitions)).values())


def _origins(headers: Headers, sender: bytes, origins: bytes) -> list[int]:
    """The offsets that a record of this sender names."""
    if (SENDER_HEADER, sender) not in headers:
        return []
    named = (_offset(value, origins) for name, value in headers if name == ORIGIN_HEADER)
    return [offset for offset in named if offset is not None]


def _offset(origin: object, origins: bytes) -> int | None:
    """The offset that an origin names; None if it is none of these."""
    if not isinstance(origin, bytes) or not origin.startswith(origins):
        return None
    offset = origin[len(origins) :]
    return int(offset) if offset.isdigit() else None
