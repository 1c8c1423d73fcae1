"""Records of a topic as lines of JSON, as they are committed."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from balance_service.avro.codec import FrameReader, UndecodableError
from balance_service.avro.registry import SchemaRegistry
from balance_service.errors import ConfigurationError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader
from balance_service.kafka.messages import place_of, shown_headers, text_or_base64
from balance_service.kafka.topics import Topics
from balance_service.model.json_view import exact_json

if TYPE_CHECKING:
    from collections.abc import Generator
    from threading import Event

    from confluent_kafka import Message

    from balance_service.settings import Settings

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def tail(settings: Settings, topic: str, stopping: Event, *, from_beginning: bool) -> Generator[str]:
    """The records that are committed from now on, or all, each as a JSON object, until told to stop.

    Records of one partition come in offset order.

    Raises:
        ConfigurationError: there is no such topic, or it may not be read.
        RetriableError: the brokers or the registry do not answer.
    """
    topics = Topics(settings)
    found = topics.find_patiently(topic)
    if found is None:
        raise ConfigurationError(f"topic '{topic}' does not exist")
    starts = topics.offsets(topic, range(found.partitions), earliest=from_beginning, committed=not from_beginning)
    with (
        closing(SchemaRegistry.from_settings(settings)) as registry,
        LogReader(reader_config(settings), topic, starts) as reader,
    ):
        frames = FrameReader(registry)
        while not stopping.is_set():
            for message in reader.read():
                yield line_of(message, frames)


def line_of(message: Message, frames: FrameReader) -> str:
    """A record as a JSON object, with every digit of its decimals.

    What is no UTF-8, or does not decode, is base64 under a name with `Base64` at its end. Headers are in their order,
    or null where a name of one is no UTF-8.

    Raises:
        RetriableError: the registry does not answer.
    """
    partition, offset = place_of(message)
    return exact_json(
        {
            "partition": partition,
            "offset": offset,
            "timestamp": _moment(message.timestamp()[1]),
            **text_or_base64("key", message.key()),
            "headers": shown_headers(message),
            **_value(message.value(), frames),
        }
    )


def _value(frame: bytes | None, frames: FrameReader) -> dict[str, Any]:
    if frame is None:
        return {"value": None}
    try:
        return {"record": frames.record(frame), "value": frames.value(frame)}
    except UndecodableError as error:
        return {"problem": str(error), "valueBase64": frame}


def _moment(milliseconds: int) -> datetime | int:
    """A timestamp; as a number, where it is beyond the years that have a form in ISO 8601."""
    try:
        return _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return milliseconds
