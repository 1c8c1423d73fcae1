"""The state store of a task: its states, its position and its changelog offset, in one database.

The task's thread writes. Any thread may take a `StoreView` and read it.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from balance_service.engine.databases import View, opened
from balance_service.engine.records import POSITION_KEY, RESERVED_PREFIX, Position
from balance_service.engine.state_directory import FORMAT
from balance_service.errors import BalanceServiceError, ConfigurationError
from balance_service.process.failpoints import failpoint, part_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.databases import AnySnapshot
    from balance_service.engine.records import Record, StoreSizes
    from balance_service.model.stream import Partitioner


_IDENTITY_KEY = RESERVED_PREFIX + b"identity"
_CHANGELOG_OFFSET_KEY = RESERVED_PREFIX + b"changelog-offset"
_WRITTEN_UP_TO_KEY = RESERVED_PREFIX + b"reaches"
_OWN_KEYS = frozenset({POSITION_KEY, _IDENTITY_KEY, _CHANGELOG_OFFSET_KEY, _WRITTEN_UP_TO_KEY})
_AFTER_ANY = 2 * RESERVED_PREFIX

_BEYOND_ANY_END = 2**63 - 1
# A batch is in memory as a list, as RocksDB's, and in the memtable.
_PART = 20_000


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The topics that a store was made from. Topic ids distinguish a topic from a later one with the same name.

    `partitioner` is the function that checked that the keys of its states belong to the partition.
    """

    format: int
    application_id: str
    read_model: str
    partition: int
    partitions: int
    source_topic_id: str
    changelog_topic_id: str
    partitioner: Partitioner = "murmur2"


class StoreView(View):
    """An immutable view of the framed states and of the position that they belong to."""

    def __init__(self, snapshot: AnySnapshot, position: Position | None) -> None:
        self.position = position
        super().__init__(snapshot)


class StateStore:
    """The database of one task.

    Invariant: it contains the changelog's records below `changelog_offset`, and none from `written_up_to` on.
    """

    def __init__(self, path: Path | None, position_codec: AvroCodec) -> None:
        """Args:
        path: the folder of the store; None for one in memory. Raises as `Database`.
        """
        self.path = path
        self._position_codec = position_codec
        self._db = opened(path)
        self._view: StoreView | None = None
        self._loading: Position | None = None
        self._first: dict[bytes, bytes] = {}
        position_codec.look_in(self)
        try:
            self._view = self._take_view()
        except Exception:
            # Otherwise the folder stays locked as long as the error is referenced.
            self._db.close()
            raise

    @property
    def identity(self) -> StoreIdentity | None:
        """The topics that this store was made from; None for a new store.

        Raises:
            ConfigurationError: a newer version wrote the store.
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
        self._write([(_IDENTITY_KEY, json.dumps(asdict(identity)).encode())])

    @property
    def changelog_offset(self) -> int:
        """The next changelog offset to apply; 0 for a new store."""
        stored = self._db.get(_CHANGELOG_OFFSET_KEY)
        return 0 if stored is None else int.from_bytes(stored, "big")

    @property
    def written_up_to(self) -> int:
        """An offset above those of all records. Above `changelog_offset` after an interrupted write or `distrust`."""
        stored = self._db.get(_WRITTEN_UP_TO_KEY)
        return max(self.changelog_offset, 0 if stored is None else int.from_bytes(stored, "big"))

    @property
    def position(self) -> Position | None:
        """The position that the store's states belong to; None before the first commit, and while it is loaded."""
        view = self._view
        return None if view is None else view.position

    @property
    def loading(self) -> Position | None:
        """The record of a store that is loaded from files, and has part of them; otherwise None."""
        return None if self._view is None else self._loading

    @property
    def view(self) -> StoreView | None:
        """The view after the last write; None after `close`."""
        return self._view

    @property
    def sizes(self) -> StoreSizes:
        return self._db.sizes

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the framed states of keys, in their order; None for a key without a state."""
        return self._db.get_many(keys)

    def pages(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yields all records that a changelog has too, without the position, in key order."""
        start = b""
        while self._view is not None and (page := self._view.scan(start, _AFTER_ANY, _PART)):
            yield [(key, value) for key, value in page if key not in _OWN_KEYS]
            start = page[-1][0] + b"\0"

    def schema_text(self, key: bytes) -> bytes | None:
        """Returns the text of a schema under its reserved key; None if there is none. Any thread may ask."""
        try:
            return self._db.get(key)
        except BalanceServiceError:
            return None

    def keys(self, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        """Returns at most `limit` keys from `start` to below `stop`, in order."""
        return self._db.keys(start, stop, limit)

    def recorded_keys(self, start: bytes, limit: int) -> list[bytes]:
        """Returns at most `limit` keys of changelog records from `start` on, in order, but not that of the position."""
        found = self.keys(start, _AFTER_ANY, limit + len(_OWN_KEYS))
        return [key for key in found if key not in _OWN_KEYS][:limit]

    def first_keys(self, index: bytes, stop: bytes, limit: int) -> list[bytes]:
        """Returns the first keys of an index whose entries are deleted after they were found.

        RocksDB has to skip every deleted key, so the search starts at the first key of the last search. Keys are found
        again until a commit deletes them.

        Args:
            index: the prefix of its keys.
        """
        found = self.keys(self._first.get(index, index), stop, limit)
        self._first[index] = found[0] if found else stop
        return found

    def look_for(self, index: bytes, records: Iterable[Record]) -> None:
        """Lets `first_keys` find keys that a commit adds to an index, whether or not the commit succeeds."""
        added = (key for key, value in records if value is not None and key.startswith(index))
        self._first[index] = min([self._first.get(index, index), *added])

    def require_room(self, *, serves: bool = True) -> None:
        """As `Database.require_room`."""
        self._db.require_room(serves=serves)

    def write(self, records: Iterable[Record], changelog_offset: int) -> None:
        """Applies the records of a commit, which queries see all at once. Raises as `apply`.

        A large commit is written in several parts, and `changelog_offset` with the last one. After a crash in between,
        the store contains some records from above its offset. All of them are in the changelog, which a task reads when
        it opens the store.
        """
        rest, most = iter(records), part_size(_PART)
        last = list(itertools.islice(rest, most))
        while part := list(itertools.islice(rest, most)):
            self._db.write([*last, (_WRITTEN_UP_TO_KEY, changelog_offset.to_bytes(8, "big"))])
            failpoint("part-stored")
            last = part
        self.apply(last, changelog_offset)

    def apply(self, records: Iterable[Record], changelog_offset: int) -> None:
        """Applies changelog records and the offset after them in one write.

        Raises:
            RetriableError: the write failed.
            StoreFullError: the disk is full.
            StoreCorruptedError: the store is damaged.
        """
        self._write([*records, (_CHANGELOG_OFFSET_KEY, changelog_offset.to_bytes(8, "big"))])

    def ingest(self, records: Sequence[Record], position: Record, changelog_offset: int) -> None:
        """Applies the records of a commit as `write`, for many that are new, have values and are sorted by key.

        RocksDB takes them as a file that is made here, which is a fraction of the work. Queries see them at once with
        the position, whose record comes last.
        """
        failpoint("part-committed")
        self._db.write([(_WRITTEN_UP_TO_KEY, changelog_offset.to_bytes(8, "big"))])
        self._db.ingest(records)
        failpoint("part-ingested")
        self.apply([position], changelog_offset)

    def distrust(self) -> None:
        """Marks the store as containing records that the changelog lost, so that the next task restores it."""
        self._db.write([(_WRITTEN_UP_TO_KEY, _BEYOND_ANY_END.to_bytes(8, "big"))])

    def close(self) -> None:
        """Closes the database. The folder is unlocked when its views are gone too. Idempotent."""
        self._view = None
        self._db.close()

    def _take_view(self) -> StoreView:
        stored = self._db.get(POSITION_KEY)
        position = None if stored is None else Position.of(self._position_codec.decode(stored))
        is_loading = position is not None and position.loading is not None
        self._loading = position if is_loading else None
        return StoreView(self._db.snapshot(), None if is_loading else position)

    def _write(self, records: Collection[Record]) -> None:
        self._db.write(records)
        self._view = self._take_view()


def offset_of(view: StoreView) -> int:
    """Returns the next source offset to apply after a view; 0 before the first commit."""
    return 0 if view.position is None else view.position.offset
