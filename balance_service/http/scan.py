"""Scans of a whole read model: its entries in a range, their number, and the greatest by a field.

A scan reads local copies into a part of the answer, makes such parts of the answers of peers, and merges parts into
one, which is encoded at the end. A value is encoded once, when it is read, because a page is bounded in bytes.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import total_ordering
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from balance_service.http.answer import compact_json
from balance_service.model.json_view import exact_json, parsed_json
from balance_service.model.keys import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from balance_service.http.routing import LocalCopy
    from balance_service.model.keys import KeyType

    View = Callable[[bytes], Any]
    """Framed state → the value in the answer."""
    _Ranked = tuple[Any, bytes, bytes]
    """Value, key, framed state."""

P = TypeVar("P")
Steps = Generator[None, None, P]
MAX_BYTES = 1 << 20
# States read between two yields, a millisecond or two.
_STEP = 200
# Greater than the key of any state.
_END = b"\xff"


class Scan(Protocol[P]):
    """A query about all keys of a read model, whose answer has parts of type P."""

    def parameters(self) -> dict[str, str]:
        """Returns the parameters of the same scan, for a peer."""

    def read(self, copies: Sequence[LocalCopy], view: View) -> Steps[P]:
        """Reads some partitions. Yields where other scans may run; too slow for the event loop."""

    def parse(self, body: str) -> P:
        """Returns the part that a peer has encoded.

        Raises one of `answer.MALFORMED` if it does not have the form of this version; `merge` may, too.
        """

    def merge(self, parts: Sequence[P]) -> P:
        """Merges the parts of several instances."""

    def encode(self, part: P) -> str:
        """Returns the whole answer as JSON."""


class Entry(NamedTuple):
    """A key, as its text, and its value. `json` is the value as JSON, `text` the whole entry."""

    key: str
    value: Any
    json: str
    text: str


class Page(NamedTuple):
    """Entries, and the key after which the next page begins; None if there are no more."""

    entries: Sequence[Entry]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesScan:
    """The entries from `start` to `end`, both inclusive, after `after` and with `prefix`, in key order.

    Of a composite key, `within` has the first columns, and `start`, `end` and `prefix` are of the one after them.
    """

    start: str | None = None
    end: str | None = None
    prefix: str | None = None
    after: str | None = None
    within: Mapping[str, str] = field(default_factory=dict)
    limit: int = 100
    key_type: KeyType = TEXT

    def parameters(self) -> dict[str, str]:
        given = {"from": self.start, "to": self.end, "prefix": self.prefix, "after": self.after}
        own = {name: value for name, value in given.items() if value is not None} | {"limit": str(self.limit)}
        return {**self.within, **own}

    def read(self, copies: Sequence[LocalCopy], view: View) -> Steps[Page]:
        start, stop = self._bounds()
        some = (_states(copy, start, stop, self.limit + 1) for copy in copies)
        ordered = heapq.merge(*(chain.from_iterable(states) for states in some))
        entries: list[Entry] = []
        size = 0
        for key, frame in ordered:
            entries.append(_entry(self.key_type, self.key_type.text(key), view(frame)))
            size += len(entries[-1].text)
            # One entry beyond the page shows that there are more.
            if len(entries) > self.limit or (len(entries) > 1 and size > MAX_BYTES):
                break
            if len(entries) % _STEP == 0:
                yield
        return _page(entries, self.limit)

    def parse(self, body: str) -> Page:
        return _parsed(self.key_type, body)

    def merge(self, parts: Sequence[Page]) -> Page:
        # Entries that one instance left out may precede those of another.
        place = self._place
        known_up_to = min((place(page.next) for page in parts if page.next is not None), default=None)
        ordered = heapq.merge(*(page.entries for page in parts), key=lambda entry: place(entry.key))
        known = (entry for entry in ordered if known_up_to is None or place(entry.key) <= known_up_to)
        return _page(known, self.limit, is_all=known_up_to is None)

    def encode(self, part: Page) -> str:
        return f'{{"entries":[{_joined(part)}],"next":{json.dumps(part.next)}}}'

    def _bounds(self) -> tuple[bytes, bytes]:
        start, stop = self.key_type.range(self.start, self.end, self.prefix, self.within)
        return start if self.after is None else max(start, self._place(self.after) + b"\0"), stop

    def _place(self, key: str) -> bytes:
        """The key's position in the order."""
        return self.key_type.of_text(key)


@dataclass(frozen=True, slots=True)
class CountScan:
    """The number of keys."""

    def parameters(self) -> dict[str, str]:
        return {}

    def read(self, copies: Sequence[LocalCopy], view: View) -> Steps[int]:  # noqa: ARG002
        yield
        return sum(copy.position.keys for copy in copies)

    def parse(self, body: str) -> int:
        return int(json.loads(body)["count"])

    def merge(self, parts: Sequence[int]) -> int:
        return sum(parts)

    def encode(self, part: int) -> str:
        return f'{{"count":{part}}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class TopScan:
    """The entries with the greatest value of a field, equal values by key. Entries without a value are omitted.

    A page has `next`, the key of its last entry, only if entries are missing because they exceed the maximum size.
    """

    by: str
    value: Callable[[bytes], Any] = field(repr=False, compare=False)
    """Framed state → the field's value."""
    limit: int = 10
    key_type: KeyType = TEXT

    def parameters(self) -> dict[str, str]:
        return {"by": self.by, "limit": str(self.limit)}

    def read(self, copies: Sequence[LocalCopy], view: View) -> Steps[Page]:
        best: list[_Ranked] = []
        for copy in copies:
            for some in _states(copy, b"", _END):
                best = self._best(best, some)
                yield
        texts = ((self.key_type.text(key), frame) for _, key, frame in best)
        return _page((_entry(self.key_type, text, view(frame)) for text, frame in texts), self.limit)

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

    def parse(self, body: str) -> Page:
        return _parsed(self.key_type, body)

    def merge(self, parts: Sequence[Page]) -> Page:
        # Nothing is known about entries after the last one of a truncated page.
        known_up_to = min((self._rank(page.entries[-1]) for page in parts if page.next is not None), default=None)
        best = sorted((entry for page in parts for entry in page.entries), key=self._rank)
        known = [entry for entry in best if known_up_to is None or self._rank(entry) <= known_up_to]
        return _page(known[: self.limit], self.limit, is_all=known_up_to is None or len(known) >= self.limit)

    def encode(self, part: Page) -> str:
        following = "" if part.next is None else f',"next":{json.dumps(part.next)}'
        return f'{{"entries":[{_joined(part)}]{following}}}'

    def _rank(self, entry: Entry) -> tuple[_Descending, bytes]:
        value = entry.value[self.by]
        # As JSON has it: the same number of a peer is a decimal with its digits.
        ordered = Decimal(repr(value)) if isinstance(value, float) else value
        return _Descending(ordered), self.key_type.of_text(entry.key)


@total_ordering
@dataclass(frozen=True, slots=True)
class _Descending:
    value: Any

    def __lt__(self, other: _Descending) -> bool:
        return bool(self.value > other.value)


def _is_ordered(value: Any) -> bool:
    """Whether a value can be ranked: null, infinities and NaN cannot."""
    return value is not None and (not isinstance(value, float) or math.isfinite(value))


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


def _entry(key_type: KeyType, key: str, value: Any) -> Entry:
    encoded, shown = exact_json(value), compact_json(key_type.shown(key))
    return Entry(key, value, encoded, f'{{"key":{shown},"value":{encoded}}}')


def _page(entries: Iterable[Entry], limit: int, *, is_all: bool = True) -> Page:
    """The entries that fit the limits.

    Args:
        is_all: whether no others are known to follow.
    """
    fit: list[Entry] = []
    size = 0
    for entry in entries:
        size += len(entry.text.encode())
        if len(fit) == limit or (fit and size > MAX_BYTES):
            is_all = False
            break
        fit.append(entry)
    return Page(fit, None if is_all or not fit else fit[-1].key)


def _joined(page: Page) -> str:
    return ",".join([entry.text for entry in page.entries])


def _parsed(key_type: KeyType, body: str) -> Page:
    content = parsed_json(body)
    entries = [_entry(key_type, key_type.text_of_shown(one["key"]), one["value"]) for one in content["entries"]]
    following = content.get("next")
    if not isinstance(following, str | None):
        raise TypeError("a key is not text")
    return Page(entries, following)
