"""Records from lines of JSON, and random `FundsAdded` events, appended to topics."""

from __future__ import annotations

import random
import time
from contextlib import closing
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING

from balance_service.avro.from_json import key_and_json, record_line
from balance_service.avro.logical_types import with_times
from balance_service.avro.named_types import expanded
from balance_service.avro.registry import SchemaRegistry
from balance_service.errors import BalanceServiceError, ConfigurationError, InvalidInputError
from balance_service.formats.json_document import MalformedJsonError, parsed
from balance_service.formats.json_format import JsonCodec
from balance_service.formats.known import FORMATS
from balance_service.kafka.clients import producer_config
from balance_service.kafka.producers import BulkProducer
from balance_service.kafka.topics import Topics
from balance_service.model.binding import with_producers_fields
from balance_service.model.events import DeclaredRecord
from balance_service.model.placing import records_of_topic, topics_read
from balance_service.model.record_keys import RecordKey
from balance_service.model.stage import OF_HEADER
from balance_service.read_models.add_funds import FundsAddedSerializer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from balance_service.avro.schemas import Schema
    from balance_service.formats.format import RecordCodec
    from balance_service.kafka.clients import ClientConfig
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings

_SLICE_SECONDS = 0.05
_UNPACED_SLICE = 5_000
_MAX_CENTS = 100_000


def produce(
    settings: Settings,
    models: Iterable[ReadModel],
    topic: str,
    lines: Iterable[bytes],
    *,
    record: str | None = None,
    key_separator: str | None = None,
    topic_format: str | None = None,
) -> int:
    """Append a record for each line that is not blank, as `record_line` reads it; stops at the first invalid line.

    Keys are written in the form that the read models declare, such as a long of 8 bytes for `42`.

    Args:
        models: their declarations define the records of the topic.
        record: the simple name of the record; required if the topic has several.
        topic_format: of the topic. With `json`, a topic that no read model reads gets the documents unchanged.

    Returns:
        The number of acknowledged records.

    Raises:
        ConfigurationError: no read model reads the topic, it does not exist, it has several records, or the dataclass
            of the record does not fit the schema of its producers.
        BalanceServiceError: a line is not a record, or a record was not acknowledged. The records before an invalid
            line are sent.
    """
    models = [*models]
    if topic_format == "json" and topic not in topics_read(models, settings):
        _require(topic, settings)
        return _sent(settings, "murmur2", topic, lines, partial(document_line, key_separator=key_separator))
    taken = records_of_topic(topic, models, settings)
    if topic_format not in (None, taken.format):
        raise ConfigurationError(
            f"read models declare topic '{topic}' to have {taken.format}: leave --format out, or correct them"
        )
    record, schema = _chosen(topic, record, taken.records)
    _require(topic, settings)
    if taken.format == "cloudevents" or (taken.type or "").startswith(OF_HEADER):
        raise ConfigurationError(f"a header tells the records of topic '{topic}', and `produce` writes none")
    codec: RecordCodec
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        if taken.format == "json":
            codec = JsonCodec(schema, taken.type)
        else:
            if taken.format == "avro" and isinstance(record, DeclaredRecord):
                # A class may lack fields of the producers, and must not become the newest schema.
                schema = expanded(with_times(with_producers_fields(registry, topic, schema)[0]))
            codec = FORMATS[taken.format].codec(registry, topic, schema)

    def made(line: bytes) -> tuple[bytes | None, bytes | None]:
        key, value = record_line(line, schema, key_separator, takes_tombstones=taken.tombstones)
        if key is not None and taken.key_format != "string":
            key = RecordKey.of_format(taken.key_format).record_key(key.decode())
        return key, None if value is None else codec.encode(value)

    return _sent(settings, taken.partitioner, topic, lines, made)


def _require(topic: str, settings: Settings) -> None:
    if Topics(settings).find(topic) is None:
        raise ConfigurationError(
            f"topic '{topic}' does not exist; `balance-service topics create` creates the topics of BALANCE_MODELS"
        )


def _sent(
    settings: Settings,
    partitioner: Partitioner,
    topic: str,
    lines: Iterable[bytes],
    made: Callable[[bytes], tuple[bytes | None, bytes | None]],
) -> int:
    """Append the key and the value that each line makes; `made` raises InvalidInputError for one that makes none."""
    producer = BulkProducer(producer_config(settings, partitioner), topic)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            key, frame = made(line)
        except InvalidInputError as error:
            sent = producer.finish()
            raise BalanceServiceError(
                f"line {number}: {error}; {sent} {'record' if sent == 1 else 'records'} before it "
                f"{'was' if sent == 1 else 'were'} acknowledged, nothing after it was sent"
            ) from None
        producer.send(key, frame)
    return producer.finish()


def document_line(line: bytes, key_separator: str | None) -> tuple[bytes | None, bytes]:
    """Key and document of a line `[key S] JSON`. Raises InvalidInputError if it is not such a line."""
    key, text = key_and_json(line, key_separator)
    document = text.strip().encode()
    try:
        parsed(document)
    except MalformedJsonError as error:
        raise InvalidInputError(str(error)) from None
    return key, document


def _chosen(topic: str, record: str | None, taken: Mapping[str, Schema]) -> tuple[str, Schema]:
    if record is None and len(taken) > 1:
        raise ConfigurationError(f"topic '{topic}' has several records; choose one by --record: {', '.join(taken)}")
    for name, schema in taken.items():
        if record in (None, name):
            return name, schema
    raise ConfigurationError(f"topic '{topic}' has no record {record}; it has {', '.join(taken)}")


def produce_load(
    config: ClientConfig,
    registry: SchemaRegistry,
    topic: str,
    events: int,
    customers: int,
    rate: float | None,
    progress: Callable[[int], None],
) -> Decimal:
    """Append random events for `customer-0` to `customer-<customers - 1>`.

    Args:
        rate: events per second; None for as fast as possible.
        progress: called with the number of events that were queued since the last call.

    Returns:
        The sum of all amounts.

    Raises:
        BalanceServiceError: an event was not acknowledged.
    """
    producer = BulkProducer(config, topic)
    serialize = FundsAddedSerializer(registry, topic)
    # The registry has answered; at a low rate, the first event is due much later.
    progress(0)
    total = Decimal(0)
    random_source = random.Random(events)  # noqa: S311  (load, not secrets)
    for size in _slices(events, rate):
        for _ in range(size):
            customer = f"customer-{random_source.randrange(customers)}"
            amount = Decimal(random_source.randrange(1, _MAX_CENTS)).scaleb(-2)
            producer.send(customer.encode(), serialize(customer, amount))
            total += amount
        progress(size)
    producer.finish()
    return total


def _slices(events: int, rate: float | None) -> Iterator[int]:
    """Sizes of the next slices of events, paced by the rate."""
    began, done = time.monotonic(), 0
    while done < events:
        if rate is None:
            size = _UNPACED_SLICE
        else:
            size = int((time.monotonic() - began + _SLICE_SECONDS) * rate) - done
            if size <= 0:
                time.sleep(_SLICE_SECONDS / 2)
                continue
        size = min(size, events - done)
        yield size
        done += size
