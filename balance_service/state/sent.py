"""Up to where a partition's events were sent on, as the topics say that they were sent to.

A task asks where its changelog does not tell: at the first start, and if that topic was lost. So a stage that begins
anew sends nothing twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.kafka.bounded_reader import BoundedReader
from balance_service.state.outputs import ORIGIN_HEADER, SENDER_HEADER, origin_prefix, sender_of

if TYPE_CHECKING:
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.settings import Settings, Stage


def sent_up_to(settings: Settings, topics: Topics, stage: Stage, source: Topic, partition: int) -> int:
    """The offset after the last record of a partition of a stage's source of which something was sent; 0 if none was.

    Of this source: what was sent of another topic that had its name before does not count.

    What the predecessor has left open is to be ended before. Reads those topics from the first to the last record.

    Raises:
        RetriableError: the broker does not answer.
    """
    origins = origin_prefix(stage.source, partition).encode()
    sender = sender_of(stage.full_name, source.topic_id).encode()
    last = -1
    for name in stage.targets:
        topic = topics.find(name)
        if topic is None:
            continue
        partitions = range(topic.partitions)
        # To the very end, beyond what others have open: behind it, there may be something of ours.
        ends = topics.offsets(name, partitions)
        with BoundedReader(settings, name, topics.offsets(name, partitions, earliest=True), ends) as reader:
            while reader.unfinished:
                for message in reader.read():
                    headers: list[Any] = list(message.headers() or ())
                    if (SENDER_HEADER, sender) in headers:
                        last = max(
                            [last, *(_offset(value, origins) for name, value in headers if name == ORIGIN_HEADER)]
                        )
    return last + 1


def _offset(origin: object, origins: bytes) -> int:
    """The offset that an origin names; -1 if it is none of these."""
    if not isinstance(origin, bytes) or not origin.startswith(origins):
        return -1
    offset = origin[len(origins) :]
    return int(offset) if offset.isdigit() else -1
