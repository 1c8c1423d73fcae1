"""Micro-batches gathered for one commit.

Behind, when one full micro-batch follows the other, most of what a commit costs is per key, and the keys of several
micro-batches are far fewer than those of each. So a full one waits for the next, and several are committed as one. One
that is not full has come to the end of the topic, and waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.events.combine import PartitionUpdates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.events.combine import PartitionRows
    from balance_service.read_models.read_model import Combine

# A batch is cut by partition, and each share rounded down.
_FULL = 0.9
_MOST_BATCHES = 8
# A transaction has to end within its time, and what is written is in memory more than once.
_MOST_KEYS = 1_000_000
# As Python objects they take far more than a key does.
_MOST_DEAD_LETTERS = 10_000


@dataclass(frozen=True, slots=True)
class Gathered:
    """What the records `[starts, ends)` of some partitions come to."""

    starts: Mapping[int, int]
    ends: Mapping[int, int]
    parts: Mapping[int, PartitionUpdates]
    """Of the partitions that have records."""
    waiting: Mapping[int, str]
    """The partitions that cannot be folded for now, and why."""
    traceparents: Mapping[int, Sequence[str]]
    rows: Mapping[int, PartitionRows]
    """Of one micro-batch; empty of several: they would fill the memory."""
    began: float
    """Seconds, monotonic."""
    batches: int = 1

    def may_grow(self, most_records: int) -> bool:
        """Whether the next micro-batch will be here soon, and may be gathered with this one.

        Args:
            most_records: what a micro-batch is bounded to.
        """
        parts = self.parts.values()
        has_room = sum(part.keys for part in parts) < _MOST_KEYS and self.batches < _MOST_BATCHES
        is_plain = not self.waiting and not any(part.events for part in parts)
        letters = sum(len(part.dead_letters) for part in parts)
        return self.is_full(most_records) and is_plain and has_room and letters < _MOST_DEAD_LETTERS

    def is_full(self, most_records: int) -> bool:
        """Whether its micro-batches are as large as they may be, so that the end of the topic was not met."""
        records = sum(end - self.starts[partition] for partition, end in self.ends.items())
        return records >= self.batches * most_records * _FULL

    def and_then(self, later: Gathered, combine: Mapping[str, Combine] | None) -> Gathered | None:
        """Both as one; None if they have to be committed one after the other."""
        if self.waiting or later.waiting:
            return None
        parts: dict[int, PartitionUpdates] = {}
        for partition in sorted({*self.parts, *later.parts}):
            nothing = PartitionUpdates()
            both = self.parts.get(partition, nothing).and_then(later.parts.get(partition, nothing), combine)
            if both is None:
                return None
            parts[partition] = both
        traceparents = {p: (*t, *later.traceparents.get(p, ())) for p, t in self.traceparents.items()}
        return Gathered(
            self.starts,
            later.ends,
            parts,
            {},
            {**later.traceparents, **traceparents},
            {},
            self.began,
            self.batches + later.batches,
        )
