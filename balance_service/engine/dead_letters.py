"""The dead letters of a stage's tasks, in their stores: which there are, which are due, what each commit makes of them.

A letter lies in the store and the changelog beside the states, and changes in the transaction in which its record is
applied, tried in vain or discarded. A record counts only while its letter is open, so it counts once. Three records:

    0xFF letter-at,  offset                           the letter
    0xFF letter-due, time in ms, offset               when it is tried again, or forgotten
    0xFF letter-of,  length of the key, key, offset   open, and later records of its key wait for it
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from balance_service.engine.dead_letter import NEVER, DueLetters, Letter, LetterChanges, Status, holds_key, open_letters
from balance_service.engine.records import RESERVED_PREFIX
from balance_service.process.runtime import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.database import Snapshot
    from balance_service.engine.records import DeadLetter, TaskBatch
    from balance_service.engine.store import StateStore, StoreView


# Letters that one commit tries again.
_MOST_AT_ONCE = 1_000
_AT = RESERVED_PREFIX + b"letter-at"
_DUE = RESERVED_PREFIX + b"letter-due"
_OF = RESERVED_PREFIX + b"letter-of"
_END = b"\xff"
_NUMBER_BYTES = 8
_STEP = 1_000
_BEYOND = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Letters:
    """How the tasks of one stage keep their letters."""

    codec: AvroCodec
    every_ms: int
    """After which a letter that heals by itself is tried again first; then after twice as long each time."""
    keeps_order: bool = False
    """Whether a record waits for an earlier one of its key that could not be applied."""
    now_ms: Callable[[], int] = now_ms

    def at(self, store: StateStore, offsets: Iterable[int]) -> dict[int, Letter]:
        """The letters of these offsets, as far as there are any."""
        wanted = sorted(offsets)
        frames = store.get_many([_AT + _number(offset) for offset in wanted]) if wanted else []
        found = zip(wanted, frames, strict=True)
        return {offset: self.read(offset, frame) for offset, frame in found if frame is not None}

    def between(self, store: StateStore, start: int, end: int = _BEYOND) -> Iterator[Letter]:
        """The letters of a range of the source, in its order."""
        for keys in _steps(store, _AT + _number(start), _AT + _number(end)):
            yield from self.at(store, map(_last_number, keys)).values()

    def of_batch(self, store: StateStore, batch: TaskBatch) -> dict[int, Letter]:
        """Those of the records of a batch: of the ones that it tries again, or, in a replay, of what was one before.

        A replay leaves out those that are open or discarded.
        """
        if batch.retried or not _counts(store):
            return self.at(store, batch.retried)
        found = self.between(store, batch.start, batch.end)
        return {letter.offset: letter for letter in found if letter.status is Status.APPLIED}

    def left_out_from(self, store: StateStore, start: int) -> list[int]:
        """The offsets from `start` on of which the record is not applied as it comes, when the source is read again.

        What is open is tried after that, as it is now; what is discarded never counts.
        """
        if not _counts(store):
            return []
        return [letter.offset for letter in self.between(store, start) if letter.status is not Status.APPLIED]

    def due(self, store: StateStore) -> DueLetters:
        """Those whose time has come, a thousand at most; with those that wait behind them."""
        position = store.position
        if position is None or not position.letters:
            return DueLetters()
        # Not before a rebuild has read all that comes before them, and what comes after.
        if store.keys(_AT + _number(position.offset), _AT + _number(_BEYOND), 1):
            return DueLetters()
        end = _DUE + _number(self.now_ms() + 1)
        keys = store.first_keys(_DUE, end, _MOST_AT_ONCE)
        letters = self.at(store, map(_last_number, keys))
        forgotten = [letter for letter in letters.values() if not letter.status.is_open]
        again = {offset: letter for offset, letter in letters.items() if letter.status.is_open}
        if self.keeps_order:
            again |= self._behind(store, again)
        return DueLetters([letter for _, letter in sorted(again.items())][:_MOST_AT_ONCE], forgotten)

    def hold_keys(self, store: StateStore) -> bool:
        """Whether there are keys whose records have to wait."""
        return self.keeps_order and any(holds_key(cause) for cause, _ in open_letters(_counts(store)))

    def held_from(self, store: StateStore, keys: Iterable[bytes], passing: frozenset[int]) -> dict[bytes, int]:
        """Of keys whose records have to wait, the offset after which they do.

        Args:
            passing: letters for which they need not, for these are tried now.
        """
        if not self.hold_keys(store):
            return {}
        first = {key: next((at for at in _holding(store, key) if at not in passing), None) for key in keys}
        return {key: offset for key, offset in first.items() if offset is not None}

    def after(
        self,
        store: StateStore,
        known: Mapping[int, Letter],
        failed: Sequence[DeadLetter],
        forgotten: Iterable[Letter] = (),
        made: Iterable[Letter] = (),
    ) -> LetterChanges:
        """What becomes of letters by a commit.

        Args:
            known: the letters of the records that it has applied, or could not apply.
            failed: the records that it could not apply.
            forgotten: closed ones of which nothing is kept any more.
            made: by the stage itself, of records that it is to take up later; of those that it knows, nothing is made.
        """
        now, changes = self.now_ms(), LetterChanges(_counts(store))
        sent_before = store.position.emitted_up_to if store.position else 0
        for letter in made:
            if letter.offset not in known:
                self._change(changes, letter.offset, None, letter)
        for record in failed:
            before = known.get(record.offset)
            if before is None:
                changes.fresh.append(record)
                first = Letter.first(record.offset, record.cause, record.key, now, self.every_ms)
                # What was sent of it before it failed is not sent again once it heals.
                after = replace(first, is_sent=record.offset < sent_before)
            elif before.status.is_open:
                after = before.failed_again(record.cause, now, self.every_ms)
            else:
                # It was applied later than the source has it, and is to be again.
                after = before.failed_in_replay(record.cause, record.key, now)
            self._change(changes, record.offset, before, after)
        for offset, before in known.items():
            if offset not in changes.after and before.status.is_open:
                self._change(changes, offset, before, before.closed(Status.APPLIED, now))
        self._release(store, changes)
        for letter in forgotten:
            self._change(changes, letter.offset, letter, None)
        store.look_for(_DUE, changes.records)
        return changes

    def decided(self, store: StateStore, letters: Iterable[Letter], status: Status) -> LetterChanges:
        """What becomes of letters by a decision: DISCARDED, or SCHEDULED, to be tried again at once."""
        now, changes = self.now_ms(), LetterChanges(_counts(store))
        for before in letters:
            again = status is Status.SCHEDULED
            self._change(
                changes, before.offset, before, before.due_at_once(now) if again else before.closed(status, now)
            )
        self._release(store, changes)
        store.look_for(_DUE, changes.records)
        return changes

    def carried(self, letters: Iterable[Letter]) -> LetterChanges:
        """What a changelog that is made anew is to have of letters that there were before."""
        changes = LetterChanges(Counter())
        for letter in letters:
            self._change(changes, letter.offset, None, self._freed(letter))
        return changes

    def at_opening(self, store: StateStore) -> LetterChanges:
        """What becomes of letters as a task is opened: where order no longer matters, none waits for another.

        Where it matters from now on, later records wait for those that are open.
        """
        changes = LetterChanges(_counts(store))
        if self.keeps_order:
            # None does yet where order did not matter before.
            if self.hold_keys(store) and not store.keys(_OF, _OF + _END, 1):
                changes.records += [(key, b"") for letter in self.between(store, 0) for key in self._held_by(letter)]
            return changes
        for keys in _steps(store, _OF, _OF + _END):
            changes.records += [(key, None) for key in keys]
        if changes.records:
            for letter in self.between(store, 0):
                if letter.status is Status.BEHIND:
                    self._change(changes, letter.offset, letter, self._freed(letter))
            store.look_for(_DUE, changes.records)
        return changes

    def _freed(self, letter: Letter) -> Letter:
        """The letter, which waits for no other where order does not matter."""
        waits = letter.status is Status.BEHIND and not self.keeps_order
        return letter.due_at_once(self.now_ms()) if waits else letter

    def page(self, view: Snapshot, start: int, limit: int) -> list[Letter]:
        """The letters from an offset on, in the order of their records; a thousand at most, and as many as `limit`."""
        found = view.scan(_AT + _number(start), _AT + _number(_BEYOND), min(limit, _STEP))
        return [self.read(_last_number(key), frame) for key, frame in found]

    def first_open(self, view: StoreView) -> int | None:
        """The offset of the first letter of which the record may still be applied; None if there is none."""
        if view.position is None or not open_letters(view.position.letters):
            return None
        start = 0
        while some := self.page(view, start, _STEP):
            for letter in some:
                if letter.status.is_open:
                    return letter.offset
            start = some[-1].offset + 1
        return None

    def read(self, offset: int, frame: bytes) -> Letter:
        """A letter as a record of the changelog has it."""
        return Letter.of(offset, self.codec.decode(frame))

    def _behind(self, store: StateStore, heads: Mapping[int, Letter]) -> dict[int, Letter]:
        """What waits for some letters, and would fit in with them."""
        behind: dict[int, Letter] = {}
        for key in {letter.key for letter in heads.values() if letter.key is not None}:
            room = _MOST_AT_ONCE - len(heads) - len(behind)
            if room > 0:
                found = self.at(store, islice((at for at in _holding(store, key) if at not in heads), room))
                behind |= {at: letter for at, letter in found.items() if letter.status is Status.BEHIND}
        return behind

    def _release(self, store: StateStore, changes: LetterChanges) -> None:
        """Where nothing holds a key any more that did, have the first record that waited tried next."""
        if not self.keeps_order:
            return
        holding = {(letter.key, letter.offset) for letter in changes.after.values() if letter.holds_key}
        for key in changes.freed:
            left = next((at for at in _holding(store, key) if at not in changes.after), None)
            if left is None or any(other == key and at < left for other, at in holding):
                continue
            first = self.at(store, [left])[left]
            if first.status is Status.BEHIND:
                self._change(changes, left, first, first.due_at_once(self.now_ms()))

    def _change(self, changes: LetterChanges, offset: int, before: Letter | None, after: Letter | None) -> None:
        was, is_now = self._indexed(before), self._indexed(after)
        changes.records += [(key, None) for key in was if key not in is_now]
        changes.records += [(key, b"") for key in is_now if key not in was]
        changes.records.append((_AT + _number(offset), None if after is None else self.codec.encode(after.record())))
        changes.counts.subtract([] if before is None else [before.count])
        changes.counts.update([] if after is None else [after.count])
        if after is not None:
            changes.after[offset] = after
        if before is not None and before.key is not None and before.holds_key and not (after and after.holds_key):
            changes.freed.add(before.key)

    def _indexed(self, letter: Letter | None) -> list[bytes]:
        """The keys by which a letter is found, beside its own."""
        if letter is None:
            return []
        offset = _number(letter.offset)
        due = [] if letter.due_ms == NEVER else [_DUE + _number(letter.due_ms) + offset]
        return due + self._held_by(letter)

    def _held_by(self, letter: Letter) -> list[bytes]:
        """The key under which later records find that they wait for a letter, if they do."""
        if letter.key is None or not self.keeps_order or not letter.holds_key:
            return []
        return [_of(letter.key) + _number(letter.offset)]


def letter_offset(key: bytes) -> int | None:
    """Which letter a record of a changelog holds, by its key; None if it is another record."""
    return _last_number(key) if key.startswith(_AT) else None


def _holding(store: StateStore, key: bytes) -> Iterator[int]:
    """The offsets of letters for which later records of a key wait, in their order."""
    start = _of(key)
    for keys in _steps(store, start, start + _number(_BEYOND)):
        yield from map(_last_number, keys)


def _steps(store: StateStore, start: bytes, end: bytes) -> Iterator[list[bytes]]:
    """The keys of a range, a thousand at a time; they may be deleted meanwhile."""
    while keys := store.keys(start, end, _STEP):
        yield keys
        start = keys[-1] + b"\0"


def _of(key: bytes) -> bytes:
    return _OF + len(key).to_bytes(4, "big") + key


def _counts(store: StateStore) -> Counter[str]:
    position = store.position
    return Counter() if position is None else Counter(position.letters)


def _number(value: int) -> bytes:
    return max(value, 0).to_bytes(_NUMBER_BYTES, "big")


def _last_number(key: bytes) -> int:
    return int.from_bytes(key[-_NUMBER_BYTES:], "big")
