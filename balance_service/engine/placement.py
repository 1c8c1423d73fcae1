"""Finds out why keys are on other partitions than their topic's function says: which function their producers use.

A key that is misplaced by the declared function is a dead letter. From the first one on, the keys of each batch are
compared with all known functions, until none was misplaced for an hour.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import structlog

from balance_service.kafka.partitioner import Partitioning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from balance_service.model.stream import Partitioner

log = structlog.get_logger(__name__)

_PRODUCERS: dict[Partitioner, str] = {
    "murmur2": "Java's default",
    "crc32": "librdkafka's default",
    "fnv1a": "sarama's default",
}
MOST_KEYS = 10_000
"""How many keys are compared, the last ones."""
_LASTS_SECONDS = 3600.0
_LOG_EVERY_SECONDS = 60.0
# Percent of the keys that a function must explain. The others may be older than a change of the producers.
_EXPLAINED = 95
# Of p partitions, a function that no producer uses explains n misplaced keys with a chance of about 1 in p**n.
_LEAST_ODDS = 1000


class Placement:
    """Where the keys of a topic should be, and where they are. The tasks of a stage share it; for any thread."""

    def __init__(self, topic: str, partitioning: Partitioning, clock: Callable[[], float] = time.monotonic) -> None:
        self.partitioning = partitioning
        self._topic = topic
        self._clock = clock
        self._lock = threading.Lock()
        self._known = {name: Partitioning(partitioning.partitions, name) for name in _PRODUCERS}
        self._places: dict[bytes, frozenset[Partitioner]] = {}
        """Key → the functions that put it where it is, the key that was read last at the end."""
        self._counts: Counter[frozenset[Partitioner]] = Counter()
        self._verdict = ""
        self._misplaced_at = float("-inf")
        self._logged_at = float("-inf")

    @property
    def is_doubtful(self) -> bool:
        """Whether a key was misplaced lately, so that the keys of each batch must be examined."""
        return self._clock() - self._misplaced_at < _LASTS_SECONDS

    @property
    def problem(self) -> str:
        """A sentence about the misplaced keys of the last hour; empty if there were none."""
        if not self.is_doubtful:
            return ""
        return f"events of '{self._topic}' become dead letters, because their keys are misplaced: {self._verdict}"

    def examine(self, keys: Sequence[bytes], partition: int, *, is_misplaced: bool) -> None:
        """Compares keys of a partition with the functions.

        Args:
            is_misplaced: whether the declared function assigns one of them to another partition.
        """
        with self._lock:
            if not self.is_doubtful:
                self._places.clear()
                self._counts.clear()
            if is_misplaced:
                self._misplaced_at = self._clock()
            recent = keys[-MOST_KEYS:]
            by_function = {name: of.of_keys(recent) for name, of in self._known.items()}
            for row, key in enumerate(recent):
                here = frozenset(name for name, places in by_function.items() if places[row] == partition)
                if (before := self._places.pop(key, None)) is not None:
                    self._counts[before] -= 1
                self._places[key] = here
                self._counts[here] += 1
            for key in [*islice(self._places, max(0, len(self._places) - MOST_KEYS))]:
                self._counts[self._places.pop(key)] -= 1
            self._verdict = self._judged()
            if is_misplaced and self._clock() - self._logged_at > _LOG_EVERY_SECONDS:
                self._logged_at = self._clock()
                log.warning("keys are misplaced", topic=self._topic, partition=partition, problem=self._verdict)

    def detail(self, key: bytes) -> str:
        """Returns what the dead letter of a misplaced key says."""
        declared = self.partitioning
        return f"by {declared.partitioner}, the key belongs to partition {declared.of(key)}; {self._verdict}"

    def _judged(self) -> str:
        declared, count = self.partitioning.partitioner, len(self._places)
        right = self._number(declared)
        misplaced = count - right
        moved = {name: self._number(name, but_not=declared) for name in _PRODUCERS}
        other = max(moved, key=moved.__getitem__)
        if self.partitioning.partitions ** min(misplaced, 10) < _LEAST_ODDS:
            return f"{misplaced:,} of the last {count:,} keys are misplaced: too few to name the function"
        if not _explains(moved[other], misplaced):
            return (
                f"no function that the service knows explains {misplaced - moved[other]:,} of the last {count:,} keys: "
                'declare partitioner="any", and re-key the events with a `.by` the key\'s column'
            )
        by_other = self._number(other)
        if _explains(by_other, count):
            return (
                f"{by_other:,} of the last {count:,} keys lie where {_PRODUCERS[other]} puts them: declare "
                f'partitioner="{other}" (for BALANCE_TOPIC, BALANCE_PARTITIONER={other})'
            )
        return (
            f"{right:,} of the last {count:,} keys lie where {_PRODUCERS[declared]} puts them, and {moved[other]:,} of "
            f"the others where {_PRODUCERS[other]} does, so the topic has two kinds of producers: configure all to use "
            f"{declared}"
        )

    def _number(self, by: Partitioner, but_not: Partitioner | None = None) -> int:
        """Returns how many of the keys are where one function puts them, and another does not."""
        return sum(count for here, count in self._counts.items() if by in here and but_not not in here)


def _explains(keys: int, of_keys: int) -> bool:
    return 100 * keys >= _EXPLAINED * of_keys
