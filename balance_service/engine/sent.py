"""Finds which source records a stage has sent records of, when the changelog that says so is gone or another's."""

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
    origins = origin_prefix(stage.source, partition).encode()
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
