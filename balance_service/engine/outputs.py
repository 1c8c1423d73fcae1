"""Records that a stage sends to other topics, and the headers that name their origin."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from balance_service.engine.processor import OwnCodeFailedError, records_of_own_code
from balance_service.engine.records import BY_KEY, Output
from balance_service.errors import ConfigurationError, PoisonRecordError, TaskHaltedError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader
from balance_service.kafka.messages import headers_of
from balance_service.model.converters import record_of
from balance_service.model.events import Each
from balance_service.model.made_records import UNFIT, unfit
from balance_service.model.record_keys import KEY_FORMAT_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from balance_service.engine.batch import KeyedUpdate, TaskBatch
    from balance_service.engine.records import Position
    from balance_service.formats.format import RecordCodec
    from balance_service.kafka.messages import Headers
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.events import Emit, State
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings


ORIGIN_HEADER = "origin"
"""Names the source record that a record was made of: `topic:partition:offset`."""
SENDER_HEADER = "sent-by"
"""Names the stage that sent a record, and its source topic: see `sender_of`. Several stages may send to one topic."""
_OF_ONE_HOP = frozenset({ORIGIN_HEADER, SENDER_HEADER, KEY_FORMAT_HEADER})
# The form of a key that the stage has not read.
_UNCHANGED = b"unchanged"
ENVELOPE_BYTES = 2 << 10
"""Upper bound of the size of a batch with one record, without the record's key, value and headers."""


@dataclass(frozen=True, slots=True)
class Target:
    """A topic that a stage sends to.

    `largest_bytes` is the largest batch that topic and producer accept. A compacted topic rejects records without a
    key. `sender` identifies the stage in the records: see `sender_of`. `sent_key` makes the keys of records of the
    stage's keys, in the form that a header names, `key_format`; empty for none.
    """

    topic: str
    partitions: int
    largest_bytes: int
    is_compacted: bool
    sender: str
    sent_key: Callable[[bytes], bytes] | None = None
    key_format: str = ""


def sender_of(stage: str, source_topic_id: str) -> str:
    """Returns the identity of a stage that reads a topic: `<application id>-<stage>:<topic id>`."""
    return f"{stage}:{source_topic_id}"


class OutputBuilder:
    """Builds the records that one partition of a source topic sends to a target."""

    def __init__(self, target: Target, source: str, partition: int) -> None:
        self._target = target
        self._origin = _origin_prefix(source, partition).encode()
        self._own = [(SENDER_HEADER, target.sender.encode())]
        if target.key_format:
            self._own.append((KEY_FORMAT_HEADER, target.key_format.encode()))
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
        if key is not None and target.sent_key is not None:
            key = target.sent_key(key)
        size = len(key or b"") + len(value or b"")
        for name, of in headers:
            size += len(name) + len(of or b"")
        if size + ENVELOPE_BYTES > target.largest_bytes:
            raise PoisonRecordError(UNFIT, f"a record of {size} bytes is too large for topic '{target.topic}'")
        partition = self._without_key if key is None else BY_KEY
        origin = ORIGIN_HEADER, self._origin + b"%d" % offset
        return Output(offset, target.topic, partition, key, value, timestamp_ms, [*headers, origin, *self._own])

    def fit(self, keys: pa.Array, values: pa.Array) -> NDArray[np.bool_]:
        """Returns which records `build` would not refuse, given keys and values that are not null."""
        if self._target.sent_key is not None:
            keys = pa.array(map(self._target.sent_key, keys.to_pylist()), pa.binary())
        sizes = pc.add(pc.binary_length(keys), pc.binary_length(values)).fill_null(0).to_numpy()
        return np.asarray(sizes + ENVELOPE_BYTES <= self._target.largest_bytes)

    def build_all(self, rows: pa.Table | pa.RecordBatch, values: pa.Array) -> list[Output]:
        """Returns what `build` does for each of many records that fit, and have a key and no headers.

        Args:
            rows: `offset` and `timestamp` of the source records, and the `key` of each record.
        """
        target, own, origin = self._target, self._own, self._origin
        keys = rows["key"].to_pylist()
        if target.sent_key is not None:
            keys = [*map(target.sent_key, keys)]
        columns = rows["offset"].to_pylist(), keys, values.to_pylist(), rows["timestamp"].to_pylist()
        return [
            Output(at, target.topic, BY_KEY, key, value, timestamp_ms, [(ORIGIN_HEADER, origin + b"%d" % at), *own])
            for at, key, value, timestamp_ms in zip(*columns, strict=True)
        ]


def sent_record(sent: Any) -> Any:
    """Returns the record of an output, a mapping or an instance of a dataclass. Raises as `encoded`."""
    if sent.__class__ is dict:
        return sent
    try:
        return record_of(sent)
    except ConfigurationError as error:
        raise OwnCodeFailedError(error) from error
    except ValueError as error:
        raise unfit(str(error)) from error


def encoded(codec: RecordCodec, sent: Any) -> bytes:
    """Returns the value of an output, a mapping or an instance of a dataclass.

    Raises:
        OwnCodeFailedError: the dataclass cannot be a record, for any event.
        PoisonRecordError: it does not fit its schema.
    """
    record = sent_record(sent)
    try:
        return codec.encode(record)
    except Exception as error:  # fastavro raises any exception its writer runs into
        why = codec.misfit(record) or error
        raise unfit(str(why)) from error


def is_in_our_form(headers: Headers) -> bool:
    """Whether a record was sent by a stage of ours under a key in the form of its store: a number in our order."""
    names = {name for name, _ in headers}
    return SENDER_HEADER in names and KEY_FORMAT_HEADER not in names


def forwarded(headers: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, bytes | None]]:
    """Returns the headers of a record to pass on, without its origin and sender: each hop sets its own."""
    return [(header["key"], header["value"]) for header in headers or () if header["key"] not in _OF_ONE_HOP]


def form_of_unchanged_key(headers: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, bytes | None]]:
    """Returns the header that names the form of the key of a record that is passed on by a stage which reads no keys.

    Without one, the key would be taken for one in the form of our stores. Empty if the record's key has that form.
    """
    given = [(header["key"], header["value"]) for header in headers or ()]
    if is_in_our_form(given):
        return []
    return [one for one in given if one[0] == KEY_FORMAT_HEADER][:1] or [(KEY_FORMAT_HEADER, _UNCHANGED)]


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
    def is_for_each_event(self) -> bool:
        return self.emission.emit.each is Each.EVENT

    @property
    def is_by_code(self) -> bool:
        """Whether the read model's own code makes the records, so that the state may be an instance that lasts."""
        return self.emission.emit.record is not None and not self.emission.emit.fields

    @property
    def takes_each_frame(self) -> bool:
        """Whether `of_event` sends the framed state itself."""
        return self.is_for_each_event and self.emission.emit.record is None

    def are_sent(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """As `sends_for`, of many events."""
        return self.batch.are_to_be_sent(offsets, self.sent_before)

    def sends_for(self, update: KeyedUpdate) -> bool:
        """Whether outputs of an event are sent now: not if they were sent before, or if another generation sends."""
        return self.batch.is_to_be_sent(update.offset, self.sent_before)

    def of_event(self, update: KeyedUpdate, event: Any, state: State | None, frame: bytes | None) -> Sequence[Output]:
        """Returns the outputs of an event, given the state after it.

        Args:
            event: what the read model's own `fold` took; None if it took none.
            frame: the frame of the state if `takes_each_frame`.

        Raises:
            PoisonRecordError: the outputs cannot be sent, so the event must not be applied.
        """
        if not self.is_for_each_event:
            return ()
        # Made even if sent before: otherwise, whether an event is applied would depend on it.
        told = None
        if self.is_by_code:
            told = self.emission.read_model.told_to_emit(event, update.update, update.timestamp_ms)
        made = self._made(update, told, state, frame)
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

    def _made(self, update: KeyedUpdate, event: Any, state: State | None, frame: bytes | None) -> Sequence[Output]:
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
