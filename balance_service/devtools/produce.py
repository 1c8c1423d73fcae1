"""Lines of JSON as records on a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.avro.codec import AvroCodec
from balance_service.avro.from_json import parsed_json, record_of
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import subject_of
from balance_service.errors import BalanceServiceError, ConfigurationError, InvalidInputError
from balance_service.kafka.clients import producer_config
from balance_service.kafka.producers import BulkProducer
from balance_service.kafka.topics import Topics
from balance_service.model.taken import taken_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.avro.schemas import Schema
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings


class RecordLines:
    """Reads lines `[key S] JSON` as records of one schema."""

    def __init__(
        self, codec: AvroCodec, schema: Schema, key_separator: str | None, *, takes_tombstones: bool = False
    ) -> None:
        """Args:
        key_separator: what stands between key and JSON; None if lines have no key.
        takes_tombstones: whether `null` after a key deletes what is known of it; else it is a bad line.
        """
        self._codec = codec
        self._schema = schema
        self._separator = key_separator
        self._takes_tombstones = takes_tombstones

    def record(self, line: bytes) -> tuple[bytes | None, bytes | None]:
        """Key and frame, None for a tombstone. The key ends at the first separator.

        Raises:
            InvalidInputError: the line is no such record; the message says why.
        """
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"no UTF-8 from byte {error.start + 1} on") from None
        key = None
        if self._separator is not None:
            key, found, text = text.partition(self._separator)
            if not found:
                raise InvalidInputError(f"no key separator '{self._separator}'")
            if not key:
                raise InvalidInputError(f"no key before '{self._separator}'")
        value = parsed_json(text)
        if value is None and key is not None and self._takes_tombstones:
            return key.encode(), None
        return None if key is None else key.encode(), self._codec.encode(record_of(self._schema, value))


def produce(
    settings: Settings,
    models: Iterable[ReadModel],
    topic: str,
    lines: Iterable[bytes],
    *,
    record: str | None = None,
    key_separator: str | None = None,
) -> int:
    """Append a record for each line that is not blank, up to the first that is none.

    Args:
        models: whose declarations say what the topic takes.
        record: the simple name of the lines' record; None where the topic takes only one.
        key_separator: what stands between key and JSON; None if lines have no key.

    Returns:
        How many were acknowledged.

    Raises:
        ConfigurationError: nothing is known of the topic, it does not exist, or it takes several records.
        BalanceServiceError: a line is no such record, or not every record was acknowledged. What came before a bad line
            is sent, and nothing after it.
    """
    taken = taken_by(topic, models, settings)
    schema = _schema_of(topic, record, taken.records)
    if Topics(settings).find(topic) is None:
        raise ConfigurationError(
            f"topic '{topic}' does not exist; `balance-service topics create` creates those that BALANCE_MODELS need"
        )
    registry = SchemaRegistry.from_settings(settings)
    try:
        codec = AvroCodec(registry, subject_of(topic, schema), schema)
    finally:
        registry.close()
    reader = RecordLines(codec, schema, key_separator, takes_tombstones=taken.tombstones)
    producer = BulkProducer(producer_config(settings), topic)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            key, frame = reader.record(line)
        except InvalidInputError as error:
            sent = producer.finish()
            raise BalanceServiceError(
                f"line {number}: {error}; {sent} records before it were acknowledged, nothing after it was sent"
            ) from None
        producer.send(key, frame)
    return producer.finish()


def _schema_of(topic: str, record: str | None, taken: Mapping[str, Schema]) -> Schema:
    if record is None and len(taken) > 1:
        raise ConfigurationError(f"topic '{topic}' takes several records; choose one by --record: {', '.join(taken)}")
    name = next(iter(taken)) if record is None else record
    if name not in taken:
        raise ConfigurationError(f"topic '{topic}' takes no record {name}; it takes {', '.join(taken)}")
    return taken[name]
