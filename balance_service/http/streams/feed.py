"""The latest changes of the partitions that this instance owns, for those who follow them.

A task tells its feed of each commit, by the keys of the changed states. A feed keeps the keys in the order of their
latest change, up to a number of them. A follower reads the states themselves from the task's view when it is its turn,
so that one who reads slowly gets the newest state, and none waits for another. A feed exists from the first follower
of its partition until some time after the last one; without a feed, a commit costs one comparison.

Everything here belongs to the event loop, except `Feed.committed`.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from balance_service.engine.records import Position
    from balance_service.http.routing import ReadableTask

MOST_REMEMBERED = 50_000
_MOST_COMMITS = 5_000
# Followers get at most this part of a processor, so that queries and folding keep the rest.
_SHARE = 0.2
# Tens of thousands may follow one key: so many take some 20 ms, during which nothing else is answered.
_MOST_AT_ONCE = 200


class Point(NamedTuple):
    """A position in one history of a partition.

    `changelog` is the topic id of the changelog whose states were seen. Each build has a changelog of its own, and may
    have other states at the same position.
    """

    position: int
    changelog: str


class Follower(Protocol):
    """Follows the states of a feed whose keys are in `[start, stop)`."""

    start: bytes
    stop: bytes
    is_of_key: bool
    """Whether it follows the key `start` alone."""

    def changed(self, before: int) -> None:
        """Called when a state may have changed, or when the feed has ended.

        Args:
            before: the feed's `number` until then. No state of the follower has changed from its last call to that.
        """

    def go(self) -> None:
        """Called when it is the follower's turn to read."""


class Pace:
    """Lets followers read in rounds, some in each. A pause follows, in proportion to the round's processor time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: OrderedDict[Follower, None] = OrderedDict()
        self._next_at = 0.0
        self._is_scheduled = False

    def wake(self, followers: Iterable[Follower]) -> None:
        """Gives followers a turn in the next round."""
        for follower in followers:
            self._due[follower] = None
        if self._due and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_at(max(self._loop.time(), self._next_at), self._round)

    def _round(self) -> None:
        began = time.thread_time()
        for _ in range(min(len(self._due), _MOST_AT_ONCE)):
            follower, _ = self._due.popitem(last=False)
            follower.go()
        # A follower's task runs two passes of the loop after it was woken.
        self._loop.call_soon(self._loop.call_soon, self._loop.call_soon, self._ended, began)

    def _ended(self, began: float) -> None:
        spent = time.thread_time() - began
        self._next_at = self._loop.time() + spent * (1 - _SHARE) / _SHARE
        self._is_scheduled = False
        self.wake(())


class _Change(NamedTuple):
    """The latest change of a state. `number` counts the changes of the feed; `mark` orders them by position."""

    number: int
    mark: int


def _mark(end: int, *, is_retry: bool) -> int:
    """Orders the commits that end at one position: that of the micro-batch, then those that retry dead letters."""
    return 2 * end + is_retry


_mark_of = attrgetter("mark")


def _position_before(mark: int) -> int:
    """A position from which the changes with a mark, and all later ones, are found again."""
    return max(0, mark - 1) // 2


class Feed:
    """The latest changes of one partition."""

    def __init__(self, task: ReadableTask, pace: Pace) -> None:
        """Args:
        task: the owner, which tells the feed of its commits from now on.
        """
        self.task = task
        self.end = 0
        """Changes below this position are known, or forgotten."""
        self.number = 0
        """Counts changes. A reader that has seen `number` has seen all."""
        self._changelog = ""
        self.has_ended = False
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self.empty_since = self._loop.time()
        self._changes: OrderedDict[bytes, _Change] = OrderedDict()
        self._commits: list[_Change] = []
        """The last change of each of the latest commits, in order."""
        self._forgotten = _Change(0, 0)
        self._of_keys: dict[bytes, set[Follower]] = {}
        self._of_ranges: set[Follower] = set()
        task.watch(self)

    def begin(self, position: Position) -> None:
        """Knows nothing of the changes up to a position, which was read after the task began to tell."""
        self.end, self._changelog = position.offset, position.changelog_topic_id
        # States that were begun again in this changelog lack what was deleted then.
        known_up_to = max(self.end, position.emitted_up_to)
        # Commits that retry dead letters do not move the position. Without a dead letter, there was none of late.
        is_retry = bool(position.letters) or known_up_to > self.end
        self._forgotten = _Change(0, _mark(known_up_to, is_retry=is_retry))

    @property
    def is_followed(self) -> bool:
        return bool(self._of_keys or self._of_ranges)

    def add(self, follower: Follower) -> None:
        if follower.is_of_key:
            self._of_keys.setdefault(follower.start, set()).add(follower)
        else:
            self._of_ranges.add(follower)

    def remove(self, follower: Follower) -> None:
        self._of_ranges.discard(follower)
        of_key = self._of_keys.get(follower.start)
        if of_key is not None:
            of_key.discard(follower)
            if not of_key:
                del self._of_keys[follower.start]
        if not self.is_followed:
            self.empty_since = self._loop.time()

    def committed(self, start: int, end: int, keys: Sequence[bytes] | None) -> None:
        """A `Watcher`'s, called on the task's thread."""
        self._loop.call_soon_threadsafe(self.note_commit, start, end, keys)

    def close(self) -> None:
        """Ends the feed: its followers look for the partition's owner again."""
        self.has_ended = True
        self.task.watch(None)
        self._wake(self._followers(), self.number)

    def number_at(self, point: Point) -> int | None:
        """What `number` was when the changes up to a point had been seen.

        None if later ones are forgotten, or if the point is of another changelog: the read model was built again since,
        and each state may differ.
        """
        mark = _mark(point.position, is_retry=False)
        if mark < self._forgotten.mark or point.position > self.end or point.changelog != self._changelog:
            return None
        at = bisect_right(self._commits, mark, key=_mark_of)
        return max(self._forgotten.number, self._commits[at - 1].number if at else 0)

    def has_changed(self, key: bytes, number: int) -> bool:
        """Whether the state of a key may have changed since a number."""
        change = self._changes.get(key)
        return number < self._forgotten.number if change is None else number < change.number

    def since(self, number: int, follower: Follower, limit: int) -> Changed | None:
        """The keys that changed since a number, least recent first; None if some are forgotten."""
        if number < self._forgotten.number:
            return None
        # In the end it has the least recent ones, and one more.
        found: deque[tuple[bytes, _Change]] = deque(maxlen=limit + 1)
        start, stop = follower.start, follower.stop
        for key, change in reversed(self._changes.items()):
            if change.number <= number:
                break
            if start <= key < stop:
                found.appendleft((key, change))
        if len(found) <= limit:
            return Changed([key for key, _ in found], self.number, self.end)
        _, first_left = found.pop()
        return Changed([key for key, _ in found], found[-1][1].number, _position_before(first_left.mark))

    def note_commit(self, start: int, end: int, keys: Sequence[bytes] | None) -> None:
        """Notes the keys of a commit, and wakes the followers. For the event loop: `committed` calls it there."""
        if self.has_ended:
            return
        is_retry = start == end
        if end < self.end or (end == self.end and not is_retry):
            # The view that the feed began with has it.
            return
        mark, is_next, before = _mark(end, is_retry=is_retry), start <= self.end, self.number
        self.end = end
        if keys is None or not is_next:
            self.number += 1
            self._changes.clear()
            self._commits.clear()
            self._forgotten = _Change(self.number, mark)
            self._wake(self._followers(), before)
            return
        for key in keys:
            self.number += 1
            self._changes[key] = _Change(self.number, mark)
            self._changes.move_to_end(key)
        if keys:
            self._commits.append(_Change(self.number, mark))
        while len(self._changes) > MOST_REMEMBERED:
            _, self._forgotten = self._changes.popitem(last=False)
        if len(self._commits) > 2 * _MOST_COMMITS:
            # A client that has reached one of the others reads some states again.
            del self._commits[:-_MOST_COMMITS]
        self._wake(self._followers_of(keys), before)

    def _followers(self) -> list[Follower]:
        return [follower for of_key in self._of_keys.values() for follower in of_key] + [*self._of_ranges]

    def _followers_of(self, keys: Sequence[bytes]) -> list[Follower]:
        of_keys = self._of_keys
        if len(of_keys) < len(keys):
            changed = frozenset(keys)
            found = [follower for key, some in of_keys.items() if key in changed for follower in some]
        else:
            found = [follower for key in keys for follower in of_keys.get(key, ())]
        if self._of_ranges:
            ordered = sorted(keys)
            for follower in self._of_ranges:
                at = bisect_left(ordered, follower.start)
                if at < len(ordered) and ordered[at] < follower.stop:
                    found.append(follower)
        return found

    def _wake(self, followers: list[Follower], before: int) -> None:
        for follower in followers:
            follower.changed(before)
        self._pace.wake(followers)


class Changed(NamedTuple):
    """Keys whose states changed. With them, who follows has seen all up to `number`, and up to `position`."""

    keys: list[bytes]
    number: int
    position: int
