"""Scans of a whole read model: its entries in a range, their number, and the greatest by a field.

Each scan reads local copies into a JSON body, and merges the bodies of several instances into one. It cuts entries out
of the text of a body instead of encoding them again, so that numbers keep their digits.
"""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import dataclass, field
from decimal import Decimal
from functools import total_ordering
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from balance_service.model.keys import TEXT, key_range

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from balance_service.http.routing import LocalCopy
    from balance_service.model.keys import KeyType

    View = Callable[[bytes], Any]
    """Framed state → the value in the answer."""
    Render = Callable[[Any], str]
    Steps = Generator[None, None, str]
    _Ranked = tuple[Any, bytes, bytes]
    """Value, key, framed state."""

MAX_BYTES = 1 << 20
# States read between two yields, a millisecond or two.
_STEP = 200
# Greater than the key of any state.
_END = b"\xff"
_HEAD, _SEPARATOR, _NEXT = '{"entries":[', ",", ',"next":'


class Scan(Protocol):
    """A query about all keys of a read model."""

    def parameters(self) -> dict[str, str]:
        """Returns the parameters of the same scan, for a peer."""

    def read(self, copies: Sequence[LocalCopy], view: View, render: Render) -> Steps:
        """Reads some partitions into a JSON body. Yields where other scans may run; too slow for the event loop."""

    def merge(self, bodies: Sequence[str]) -> str:
        """Merges the bodies of several instances; returns a single body unchanged.

        Raises one of `scatter.MALFORMED` if a body does not have the form that `read` writes.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesScan:
    """The entries from `start` to `end`, both inclusive, after `after` and with `prefix`, in key order."""

    start: str | None = None
    end: str | None = None
    prefix: str | None = None
    after: str | None = None
    limit: int = 100
    key_type: KeyType = TEXT

    def parameters(self) -> dict[str, str]:
        given = {"from": self.start, "to": self.end, "prefix": self.prefix, "after": self.after}
        return {name: value for name, value in given.items() if value is not None} | {"limit": str(self.limit)}

    def read(self, copies: Sequence[LocalCopy], view: View, render: Render) -> Steps:
        start, stop = self._bounds()
        some = (_states(copy, start, stop, self.limit + 1) for copy in copies)
        ordered = heapq.merge(*(chain.from_iterable(states) for states in some))
        entries: list[_Entry] = []
        size = 0
        for key, frame in ordered:
            entries.append(_entry(self.key_type, key, render(view(frame))))
            size += len(entries[-1].text)
            # One entry beyond the page shows that there are more.
            if len(entries) > self.limit or (len(entries) > 1 and size > MAX_BYTES):
                break
            if len(entries) % _STEP == 0:
                yield
        return _page(entries, self.limit)

    def merge(self, bodies: Sequence[str]) -> str:
        pages = [_parsed(body) for body in bodies]
        # Entries that one instance left out may precede those of another.
        place = self._place
        known_up_to = min((place(page.next) for page in pages if page.next is not None), default=None)
        ordered = heapq.merge(*(page.entries for page in pages), key=lambda entry: place(entry.key))
        known = (entry for entry in ordered if known_up_to is None or place(entry.key) <= known_up_to)
        return _page(known, self.limit, is_all=known_up_to is None)

    def _bounds(self) -> tuple[bytes, bytes]:
        start, stop = key_range(self.key_type, self.start, self.end, self.prefix)
        return start if self.after is None else max(start, self._place(self.after) + b"\0"), stop

    def _place(self, key: str) -> bytes:
        """The key's position in the order."""
        return self.key_type.of_text(key)


@dataclass(frozen=True, slots=True)
class CountScan:
    """The number of keys."""

    def parameters(self) -> dict[str, str]:
        return {}

    def read(self, copies: Sequence[LocalCopy], view: View, render: Render) -> Steps:  # noqa: ARG002
        yield
        return _count(copy.position.keys for copy in copies)

    def merge(self, bodies: Sequence[str]) -> str:
        return _count(int(json.loads(body)["count"]) for body in bodies)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopScan:
    """The entries with the greatest value of a field, equal values by key. Entries without a value are omitted.

    A body has `next` only if entries are missing because they exceed the maximum size.
    """

    by: str
    value: Callable[[bytes], Any] = field(repr=False, compare=False)
    """Framed state → the field's value, which is cheaper than the whole view."""
    limit: int = 10
    key_type: KeyType = TEXT

    def parameters(self) -> dict[str, str]:
        return {"by": self.by, "limit": str(self.limit)}

    def read(self, copies: Sequence[LocalCopy], view: View, render: Render) -> Steps:
        best: list[_Ranked] = []
        for copy in copies:
            for some in _states(copy, b"", _END):
                best = self._best(best, some)
                yield
        entries = (_entry(self.key_type, key, render(view(frame))) for _, key, frame in best)
        return _page(entries, self.limit, says_if_all=False)

    def _best(self, best: list[_Ranked], some: Iterable[tuple[bytes, bytes]]) -> list[_Ranked]:
        """Merges entries into the best, ordered by greatest value, then least key."""
        value_of = self.value
        valued = [(value_of(frame), key, frame) for key, frame in some]
        more = [ranked for ranked in valued if _is_ordered(ranked[0])]
        if len(best) == self.limit:
            # Discards most entries without sorting them.
            least = best[-1][0]
            more = [ranked for ranked in more if ranked[0] >= least]
        if not more:
            return best
        return heapq.nsmallest(self.limit, best + more, key=lambda ranked: (_Descending(ranked[0]), ranked[1]))

    def merge(self, bodies: Sequence[str]) -> str:
        pages = [_parsed(body) for body in bodies]
        # Nothing is known about entries after the last one of a truncated body.
        known_up_to = min((self._rank(page.entries[-1]) for page in pages if page.next is not None), default=None)
        best = sorted((entry for page in pages for entry in page.entries), key=self._rank)
        known = [entry for entry in best if known_up_to is None or self._rank(entry) <= known_up_to]
        is_all = known_up_to is None or len(known) >= self.limit
        return _page(known[: self.limit], self.limit, is_all=is_all, says_if_all=False)

    def _rank(self, entry: _Entry) -> tuple[_Descending, bytes]:
        return _Descending(entry.value[self.by]), self.key_type.of_text(entry.key)


@total_ordering
@dataclass(frozen=True, slots=True)
class _Descending:
    value: Any

    def __lt__(self, other: _Descending) -> bool:
        return bool(self.value > other.value)


def _is_ordered(value: Any) -> bool:
    """Whether a value can be ranked: null, infinities and NaN cannot."""
    return value is not None and (not isinstance(value, float) or math.isfinite(value))


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    text: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class _Page:
    entries: list[_Entry]
    next: str | None


def _states(
    copy: LocalCopy, start: bytes, stop: bytes, limit: int | None = None
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yields states in key order, in batches."""
    left = limit
    while left is None or left > 0:
        wanted = _STEP if left is None else min(_STEP, left)
        found = copy.view.scan(start, stop, wanted)
        yield found
        if len(found) < wanted:
            return
        start = found[-1][0] + b"\0"
        left = None if left is None else left - wanted


def _entry(key_type: KeyType, key: bytes, value: str) -> _Entry:
    name = key_type.text(key)
    return _Entry(name, f'{{"key":{json.dumps(name)},"value":{value}}}')


def _page(entries: Iterable[_Entry], limit: int, *, is_all: bool = True, says_if_all: bool = True) -> str:
    """Renders the entries that fit the limits, and the key after which the next page begins if there are more."""
    texts: list[str] = []
    size, last = 0, None
    for entry in entries:
        size += len(entry.text.encode())
        if len(texts) == limit or (texts and size > MAX_BYTES):
            is_all = False
            break
        texts.append(entry.text)
        last = entry.key
    following = f"{_NEXT}{json.dumps(None if is_all else last)}" if says_if_all or not is_all else ""
    return f"{_HEAD}{_SEPARATOR.join(texts)}]{following}}}"


def _count(counts: Iterable[int]) -> str:
    return f'{{"count":{sum(counts)}}}'


def _parsed(body: str) -> _Page:
    """Parses a body of `_page` into entries, each with its original text."""
    decoder = json.JSONDecoder(parse_float=Decimal)
    entries: list[_Entry] = []
    at = len(_HEAD)
    while not body.startswith("]", at):
        at += len(_SEPARATOR) if entries else 0
        value, end = decoder.raw_decode(body, at)
        if not isinstance(value["key"], str):
            raise TypeError("a key is not text")
        entries.append(_Entry(value["key"], body[at:end], value["value"]))
        at = end
    following = body[at + 1 : -1].removeprefix(_NEXT)
    return _Page(entries, json.loads(following) if following else None)
