"""What a topic takes, by the declarations of the read models that read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.avro.schemas import load_schema
from balance_service.errors import ConfigurationError
from balance_service.model.catalogue import names, read_model
from balance_service.model.joins import Join

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balance_service.avro.schemas import Schema
    from balance_service.model.flow import Stream
    from balance_service.settings import Settings


@dataclass(frozen=True, slots=True)
class Taken:
    """Records by simple name, and whether a record without a value is one too."""

    records: Mapping[str, Schema]
    tombstones: bool


def taken_by(topic: str, settings: Settings) -> Taken:
    """What read models are declared to read from a topic.

    Raises:
        ConfigurationError: no read model reads the topic.
    """
    records: dict[str, dict[str, Schema]] = {}
    with_tombstones = set()
    for source in (read_model(name).source for name in names()):
        for read, record, tombstones in _reads(source):
            name = settings.topic_of(read)
            records.setdefault(name, {})[record] = load_schema(record)
            if tombstones:
                with_tombstones.add(name)
    if topic not in records:
        raise ConfigurationError(f"no read model reads topic '{topic}'; name one of {', '.join(sorted(records))}")
    return Taken(records[topic], topic in with_tombstones)


def _reads(source: Stream) -> Iterator[tuple[str, str, bool]]:
    """Each topic and record that a source reads, and whether a record without a value is one there."""
    for record in source.records:
        yield source.topic, record, source.tombstones
    for step in source.steps:
        if isinstance(step, Join):
            yield step.table.topic, step.table.record, True
