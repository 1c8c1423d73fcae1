"""The state store, on real RocksDB and in memory: states and position together, or not at all."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.engine.database import Database
from balance_service.engine.records import POSITION_KEY, RESERVED_PREFIX, Position
from balance_service.engine.state_directory import FORMAT
from balance_service.engine.store import StateStore, StoreIdentity
from balance_service.errors import ConfigurationError, RetriableError, StoreCorruptedError
from tests.support.collector import no_collector
from tests.support.fakes import position_codec, record_scan_starts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.engine.records import Record
    from balance_service.engine.store import StoreView

CODEC = position_codec()
IDENTITY = StoreIdentity(FORMAT, "balance-service", "balance", 1, 2, "source-id", "changelog-id")


def position(offset: int, epoch: int = 1) -> Position:
    return Position(offset, epoch, "t", source="balance:1")


def position_record(offset: int, epoch: int = 1) -> tuple[bytes, bytes]:
    return POSITION_KEY, CODEC.encode(position(offset, epoch).record())


def view_of(store: StateStore) -> StoreView:
    view = store.view
    assert view is not None
    return view


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "balance_1"


@pytest.fixture
def on_disk(path: Path) -> Iterator[StateStore]:
    with closing(StateStore(path, CODEC)) as opened:
        yield opened


@pytest.fixture(params=["on-disk", "in-memory"])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[StateStore]:
    with closing(StateStore(path if request.param == "on-disk" else None, CODEC)) as opened:
        yield opened


def test_a_new_store_has_no_identity_no_position_and_no_states(store: StateStore) -> None:
    assert store.identity is None
    assert store.position is None
    assert store.changelog_offset == 0
    assert view_of(store).get(b"c1") is None
    assert store.get_many([b"c1", b"c2"]) == [None, None]


def test_states_position_and_changelog_offset_are_written_together(store: StateStore) -> None:
    store.write([(b"c1", b"one"), (b"c2", b"two"), position_record(10, epoch=3)], 13)

    assert store.get_many([b"c2", b"none", b"c1"]) == [b"two", None, b"one"]
    assert store.position == position(10, 3)
    assert store.changelog_offset == 13


def test_a_state_is_replaced_by_a_later_one_and_removed_by_a_tombstone(store: StateStore) -> None:
    store.write([(b"c1", b"one"), (b"c2", b"two")], 2)
    store.write([(b"c1", b"newer"), (b"c2", None)], 4)

    assert store.get_many([b"c1", b"c2"]) == [b"newer", None]


@pytest.mark.parametrize("more", [0, 5_000], ids=["in-order", "sorted"])
def test_the_last_of_several_records_of_one_key_stays(store: StateStore, more: int) -> None:
    others = [(b"%d" % n, b"another") for n in range(more)]
    before = [(b"c1", b"one"), (b"c2", b"one"), (b"c1", None), position_record(1)]
    after = [(b"c1", b"three"), (b"c2", None), position_record(2)]

    store.write([*before, *others, *after], 5)

    assert store.get_many([b"c1", b"c2"]) == [b"three", None]
    assert store.position == position(2, 1)


def test_a_position_of_a_newer_version_is_rejected_and_the_store_kept(on_disk: StateStore, path: Path) -> None:
    on_disk.write([(b"c1", b"one"), position_record(10)], 13)
    newer = CODEC.encode({**position(20).record(), "format": 4})

    with pytest.raises(ConfigurationError, match="position has format 4"):
        on_disk.write([(b"c1", b"newer"), (POSITION_KEY, newer)], 15)
    on_disk.close()
    with pytest.raises(ConfigurationError, match="position has format 4"):
        StateStore(path, CODEC)


def test_a_write_without_a_position_record_keeps_the_position(store: StateStore) -> None:
    store.write([(b"c1", b"one"), position_record(10)], 2)
    store.write([(b"c2", b"two")], 3)

    assert store.position == position(10, 1)
    assert store.changelog_offset == 3


def test_an_interrupted_large_write_is_invisible_and_records_how_far_it_may_reach(path: Path) -> None:
    store = StateStore(path, CODEC)
    store.write([(b"c00000", b"before"), position_record(1)], 2)

    def cut_off() -> Iterator[Record]:
        for n in range(50_000):
            yield f"c{n:05}".encode(), b"after"
        raise OSError("killed")

    with pytest.raises(OSError, match="killed"):
        store.write(cut_off(), 60_000)

    assert view_of(store).get(b"c00000") == b"before"
    store.close()
    reopened = StateStore(path, CODEC)
    assert reopened.get_many([b"c00000"]) == [b"after"]
    assert (reopened.changelog_offset, reopened.written_up_to) == (2, 60_000)
    states = [(f"c{n:05}".encode(), b"after") for n in range(50_000)]
    reopened.write([*states, position_record(2)], 70_000)
    assert (reopened.changelog_offset, reopened.written_up_to) == (70_000, 70_000)
    assert view_of(reopened).position == position(2, 1)
    reopened.close()


def test_a_view_is_immutable_under_later_writes(store: StateStore) -> None:
    store.write([(b"c1", b"one"), position_record(10)], 2)
    before = view_of(store)
    store.write([(b"c1", b"newer"), (b"c2", b"two"), position_record(20)], 5)

    assert (before.get(b"c1"), before.get(b"c2"), before.position) == (b"one", None, position(10, 1))
    after = view_of(store)
    assert (after.get(b"c1"), after.get(b"c2"), after.position) == (b"newer", b"two", position(20, 1))


def test_a_reopened_store_has_its_records(path: Path) -> None:
    store = StateStore(path, CODEC)
    store.identity = IDENTITY
    store.write([(b"c1", b"one"), position_record(10, epoch=2)], 7)
    store.close()

    reopened = StateStore(path, CODEC)

    assert reopened.identity == IDENTITY
    assert (reopened.position, reopened.changelog_offset) == (position(10, 2), 7)
    assert view_of(reopened).get(b"c1") == b"one"
    reopened.close()


@pytest.mark.parametrize("key", [b"c1", "Zoë".encode(), b"k" * 256, b"\x00"])
def test_a_key_is_its_bytes(store: StateStore, key: bytes) -> None:
    store.write([(key, b"state")], 1)

    assert view_of(store).get(key) == b"state"
    assert view_of(store).get(key + b"x") is None


def test_an_empty_state_differs_from_no_state(store: StateStore) -> None:
    store.write([(b"c1", b"")], 1)

    assert view_of(store).get(b"c1") == b""
    assert store.get_many([b"c1"]) == [b""]


@given(st.text(min_size=1))
def test_no_customer_id_can_reach_a_reserved_key(customer_id: str) -> None:
    try:
        key = customer_id.encode()
    except UnicodeEncodeError:
        return
    assert not key.startswith(RESERVED_PREFIX)


def test_a_store_keeps_its_identity_together_with_its_states(store: StateStore) -> None:
    store.identity = IDENTITY
    store.write([(b"c1", b"one")], 1)

    assert store.identity == IDENTITY


def test_a_store_of_a_newer_format_is_rejected(path: Path) -> None:
    store = StateStore(path, CODEC)
    store.identity = replace(IDENTITY, format=FORMAT + 1)
    store.close()

    reopened = StateStore(path, CODEC)
    with pytest.raises(ConfigurationError, match=f"format {FORMAT + 1}, this version knows {FORMAT}"):
        _ = reopened.identity
    reopened.close()


@pytest.mark.usefixtures("on_disk")
def test_an_open_store_cannot_be_opened_again(path: Path) -> None:
    with pytest.raises(RetriableError):
        StateStore(path, CODEC)


def test_a_views_scan_does_not_see_later_writes(store: StateStore) -> None:
    store.write([(b"c1", b"one"), (b"c2", b"two"), position_record(10)], 5)
    before = view_of(store)

    store.write([(b"c0", b"new"), (b"c1", None), (b"c2", b"newer"), position_record(20)], 11)

    assert before.scan(b"", RESERVED_PREFIX, 10) == [(b"c1", b"one"), (b"c2", b"two")]
    assert view_of(store).scan(b"", RESERVED_PREFIX, 10) == [(b"c0", b"new"), (b"c2", b"newer")]


def test_a_closed_store_has_no_view_and_rejects_writes(path: Path) -> None:
    store = StateStore(path, CODEC)
    store.write([(b"c1", b"one"), position_record(1)], 2)
    store.close()

    assert store.view is None
    assert store.position is None
    assert store.sizes.store_bytes == 0
    with pytest.raises(RetriableError):
        store.write([(b"c1", b"two")], 3)


def test_a_view_taken_before_closing_still_answers(path: Path) -> None:
    store = StateStore(path, CODEC)
    store.write([(b"c1", b"one")], 1)
    view = view_of(store)
    store.close()

    assert view.get(b"c1") == b"one"


def test_the_first_keys_of_an_index_are_found_until_deleted_and_deleted_ones_are_not_scanned_again(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_from = record_scan_starts(monkeypatch)
    store.write([(b"i%d" % n, b"") for n in range(1, 5)], 1)

    assert store.first_keys(b"i", b"i9", 2) == [b"i1", b"i2"]
    assert store.first_keys(b"i", b"i9", 2) == [b"i1", b"i2"]
    store.write([(b"i1", None), (b"i2", None)], 2)
    assert store.first_keys(b"i", b"i9", 2) == [b"i3", b"i4"]
    assert store.first_keys(b"i", b"i2", 2) == []
    added: list[Record] = [(b"a", b""), (b"i0", None), (b"i1", b"")]
    store.look_for(b"i", added)
    store.write(added, 3)
    assert store.first_keys(b"i", b"i9", 2) == [b"i1", b"i3"]
    assert looked_from == [b"i", b"i1", b"i1", b"i3", b"i1"]


def test_closing_twice_does_no_harm(path: Path) -> None:
    store = StateStore(path, CODEC)
    store.close()
    store.close()


def test_a_store_reports_its_sizes(store: StateStore) -> None:
    store.write([(f"c{n}".encode(), b"s" * 1000) for n in range(1000)], 1000)

    assert store.sizes.store_bytes > 500_000


def damaged(path: Path) -> StateStore:
    """A store with flipped bits in the blocks of its first keys; the reserved keys lie in the last one."""
    store = StateStore(path, CODEC)
    states = [(f"c{n:05}".encode(), f"{n * 7919:0100}".encode()) for n in range(2000)]
    store.write([*states, position_record(10)], 2001)
    store.close()
    # Opening writes what was only in the log to a table file.
    StateStore(path, CODEC).close()
    (table,) = path.glob("*.sst")
    content = bytearray(table.read_bytes())
    for at in range(100, len(content) // 4, 50):
        content[at] ^= 0xFF
    table.write_bytes(content)
    return StateStore(path, CODEC)


@pytest.mark.shows("damaged-store")
def test_a_flipped_bit_is_never_read_as_a_balance(path: Path) -> None:
    store = damaged(path)

    with pytest.raises(StoreCorruptedError):
        view_of(store).get(b"c00001")
    with pytest.raises(StoreCorruptedError):
        store.get_many([b"c00001"])
    store.close()


def test_a_damaged_block_does_not_keep_the_others_from_answering(path: Path) -> None:
    store = damaged(path)

    assert view_of(store).get(b"c01999") is not None
    assert store.position == position(10, 1)
    store.close()


@pytest.mark.parametrize("files", ["*.sst", "MANIFEST*", "CURRENT"])
def test_a_store_with_a_missing_file_is_damaged(path: Path, files: str) -> None:
    damaged(path).close()
    for file in path.glob(files):
        file.unlink()

    with pytest.raises(StoreCorruptedError):
        StateStore(path, CODEC)


def test_a_store_with_a_damaged_position_can_be_wiped_and_recreated_at_once(path: Path) -> None:
    store = StateStore(path, CODEC)
    store.write([(b"c1", b"one"), position_record(10)], 2)
    store.close()
    StateStore(path, CODEC).close()
    (table,) = path.glob("*.sst")
    content = bytearray(table.read_bytes())
    content[20] ^= 0xFF
    table.write_bytes(content)

    with pytest.raises(StoreCorruptedError):
        StateStore(path, CODEC)
    Database.wipe(path)

    StateStore(path, CODEC).close()


@pytest.mark.parametrize(
    ("position", "error"),
    # Blocks have checksums, so a schema that is unknown is the registry's loss.
    [(b"\x07rubbish", StoreCorruptedError), (b"\x00rubbish", RetriableError)],
)
def test_an_undecodable_position_leaves_the_directory_unlocked(
    path: Path, position: bytes, error: type[Exception]
) -> None:
    store = StateStore(path, CODEC)
    with pytest.raises(error) as kept:
        store.write([(POSITION_KEY, position)], 2)
    store.close()
    with pytest.raises(error) as kept_too:
        StateStore(path, CODEC)

    Database.wipe(path)
    StateStore(path, CODEC).close()
    assert kept.value is not kept_too.value


def test_a_wiped_store_is_empty(path: Path) -> None:
    damaged(path).close()

    Database.wipe(path)
    store = StateStore(path, CODEC)

    assert (store.identity, store.position, store.changelog_offset) == (None, None, 0)
    store.close()


def test_wiping_a_missing_store_does_no_harm(path: Path) -> None:
    Database.wipe(path)


def test_a_store_cannot_be_made_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(RetriableError):
        StateStore(tmp_path / "file" / "balance_1", CODEC)


def test_a_folder_that_only_garbage_keeps_locked_is_opened_at_the_second_attempt(path: Path) -> None:
    """A collection comes once in five minutes by itself."""
    with no_collector():
        database = Database(path)
        garbage: list[Any] = [database.snapshot()]
        garbage.append(garbage)
        database.close()
        del garbage
        with pytest.raises(RetriableError, match="lock hold by current process"):
            Database(path)
        Database(path).close()
