"""Whether a copy is one: both topics are read once more and added up."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.avro.registry import SchemaRegistry
from balance_service.devtools.topic_copy.contents import ContentsCounter
from balance_service.errors import FatalError, RetriableError
from balance_service.kafka.log_reader import reader_to_end
from balance_service.kafka.messages import place_of
from balance_service.kafka.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.devtools.topic_copy.contents import Contents
    from balance_service.devtools.topic_copy.copy import Copied
    from balance_service.kafka.topics import Topic
    from balance_service.settings import Settings

_SETTLE_SECONDS = 30.0
_LOOK_EVERY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both topics as read anew: the source up to where the copy ended, and the whole target.

    `grown`: committed records of the source beyond that. `undecided`: its offsets from the first open transaction on.
    """

    source: Contents
    target: Contents
    grown: int
    undecided: int

    def check(self, source: str, target: str) -> None:
        """Nothing, if the target holds all that the source does.

        Raises:
            FatalError: it does not hold what was copied.
            RetriableError: it does, but there is more to copy.
        """
        again = "stop its writers and run this again: it goes on from where it was"
        if self.source != self.target:
            raise FatalError(
                f"'{target}' is not a copy of '{source}', as the figures say: do not use it; delete it, see that "
                f"nobody writes to it nor deletes records of '{source}', and run this again"
            )
        if self.grown:
            raise RetriableError(f"'{source}' has grown by {self.grown} records since the copy began; {again}")
        if self.undecided:
            raise RetriableError(
                f"'{source}' has an open transaction, which holds back its last {self.undecided} offsets; {again}"
            )


def compare(settings: Settings, copied: Copied, progress: Callable[[int, int], None]) -> Comparison:
    """Read both topics once more and add them up; nothing that the copy noted is used but where it ended.

    Args:
        settings: of brokers and registry.
        copied: what `copy_topic` said.
        progress: told how many offsets of how many are read.

    Raises:
        RetriableError: a broker or the registry does not answer, or a transaction on the target does not end.
    """
    topics = Topics(settings)
    _settle(topics, copied.target)
    with (
        closing(SchemaRegistry.from_settings(settings)) as registry,
        reader_to_end(settings, topics, copied.source) as source,
        reader_to_end(settings, topics, copied.target) as target,
    ):
        total = source.offsets_in_all + target.offsets_in_all
        left, right, grown = ContentsCounter(registry), ContentsCounter(registry), 0
        while source.unfinished:
            for message in source.read():
                partition, offset = place_of(message)
                if offset < copied.ends[partition]:
                    left.add(message)
                else:
                    grown += 1
            progress(source.offsets_read, total)
        while target.unfinished:
            for message in target.read():
                right.add(message)
            progress(source.offsets_read + target.offsets_read, total)
    return Comparison(left.contents(), right.contents(), grown, _undecided(topics, copied.source))


def _settle(topics: Topics, topic: Topic) -> None:
    """Wait until every transaction has ended: the broker confirms a commit before readers can see it."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while _undecided(topics, topic):
        if time.monotonic() > deadline:
            raise RetriableError(f"a transaction on topic '{topic.name}' does not end; find its writer, run it again")
        time.sleep(_LOOK_EVERY_SECONDS)


def _undecided(topics: Topics, topic: Topic) -> int:
    """How many offsets lie beyond the first transaction that is open."""
    partitions = range(topic.partitions)
    committed = topics.offsets(topic.name, partitions, committed=True)
    ends = topics.offsets(topic.name, partitions)
    return sum(ends[p] - committed[p] for p in partitions)
