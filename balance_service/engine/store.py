"""The state store: states, position and changelog offset of one task in one RocksDB, seen together.

The task's thread writes; any thread may take a `StoreView` and read from it.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from balance_service.engine.database import Database, Snapshot, StoreBatch
from balance_service.engine.records import POSITION_KEY, RESERVED_PREFIX, Position
from balance_service.engine.state_directory import FORMAT
from balance_service.errors import ConfigurationError
from balance_service.process.failpoints import part_size, reach

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.records import Record, StoreSizes


_IDENTITY_KEY = RESERVED_PREFIX + b"identity"
_CHANGELOG_OFFSET_KEY = RESERVED_PREFIX + b"changelog-offset"
_REACHES_KEY = RESERVED_PREFIX + b"reaches"

_BEYOND_ANY_END = 2**63 - 1
# A batch is in memory as a whole, and once more in the memtable.
_PART = 20_000


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What a store is a copy of. Topic ids tell a topic from another that took its name later."""

    format: int
    application_id: str
    read_model: str
    partition: int
    partitions: int
    source_topic_id: str
    changelog_topic_id: str


class StoreView(Snapshot):
    """States, framed, and position as of one moment; immutable, so an answer is never torn from its position."""

    def __init__(self, database: Database, position: Position | None) -> None:
        self.position = position
        super().__init__(database)


class StateStore:
    """RocksDB under one task.

    Invariant: it holds the changelog's content below `changelog_offset`, and nothing from `reaches` on.
    """

    def __init__(self, path: Path, position_codec: AvroCodec) -> None:
        self.path = path
        self._position_codec = position_codec
        self._db = Database(path)
        self._view: StoreView | None = None
        self._first: dict[bytes, bytes] = {}
        try:
            self._view = self._take_view()
        except Exception:
            # Else the directory stays locked as long as anybody holds the error.
            self._db.close()
            raise

    @property
    def identity(self) -> StoreIdentity | None:
        """What this store is a copy of; None while it is new.

        Raises:
            ConfigurationError: it was written by a newer version.
        """
        stored = self._db.get(_IDENTITY_KEY)
        if stored is None:
            return None
        fields: dict[str, Any] = json.loads(stored)
        if fields["format"] != FORMAT:
            raise ConfigurationError(
                f"the store at {self.path} has format {fields['format']}, this version knows {FORMAT}; "
                "run the version that wrote it, or remove the directory to restore from the changelog"
            )
        return StoreIdentity(**fields)

    @identity.setter
    def identity(self, identity: StoreIdentity) -> None:
        batch = StoreBatch()
        batch.put(_IDENTITY_KEY, json.dumps(asdict(identity)).encode())
        self._write(batch)

    @property
    def changelog_offset(self) -> int:
        """Next changelog offset to apply; 0 while the store is new."""
        stored = self._db.get(_CHANGELOG_OFFSET_KEY)
        return 0 if stored is None else int.from_bytes(stored, "big")

    @property
    def reaches(self) -> int:
        """The changelog offset below which all that it holds lies: beyond `changelog_offset` if a write was cut off."""
        stored = self._db.get(_REACHES_KEY)
        return max(self.changelog_offset, 0 if stored is None else int.from_bytes(stored, "big"))

    @property
    def position(self) -> Position | None:
        """Next source offset to apply, and the epoch; None before the first."""
        view = self._view
        return None if view is None else view.position

    @property
    def view(self) -> StoreView | None:
        """States and position as of the last write; None once closed."""
        return self._view

    @property
    def sizes(self) -> StoreSizes:
        """How large it is now; nothing once closed."""
        return self._db.sizes

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The states under some keys, in their order; None where there is none."""
        return self._db.get_many(keys)

    def keys(self, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        """At most `limit` of the keys from `start` on and below `stop`, in their order."""
        return self._db.keys(start, stop, limit)

    def first_keys(self, index: bytes, stop: bytes, limit: int) -> list[bytes]:
        """As `keys`, from the first that begins with `index`: for those that are deleted once they were found.

        RocksDB looks at each that was deleted, so it begins where the last one was found. They are found again until
        they are deleted, whatever becomes of the commit that is to do it.
        """
        found = self.keys(self._first.get(index, index), stop, limit)
        self._first[index] = found[0] if found else stop
        return found

    def look_for(self, index: bytes, records: Iterable[Record]) -> None:
        """Have `first_keys` find what a commit adds to an index, whether or not it succeeds."""
        added = (key for key, value in records if value is not None and key.startswith(index))
        self._first[index] = min([self._first.get(index, index), *added])

    def require_room(self) -> None:
        """Raises StoreFullError if the disk has less room than the next writes may need."""
        self._db.require_room()

    def write(self, records: Iterable[Record], changelog_offset: int) -> None:
        """Apply changelog records and their end, for queries at once. Raises as `apply`.

        Many go to the disk in parts, the end with the last: a crash in between leaves a store that has more than it
        says, of which the changelog has all. Whatever opens it reads that first.
        """
        batch, rest, most = StoreBatch(), iter(records), part_size(_PART)
        while part := list(itertools.islice(rest, most)):
            if len(batch):
                batch.put(_REACHES_KEY, changelog_offset.to_bytes(8, "big"))
                self._db.write(batch)
                reach("part-stored")
                batch = StoreBatch()
            batch.extend(part)
        self.apply(batch, changelog_offset)

    def apply(self, batch: StoreBatch, changelog_offset: int) -> None:
        """Apply changelog records (a position record among them, or not) and their end, at once.

        Raises:
            RetriableError: the disk refuses the write.
            StoreFullError: the disk is full.
            StoreCorruptedError: the store is damaged.
        """
        batch.put(_CHANGELOG_OFFSET_KEY, changelog_offset.to_bytes(8, "big"))
        self._write(batch)

    def distrust(self) -> None:
        """Note that it holds what its changelog has lost: whatever opens it next gives it up for the changelog."""
        batch = StoreBatch()
        batch.put(_REACHES_KEY, _BEYOND_ANY_END.to_bytes(8, "big"))
        self._db.write(batch)

    def close(self) -> None:
        """Close the database. The directory is free once the views taken of it are gone. Idempotent."""
        self._view = None
        self._db.close()

    def _take_view(self) -> StoreView:
        stored = self._db.get(POSITION_KEY)
        if stored is None:
            return StoreView(self._db, None)
        return StoreView(self._db, Position.of(self._position_codec.decode(stored)))

    def _write(self, batch: StoreBatch) -> None:
        self._db.write(batch)
        self._view = self._take_view()
