"""What a topic takes, by the declarations of the read models that read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.model.placing import stages_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.avro.schemas import Schema
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings


@dataclass(frozen=True, slots=True)
class Taken:
    """Records by simple name, and whether a record without a value is one too."""

    records: Mapping[str, Schema]
    tombstones: bool


def taken_by(topic: str, models: Iterable[ReadModel], settings: Settings) -> Taken:
    """What read models are declared to read from a topic.

    Raises:
        ConfigurationError: no read model reads the topic.
    """
    records: dict[str, dict[str, Schema]] = {}
    with_tombstones = set()
    for model in models:
        for stage in stages_of(model, settings):
            if not stage.reads_rekeyed:
                records.setdefault(stage.source, {}).update(stage.schemas)
                if model.source.tombstones:
                    with_tombstones.add(stage.source)
            for join in stage.joins:
                table = settings.topic_of(join.table.topic)
                records.setdefault(table, {})[join.table.record] = stage.rows[join.table.record]
                with_tombstones.add(table)
    if topic not in records:
        raise ConfigurationError(f"no read model reads topic '{topic}'; name one of {', '.join(sorted(records))}")
    return Taken(records[topic], topic in with_tombstones)
