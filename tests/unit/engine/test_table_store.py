"""The versions of a table's rows in the store, compared with plain lists."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from balance_service.engine.records import RESERVED_PREFIX
from balance_service.engine.table_store import TableStore, TableView, Version

if TYPE_CHECKING:
    from collections.abc import Iterator

HISTORY_MS = 10
# A key that is the prefix of another, an empty key, and bytes that sort first and last.
KEYS = (b"1", b"12", b"\x00", b"2\xff", b"")
TIMES = st.integers(-3, 40)


@pytest.fixture(params=["on-disk", "in-memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TableStore]:
    path = tmp_path / "players_0" if request.param == "on-disk" else None
    with closing(TableStore(path, HISTORY_MS)) as opened:
        yield opened


def version(timestamp_ms: int, offset: int) -> Version:
    return Version(timestamp_ms, offset, b"frame %d" % offset)


def view_of(store: TableStore) -> TableView:
    view = store.view
    assert view is not None
    return view


def test_a_lookup_returns_the_version_at_a_time_or_the_oldest_one(store: TableStore) -> None:
    store.apply([(b"1", version(100, 0)), (b"1", Version(105, 1, None)), (b"1", version(110, 2))], 3)

    times = {time: view_of(store).as_of(b"1", time) for time in (99, 100, 104, 105, 110, 999)}
    assert {time: found.offset for time, found in times.items() if found} == {
        99: 0,
        100: 0,
        104: 0,
        105: 1,
        110: 2,
        999: 2,
    }
    assert times[105] == (105, 1, None)
    assert view_of(store).as_of(b"2", 999) is None


def test_a_late_record_does_not_replace_a_newer_one(store: TableStore) -> None:
    store.apply([(b"1", version(110, 0))], 1)
    store.apply([(b"1", version(105, 1)), (b"1", version(110, 2))], 3)

    view = view_of(store)
    assert (view.as_of(b"1", 109), view.as_of(b"1", 111)) == (version(105, 1), version(110, 2))


def test_a_sweep_deletes_the_versions_before_the_history_except_the_newest_of_each_row(store: TableStore) -> None:
    told = [(key, version(time, time)) for time in range(20) for key in (b"1", b"2")]
    store.apply(told, 20)
    # Advances the time of the table: the history begins at 15.
    store.apply([(b"3", version(25, 25))], 26)
    before = {time: view_of(store).as_of(b"1", time) for time in range(30)}

    for _ in range(30):
        store.sweep(3)

    # The next write makes a view after the sweeps.
    store.apply([], 26)
    # Versions 15 to 18 of each row are older ones, 19 is the newest.
    assert len(view_of(store).scan(RESERVED_PREFIX + b"version", RESERVED_PREFIX + b"versioo", 100)) == 8
    assert {time: view_of(store).as_of(b"1", time) for time in range(30)} == before


def test_a_view_does_not_change(store: TableStore) -> None:
    store.apply([(b"1", version(100, 0)), (b"1", version(101, 1))], 2)
    view = view_of(store)

    store.apply([(b"1", version(200, 2))], 3)
    store.sweep(10)

    assert view.as_of(b"1", 100) == version(100, 0)
    assert view_of(store).as_of(b"1", 100) == version(101, 1)


def test_a_store_keeps_its_identity_and_its_offset(store: TableStore) -> None:
    assert (store.identity, store.offset) == (None, None)

    store.identity = "abc"
    store.apply([], 7)

    assert (store.identity, store.offset) == ("abc", 7)


class Naive:
    """Every version by key, in the order of the topic."""

    def __init__(self) -> None:
        self.versions: dict[bytes, list[Version]] = {}

    def as_of(self, key: bytes, timestamp_ms: int) -> Version | None:
        told = sorted(self.versions.get(key, []))
        newest = max((v.timestamp_ms for versions in self.versions.values() for v in versions), default=0)
        begins = newest - HISTORY_MS
        before = [v for v in told if v.timestamp_ms <= max(timestamp_ms, begins)]
        return (before[-1] if before else told[0]) if told else None


class AnyInterleaving(RuleBasedStateMachine):
    """Upserts, tombstones and late records in any batches, with sweeps and restarts between them."""

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = TableStore(Path(self.folder.name), HISTORY_MS)
        self.naive = Naive()
        self.offset = 0

    @rule(told=st.lists(st.tuples(st.sampled_from(KEYS), TIMES, st.booleans()), max_size=6))
    def apply(self, told: list[tuple[bytes, int, bool]]) -> None:
        batch = []
        for key, timestamp_ms, is_tombstone in told:
            version = Version(timestamp_ms, self.offset, None if is_tombstone else b"frame %d" % self.offset)
            self.offset += 1
            batch.append((key, version))
            self.naive.versions.setdefault(key, []).append(version)
        self.store.apply(batch, self.offset)

    @rule(most=st.integers(1, 4))
    def sweep(self, most: int) -> None:
        self.store.sweep(most)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = TableStore(Path(self.folder.name), HISTORY_MS)
        assert self.store.offset in (None, self.offset)

    @invariant()
    def every_row_equals_the_model_at_any_time(self) -> None:
        view = view_of(self.store)
        for key in KEYS:
            for timestamp_ms in range(-5, 43, 3):
                assert view.as_of(key, timestamp_ms) == self.naive.as_of(key, timestamp_ms), (key, timestamp_ms)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestAnyInterleaving = pytest.mark.timeout(120)(AnyInterleaving.TestCase)
TestAnyInterleaving.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
