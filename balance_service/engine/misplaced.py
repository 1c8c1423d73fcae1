"""Keys on other partitions than their topic's function says, and a hint which function their producers use."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from balance_service.kafka.partitioner import Partitioning
    from balance_service.model.stream import Partitioner

_PRODUCERS: dict[Partitioner, str] = {
    "murmur2": "Java's default",
    "crc32": "librdkafka's default",
    "fnv1a": "sarama's default",
}
_MOST_KEYS = 1_000
_LASTS_SECONDS = 3600.0
# Percent of the misplaced keys that a function must explain. The others may be older than a change of the producers.
_EXPLAINED = 95
# Of p partitions, a function that no producer uses explains n misplaced keys with a chance of about 1 in p**n.
_LEAST_ODDS = 1000


class MisplacedKeys:
    """Where the keys of a topic should be, and those that are elsewhere. The tasks of a stage share it; any thread.

    It forgets them an hour after the last one.
    """

    def __init__(self, topic: str, partitioning: Partitioning, clock: Callable[[], float] = time.monotonic) -> None:
        self.partitioning = partitioning
        self._topic = topic
        self._clock = clock
        self._lock = threading.Lock()
        declared = partitioning.partitioner
        self._others = {name: replace(partitioning, partitioner=name) for name in _PRODUCERS if name != declared}
        self._keys: dict[bytes, Sequence[Partitioner]] = {}
        """The last ones, and the other functions that put each where it is."""
        self._explained: Counter[Partitioner] = Counter()
        """How many of them each function explains."""
        self._last = float("-inf")

    @property
    def problem(self) -> str:
        """A sentence about the misplaced keys of the last hour; empty if there were none."""
        if not self._is_lately:
            return ""
        return f"events of '{self._topic}' become dead letters, because their keys are misplaced: {self._hint()}"

    def found(self, keys: Iterable[bytes], partition: int) -> None:
        """Notes misplaced keys of a partition."""
        with self._lock:
            if not self._is_lately:
                self._keys.clear()
                self._explained.clear()
            self._last = self._clock()
            for key in keys:
                if key not in self._keys:
                    if len(self._keys) == _MOST_KEYS:
                        self._explained.subtract(self._keys.pop(next(iter(self._keys))))
                    names = [name for name, by in self._others.items() if by.of(key) == partition]
                    self._keys[key] = names
                    self._explained.update(names)

    def detail(self, key: bytes) -> str:
        """Returns what the dead letter of a misplaced key says."""
        declared = self.partitioning
        return f"by {declared.partitioner}, the key belongs to partition {declared.of(key)}; {self._hint()}"

    @property
    def _is_lately(self) -> bool:
        return self._clock() - self._last < _LASTS_SECONDS

    def _hint(self) -> str:
        declared, count = self.partitioning.partitioner, len(self._keys)
        other = max(self._others, key=self._explained.__getitem__)
        explained = self._explained[other]
        if self.partitioning.partitions ** min(count, 10) < _LEAST_ODDS:
            return f"too few keys are misplaced to name the function: {count}"
        if 100 * explained < _EXPLAINED * count:
            return (
                f"no function that the service knows explains {count - explained:,} of {count:,} misplaced keys: "
                'declare partitioner="any", and re-key the events with a `.by` the key\'s column'
            )
        return (
            f"{explained:,} of {count:,} misplaced keys lie where {_PRODUCERS[other]} puts them: configure their "
            f"producers to use {declared}; only if all producers use {other}, declare "
            f'partitioner="{other}" (for BALANCE_TOPIC, BALANCE_PARTITIONER={other})'
        )
