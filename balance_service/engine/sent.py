"""Which of a partition's records were sent on, as the topics say that they were sent to.

A task asks where its changelog does not tell: at the first start, and if that topic was lost. So a stage that begins
anew sends nothing twice.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from balance_service.engine.outputs import ORIGIN_HEADER, SENDER_HEADER, origin_prefix, sender_of
from balance_service.errors import PoisonRecordError, TaskHaltedError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader
from balance_service.kafka.messages import headers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.kafka.messages import Headers
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings

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
