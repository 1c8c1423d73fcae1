"""A database in the memory of this process, for one thread: that of `try`, and of tests of a model."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import chain, islice
from typing import TYPE_CHECKING
from weakref import WeakSet

from balance_service.engine.records import StoreSizes
from balance_service.errors import RetriableError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from balance_service.engine.records import Record


class MemorySnapshot:
    """What a `View` reads: the present values, and the former ones of keys that are written later."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._former: dict[bytes, bytes | None] = {}

    def keep(self, keys: Iterable[bytes]) -> None:
        """Called before these keys are written."""
        for key in keys:
            self._former.setdefault(key, self._database.values.get(key))

    def get(self, key: bytes) -> bytes | None:
        return self._former[key] if key in self._former else self._database.values.get(key)

    def scan(self, start: bytes, stop: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """As `View.scan`."""
        present, deleted = self._database.ordered(start, stop), [key for key in self._deleted() if start <= key < stop]
        found = ((key, self.get(key)) for key in (sorted(chain(present, deleted)) if deleted else present))
        return [*islice(((key, value) for key, value in found if value is not None), limit)]

    def last_at_or_before(self, key: bytes) -> tuple[bytes, bytes] | None:
        """As `View.last_at_or_before`."""
        present = (found for found in self._database.backwards(key) if self.get(found) is not None)
        last = max([*islice(present, 1), *(found for found in self._deleted() if found <= key)], default=None)
        value = None if last is None else self.get(last)
        return None if last is None or value is None else (last, value)

    def _deleted(self) -> list[bytes]:
        """Returns the keys of this view that the database has no longer."""
        return [key for key, value in self._former.items() if value is not None and key not in self._database.values]


class MemoryDatabase:
    """A dict and the order of its keys, apart for each first byte. A read sorts what was written since the last one.

    Every method that reads or writes raises RetriableError after `close`.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self._of_first: defaultdict[bytes, set[bytes]] = defaultdict(set)
        self._order: dict[bytes, list[bytes]] = {}
        self._snapshots: WeakSet[MemorySnapshot] = WeakSet()
        self._is_open = True

    @property
    def sizes(self) -> StoreSizes:
        """The present sizes; all 0 after `close`."""
        if not self._is_open:
            return StoreSizes()
        return StoreSizes(memtable_bytes=sum(map(len, chain(*self.values.items()))), keys=len(self.values))

    def snapshot(self) -> MemorySnapshot:
        self._require_open()
        taken = MemorySnapshot(self)
        self._snapshots.add(taken)
        return taken

    def get(self, key: bytes) -> bytes | None:
        self._require_open()
        return self.values.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `Database.get_many`."""
        self._require_open()
        return [*map(self.values.get, keys)]

    def keys(self, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        """As `Database.keys`."""
        self._require_open()
        return [*islice(self.ordered(start, stop), limit)]

    def ordered(self, start: bytes, stop: bytes) -> Iterator[bytes]:
        """Yields the keys from `start` to below `stop`, in order."""
        for first in sorted(first for first in self._of_first if start[:1] <= first <= stop[:1]):
            order = self._ordered(first)
            yield from (order[at] for at in range(bisect_left(order, start), bisect_left(order, stop)))

    def backwards(self, key: bytes) -> Iterator[bytes]:
        """Yields the keys up to and including this one, the last one first."""
        for first in sorted((first for first in self._of_first if first <= key[:1]), reverse=True):
            order = self._ordered(first)
            yield from (order[at] for at in range(bisect_left(order, key + b"\0") - 1, -1, -1))

    def write(self, records: Collection[Record]) -> None:
        """As `Database.write`."""
        self._require_open()
        for snapshot in self._snapshots:
            snapshot.keep(key for key, _ in records)
        for key, value in records:
            first = key[:1]
            if (key in self.values) != (value is not None):
                self._order.pop(first, None)
            if value is None:
                self.values.pop(key, None)
                self._of_first[first].discard(key)
            else:
                self.values[key] = value
                self._of_first[first].add(key)

    def ingest(self, records: Sequence[Record]) -> None:
        """As `Database.ingest`."""
        self.write(records)

    def require_room(self, *, serves: bool = True) -> None:
        """Does nothing: a process that lacks memory ends by itself. Arguments as of `Database.require_room`."""

    def close(self) -> None:
        """As `Database.close`; its snapshots still answer."""
        self._is_open = False

    def _ordered(self, first: bytes) -> list[bytes]:
        if first not in self._order:
            self._order[first] = sorted(self._of_first[first])
        return self._order[first]

    def _require_open(self) -> None:
        if not self._is_open:
            raise RetriableError("the local store cannot be used: it is closed")
