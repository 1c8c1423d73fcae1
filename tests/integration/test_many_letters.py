"""A million open dead letters in one partition of a store: the cost of a tick, a page, and their size."""

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
    """A store whose position lies beyond its dead letters, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now_ms = NOW_MS
        self.letters: Letters = letters(every_ms=EVERY_MS, now_ms=lambda: self.now_ms, keeps_order=True)
        self.codec = position_codec()
        self.store = StateStore(folder, self.codec)
        for start in range(0, MANY, PART):
            # The dead letters are a millisecond apart, so a thousand become due each second.
            made = [
                Letter.first(at, "schema-id-unknown", b"c%07d" % at, NOW_MS + at, EVERY_MS)
                for at in range(start, start + PART)
            ]
            self._write(self.letters.on_commit(self.store, {}, (), (), made), start + PART)

    def retry_and_fail(self) -> int:
        """Runs a tick in which each due retry fails; returns their number."""
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
    """Returns the best CPU time of five calls, which excludes other work of the machine."""

    def once() -> float:
        began = time.thread_time()
        look()
        return time.thread_time() - began

    return min(once() for _ in range(5))


def test_a_tick_finds_due_letters_within_50_ms_however_many_wait(partition: Partition) -> None:
    assert seconds(lambda: partition.letters.due(partition.store)) < TICK_SECONDS
    assert not partition.letters.due(partition.store).again

    partition.now_ms = NOW_MS + EVERY_MS + MANY // 2
    for _ in range(20):
        assert partition.retry_and_fail() == AT_ONCE
        assert seconds(lambda: partition.letters.due(partition.store)) < TICK_SECONDS


def test_letters_are_counted_and_paged_from_any_offset(partition: Partition) -> None:
    view = partition.store.view
    assert view is not None
    assert view.position is not None
    counts: Mapping[tuple[str, str], int] = open_letters(view.position.letters)
    assert sum(counts.values()) == MANY
    for start in (0, MANY // 2, MANY - 100):
        page = partial(partition.letters.page, view, start, 100)
        assert [letter.offset for letter in page()] == [*range(start, start + 100)]
        assert seconds(page) < TICK_SECONDS


def test_the_size_of_letters_is_bounded_and_reported(partition: Partition) -> None:
    assert 0 < partition.store.sizes.store_bytes < LETTER_BYTES * MANY


def test_a_query_starts_beyond_the_letters_without_reading_them(partition: Partition) -> None:
    assert seconds(lambda: partition.letters.left_out_from(partition.store, MANY)) < TICK_SECONDS
