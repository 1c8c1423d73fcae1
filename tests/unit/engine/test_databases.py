"""RocksDB and the database in memory do the same, in any order of writes and reads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from balance_service.engine.databases import View, opened
from balance_service.errors import RetriableError

if TYPE_CHECKING:
    from balance_service.engine.databases import AnyDatabase

# Neighbours, a key that is the beginning of another, the empty key, and the first and the last byte.
KEYS = st.sampled_from([b"", b"\0", b"a", b"a\0", b"ab", b"b", b"\xff", b"\xff\0", b"\xff\xff"])
VALUES = st.none() | st.sampled_from([b"", b"one", b"two"])


class AnyWritesAndReads(RuleBasedStateMachine):
    """A dict is the model of both databases, and a copy of it that of a view."""

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.databases: list[AnyDatabase] = [opened(Path(self.folder.name)), opened(None)]
        self.content: dict[bytes, bytes] = {}
        self.views: list[tuple[dict[bytes, bytes], list[View]]] = []

    @rule(records=st.lists(st.tuples(KEYS, VALUES), max_size=5))
    def write(self, records: list[tuple[bytes, bytes | None]]) -> None:
        for database in self.databases:
            database.write(records)
        for key, value in records:
            if value is None:
                self.content.pop(key, None)
            else:
                self.content[key] = value

    @rule()
    def view(self) -> None:
        self.views.append((dict(self.content), [View(database.snapshot()) for database in self.databases]))
        # The others are forgotten, as by a store.
        del self.views[:-2]

    @rule(start=KEYS, stop=KEYS, limit=st.integers(0, 5), wanted=st.lists(KEYS, max_size=3))
    def read(self, start: bytes, stop: bytes, limit: int, wanted: list[bytes]) -> None:
        within = sorted(key for key in self.content if start <= key < stop)
        for database in self.databases:
            assert database.keys(start, stop, limit) == within[:limit]
            assert database.get_many(wanted) == [self.content.get(key) for key in wanted]
            assert database.get(start) == self.content.get(start)

    @rule(start=KEYS, stop=KEYS, limit=st.integers(0, 5))
    def read_views(self, start: bytes, stop: bytes, limit: int) -> None:
        for content, views in self.views:
            within = sorted(item for item in content.items() if start <= item[0] < stop)
            before = max((item for item in content.items() if item[0] <= start), default=None)
            for view in views:
                assert view.scan(start, stop, limit) == within[:limit]
                assert view.last_at_or_before(start) == before
                assert view.get(start) == content.get(start)

    @invariant()
    def both_have_the_content(self) -> None:
        for database in self.databases:
            assert database.keys(b"", b"\xff\xff\xff", 100) == sorted(self.content)

    def teardown(self) -> None:
        self.views.clear()
        for database in self.databases:
            database.close()
        self.folder.cleanup()


TestAnyWritesAndReads = pytest.mark.timeout(120)(AnyWritesAndReads.TestCase)
TestAnyWritesAndReads.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.fixture(params=["on-disk", "in-memory"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> AnyDatabase:
    return opened(tmp_path / "store" if request.param == "on-disk" else None)


def test_a_closed_database_refuses_reads_and_writes_and_its_views_answer(database: AnyDatabase) -> None:
    database.write([(b"c1", b"one")])
    view = View(database.snapshot())
    database.close()
    database.close()

    assert view.get(b"c1") == b"one"
    assert database.sizes.keys == 0
    for refused in (lambda: database.get(b"c1"), lambda: database.get_many([b"c1"]), lambda: database.write([])):
        with pytest.raises(RetriableError, match="the local store cannot be used"):
            refused()


def test_a_database_has_as_many_keys_as_were_written(database: AnyDatabase) -> None:
    database.write([(b"%d" % number, b"a state") for number in range(100)])

    assert database.sizes.keys == 100
    assert database.sizes.store_bytes > 100 * len(b"a state")
    database.close()
