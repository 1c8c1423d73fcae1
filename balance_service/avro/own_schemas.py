"""The schemas of an application's own records: states, dead letters, positions, re-keyed rows, and control records.

They are named in one of two forms, which the application keeps permanently. With a schema registry, a record has the id
of its schema there. Without one, it has the schema's fingerprint, and the same partition has the text of the schema: a
record under a reserved key, written in the transaction of the first record that needs it, or before. Records of either
form are read in any case, as far as a registry is not needed for them.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakSet

from balance_service.avro.codec import AvroCodec
from balance_service.avro.frames import SCHEMA_PREFIX, fingerprint_of, is_fingerprint, opened_own, schema_key
from balance_service.avro.schemas import subject_of
from balance_service.avro.writer_schema import WriterSchema
from balance_service.errors import ConfigurationError, PoisonRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from balance_service.avro.registry import Place, SchemaRegistry
    from balance_service.avro.schemas import Schema
else:
    # The test driver does without its client, whose import takes longer than folding a thousand events.
    SchemaRegistry = object


_SEARCH_AGAIN_SECONDS = 60.0


class OwnSchemas(SchemaRegistry):
    """The part of a registry's client that codecs and decoders of the service's own records use. Thread-safe."""

    def __init__(self, registry: SchemaRegistry, search: Callable[[bytes], bytes | None] = lambda _key: None) -> None:
        """Args:
        registry: the application's; `NoRegistry` if it has none.
        search: looks for the text under a key of `schema_key` where it takes longer than in the places of `look_in`.
        """
        self.is_set = registry.is_set
        self._registry = registry
        self.url = registry.url
        self.has_fingerprints = not registry.is_set
        """Whether records are written with fingerprints."""
        self._text_of: dict[int, str] = {}
        self._topics: dict[str, set[int]] = {}
        """Topic → the fingerprints of what is written there."""
        self._places: WeakSet[Place] = WeakSet()
        self._search = search
        self._searched: dict[int, float] = {}
        """Fingerprint → when to search for its text again."""
        self._lock = threading.Lock()

    @property
    def of_producers(self) -> SchemaRegistry:
        return self._registry

    def close(self) -> None:
        self._registry.close()

    def settle(self, frame: bytes, topic: str) -> bool:
        """Keeps to the form of a record that the application has written before.

        Args:
            topic: of the record.

        Returns:
            Whether the record tells the form; another one may.

        Raises:
            ConfigurationError: its schema is in a registry, and none is set.
        """
        try:
            schema_id, _ = opened_own(frame)
        except PoisonRecordError:
            return False
        self.has_fingerprints = is_fingerprint(schema_id)
        if not self.has_fingerprints and not self._registry.is_set:
            raise ConfigurationError(
                f"the records of '{topic}' name schemas of a registry, and BALANCE_SCHEMA_REGISTRY_URL is not set: set "
                "it to the registry that this application began with, which it needs permanently; or start from "
                "scratch with another BALANCE_APPLICATION_ID"
            )
        return True

    def codec(self, topic: str, schema: Schema) -> AvroCodec:
        """Returns the codec of records that the service writes to a topic. Raises as `SchemaRegistry.register`."""
        made = AvroCodec(self, subject_of(topic, schema), schema)
        if is_fingerprint(made.schema_id):
            with self._lock:
                self._topics.setdefault(topic, set()).add(made.schema_id)
        return made

    def records(self, topic: str) -> dict[bytes, bytes]:
        """Returns key → text of the schemas that a topic needs, by the codecs that were made for it."""
        with self._lock:
            needed = sorted(self._topics.get(topic, ())) if self.has_fingerprints else []
        return {schema_key(schema_id): self._text_of[schema_id].encode() for schema_id in needed}

    def register(self, subject: str, schema: Schema) -> int:
        if not self.has_fingerprints:
            return self._registry.register(subject, schema)
        schema_id = fingerprint_of(schema)
        self._text_of[schema_id] = json.dumps(schema)
        return schema_id

    def writer_schema(self, schema_id: int) -> WriterSchema | None:
        """As of `SchemaRegistry`. None also for a fingerprint whose text is not found, for a minute."""
        if not is_fingerprint(schema_id):
            return self._registry.writer_schema(schema_id)
        if schema_id not in self._text_of:
            self._look_for(schema_id)
        text = self._text_of.get(schema_id)
        return None if text is None else WriterSchema.from_avro(text)

    def _look_for(self, schema_id: int) -> None:
        key = schema_key(schema_id)
        with self._lock:
            places = [*self._places]
        for place in places:
            if (text := place.schema_text(key)) is not None:
                self.learn(key, text)
                return
        if time.monotonic() >= self._searched.get(schema_id, 0.0):
            self.learn(key, self._search(key))
            self._searched[schema_id] = time.monotonic() + _SEARCH_AGAIN_SECONDS

    def look_in(self, place: Place) -> None:
        """Has unknown schemas looked for in a place, as long as something else refers to it."""
        with self._lock:
            self._places.add(place)

    def learn(self, key: bytes, value: bytes | None) -> bool:
        """Takes the text of a schema from a record. Returns whether the record is one with a text.

        A text that has another fingerprint than its key says is not taken.
        """
        if not key.startswith(SCHEMA_PREFIX):
            return False
        try:
            text = (value or b"").decode()
            schema_id = fingerprint_of(json.loads(text))
        except Exception:  # a text of another writer may fail in any way
            return True
        if schema_key(schema_id) == key:
            self._text_of.setdefault(schema_id, text)
        return True

    def schema_ids(self, topic: str, records: Iterable[str]) -> list[int]:
        with self._lock:
            ours = sorted(self._topics.get(topic, ()))
        if self.has_fingerprints and not self._registry.is_set:
            return ours
        return [*ours, *self._registry.schema_ids(topic, records)]

    def id_of(self, guid: str) -> int | None:
        return self._registry.id_of(guid)

    def ask_anew(self) -> None:
        self._registry.ask_anew()

    def forget(self, topic: str) -> None:
        self._registry.forget(topic)
