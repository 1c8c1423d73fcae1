"""A million open dead letters of one partition, in a real store: what a tick, a page and their bytes come to."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.dead_letter import Letter, open_letters
from balance_service.engine.records import POSITION_KEY, DeadLetter, Position
from balance_service.engine.store import StateStore
from tests.support.fakes import letters, position_codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from balance_service.engine.dead_letter import LetterChanges
    from balance_service.engine.dead_letters import Letters

MANY, PART = 1_000_000, 50_000
AT_ONCE = 1_000
EVERY_MS = 300_000
NOW_MS = 1_700_000_000_000
TICK_SECONDS = 0.050
LETTER_BYTES = 200


class Partition:
    """A store at a position beyond its letters, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now_ms = NOW_MS
        self.letters: Letters = letters(every_ms=EVERY_MS, now_ms=lambda: self.now_ms, keeps_order=True)
        self.codec = position_codec()
        self.store = StateStore(folder, self.codec)
        for start in range(0, MANY, PART):
            # Written a millisecond apart, so each second a thousand become due.
            made = [
                Letter.first(at, "schema-id-unknown", b"c%07d" % at, NOW_MS + at, EVERY_MS)
                for at in range(start, start + PART)
            ]
            self._write(self.letters.on_commit(self.store, {}, (), (), made), start + PART)

    def try_in_vain(self) -> int:
        """One tick: what is due is tried again in vain; returns how many were."""
        due = self.letters.due(self.store).again
        known = {letter.offset: letter for letter in due}
        failed = [DeadLetter(letter.offset, 0, letter.key, None, letter.cause) for letter in due]
        self._write(self.letters.on_commit(self.store, known, failed), MANY)
        return len(due)

    def _write(self, changes: LetterChanges, offset: int) -> None:
        position = Position(offset, 1, "id", letters=changes.counted)
        frame = self.codec.encode(position.record())
        self.store.write([*changes.records, (POSITION_KEY, frame)], self.store.changelog_offset + 1)


@pytest.fixture(scope="module")
def partition(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Partition]:
    made = Partition(tmp_path_factory.mktemp("letters") / "store")
    with closing(made.store):
        yield made


def seconds(look: Callable[[], object]) -> float:
    """The processor's time that a look takes, at best of five: what else the machine does is not its own."""

    def once() -> float:
        began = time.thread_time()
        look()
        return time.thread_time() - began

    return min(once() for _ in range(5))


def test_a_tick_finds_what_is_due_within_50_ms_however_many_wait(partition: Partition) -> None:
    assert seconds(lambda: partition.letters.due(partition.store)) < TICK_SECONDS
    assert not partition.letters.due(partition.store).again

    partition.now_ms = NOW_MS + EVERY_MS + MANY // 2
    for _ in range(20):
        assert partition.try_in_vain() == AT_ONCE
        assert seconds(lambda: partition.letters.due(partition.store)) < TICK_SECONDS


def test_they_are_counted_and_listed_by_pages_from_anywhere(partition: Partition) -> None:
    view = partition.store.view
    assert view is not None
    assert view.position is not None
    counts: Mapping[tuple[str, str], int] = open_letters(view.position.letters)
    assert sum(counts.values()) == MANY
    for start in (0, MANY // 2, MANY - 100):
        page = partial(partition.letters.page, view, start, 100)
        assert [letter.offset for letter in page()] == [*range(start, start + 100)]
        assert seconds(page) < TICK_SECONDS


def test_what_they_take_is_bounded_and_told(partition: Partition) -> None:
    assert 0 < partition.store.sizes.store_bytes < LETTER_BYTES * MANY


def test_a_query_starts_beyond_them_without_reading_them(partition: Partition) -> None:
    assert seconds(lambda: partition.letters.left_out_from(partition.store, MANY)) < TICK_SECONDS
