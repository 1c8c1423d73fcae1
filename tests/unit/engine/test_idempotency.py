"""Of several events with the same idempotency key the first counts, independent of where batches begin and end."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.engine.batch import KeyedUpdate, PartitionUpdates, TaskBatch
from balance_service.engine.commit import Committed, commit, write_position
from balance_service.engine.fold import FoldProcessor
from balance_service.engine.idempotency import REUSED
from balance_service.engine.misplaced import MisplacedKeys
from balance_service.engine.processor import Tolerance
from balance_service.engine.records import RESERVED_PREFIX, DeadLetter, Position
from balance_service.engine.state_frames import StateFrames
from balance_service.engine.store import StateStore
from balance_service.errors import RetriableError
from balance_service.kafka.partitioner import Partitioning
from balance_service.model.events import HALT
from balance_service.read_models.activity import Activity
from balance_service.read_models.balance import Balance
from tests.support.fakes import FakeRegistry, FakeWriter, letters, record_scan_starts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

REGISTRY = FakeRegistry()
STATES = AvroCodec(REGISTRY, "states", load_schema("BalanceState"))
POSITIONS = AvroCodec(REGISTRY, "positions", load_schema("Position"))
MARKERS = AvroCodec(REGISTRY, "markers", load_schema("IdempotencyMarker"))
WINDOW_MS = 1_000
FOLDING = FoldProcessor(
    read_model=Balance(),
    acceleration=None,
    frames=StateFrames(STATES, 1 << 20, are_of_standard_folds=True),
    position_codec=POSITIONS,
    letters=letters(REGISTRY),
    marker_codec=MARKERS,
    misplaced=MisplacedKeys("balance", Partitioning(1, "murmur2")),
    idempotency_window_ms=WINDOW_MS,
    tolerance=Tolerance(HALT),
)
LARGEST = Decimal("9" * 36 + ".99")


class Event(NamedTuple):
    amount: str
    name: bytes | None
    at_ms: int = 5_000
    key: bytes = b"c1"

    def update(self, offset: int, *, with_record: bool) -> KeyedUpdate:
        record = DeadLetter(offset, self.at_ms, self.key, b"v%d" % offset, "")
        is_kept = with_record or self.name is not None
        return KeyedUpdate(self.key, {"amount": Decimal(self.amount)}, record if is_kept else None, self.name)


class Partition:
    """A store and a changelog that events are folded into."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self.writer = FakeWriter()
        self.position = 0
        write_position(Position(0, 1, "t"), POSITIONS, store, FakeWriter())

    def fold(self, *events: Event) -> Committed:
        start = self.position
        self.position += len(events)

        def singles(keys: Sequence[bytes]) -> list[KeyedUpdate]:
            numbered = enumerate(events, start)
            return [event.update(offset, with_record=True) for offset, event in numbered if event.key in keys]

        updates = [event.update(offset, with_record=False) for offset, event in enumerate(events, start)]
        batch = TaskBatch(start, PartitionUpdates(self.position, None, updates, len(events), singles=singles))
        return commit(batch, 0, FOLDING, self.store, self.writer)

    def balance(self, key: bytes = b"c1") -> Decimal | None:
        (frame,) = self.store.get_many([key])
        return None if frame is None else STATES.decode(frame)["amount"]

    @property
    def letters(self) -> list[tuple[int, str]]:
        return [(letter.offset, letter.cause) for _, letters, _ in self.writer.commits for letter in letters]

    @property
    def markers(self) -> list[bytes]:
        return self.store.keys(RESERVED_PREFIX + b"once", RESERVED_PREFIX + b"oncf", 10_000)


@pytest.fixture
def partition(tmp_path: Path) -> Iterator[Partition]:
    store = StateStore(tmp_path / "balance_0", POSITIONS)
    yield Partition(store)
    store.close()


def test_a_retry_in_the_same_batch_is_a_duplicate(partition: Partition) -> None:
    done = partition.fold(Event("1.00", b"a"), Event("1.00", b"a"), Event("2.00", b"b"))

    assert (done.applied, done.duplicates, partition.balance()) == (2, 1, Decimal("3.00"))


def test_a_retry_in_a_later_batch_is_a_duplicate(partition: Partition) -> None:
    partition.fold(Event("1.00", b"a"))

    done = partition.fold(Event("1.00", b"a", 5_999))

    assert (done.applied, done.duplicates, partition.balance()) == (0, 1, Decimal("1.00"))


@pytest.mark.shows("idempotency-key")
def test_a_retry_with_another_amount_is_a_dead_letter(partition: Partition) -> None:
    partition.fold(Event("1.00", b"a"))

    done = partition.fold(Event("1.01", b"a"), Event("1.00", b"a"))

    assert (done.applied, done.duplicates, done.dead_lettered) == (0, 1, 1)
    assert (partition.letters, partition.balance()) == ([(1, REUSED)], Decimal("1.00"))


def test_customers_do_not_share_idempotency_keys(partition: Partition) -> None:
    partition.fold(Event("1.00", b"a"), Event("1.00", b"a", key=b"c2"), Event("5.00", b"2a", key=b"c"))

    assert [partition.balance(key) for key in (b"c1", b"c2", b"c")] == [Decimal(1), Decimal(1), Decimal(5)]


def test_after_the_window_an_idempotency_key_is_new_again(partition: Partition) -> None:
    partition.fold(Event("1.00", b"a", 5_000))

    done = partition.fold(Event("1.00", b"a", 6_000), Event("1.00", b"a", 6_500))

    assert (done.applied, done.duplicates, partition.balance()) == (1, 1, Decimal("2.00"))


@pytest.mark.shows("idempotency-key")
def test_time_is_the_greatest_timestamp_so_far_not_that_of_a_late_event(partition: Partition) -> None:
    partition.fold(Event("1.00", b"a", 5_000), Event("1.00", b"b", 7_000))

    done = partition.fold(Event("1.00", b"a", 5_100))

    assert (done.applied, done.duplicates) == (1, 0)


@pytest.mark.shows("idempotency-key")
def test_a_retry_of_an_event_that_is_late_by_more_than_the_window_is_a_duplicate(partition: Partition) -> None:
    partition.fold(Event("1.00", b"now", 9_000))

    late = partition.fold(Event("1.00", b"a", 5_000), Event("1.00", b"a", 5_000))
    later = partition.fold(Event("1.00", b"a", 5_001), Event("2.00", b"a", 5_001))
    after = partition.fold(Event("1.00", b"b", 10_000), Event("1.00", b"a", 5_000))

    assert (late.applied, late.duplicates) == (1, 1)
    assert (later.applied, later.duplicates, later.dead_lettered) == (0, 1, 1)
    # The window of a began at the stream time of its first event, 9,000.
    assert (after.applied, after.duplicates, partition.balance()) == (2, 0, Decimal("4.00"))


@pytest.mark.parametrize("at_ms", [1_780_000_000_000_000, 1_780_000_000_000_000_000])
def test_a_time_in_another_unit_makes_nothing_expire(partition: Partition, at_ms: int) -> None:
    partition.fold(Event("1.00", b"a"), Event("2.00", b"b", at_ms))

    done = partition.fold(Event("1.00", b"a"), Event("2.00", b"b", at_ms), Event("4.00", b"c"))

    assert (done.applied, done.duplicates) == (1, 2)
    assert partition.fold(Event("4.00", b"c")).duplicates == 1
    assert partition.balance() == Decimal("7.00")


def test_a_stream_time_in_another_unit_is_ignored(partition: Partition) -> None:
    write_position(Position(0, 1, "t", 1_780_000_000_000_000), POSITIONS, partition.store, FakeWriter())

    partition.fold(Event("1.00", b"a"))

    assert partition.fold(Event("1.00", b"a")).duplicates == 1


def test_an_event_that_cannot_be_applied_does_not_use_up_its_idempotency_key(partition: Partition) -> None:
    partition.fold(Event(str(LARGEST), None))
    partition.fold(Event("1.00", b"a"))

    done = partition.fold(Event("-5.00", None), Event("1.00", b"a"))

    assert (done.applied, done.duplicates, partition.letters) == (2, 0, [(1, "balance-overflow")])


def test_an_overflow_among_events_with_idempotency_keys_counts_nothing_twice(partition: Partition) -> None:
    partition.fold(Event("9" * 35 + "7.99", None))

    done = partition.fold(Event("1.00", b"a"), Event("5.00", None), Event("1.00", b"a"), Event("1.00", b"b"))

    assert (done.applied, done.duplicates, done.dead_lettered) == (2, 1, 1)
    assert (partition.letters, partition.balance()) == ([(2, "balance-overflow")], LARGEST)


def test_events_without_an_idempotency_key_write_no_markers(partition: Partition) -> None:
    partition.fold(*(Event("1.00", None) for _ in range(10)))

    assert partition.markers == []
    assert partition.store.position == Position(10, 1, "t", -1, keys=1)


def test_the_changelog_has_the_markers_of_the_store(partition: Partition) -> None:
    partition.fold(Event("1.00", b"a"))

    ((records, _, _),) = partition.writer.commits
    assert sorted(key for key, _ in records) == sorted([b"c1", *partition.markers])


def test_expired_markers_are_removed_from_store_and_changelog(partition: Partition) -> None:
    partition.fold(*(Event("1.00", b"%d" % n, 5_000 + n) for n in range(50)))
    assert len(partition.markers) == 100

    partition.fold(Event("1.00", b"late", 6_010))

    # The first eleven are at least as old as the window.
    assert len(partition.markers) == 2 * (50 - 11 + 1)
    removed = [key for key, value in partition.writer.commits[-1][0] if value is None]
    assert len(removed) == 22


def test_a_rewritten_marker_outlives_the_expiry_of_the_old_one(partition: Partition) -> None:
    partition.fold(Event("1.00", b"a", 5_000))
    partition.fold(Event("1.00", b"a", 6_000))
    partition.fold(Event("1.00", b"b", 6_900))

    done = partition.fold(Event("1.00", b"a", 6_950))

    assert (done.applied, done.duplicates, partition.balance()) == (0, 1, Decimal("3.00"))


def test_a_rewritten_marker_outlives_the_late_removal_of_the_old_one(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balance_service.engine.idempotency._REMOVED_AT_LEAST", 1)
    partition.fold(*(Event("1.00", b"%d" % n, 5_000) for n in range(20)), Event("1.00", b"a", 5_001))
    partition.fold(Event("1.00", b"a", 6_500))
    # The commit removes only three of the expired markers, of two records each, to take little time.
    assert len(partition.markers) == 2 * 21 + 1 - 2 * 3
    for _ in range(20):
        partition.fold(Event("1.00", None))
    # The rewritten marker of a remains, of two records.
    assert len(partition.markers) == 2

    done = partition.fold(Event("1.00", b"a", 6_600))

    assert (done.applied, done.duplicates) == (0, 1)


def by_time(timestamp_ms: int) -> bytes:
    return RESERVED_PREFIX + b"once-by-time" + timestamp_ms.to_bytes(8, "big")


def test_removed_markers_are_not_scanned_again(partition: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    partition.fold(*(Event("1.00", b"%d" % n, 5_000 + n) for n in range(50)))
    scanned_from = record_scan_starts(monkeypatch)
    for n in range(3):
        partition.fold(Event("1.00", b"late", 6_049 + 1_000 * n))

    first, second, third = scanned_from
    # The second commit still scans the fifty: it is the first to find them deleted.
    assert first <= by_time(5_000) <= second <= by_time(5_049) < third


def test_a_marker_that_expires_with_its_own_batch_is_removed_later(partition: Partition) -> None:
    partition.fold(Event("1.00", b"a", 5_000), Event("1.00", b"b", 9_000))

    partition.fold(Event("1.00", b"c", 9_001))

    # The last two markers remain, of two records each.
    assert len(partition.markers) == 4


def test_expired_markers_are_removed_after_a_commit_that_failed_to_remove_them(partition: Partition) -> None:
    partition.fold(Event("1.00", b"a", 5_000))
    partition.writer.fails_with = RetriableError("the broker does not respond")
    with pytest.raises(RetriableError):
        partition.fold(Event("1.00", b"b", 9_000))
    # The task is reopened.
    partition.writer = FakeWriter()
    partition.position -= 1
    # A smaller batch, as after a full disk: stream time is behind that of the failed commit.
    partition.fold(Event("1.00", b"c", 6_000))

    partition.fold(Event("1.00", b"d", 9_000))

    assert len(partition.markers) == 2


EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from(["1.00", "1.00", "1.00", "2.00"]),
        st.sampled_from([None, b"a", b"b", b"c"]),
        st.integers(0, 4_000),
        st.sampled_from([b"c1", b"c2"]),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.shows("deterministic")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS, cuts=st.sets(st.integers(1, 24)))
def test_batch_boundaries_do_not_change_which_events_count(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event], cuts: set[int]
) -> None:
    outcomes = []
    for bounds in ([0, len(events)], sorted({0, len(events), *(c for c in cuts if c < len(events))})):
        store = StateStore(tmp_path_factory.mktemp("store"), POSITIONS)
        partition = Partition(store)
        done = [partition.fold(*events[start:end]) for start, end in pairwise(bounds)]
        totals = [
            sum(column) for column in zip(*((d.applied, d.duplicates, d.dead_lettered) for d in done), strict=True)
        ]
        outcomes.append((totals, partition.balance(b"c1"), partition.balance(b"c2"), partition.letters))
        store.close()

    assert outcomes[0] == outcomes[1]


@pytest.mark.shows("idempotency-key")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS)
def test_any_events_count_as_the_rule_says(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    seen: dict[tuple[bytes, bytes], tuple[int, str]] = {}
    now, expected = -1, Decimal(0)
    for event in events:
        if event.name is None:
            expected += Decimal(event.amount)
            continue
        now = max(now, event.at_ms)
        at_ms, _ = seen.get((event.key, event.name), (-WINDOW_MS, ""))
        if at_ms + WINDOW_MS <= now:
            expected += Decimal(event.amount)
            seen[event.key, event.name] = (now, event.amount)
    store = StateStore(tmp_path_factory.mktemp("store"), POSITIONS)
    partition = Partition(store)

    partition.fold(*events)

    assert sum(partition.balance(key) or Decimal(0) for key in (b"c1", b"c2")) == expected
    store.close()


def test_every_read_model_recognizes_a_retry_with_another_id_and_time() -> None:
    update = {"additions": True, "first": 1, "latest": 1, "greatest": Decimal("1.00")}

    assert Activity().repeated(update) == Activity().repeated(update | {"first": 2, "latest": 2})
    assert Activity().repeated(update) != Activity().repeated(update | {"greatest": Decimal("2.00")})
    assert Balance().repeated({"amount": Decimal("1.00")}) == {"amount": Decimal("1.00")}
