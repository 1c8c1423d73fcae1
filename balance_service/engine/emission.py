"""What a read model with states emits of them, as its events are folded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.avro.codec import frame_header, opened
from balance_service.engine.outputs import Sender, encoded
from balance_service.engine.own_code import OwnCodeFailedError, made_by_own
from balance_service.errors import PoisonRecordError
from balance_service.model.outputs import Each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.outputs import Target
    from balance_service.engine.records import KeyedUpdate, Output, Position, TaskBatch
    from balance_service.model.event import Event, State
    from balance_service.model.outputs import Emit
    from balance_service.model.read_model import ReadModel


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
