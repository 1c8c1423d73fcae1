"""The dead letters of a stage's tasks: their index in the store, those that are due, and how commits change them.

The store and the changelog keep dead letters next to the states. A dead letter changes in the transaction that applies,
retries or discards its record. A record counts only while its dead letter is open, so it counts once. Keys and values:

    0xFF letter-at,  offset                           the dead letter
    0xFF letter-due, time in ms, offset               when it is retried or forgotten
    0xFF letter-of,  length of the key, key, offset   it is open, and blocks later records of its key, or is superseded
                                                      by one
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from balance_service.engine.dead_letter import (
    GONE,
    NEVER,
    SET_ASIDE,
    Letter,
    Status,
    blocks_key,
    is_final,
    open_letters,
)
from balance_service.engine.records import RESERVED_PREFIX
from balance_service.engine.store import offset_of
from balance_service.engine.transform_failures import TransformFailures
from balance_service.errors import RetriableError
from balance_service.process.runtime import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.batch import TaskBatch
    from balance_service.engine.records import DeadLetter, Record
    from balance_service.engine.store import StateStore, StoreView


# Dead letters that one commit retries.
_MAX_RETRIED = 1_000
# Dead letters of the sending generation that one commit of a silent one takes over.
_MAX_FOLLOWED = 10_000
_AT = RESERVED_PREFIX + b"letter-at"
_DUE = RESERVED_PREFIX + b"letter-due"
_OF = RESERVED_PREFIX + b"letter-of"
_END = b"\xff"
_NUMBER_BYTES = 8
_SCANNED = 1_000
_BEYOND = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class DueLetters:
    """Dead letters that are due, in the order of their records: open ones to retry, closed ones to forget."""

    again: Sequence[Letter] = ()
    forgotten: Sequence[Letter] = ()


@dataclass(slots=True)
class LetterChanges:
    """The dead letters that a commit changes: `records` for changelog and store, `counts` for the position."""

    counts: Counter[str]
    records: list[Record] = field(default_factory=list)
    fresh: list[DeadLetter] = field(default_factory=list)
    """Records that could not be applied, and whose dead letters are not in their topic yet."""
    after: dict[int, Letter] = field(default_factory=dict)
    """The changed dead letters in their new state, by offset."""
    unblocked: set[bytes] = field(default_factory=set)
    """Keys that a changed dead letter no longer blocks."""

    @property
    def counted(self) -> dict[str, int]:
        return {name: count for name, count in self.counts.items() if count}

    @property
    def applied(self) -> int:
        """The number of dead letters that were closed because their records were applied."""
        return sum(letter.status is Status.APPLIED for letter in self.after.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Letters:
    """Reads and changes the dead letters in the stores of one stage's tasks."""

    codec: AvroCodec
    every_ms: int
    """The retry interval: the first retry waits this long, each further one twice as long as the one before."""
    keeps_order: bool = False
    """Whether a record waits for an earlier record of its key that could not be applied."""
    keeps_newest: bool = False
    """Whether a record supersedes earlier records of its key that could not be applied: their dead letters close."""
    is_compacted: bool = False
    """Whether a record that is gone from the source was replaced by a later one of its key."""
    now_ms: Callable[[], int] = now_ms
    failures: TransformFailures = field(default_factory=TransformFailures)

    def at(self, store: StateStore, offsets: Iterable[int]) -> dict[int, Letter]:
        """Returns the dead letters of those of the offsets that have one."""
        wanted = sorted(offsets)
        frames = store.get_many([_AT + _number(offset) for offset in wanted]) if wanted else []
        found = zip(wanted, frames, strict=True)
        return {offset: self.decode(offset, frame) for offset, frame in found if frame is not None}

    def between(self, store: StateStore, start: int, end: int = _BEYOND) -> Iterator[Letter]:
        """Yields the dead letters of a range of source offsets, in order."""
        for keys in _scan(store, _AT + _number(start), _AT + _number(end)):
            yield from self.at(store, map(_last_number, keys)).values()

    def of_batch(self, store: StateStore, batch: TaskBatch) -> dict[int, Letter]:
        """Returns the dead letters of the records that a batch applies.

        A batch of retries applies the records that it retries. A replay applies those whose dead letters are closed as
        applied; it skips all others.

        Raises:
            RetriableError: the batch has a record that must be skipped: it became a dead letter after it was gathered.
        """
        if batch.retried or not _counts(store):
            return self.at(store, batch.retried)
        found = {letter.offset: letter for letter in self.between(store, batch.start, batch.end)}
        applied = {offset: letter for offset, letter in found.items() if letter.status is Status.APPLIED}
        if not found.keys() - applied.keys() <= batch.left_out:
            raise RetriableError("a record was discarded, or is another generation's dead letter, before it was read")
        return applied

    def left_out_from(self, store: StateStore, start: int) -> list[int]:
        """Returns the offsets from `start` on that a replay of the source skips.

        An open dead letter is retried later, from its present state. A discarded or superseded one never counts.
        """
        if not _counts(store):
            return []
        return [letter.offset for letter in self.between(store, start) if letter.status is not Status.APPLIED]

    def due(self, store: StateStore, sender: StoreView | None = None) -> DueLetters:
        """Returns at most a thousand dead letters that are due, including those that wait behind them.

        Args:
            sender: the states of the generation that sends, if that is another one. Letters that are open there wait,
                and so do those that it has discarded, and that are open here: they are closed next.
        """
        position = store.position
        if position is None or not position.letters:
            return DueLetters()
        # A rebuild applies everything up to its last dead letter first.
        if store.keys(_AT + _number(position.offset), _AT + _number(_BEYOND), 1):
            return DueLetters()
        end = _DUE + _number(self.now_ms() + 1)
        if sender is None:
            letters = self.at(store, map(_last_number, store.first_keys(_DUE, end, _MAX_RETRIED)))
        else:
            letters = self._due_and_not_left_to(sender, store, end)
        forgotten = [letter for letter in letters.values() if not letter.status.is_open]
        again = {offset: letter for offset, letter in letters.items() if letter.status.is_open}
        if self.keeps_order:
            behind = self._behind(store, again)
            left_there = set() if sender is None else self._left_to(sender, behind)
            again |= {offset: letter for offset, letter in behind.items() if offset not in left_there}
        return DueLetters([letter for _, letter in sorted(again.items())][:_MAX_RETRIED], forgotten)

    def blocks_keys(self, store: StateStore) -> bool:
        """Whether any key has records that must wait."""
        return self.keeps_order and any(blocks_key(cause) for cause, _ in open_letters(_counts(store)))

    def supersedes(self, store: StateStore, failed: Sequence[DeadLetter]) -> bool:
        """Whether a commit may supersede dead letters: those of the store, or of records that failed in its batch."""
        return self.keeps_newest and bool(failed or open_letters(_counts(store)))

    def _superseded(self, store: StateStore, newest: Mapping[bytes, int]) -> dict[int, Letter]:
        """Returns the open dead letters before the newest record of their key."""
        found: list[int] = []
        if newest and self.supersedes(store, ()):
            for key, offset in newest.items():
                found += takewhile(offset.__gt__, _indexed_of(store, key))
        return self.at(store, found)

    def blocked_after(self, store: StateStore, keys: Iterable[bytes], retried: frozenset[int]) -> dict[bytes, int]:
        """Returns, for each blocked key, the offset after which its records must wait.

        Args:
            retried: the dead letters that are being retried; these block nothing.
        """
        return self._first_of(store, keys, retried) if self.blocks_keys(store) else {}

    def first_open(self, store: StateStore, keys: Iterable[bytes], batch: TaskBatch) -> dict[bytes, int]:
        """Returns the offset of the first open dead letter of each key that has one; empty unless `keeps_newest`.

        Those that a batch retries do not count; those that it is about to make do.
        """
        failed, wanted = batch.updates.dead_letters, {*keys}
        if not wanted or not self.supersedes(store, failed):
            return {}
        found = self._first_of(store, wanted, batch.retried)
        for letter in failed:
            if letter.key is not None and letter.key in wanted:
                found[letter.key] = min(letter.offset, found.get(letter.key, letter.offset))
        return found

    def _first_of(self, store: StateStore, keys: Iterable[bytes], retried: frozenset[int]) -> dict[bytes, int]:
        first = {key: next((at for at in _indexed_of(store, key) if at not in retried), None) for key in keys}
        return {key: offset for key, offset in first.items() if offset is not None}

    def on_commit(
        self,
        store: StateStore,
        known: Mapping[int, Letter],
        failed: Sequence[DeadLetter],
        forgotten: Iterable[Letter] = (),
        made: Iterable[Letter] = (),
        newest: Mapping[bytes, int] | None = None,
        *,
        is_silent: bool = False,
    ) -> LetterChanges:
        """Returns the changes of a commit.

        Args:
            known: the dead letters, before the commit, of the records that it applied or could not apply.
            failed: the records that it could not apply.
            forgotten: closed dead letters to delete.
            made: new dead letters of records that the stage schedules; those in `known` are ignored.
            newest: by the records' key, the offset of the last one that it applied, which supersedes dead letters.
            is_silent: whether another generation sends the outputs, and writes the dead letters to their topic.
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
                first = Letter.first(record.offset, record.cause, record.key, now, self.every_ms, record.detail)
                # Its outputs were sent before it failed, and a retry must not send them again.
                after = replace(first, is_sent=not is_silent and record.offset < sent_before)
            elif before.status.is_open:
                after = before.failed_again(record.cause, now, self.every_ms, record.detail)
            else:
                # It was applied out of source order before, and must be applied so again.
                after = before.failed_in_replay(record.cause, record.key, now, record.detail)
            is_replaced = self.is_compacted and record.cause == GONE and (before is None or before.cause != SET_ASIDE)
            if is_replaced or (newest and record.key is not None and record.offset < newest.get(record.key, NEVER)):
                after = after.closed(Status.SUPERSEDED, now)
            if not after.is_in_topic and not is_silent:
                changes.fresh.append(record)
                after = replace(after, is_in_topic=True)
            self._change(changes, record.offset, before, after)
        for offset, before in known.items():
            if offset not in changes.after and (before.status.is_open or not before.is_sent):
                self._change(changes, offset, before, before.closed(Status.APPLIED, now))
        for offset, before in self._superseded(store, newest or {}).items():
            if offset not in changes.after:
                self._change(changes, offset, before, before.closed(Status.SUPERSEDED, now))
        self._schedule_unblocked(store, changes)
        for letter in forgotten:
            self._change(changes, letter.offset, letter, None)
        store.look_for(_DUE, changes.records)
        return changes

    def on_decision(self, store: StateStore, letters: Iterable[Letter], status: Status) -> LetterChanges:
        """Returns the changes of an operator's decision: DISCARDED, or SCHEDULED to retry the records at once."""
        now, changes = self.now_ms(), LetterChanges(_counts(store))
        for before in letters:
            after = before.due_at_once(now) if status is Status.SCHEDULED else before.closed(status, now)
            self._change(changes, before.offset, before, after)
        self._schedule_unblocked(store, changes)
        store.look_for(_DUE, changes.records)
        return changes

    def on_decision_elsewhere(self, store: StateStore, decided: Mapping[int, Letter]) -> LetterChanges:
        """Returns the changes that a decision about another generation's dead letters makes here.

        A record that is discarded or set aside before this generation reads it is not applied here either. One that
        this generation has applied already stays applied: the comparison shows it.
        """
        now, changes, position = self.now_ms(), LetterChanges(_counts(store)), store.position
        known = self.at(store, decided)
        for offset, letter in decided.items():
            before = known.get(offset)
            if before is None:
                is_skipped = letter.status in (Status.DISCARDED, Status.WAITING)
                if is_skipped and position is not None and offset >= position.offset:
                    self._change(changes, offset, None, letter)
            elif letter.status is Status.DISCARDED and before.status.is_open:
                self._change(changes, offset, before, before.closed(Status.DISCARDED, now))
            elif letter.status is not Status.WAITING and before.status.is_open and before.status is not Status.BEHIND:
                self._change(changes, offset, before, before.due_at_once(now))
        self._schedule_unblocked(store, changes)
        store.look_for(_DUE, changes.records)
        return changes

    def on_open(self, store: StateStore) -> LetterChanges:
        """Returns the changes that opening a task makes if the read model began or ceased to keep order, or the newest.

        The index has the open dead letters that later records of their keys look for, and no others. Those that wait
        behind others become due unless order is kept.
        """
        changes = LetterChanges(_counts(store))
        waiting = sum(n for (_, status), n in open_letters(_counts(store)).items() if status == Status.BEHIND.value)
        # There may be millions, which take long to read.
        is_needed = self.keeps_order or self.keeps_newest or waiting
        letters = self.open_in(store).values() if is_needed else ()
        wanted = {key for letter in letters for key in self._of_key(letter)}
        found = {key for keys in _scan(store, _OF, _OF + _END) for key in keys}
        changes.records += [(key, None) for key in sorted(found - wanted)]
        changes.records += [(key, b"") for key in sorted(wanted - found)]
        if not self.keeps_order:
            for letter in letters:
                if letter.status is Status.BEHIND:
                    self._change(changes, letter.offset, letter, self._carried_over(letter))
        store.look_for(_DUE, changes.records)
        return changes

    def carry_over(self, letters: Iterable[Letter]) -> LetterChanges:
        """Returns the changes that write the dead letters of an earlier changelog to an empty one."""
        changes = LetterChanges(Counter())
        for letter in letters:
            self._change(changes, letter.offset, None, self._carried_over(letter))
        return changes

    def page(self, view: StoreView, start: int, limit: int) -> list[Letter]:
        """Returns up to `limit`, and at most a thousand, dead letters from an offset on, in order."""
        found = view.scan(_AT + _number(start), _AT + _number(_BEYOND), min(limit, _SCANNED))
        return [self.decode(_last_number(key), frame) for key, frame in found]

    def all(self, view: StoreView) -> dict[int, Letter]:
        """Returns the dead letters by offset, in order."""
        return {letter.offset: letter for letter in self._pages(view, 0)}

    def open_in(self, store: StateStore) -> dict[int, Letter]:
        """Returns the open dead letters by offset, in order."""
        if not open_letters(_counts(store)):
            return {}
        return {letter.offset: letter for letter in self.between(store, 0) if letter.status.is_open}

    def on_inherit(
        self,
        store: StateStore,
        theirs: Mapping[int, Letter],
        position: int,
        read_up_to: int,
        in_topic: Collection[int],
        *,
        is_same_code: bool,
    ) -> LetterChanges:
        """Returns the changes that make the dead letters here follow those of the generation that sent until now.

        That one has applied all records below its position, and sent their outputs, but those of its open and discarded
        dead letters. Open ones are retried at once: the code of this generation may apply them. The same code would
        apply one that waits for a decision only because other events came since. It goes on waiting.

        Args:
            theirs: the dead letters of the other generation.
            position: of this generation.
            read_up_to: the position of the other one. It may be lower if a third one has sent, and is lost.
            in_topic: offsets of open dead letters whose outputs are in their topics.
            is_same_code: whether both generations are folded by the same code.
        """
        now, changes = self.now_ms(), LetterChanges(_counts(store))
        ours = self.open_in(store)
        # A new store takes all over, also of records that the source no longer has.
        after = {at: letter for at, letter in theirs.items() if at >= position or store.position is None}
        after |= as_sender_has({at: letter for at, letter in ours.items() if at < read_up_to}, theirs, now)
        unread = {at: letter for at, letter in ours.items() if at >= read_up_to and at in in_topic}
        after |= {at: replace(letter, is_sent=True, is_in_topic=False) for at, letter in unread.items()}
        before = self.at(store, after)
        for offset, letter in after.items():
            if (known := before.get(offset)) is not None and known.status.never_counts:
                continue
            is_hopeless = letter.is_in_topic and is_final(letter.cause)
            other = theirs.get(offset)
            if is_same_code and other is not None and other.status.needs_decision:
                # Ours may be due: it does not say what came of the attempts there.
                self._change(changes, offset, known, other)
                continue
            is_retried = letter.status.is_open and not is_hopeless
            self._change(changes, offset, known, letter.due_at_once(now) if is_retried else letter)
        self._schedule_unblocked(store, changes)
        store.look_for(_DUE, changes.records)
        return changes

    def on_begin_to_send(self, store: StateStore, sent: Collection[int]) -> LetterChanges:
        """Returns the changes that make a generation send whose sender is lost.

        Only this generation has a dead letter of what the former sender applied: its attempt comes into the topic.

        Args:
            sent: the offsets of open dead letters whose outputs are in their topics.
        """
        now, changes, before = self.now_ms(), LetterChanges(_counts(store)), self.at(store, sent)
        for offset, letter in before.items():
            after = replace(letter, is_sent=True, is_in_topic=False).due_at_once(now)
            self._change(changes, offset, letter, after)
        self._schedule_unblocked(store, changes)
        store.look_for(_DUE, changes.records)
        return changes

    def on_following(self, store: StateStore, sender: StoreView, start: int) -> tuple[LetterChanges, int]:
        """Returns the changes that give a silent generation the dead letters of the one that sends.

        Then neither applies their records in their turn: not an open one, and a discarded one never.

        Args:
            start: where this generation stands, or further on if it has the dead letters up to there.

        Returns:
            The offset up to which this generation has the dead letters then, too.
        """
        changes, end = LetterChanges(_counts(store)), offset_of(sender)
        if sender.position is None or not sender.position.letters:
            return changes, end
        kept = (letter for letter in self._pages(sender, start, end) if letter.status is not Status.APPLIED)
        theirs = {letter.offset: letter for letter in islice(kept, _MAX_FOLLOWED)}
        if len(theirs) == _MAX_FOLLOWED:
            end = max(theirs) + 1
        known = self.at(store, theirs)
        for offset, letter in theirs.items():
            before = known.get(offset)
            # A decision to retry may have failed there.
            if before is None or before.status is Status.APPLIED:
                self._change(changes, offset, before, letter)
        store.look_for(_DUE, changes.records)
        return changes, end

    def closed_in(self, store: StateStore, sender: StoreView) -> Iterator[dict[int, Letter]]:
        """Yields the dead letters of another generation that it has closed, and that are open here, some at a time."""
        ours = iter(self.open_in(store))
        while some := [*islice(ours, _MAX_FOLLOWED)]:
            frames = ((offset, sender.get(_AT + _number(offset))) for offset in some)
            theirs = {offset: self.decode(offset, frame) for offset, frame in frames if frame is not None}
            yield {offset: letter for offset, letter in theirs.items() if not letter.status.is_open}

    def _left_to(self, sender: StoreView, letters: Mapping[int, Letter]) -> set[int]:
        """Returns the offsets whose dead letters are open in the generation that sends, or discarded there just now."""
        if sender.position is None or not sender.position.letters:
            return set()
        frames = ((offset, sender.get(_AT + _number(offset))) for offset in letters)
        found = {at: self.decode(at, frame).status for at, frame in frames if frame is not None}
        return {
            at
            for at, there in found.items()
            if there.is_open or (there is Status.DISCARDED and letters[at].status.is_open)
        }

    def _due_and_not_left_to(self, sender: StoreView, store: StateStore, end: bytes) -> dict[int, Letter]:
        """Returns the first dead letters that are due, except those that are left to the generation that sends."""
        found: dict[int, Letter] = {}
        for keys in _scan(store, _DUE, end):
            letters = self.at(store, map(_last_number, keys))
            waiting = self._left_to(sender, letters)
            found |= {offset: letter for offset, letter in letters.items() if offset not in waiting}
            if len(found) >= _MAX_RETRIED:
                break
        return dict(sorted(found.items())[:_MAX_RETRIED])

    def _pages(self, view: StoreView, start: int, end: int = _BEYOND) -> Iterator[Letter]:
        """Yields the dead letters of a range of source offsets, in order."""
        while some := self.page(view, start, _SCANNED):
            yield from (letter for letter in some if letter.offset < end)
            start = some[-1].offset + 1
            if start >= end:
                return

    def decode(self, offset: int, frame: bytes) -> Letter:
        return Letter.of(self.codec.decode(frame), offset=offset)

    def _behind(self, store: StateStore, due: Mapping[int, Letter]) -> dict[int, Letter]:
        """Returns the dead letters that wait behind due ones, as many as one commit can retry with them."""
        behind: dict[int, Letter] = {}
        for key in {letter.key for letter in due.values() if letter.key is not None}:
            room = _MAX_RETRIED - len(due) - len(behind)
            if room > 0:
                found = self.at(store, islice((at for at in _indexed_of(store, key) if at not in due), room))
                behind |= {at: letter for at, letter in found.items() if letter.status is Status.BEHIND}
        return behind

    def _schedule_unblocked(self, store: StateStore, changes: LetterChanges) -> None:
        """Makes the first waiting dead letter of each key that is no longer blocked due."""
        if not self.keeps_order:
            return
        blocking = {(letter.key, letter.offset) for letter in changes.after.values() if letter.blocks_key}
        for key in changes.unblocked:
            left = next((at for at in _indexed_of(store, key) if at not in changes.after), None)
            if left is None or any(other == key and at < left for other, at in blocking):
                continue
            first = self.at(store, [left])[left]
            if first.status is Status.BEHIND:
                self._change(changes, left, first, first.due_at_once(self.now_ms()))

    def _carried_over(self, letter: Letter) -> Letter:
        """Returns the dead letter, due at once if it waits behind another and order no longer matters."""
        waits = letter.status is Status.BEHIND and not self.keeps_order
        return letter.due_at_once(self.now_ms()) if waits else letter

    def _change(self, changes: LetterChanges, offset: int, before: Letter | None, after: Letter | None) -> None:
        was, is_now = self._indexed(before), self._indexed(after)
        changes.records += [(key, None) for key in was if key not in is_now]
        changes.records += [(key, b"") for key in is_now if key not in was]
        changes.records.append((_AT + _number(offset), None if after is None else self.codec.encode(after.record())))
        changes.counts.subtract([] if before is None else [before.counter])
        changes.counts.update([] if after is None else [after.counter])
        if after is not None:
            changes.after[offset] = after
        if before is not None and before.key is not None and before.blocks_key and not (after and after.blocks_key):
            changes.unblocked.add(before.key)

    def _indexed(self, letter: Letter | None) -> list[bytes]:
        """Returns the keys of a dead letter's index entries."""
        if letter is None:
            return []
        offset = _number(letter.offset)
        due = [] if letter.due_ms == NEVER else [_DUE + _number(letter.due_ms) + offset]
        return due + self._of_key(letter)

    def _of_key(self, letter: Letter) -> list[bytes]:
        """Returns the key of the index entry by which later records find the dead letter, if they look for it."""
        is_found = letter.status.is_open if self.keeps_newest else self.keeps_order and letter.blocks_key
        if letter.key is None or not is_found:
            return []
        return [_of(letter.key) + _number(letter.offset)]


def letter_offset(key: bytes) -> int | None:
    """Returns the offset of the dead letter in a changelog record with this key, or None for any other record."""
    return _last_number(key) if key.startswith(_AT) else None


def _indexed_of(store: StateStore, key: bytes) -> Iterator[int]:
    """Yields the offsets of the dead letters that later records of a key look for, in order."""
    start = _of(key)
    for keys in _scan(store, start, start + _number(_BEYOND)):
        yield from map(_last_number, keys)


def _scan(store: StateStore, start: bytes, end: bytes) -> Iterator[list[bytes]]:
    """Yields the keys of a range, a thousand at a time. The caller may delete them between steps."""
    while keys := store.keys(start, end, _SCANNED):
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


def as_sender_has(ours: Mapping[int, Letter], theirs: Mapping[int, Letter], now_ms: int) -> dict[int, Letter]:
    """Returns open dead letters of a silent generation with what has become of their records in the sending one.

    Args:
        theirs: the dead letters of the sending generation, which has read these records. It has applied those that it
            has no dead letter of.
    """
    after: dict[int, Letter] = {}
    for offset, letter in ours.items():
        other = theirs.get(offset)
        if other is None:
            after[offset] = replace(letter, is_sent=True, is_in_topic=False)
        elif other.status is Status.DISCARDED:
            after[offset] = letter.closed(Status.DISCARDED, now_ms)
        else:
            after[offset] = replace(letter, is_sent=other.is_sent, is_in_topic=other.is_in_topic)
    return after
