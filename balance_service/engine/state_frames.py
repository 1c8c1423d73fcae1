"""How states are kept in the store and the changelog: as frames that both accept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.engine.outputs import ENVELOPE_BYTES
from balance_service.errors import PoisonRecordError

if TYPE_CHECKING:
    from balance_service.avro.codec import AvroCodec
    from balance_service.model.events import State

STATE_UNFIT = "state-does-not-fit"


@dataclass(frozen=True, slots=True)
class StateFrames:
    """The frames of one read model's states. `largest_bytes` is the largest batch that the changelog accepts.

    `are_of_standard_folds` says that states survive encoding unchanged, and that nothing else refers to them.
    """

    codec: AvroCodec
    largest_bytes: int
    are_of_standard_folds: bool

    @property
    def most_bytes(self) -> int:
        """The most bytes of a frame that the changelog accepts."""
        return self.largest_bytes - ENVELOPE_BYTES

    def framed(self, state: State) -> tuple[State, bytes]:
        """Returns a state as it will be read from the store, and its frame.

        Raises:
            PoisonRecordError: the state does not fit its schema or the changelog.
        """
        frame = self.codec.encode_unchanged(state)
        kept: State
        if frame is not None:
            # Own code may hold on to the record, and change it.
            kept = {**state}
        else:
            try:
                frame = self.codec.encode(state)
                kept = state if self.are_of_standard_folds else self.codec.decode(frame)
            except Exception as error:  # fastavro raises any exception its writer or reader runs into
                why = self.codec.misfit(state) or error
                raise PoisonRecordError(STATE_UNFIT, f"the fold's state cannot be kept: {why}") from error
        if len(frame) > self.most_bytes:
            why = f"the changelog does not accept its {len(frame)} bytes"
            raise PoisonRecordError(STATE_UNFIT, f"the fold's state cannot be kept: {why}")
        return kept, frame
