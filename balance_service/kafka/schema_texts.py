"""Looks for the texts of schemas in topics of the service: see `avro.own_schemas`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.kafka.log_reader import reader_to_end

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balance_service.kafka.topics import Topics
    from balance_service.settings import Settings


def text_in(settings: Settings, topics: Topics, names: Iterable[str], key: bytes) -> bytes | None:
    """Returns the value under a reserved key in the first of some topics that has it; None if none has it.

    The text is in front of the first record that needs it, so a topic is read from its beginning.

    Raises:
        RetriableError: the broker does not respond.
    """
    for name in names:
        if (topic := topics.find(name)) is None:
            continue
        with reader_to_end(settings, topics, topic) as reader:
            for message in reader:
                if message.key() == key and (text := message.value()) is not None:
                    return text
    return None
