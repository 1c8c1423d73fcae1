"""Follows a topic and renders its records as lines of JSON."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from balance_service.avro.codec import UndecodableError
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import SchemaRegistry
from balance_service.errors import ConfigurationError, InvalidInputError
from balance_service.formats.any_record import AnyRecordReader
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader
from balance_service.kafka.messages import place_of, readable_headers, shown_headers, text_or_base64
from balance_service.kafka.schema_texts import text_in
from balance_service.kafka.topics import Topics
from balance_service.model.json_view import exact_json
from balance_service.model.record_keys import RecordKey

if TYPE_CHECKING:
    from collections.abc import Generator
    from threading import Event

    from confluent_kafka import Message

    from balance_service.kafka.messages import Headers
    from balance_service.model.record_keys import KeyFormat
    from balance_service.settings import Settings

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def tail(
    settings: Settings, topic: str, stopping: Event, *, from_beginning: bool, key_format: KeyFormat = "string"
) -> Generator[str]:
    """Yield committed records as JSON objects until `stopping` is set: all, or only those from now on.

    Records of one partition are in offset order.

    Args:
        key_format: the serializer of the topic's keys, which are shown as queries name them.

    Raises:
        ConfigurationError: the topic does not exist, or reading it is not authorized.
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
        schemas = OwnSchemas(registry, partial(text_in, settings, topics, [topic]))
        records = AnyRecordReader(schemas)
        while not stopping.is_set():
            for message in reader.read():
                schemas.learn(message.key() or b"", message.value())
                yield line_of(message, records, key_format)


def line_of(message: Message, records: AnyRecordReader, key_format: KeyFormat = "string") -> str:
    """A record as a JSON object, with all digits of its decimals.

    Content that is not UTF-8, or cannot be decoded, is base64 under a name that ends with `Base64`. Headers are in
    order; null if the name of a header is not UTF-8.

    Raises:
        RetriableError: the registry does not answer.
    """
    partition, offset = place_of(message)
    headers = readable_headers(message)
    return exact_json(
        {
            "partition": partition,
            "offset": offset,
            "timestamp": _moment(message.timestamp()[1]),
            **_key(message.key(), key_format),
            "headers": shown_headers(headers),
            **_value(message.value(), headers or (), records),
        }
    )


def _key(key: bytes | None, key_format: KeyFormat) -> dict[str, Any]:
    if key is None or key_format == "string":
        return text_or_base64("key", key)
    own = RecordKey.of_format(key_format)
    try:
        return {"key": own.text(own.stored(key))}
    except InvalidInputError:
        return {"keyBase64": key}


def _value(value: bytes | None, headers: Headers, records: AnyRecordReader) -> dict[str, Any]:
    if value is None:
        return {"value": None}
    try:
        record, shown = records.read(value, headers)
    except UndecodableError as error:
        return {"problem": str(error), "valueBase64": value}
    return {"record": record, "value": shown}


def _moment(milliseconds: int) -> datetime | int:
    """A timestamp; a number if ISO 8601 cannot represent its year."""
    try:
        return _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return milliseconds
