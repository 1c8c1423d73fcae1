"""One partition of a stream, read from the local store of its owner.

A part gives batches one by one, on request. So nothing piles up for a slow reader: the part notes that something has
changed, and reads the newest states at the next request.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from balance_service.errors import MustAskError, RetriableError, StoreCorruptedError
from balance_service.http.answer import by_partition, compact_json
from balance_service.http.routing import asked
from balance_service.http.streams.feed import Feed, Point
from balance_service.model.json_view import exact_json

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from balance_service.http.routing import LocalCopy, Routing
    from balance_service.http.scheduling import FairScheduler
    from balance_service.http.shares import Asker
    from balance_service.model.keys import KeyType

PAGE = 200
_PAGE_BYTES = 256 << 10
_PARAMETERS = ("key", "from", "to", "prefix")
_WITHIN = "within"
# Clients send an id in a header, and the server accepts none of more than 8,000 bytes.
_MOST_CHARACTERS = 7_000
_ASKED_SECONDS, _ASK_AGAIN_SECONDS = 10.0, 1.0


class PartEndedError(Exception):
    """The partition can no longer be followed at this instance."""


class Kind(StrEnum):
    """The kind of a batch.

    PAGE is one of a snapshot's, LAST_PAGE the last of them, CHANGES what has changed since, and OUTRUN says, once and
    without entries, that changes are missing, so that a new snapshot is needed.
    """

    PAGE = "page"
    LAST_PAGE = "last-page"
    CHANGES = "changes"
    OUTRUN = "outrun"


class Batch(NamedTuple):
    """Some entries of a partition.

    `entries` are JSON: keys with their states, null where there is none. A reader of this batch, and of those before
    it, has seen all changes below `position`; a PAGE leaves that open. `epoch` is of the owner, and `changelog` the
    topic id of its changelog.
    """

    kind: Kind
    entries: list[str]
    position: int
    epoch: int
    changelog: str

    @property
    def reached(self) -> Point:
        return Point(self.position, self.changelog)


OUTRUN = Batch(Kind.OUTRUN, [], 0, 0, "")


class EventId(NamedTuple):
    """The id of an event: up to which point of each partition its client has seen the changes of a generation."""

    generation: int
    points: dict[int, Point]

    @property
    def text(self) -> str:
        """The generation, and the positions by changelog: `1/0:12,1:40@a;2:7@b`. Mostly, all have the same one.

        Empty if it is longer than a header may be: the client then begins again with a snapshot.
        """
        positions: dict[str, dict[int, int]] = {}
        for partition, (position, changelog) in self.points.items():
            positions.setdefault(changelog, {})[partition] = position
        of_changelogs = (f"{by_partition(some)}@{changelog}" for changelog, some in positions.items())
        text = f"{self.generation}/{';'.join(of_changelogs)}"
        return text if len(text) <= _MOST_CHARACTERS else ""

    @staticmethod
    def parse(text: str) -> EventId | None:
        """Parses an id; None if it is empty. Positions may lack their changelog: `1/0:12,1:40`."""
        if not text:
            return None
        generation, _, of_changelogs = text.partition("/")
        points: dict[int, Point] = {}
        for some in of_changelogs.split(";"):
            positions, _, changelog = some.partition("@")
            for pair in positions.split(","):
                partition, _, position = pair.partition(":")
                points[int(partition)] = Point(int(position), changelog)
        return EventId(int(generation), points)


@dataclass(frozen=True, slots=True)
class Selection:
    """The keys that a stream is about, as their texts: one key, or a range.

    Of a composite key, `within` has the first columns, and `start`, `end` and `prefix` are of the one after them.
    """

    key: str | None = None
    start: str | None = None
    end: str | None = None
    prefix: str | None = None
    within: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(parameters: Mapping[str, Any]) -> Selection:
        """Returns the selection of `parameters`. Raises TypeError: one is not a text."""
        texts = [parameters.get(name) for name in _PARAMETERS]
        within = dict(parameters.get(_WITHIN, {}))
        if not all(text is None or isinstance(text, str) for text in (*texts, *within.values())):
            raise TypeError("a key is not a text")
        key, start, end, prefix = texts
        return Selection(key, start, end, prefix, within)

    def parameters(self) -> dict[str, Any]:
        """The keys as `of` takes them."""
        texts = zip(_PARAMETERS, (self.key, self.start, self.end, self.prefix), strict=True)
        given: dict[str, Any] = {name: text for name, text in texts if text is not None}
        return {**given, _WITHIN: dict(self.within)} if self.within else given

    def bounds(self, key_type: KeyType) -> tuple[bytes, bytes]:
        """The first key, and the end of the range, which is not part of it.

        Raises:
            InvalidInputError: a key is not of that type.
        """
        if self.key is not None:
            key = key_type.parse(self.key)
            return key, key + b"\0"
        return key_type.range(self.start, self.end, self.prefix, self.within)


class Part(Protocol):
    """One partition of a stream, here or at a peer."""

    address: str
    """Of the instance whose store gives the batches."""

    async def take(self) -> Batch:
        """Waits for the next batch. Raises PartEndedError."""

    def end(self) -> None:
        """Makes `take` raise PartEndedError."""

    def close(self) -> None:
        """Frees what the part holds. Nothing may be called afterwards."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reader:
    """Reads the states of one generation of a read model for parts."""

    generation: int
    routing: Routing
    key_type: KeyType
    scheduler: FairScheduler
    on_coalesced: Callable[[int], None]
    """Called with the number of changes that a follower of a key gets no event for."""

    def entry(self, key: bytes, frame: bytes | None) -> str:
        value = "null" if frame is None else exact_json(self.routing.view(frame))
        shown = compact_json(self.key_type.shown(self.key_type.text(key)))
        return f'{{"key":{shown},"value":{value},"generation":{self.generation}}}'


class LocalPart:
    """A part of a stream from this instance's store."""

    def __init__(
        self, reader: Reader, feed: Feed, partition: int, selection: Selection, since: Point | None, asker: Asker
    ) -> None:
        """Args:
        since: up to where all changes have been seen; None for nowhere.
        """
        self.address = reader.routing.address
        self.start, self.stop = selection.bounds(reader.key_type)
        self._reader = reader
        self._feed = feed
        self._partition = partition
        # Snapshots have a share of their own: they leave a client, or the clients of a peer, that of scans.
        self._asker = asker._replace(name=f"streams of {asker.name}")
        self.is_of_key = selection.key is not None
        self._may_read = asyncio.Event()
        self._has_ended = False
        self._changes = 0
        self._after: bytes | None = None
        self._first_position = 0
        seen = None if since is None else feed.number_at(since)
        self._is_outrun = since is not None and seen is None and not self.is_of_key
        self._in_snapshot = seen is None and not self.is_of_key
        # Before the first view: later changes are found from here.
        self._seen = feed.number if seen is None else seen
        self._is_new = seen is None
        # No state is empty, so that the first one is sent, and a deletion too.
        self._sent: bytes | None = b""
        if self._is_new or feed.number > self._seen:
            self._may_read.set()
        feed.add(self)

    def changed(self, before: int) -> None:
        if self._changes == 0 and not self._in_snapshot and not self._may_read.is_set():
            # The feed may forget what it has seen, as nothing of it is in the range.
            self._seen = before
        self._changes += 1

    def go(self) -> None:
        self._may_read.set()

    def end(self) -> None:
        self._has_ended = True
        self._may_read.set()

    def close(self) -> None:
        self._feed.remove(self)

    async def take(self) -> Batch:
        """Waits for the next batch, and reads it. Raises PartEndedError."""
        while True:
            await self._may_read.wait()
            if self._has_ended or self._feed.has_ended:
                raise PartEndedError
            try:
                batch = await self._page() if self._in_snapshot and not self._is_outrun else self._newest()
            except StoreCorruptedError as error:
                self._reader.routing.on_damage(self._partition, self._feed.task, error)
                raise PartEndedError from error
            except MustAskError as error:
                ask = error.ask
            except RetriableError as error:
                raise PartEndedError from error
            else:
                if batch is None:
                    continue
                return batch
            # What was read is lost, so the follower opens another part. Not in `except`: the traceback keeps the view.
            try:
                await asked(ask, _ASKED_SECONDS)
            except RetriableError:
                await asyncio.sleep(_ASK_AGAIN_SECONDS)
            raise PartEndedError

    def _newest(self) -> Batch | None:
        if self._is_outrun:
            # The follower opens another part, for a snapshot.
            return OUTRUN
        self._may_read.clear()
        return self._state() if self.is_of_key else self._changed()

    def _state(self) -> Batch | None:
        coalesced, self._changes = self._changes - 1, 0
        has_changed = self._is_new or self._feed.has_changed(self.start, self._seen)
        self._seen = self._feed.number
        if not has_changed:
            return None
        copy = self._copy()
        frame = copy.view.get(self.start)
        self._check_owned(copy)
        if coalesced > 0:
            self._reader.on_coalesced(coalesced)
        if frame == self._sent:
            return None
        self._sent, self._is_new = frame, False
        return self._batch(Kind.CHANGES, [self._reader.entry(self.start, frame)], copy, copy.position.offset)

    def _changed(self) -> Batch | None:
        self._changes = 0
        limit, copy = PAGE, self._copy()
        while True:
            changed = self._feed.since(self._seen, self, limit)
            if changed is None:
                return OUTRUN
            frames = [copy.view.get(key) for key in changed.keys]
            if limit == 1 or sum(len(frame or b"") for frame in frames) <= _PAGE_BYTES:
                break
            limit = max(1, limit // 8)
        self._check_owned(copy)
        self._seen = changed.number
        if self._seen < self._feed.number:
            self._may_read.set()
        if not changed.keys:
            return None
        entries = [self._reader.entry(key, frame) for key, frame in zip(changed.keys, frames, strict=True)]
        return self._batch(Kind.CHANGES, entries, copy, changed.position)

    async def _page(self) -> Batch:
        """Reads the next page of a snapshot, each from the newest view.

        Together they are no snapshot: later pages have later states. The changes since the first page follow them, so
        that in the end each key has its newest state. A view that was kept would keep the store from being closed.
        """
        scheduler = self._reader.scheduler
        async with scheduler.in_line(self._asker):
            if self._after is None:
                self._first_position, self._seen = self._feed.end, self._feed.number
            # Not before: a view that waits keeps its store from being closed.
            copy = self._copy()
            entries, self._in_snapshot = await scheduler.run(self._asker, self._scan(copy))
        self._check_owned(copy)
        kind = Kind.PAGE if self._in_snapshot else Kind.LAST_PAGE
        if entries:
            self._after = entries[-1][0]
        return self._batch(kind, [text for _, text in entries], copy, self._first_position)

    def _scan(self, copy: LocalCopy) -> Generator[None, None, tuple[list[tuple[bytes, str]], bool]]:
        """Reads a page of entries, and whether there may be more."""
        start = self.start if self._after is None else self._after + b"\0"
        found = copy.view.scan(start, self.stop, PAGE)
        yield
        entries: list[tuple[bytes, str]] = []
        size = 0
        for key, frame in found:
            entries.append((key, self._reader.entry(key, frame)))
            size += len(entries[-1][1])
            if size > _PAGE_BYTES:
                break
        return entries, len(entries) == PAGE or size > _PAGE_BYTES

    def _copy(self) -> LocalCopy:
        copy = self._reader.routing.copy(self._partition)
        if copy is None or copy.task is not self._feed.task:
            raise PartEndedError
        return copy

    def _check_owned(self, copy: LocalCopy) -> None:
        if not self._reader.routing.is_owned(copy):
            raise PartEndedError

    def _batch(self, kind: Kind, entries: list[str], copy: LocalCopy, position: int) -> Batch:
        return Batch(kind, entries, position, copy.position.epoch, copy.position.changelog_topic_id)
