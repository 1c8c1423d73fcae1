"""Records that a stage sends to other topics, and the headers that name their origin."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.engine.processor import OwnCodeFailedError, records_of_own_code
from balance_service.engine.records import BY_KEY, Output
from balance_service.errors import ConfigurationError, PoisonRecordError, TaskHaltedError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader
from balance_service.kafka.messages import headers_of
from balance_service.model.converters import record_of
from balance_service.model.events import Each
from balance_service.model.made_records import UNFIT, unfit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from balance_service.engine.batch import KeyedUpdate, TaskBatch
    from balance_service.engine.records import Position
    from balance_service.formats.format import RecordCodec
    from balance_service.kafka.messages import Headers
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.events import Emit, Event, State
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings


ORIGIN_HEADER = "origin"
"""Names the source record that a record was made of: `topic:partition:offset`."""
SENDER_HEADER = "sent-by"
"""Names the stage that sent a record, and its source topic: see `sender_of`. Several stages may send to one topic."""
_OF_ONE_HOP = frozenset({ORIGIN_HEADER, SENDER_HEADER})
ENVELOPE_BYTES = 2 << 10
"""Upper bound of the size of a batch with one record, without the record's key, value and headers."""


@dataclass(frozen=True, slots=True)
class Target:
    """A topic that a stage sends to.

    `largest_bytes` is the largest batch that topic and producer accept. A compacted topic rejects records without a
    key. `sender` identifies the stage in the records: see `sender_of`.
    """

    topic: str
    partitions: int
    largest_bytes: int
    is_compacted: bool
    sender: str


def sender_of(stage: str, source_topic_id: str) -> str:
    """Returns the identity of a stage that reads a topic: `<application id>-<stage>:<topic id>`."""
    return f"{stage}:{source_topic_id}"


class OutputBuilder:
    """Builds the records that one partition of a source topic sends to a target."""

    def __init__(self, target: Target, source: str, partition: int) -> None:
        self._target = target
        self._origin = _origin_prefix(source, partition)
        self._sent_by = SENDER_HEADER, target.sender.encode()
        # Records without a key have no order to keep. An event that is read again goes to the same partition.
        self._without_key = partition % target.partitions

    def build(
        self,
        offset: int,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> Output:
        """Returns a record that is made of the source record at an offset. Adds the headers for origin and sender.

        Raises:
            PoisonRecordError: the topic would reject the record, because it is too large or has no key.
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
        partition = self._without_key if key is None else BY_KEY
        origin = ORIGIN_HEADER, f"{self._origin}{offset}".encode()
        return Output(offset, target.topic, partition, key, value, timestamp_ms, [*headers, origin, self._sent_by])


def encoded(codec: RecordCodec, sent: Any) -> bytes:
    """Returns the value of an output, a mapping or an instance of a dataclass.

    Raises:
        OwnCodeFailedError: the dataclass cannot be a record, for any event.
        PoisonRecordError: it does not fit its schema.
    """
    try:
        record = record_of(sent)
    except ConfigurationError as error:
        raise OwnCodeFailedError(error) from error
    except ValueError as error:
        raise unfit(str(error)) from error
    try:
        return codec.encode(record)
    except Exception as error:  # fastavro raises any exception its writer runs into
        why = codec.misfit(record) or error
        raise unfit(str(why)) from error


def forwarded(headers: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, bytes | None]]:
    """Returns the headers of a record to pass on, without its origin and sender: each hop sets its own."""
    return [(header["key"], header["value"]) for header in headers or () if header["key"] not in _OF_ONE_HOP]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """How a read model with states emits records. `codec` is the output's, `source` the topic that the model folds."""

    read_model: ReadModel
    emit: Emit
    target: Target
    codec: RecordCodec
    source: str

    def of_batch(self, batch: TaskBatch, partition: int, position: Position) -> BatchEmission:
        builder = OutputBuilder(self.target, self.source, partition)
        return BatchEmission(self, batch, builder, position.emitted_up_to)


@dataclass(frozen=True, slots=True)
class BatchEmission:
    """Makes the outputs of one batch, except those that were sent before."""

    emission: Emission
    batch: TaskBatch
    builder: OutputBuilder
    sent_before: int

    @property
    def takes_each_frame(self) -> bool:
        """Whether `of_event` sends the framed state itself."""
        return self.emission.emit.each is Each.EVENT and self.emission.emit.record is None

    def sends_for(self, update: KeyedUpdate) -> bool:
        """Whether outputs of an event are sent now: not if they were sent before, or if another generation sends."""
        return self.batch.is_to_be_sent(update.offset, self.sent_before)

    def of_event(
        self, update: KeyedUpdate, event: Event | None, state: State | None, frame: bytes | None
    ) -> Sequence[Output]:
        """Returns the outputs of an event, given the state after it.

        Args:
            event: the event of the update if the read model's own code needs it; None for a tombstone.
            frame: the frame of the state if `takes_each_frame`.

        Raises:
            PoisonRecordError: the outputs cannot be sent, so the event must not be applied.
        """
        if self.emission.emit.each is not Each.EVENT:
            return ()
        # Made even if sent before: otherwise, whether an event is applied would depend on it.
        made = self._made(update, event, state, frame)
        return made if self.sends_for(update) else ()

    def of_last(self, update: KeyedUpdate, state: State | None, frame: bytes | None) -> Sequence[Output]:
        """Returns the outputs of a key after a batch.

        Args:
            update: the last event of the key that outputs are sent for.
            state: after the key's last event.

        Raises:
            OwnCodeFailedError: the outputs cannot be sent.
        """
        if self.emission.emit.each is not Each.LAST:
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
            # The output has the schema of the states, but may have another schema id in its topic's subject.
            value = None if frame is None else emission.codec.reframed(frame)
            return (self.builder.build(*at, value),)
        if emission.emit.fields:
            body = emission.read_model.made(update.update, state, update.key)
            return () if body is None else (self.builder.build(*at, emission.codec.frame(body)),)
        sent = records_of_own_code(emission.read_model.sent, state, event)
        return [self.builder.build(*at, encoded(emission.codec, record)) for record in sent]


START_ANEW = "start with a new BALANCE_APPLICATION_ID, which reads everything from the first topic and sends it again"
"""The remedy if records that a stage needs to read again are gone."""


def sent_of(settings: Settings, topics: Topics, stage: Stage, source: Topic, partition: int) -> Iterator[int]:
    """Yields the source offset of each record that the stage sent for a partition of its source, in any order.

    Ignores records of an earlier source topic with the same name. Reads each target topic from its first to its last
    record. The caller must have fenced the partition's previous owner.

    Raises:
        RetriableError: the broker does not respond.
        TaskHaltedError: records of the topic that the stage passes records on to are gone.
    """
    origins = _origin_prefix(stage.source, partition).encode()
    sender = sender_of(stage.sender, source.topic_id).encode()
    for name in stage.targets:
        topic = topics.find(name)
        if topic is None:
            continue
        partitions = range(topic.partitions)
        # Up to the high watermark: records of this stage may follow another producer's open transaction.
        ends = topics.offsets(name, partitions)
        starts = topics.offsets(name, partitions, earliest=True)
        if stage.passes_on and any(starts.values()) and not _has_begun(topics, stage):
            raise TaskHaltedError(
                f"the changelog '{stage.changelog}' is gone, and records of '{name}' were deleted, so it is unknown "
                f"what was passed on; {START_ANEW}"
            )
        with LogReader(reader_config(settings), name, starts, ends) as reader:
            for message in reader:
                # Records of this stage have readable headers.
                with suppress(PoisonRecordError):
                    yield from _origins(headers_of(message), sender, origins)


def _has_begun(topics: Topics, stage: Stage) -> bool:
    """Whether any task of a stage has written to the changelog: then it was not lost, and the partition is new."""
    changelog = topics.find(stage.changelog)
    return changelog is not None and any(topics.offsets(changelog.name, range(changelog.partitions)).values())


def _origin_prefix(topic: str, partition: int) -> str:
    return f"{topic}:{partition}:"


def _origins(headers: Headers, sender: bytes, origins: bytes) -> list[int]:
    """Returns the source offsets that the headers of a record of this sender name."""
    if (SENDER_HEADER, sender) not in headers:
        return []
    named = (_offset(value, origins) for name, value in headers if name == ORIGIN_HEADER)
    return [offset for offset in named if offset is not None]


def _offset(origin: object, origins: bytes) -> int | None:
    """Returns the offset that an origin names, or None if it names another partition."""
    if not isinstance(origin, bytes) or not origin.startswith(origins):
        return None
    offset = origin[len(origins) :]
    return int(offset) if offset.isdigit() else None
