"""Copying a topic's committed records to another topic with any partition count, each exactly once.

The way out when a topic's partition count was changed: in the copy a key has its whole history on one partition.

Each transaction holds some thousands of records and, as offsets of a consumer group of the copy's own, how far each
source partition is copied. Beside each offset stands a note: of which two topics it speaks, and how many records it
stands for. A copy that was killed is run again: it initialises the same transactional id, which ends what the killed
one left open and fences any that still runs; reads the offsets; and goes on from there.

Order: records of one source partition keep theirs. Where a key has its older events on one partition and its newer
ones on another, their timestamps decide, so the order is as good as the clocks of those who set them.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.devtools.topic_copy.copier import Copier, Progress, start_anew
from balance_service.devtools.topic_copy.timestamp_order import by_timestamp
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader, reader_to_end
from balance_service.kafka.topic_specs import prepare_copy
from balance_service.kafka.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from confluent_kafka import Message

    from balance_service.kafka.topics import Topic
    from balance_service.settings import Settings

_TOPIC_NAME = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
_BATCH_RECORDS = 10_000
_BATCH_BYTES = 16 << 20
_LEADERS_WITHIN_SECONDS = 20.0
_LOOK_EVERY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Copied:
    """What a run copied: records and seconds of this run, and where each source partition ended for it."""

    source: Topic
    target: Topic
    ends: dict[int, int]
    records: int
    seconds: float


def copy_topic(
    settings: Settings, source_name: str, target_name: str, partitions: int | None, progress: Callable[[int, int], None]
) -> Copied:
    """Copy what is not copied yet, up to the source's present end: key, value, headers and timestamp as they are.

    A record with a key goes where every producer here sends it; one without keeps its partition, modulo the target's
    count.

    Args:
        settings: of the brokers.
        source_name: must exist.
        target_name: created if missing, to keep its records for ever.
        partitions: of the target; None for as many as it has, or the source if it is missing.
        progress: told how many source offsets of how many are done.

    Raises:
        ConfigurationError: the topics are not such, or the target holds something else.
        TaskMigratedError: another run of the same copy took over.
        RetriableError: a broker does not answer; run it again.
    """
    topics = Topics(settings)
    source, target = _prepared(topics, settings, source_name, target_name, partitions)
    with Copier(settings, source, target) as copier:
        done = copier.progress()
        _refuse_others_records(settings, topics, target, _records(done))
        starts = _starts(topics, source, done)
        ends = topics.offsets(source.name, range(source.partitions), committed=True)
        total = sum(ends.values())
        ahead = total - sum(max(0, ends[p] - starts[p]) for p in ends)
        before, began = _records(done), time.monotonic()
        with LogReader(reader_config(settings), source.name, starts, ends) as reader:
            for batch in _batches(by_timestamp(reader)):
                copier.write(batch, done)
                progress(ahead + reader.offsets_read, total)
        progress(total, total)
    return Copied(source, target, ends, _records(done) - before, time.monotonic() - began)


def _prepared(
    topics: Topics, settings: Settings, source_name: str, target_name: str, partitions: int | None
) -> tuple[Topic, Topic]:
    for name in (source_name, target_name):
        if not _TOPIC_NAME.fullmatch(name):
            raise ConfigurationError(f"'{name}' cannot be the name of a topic; letters, digits, '.', '_' and '-' can")
    if source_name == target_name:
        raise ConfigurationError(f"'{source_name}' cannot be copied to itself; name a topic that does not exist yet")
    source = topics.find(source_name)
    if source is None:
        raise ConfigurationError(
            f"topic '{source_name}' does not exist; correct its name, or BALANCE_BOOTSTRAP_SERVERS"
        )
    target = prepare_copy(topics, settings, source, target_name, partitions)
    for topic in (source, target):
        _await_leaders(topics, topic)
    return source, target


def _await_leaders(topics: Topics, topic: Topic) -> None:
    """Wait until each partition has a leader that answers: a new one is known before that."""
    deadline = time.monotonic() + _LEADERS_WITHIN_SECONDS
    while True:
        try:
            topics.offsets(topic.name, range(topic.partitions))
        except RetriableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_EVERY_SECONDS)
        else:
            return


def _starts(topics: Topics, source: Topic, done: dict[int, Progress]) -> dict[int, int]:
    """Where to go on in each partition; at its first record where nothing is copied."""
    first = topics.offsets(source.name, range(source.partitions), earliest=True)
    for partition, d in done.items():
        if d.offset < first[partition]:
            raise ConfigurationError(
                f"events {d.offset} to {first[partition] - 1} of {source.name}-{partition} are gone and were never "
                "copied; to copy what is left, name another topic to copy to"
            )
    return {p: done[p].offset if p in done else first[p] for p in first}


def _refuse_others_records(settings: Settings, topics: Topics, target: Topic, ours: int) -> None:
    """Refuse a target with more or fewer records than the copy wrote."""
    with reader_to_end(settings, topics, target) as reader:
        count = sum(1 for _ in reader)
    if count > ours:
        raise ConfigurationError(
            f"topic '{target.name}' holds {count - ours} records that this copy did not write; "
            f"{start_anew(target.name)}"
        )
    if count < ours:
        raise ConfigurationError(
            f"topic '{target.name}' lacks {ours - count} records that this copy wrote; {start_anew(target.name)}"
        )


def _batches(messages: Iterator[Message]) -> Iterator[list[Message]]:
    batch: list[Message] = []
    size = 0
    for message in messages:
        batch.append(message)
        size += len(message)
        if len(batch) >= _BATCH_RECORDS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _records(done: dict[int, Progress]) -> int:
    return sum(d.records for d in done.values())
