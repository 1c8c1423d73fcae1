"""The records with the texts of schemas that a task writes before the first records that need them.

Only applications without a schema registry have them: see `avro.own_schemas`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from balance_service.engine.records import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.engine.records import Record
    from balance_service.engine.store import StateStore

    Headers = Callable[[bytes, bytes], Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class SentSchemas:
    """The schemas of what a stage sends to a topic of the application: key → text, as in `OwnSchemas.records`."""

    topic: str
    partitions: int
    texts: Mapping[bytes, bytes]
    headers: Headers
    """Of the record with a key and a text."""


@dataclass(frozen=True, slots=True)
class SchemaRecords:
    """The schemas of a stage: `kept` of its changelog, and those of each topic that it sends to."""

    kept: Mapping[bytes, bytes] = field(default_factory=dict)
    sent: Sequence[SentSchemas] = ()

    def missing(self, store: StateStore, offset: int, now_ms: int) -> tuple[list[Record], list[Output]]:
        """Returns what a task writes with its first commit: for its changelog, and for the other topics.

        The changelog has the schemas of the others too, so that each task sends them once. A task whose commit fails
        sends them again.

        Args:
            offset: the position in the source that the records name.
        """
        texts = dict(self.kept)
        for one in self.sent:
            texts |= one.texts
        keys = [*texts]
        lacking = {key for key, found in zip(keys, store.get_many(keys) if keys else (), strict=True) if found is None}
        outputs = [
            Output(offset, one.topic, partition, key, text, now_ms, [*one.headers(key, text).items()])
            for one in self.sent
            for key, text in one.texts.items()
            if key in lacking
            for partition in range(one.partitions)
        ]
        return [(key, text) for key, text in texts.items() if key in lacking], outputs


NO_SCHEMAS = SchemaRecords()
