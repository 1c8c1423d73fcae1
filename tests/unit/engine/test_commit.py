"""The commit protocol: folded, written to the changelog, then to the store; all of it or nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.engine.batch import KeyedUpdate, PartitionUpdates, TaskBatch
from balance_service.engine.commit import Committed, commit, decide, write_position
from balance_service.engine.database import Database
from balance_service.engine.dead_letter import Status
from balance_service.engine.fold import FoldProcessor
from balance_service.engine.misplaced import MisplacedKeys
from balance_service.engine.opening import check_same_changelog
from balance_service.engine.processor import BatchOutcome, Tolerance
from balance_service.engine.records import MISPLACED, POSITION_KEY, RESERVED_PREFIX, DeadLetter, Output, Position
from balance_service.engine.state_frames import StateFrames
from balance_service.engine.store import StateStore
from balance_service.errors import RetriableError, StoreFullError, TaskMigratedError
from balance_service.kafka.partitioner import Partitioning, partition_of
from balance_service.model.events import HALT
from balance_service.read_models.balance import Balance
from tests.support.fakes import FakeRegistry, FakeWriter, letters
from tests.unit.spark.decoded import combined, row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from balance_service.engine.records import Record

REGISTRY = FakeRegistry()
STATES = AvroCodec(REGISTRY, "states", load_schema("BalanceState"))
POSITIONS = AvroCodec(REGISTRY, "positions", load_schema("Position"))
PARTITIONS = 2
PARTITION = 0
FOLDING = FoldProcessor(
    read_model=Balance(),
    acceleration=Balance().acceleration(STATES),
    frames=StateFrames(STATES, 1 << 20, are_of_standard_folds=True),
    position_codec=POSITIONS,
    letters=letters(REGISTRY),
    marker_codec=AvroCodec(REGISTRY, "markers", load_schema("IdempotencyMarker")),
    misplaced=MisplacedKeys("balance", Partitioning(PARTITIONS, "murmur2")),
    idempotency_window_ms=1_000,
    tolerance=Tolerance(HALT),
)
EPOCH = 5
MINE = [key for n in range(100) if partition_of(key := f"c{n}".encode(), PARTITIONS) == PARTITION]
STRANGE = next(key for n in range(100) if partition_of(key := f"c{n}".encode(), PARTITIONS) != PARTITION)
LARGEST = Decimal("9" * 36 + ".99")

Event = tuple[bytes, Decimal]


@dataclass
class Source:
    """The events of one partition, from offset 0, as the stream hands them over."""

    events: list[Event]
    asked: list[Sequence[bytes]] = field(default_factory=list)

    def batch(self, start: int = 0, end: int | None = None, *, letters: Sequence[DeadLetter] = ()) -> TaskBatch:
        """Some of the events, the updates of each key combined."""
        end = len(self.events) if end is None else end
        taken = self.events[start:end]
        rows = [row(start + n, key, amount) for n, (key, amount) in enumerate(taken)]
        updates = combined(rows, Balance().combine, pa.decimal128(38, 2))
        singles = partial(self.singles, start, end)
        return TaskBatch(start, replace(updates, end=end, applied=end - start, dead_letters=letters, singles=singles))

    def singles(self, start: int, end: int, keys: Sequence[bytes]) -> list[KeyedUpdate]:
        self.asked.append(keys)
        return [
            KeyedUpdate(key, {"amount": amount}, letter(offset, key, ""))
            for offset, (key, amount) in enumerate(self.events[start:end], start)
            if key in keys
        ]


def letter(offset: int, key: bytes = b"k", cause: str = "frame-missing") -> DeadLetter:
    return DeadLetter(offset, 1000 + offset, key, b"v%d" % offset, cause)


def events(*amounts: str, key: bytes = MINE[0]) -> list[Event]:
    return [(key, Decimal(amount)) for amount in amounts]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    opened = StateStore(tmp_path / "balance_0", POSITIONS)
    write_position(Position(0, EPOCH, "t"), POSITIONS, opened, FakeWriter())
    yield opened
    opened.close()


@pytest.fixture
def writer() -> FakeWriter:
    return FakeWriter()


def put(store: StateStore, key: bytes, amount: Decimal) -> None:
    store.write([(key, STATES.encode({"customerId": key.decode(), "amount": amount}))], store.changelog_offset)


def balances(store: StateStore) -> dict[bytes, Decimal]:
    found = zip([*MINE, STRANGE], store.get_many([*MINE, STRANGE]), strict=True)
    return {key: STATES.decode(frame)["amount"] for key, frame in found if frame is not None}


def committed(store: StateStore, writer: FakeWriter, batch: TaskBatch) -> Committed:
    return commit(batch, PARTITION, FOLDING, store, writer)


def test_a_batch_is_added_to_the_balances(store: StateStore, writer: FakeWriter) -> None:
    put(store, MINE[0], Decimal("10.00"))

    committed(store, writer, Source([*events("1.00", "2.00"), *events("5.00", key=MINE[1])]).batch())

    assert balances(store) == {MINE[0]: Decimal("13.00"), MINE[1]: Decimal("5.00")}


def test_the_changelog_gets_the_states_and_last_the_position(store: StateStore, writer: FakeWriter) -> None:
    committed(store, writer, Source(events("1.00", "2.00")).batch())

    ((states, letters, position),) = writer.commits
    assert [(key, STATES.decode(frame or b"")["amount"]) for key, frame in states] == [(MINE[0], Decimal("3.00"))]
    assert letters == []
    assert POSITIONS.decode(position) == Position(2, EPOCH, "t", keys=1).record()


def test_the_store_equals_the_changelog(store: StateStore, writer: FakeWriter) -> None:
    committed(store, writer, Source(events("1.00", "2.00")).batch())

    ((states, _, position),) = writer.commits
    assert store.get_many([key for key, _ in states]) == [frame for _, frame in states]
    assert store.get_many([POSITION_KEY]) == [position]
    assert store.position == Position(2, EPOCH, "t", keys=1)
    assert store.changelog_offset == 2


def test_the_changelog_offset_passes_the_commit_marker_of_every_batch(store: StateStore, writer: FakeWriter) -> None:
    source = Source(events("1.00", "2.00"))

    committed(store, writer, source.batch(0, 1))
    committed(store, writer, source.batch(1, 2))

    assert (store.changelog_offset, writer.end) == (5, 6)
    assert store.position == Position(2, EPOCH, "t", keys=1)


@pytest.mark.parametrize("start", [0, 2, 4])
def test_a_batch_that_does_not_start_at_the_position_is_rejected(
    store: StateStore, writer: FakeWriter, start: int
) -> None:
    source = Source(events("1.00", "2.00", "3.00", "4.00", "5.00"))
    committed(store, writer, source.batch(0, 3))

    with pytest.raises(TaskMigratedError):
        committed(store, writer, source.batch(start, 5))

    assert balances(store) == {MINE[0]: Decimal("6.00")}
    assert len(writer.commits) == 1


@pytest.mark.shows("exactly-once")
def test_a_redelivered_batch_does_not_change_the_balance(store: StateStore, writer: FakeWriter) -> None:
    batch = Source(events("1.00")).batch()
    committed(store, writer, batch)

    with pytest.raises(TaskMigratedError):
        committed(store, writer, batch)

    assert balances(store) == {MINE[0]: Decimal("1.00")}


def test_a_store_without_a_position_rejects_a_batch(tmp_path: Path, writer: FakeWriter) -> None:
    store = StateStore(tmp_path / "new", POSITIONS)

    with pytest.raises(TaskMigratedError):
        committed(store, writer, Source(events("1.00")).batch())

    assert writer.commits == []
    store.close()


@pytest.mark.parametrize("error", [TaskMigratedError("fenced"), RetriableError("unknown outcome")])
def test_nothing_is_written_to_the_store_if_the_changelog_write_fails(
    store: StateStore, error: TaskMigratedError | RetriableError
) -> None:
    put(store, MINE[0], Decimal("10.00"))
    offset = store.changelog_offset

    with pytest.raises(type(error)):
        committed(store, FakeWriter(fails_with=error), Source(events("1.00")).batch())

    assert balances(store) == {MINE[0]: Decimal("10.00")}
    assert (store.position, store.changelog_offset) == (Position(0, EPOCH, "t"), offset)


def test_a_batch_without_updates_moves_the_position_too(store: StateStore, writer: FakeWriter) -> None:
    done = committed(store, writer, TaskBatch(0, PartitionUpdates(7, ignored={"a.B": 4, "": 2})))

    assert done == Committed(applied=0, ignored=6, duplicates=0, dead_lettered=0, others={"a.B": 4})
    assert store.position == Position(7, EPOCH, "t")
    assert writer.commits[0][0] == []


def test_a_batch_is_counted(store: StateStore, writer: FakeWriter) -> None:
    source = Source(events("1.00", "2.00", "3.00"))
    batch = source.batch(letters=[letter(3), letter(4)])

    done = Committed(applied=3, ignored=0, duplicates=0, dead_lettered=2, causes={letter(3).cause: 2})
    assert committed(store, writer, batch) == done


def test_a_commit_tells_of_no_dead_letter_that_another_generation_writes(store: StateStore, writer: FakeWriter) -> None:
    batch = replace(Source(events("1.00")).batch(letters=[letter(3)]), is_silent=True)

    assert committed(store, writer, batch).refused == {}


def test_dead_letters_are_written_in_offset_order(store: StateStore, writer: FakeWriter) -> None:
    put(store, MINE[0], LARGEST)
    source = Source([*events("-1.00"), *events("1.00"), *events("0.01"), *events("1.00")])

    committed(store, writer, source.batch(letters=[letter(9), letter(1)]))

    assert [dead.offset for dead in writer.commits[0][1]] == [1, 2, 3, 9]


def test_single_events_are_read_only_if_a_combined_update_cannot_be_applied(
    store: StateStore, writer: FakeWriter
) -> None:
    source = Source(events("1.00", "2.00"))

    committed(store, writer, source.batch())

    assert source.asked == []


def test_only_the_events_that_overflow_are_dead_letters(store: StateStore, writer: FakeWriter) -> None:
    put(store, MINE[0], Decimal("9" * 35 + "8.99"))
    source = Source([*events("0.50", "0.75", "0.50", "-3.00"), *events("7.00", key=MINE[1]), *events("5.00", "1.00")])

    done = committed(store, writer, source.batch())

    # 0.50 fits, 0.75 does not, 0.50 does, -3.00 makes room, 5.00 does not fit, 1.00 does.
    letters = writer.commits[0][1]
    assert [(dead.offset, dead.cause) for dead in letters] == [
        (1, "balance-overflow"),
        (5, "balance-overflow"),
    ]
    assert [(dead.key, dead.value) for dead in letters] == [(MINE[0], b"v1"), (MINE[0], b"v5")]
    assert {dead.detail for dead in letters} == {"the new 'amount' does not fit into its type"}
    assert done.refused == {"balance-overflow": letters[0]}
    assert str(balances(store)[MINE[0]]) == "9" * 35 + "7.99"
    assert balances(store)[MINE[1]] == Decimal("7.00")
    assert source.asked == [[MINE[0]]]
    assert done == Committed(applied=5, ignored=0, duplicates=0, dead_lettered=2, causes={"balance-overflow": 2})


def test_a_key_whose_every_event_overflows_keeps_its_balance(store: StateStore, writer: FakeWriter) -> None:
    put(store, MINE[0], LARGEST)
    source = Source(events("1.00", "2.00"))

    done = committed(store, writer, source.batch())

    assert balances(store) == {MINE[0]: LARGEST}
    assert MINE[0] not in dict(writer.commits[0][0])
    assert done == Committed(applied=0, ignored=0, duplicates=0, dead_lettered=2, causes={"balance-overflow": 2})


def test_updates_that_are_not_combined_are_folded_in_offset_order(store: StateStore, writer: FakeWriter) -> None:
    source = Source(events("1.00", "2.00"))
    updates = [KeyedUpdate(key, {"amount": amount}) for key, amount in source.events]

    committed(store, writer, TaskBatch(0, PartitionUpdates(2, None, updates, 2, singles=partial(source.singles, 0, 2))))

    assert balances(store) == {MINE[0]: Decimal("3.00")}
    assert len(writer.commits[0][0]) == 1


def test_an_overflow_among_uncombined_updates_counts_none_of_them_twice(store: StateStore, writer: FakeWriter) -> None:
    put(store, MINE[0], Decimal("9" * 35 + "8.99"))
    source = Source(events("0.50", "0.75", "0.25"))
    updates = [KeyedUpdate(key, {"amount": amount}) for key, amount in source.events]

    done = committed(
        store, writer, TaskBatch(0, PartitionUpdates(3, None, updates, 3, singles=partial(source.singles, 0, 3)))
    )

    assert str(balances(store)[MINE[0]]) == "9" * 35 + "9.74"
    assert [dead.offset for dead in writer.commits[0][1]] == [1]
    assert done == Committed(applied=2, ignored=0, duplicates=0, dead_lettered=1, causes={"balance-overflow": 1})


def test_events_whose_key_belongs_to_another_partition_are_dead_letters(store: StateStore, writer: FakeWriter) -> None:
    source = Source([*events("1.00"), *events("2.00", key=STRANGE), *events("3.00"), *events("4.00", key=STRANGE)])

    done = committed(store, writer, source.batch())

    assert [(dead.offset, dead.cause, dead.key) for dead in writer.commits[0][1]] == [
        (1, MISPLACED, STRANGE),
        (3, MISPLACED, STRANGE),
    ]
    assert balances(store) == {MINE[0]: Decimal("4.00")}
    assert done == Committed(applied=2, ignored=0, duplicates=0, dead_lettered=2, causes={MISPLACED: 2})


def test_a_fold_writes_nothing(store: StateStore) -> None:
    folded = FOLDING.outcome(Source(events("1.00")).batch(), PARTITION, Position(0, EPOCH, "t"), store)

    assert (len([*folded.records()]), folded.dead_letters) == (1, [])
    assert balances(store) == {}


def test_a_position_can_be_written_alone(store: StateStore, writer: FakeWriter) -> None:
    write_position(Position(0, EPOCH + 1, "t"), POSITIONS, store, writer)

    assert store.position == Position(0, EPOCH + 1, "t")
    assert writer.commits == [([], [], POSITIONS.encode(Position(0, EPOCH + 1, "t").record()))]


def test_an_overflow_that_a_later_event_undoes_is_a_dead_letter_in_one_batch_as_in_two(
    store: StateStore, writer: FakeWriter
) -> None:
    put(store, MINE[0], LARGEST)

    done = committed(store, writer, Source(events("2.00", "-3.00")).batch())

    assert done.dead_lettered == 1


@pytest.mark.shows("deterministic")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    amounts=st.lists(st.integers(0, 10**16).map(lambda n: Decimal(n).scaleb(-2)), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 11)),
)
def test_batch_boundaries_do_not_change_which_events_overflow(
    tmp_path_factory: pytest.TempPathFactory, amounts: list[Decimal], cuts: set[int]
) -> None:
    room = Decimal("9" * 22 + "0" * 14 + ".00")
    source = Source([(MINE[0], amount) for amount in amounts])
    outcomes = []
    for bounds in ([0, len(amounts)], sorted({0, len(amounts), *(c for c in cuts if c < len(amounts))})):
        store, writer = StateStore(tmp_path_factory.mktemp("store"), POSITIONS), FakeWriter()
        write_position(Position(0, EPOCH, "t"), POSITIONS, store, writer)
        put(store, MINE[0], room)
        for start, end in pairwise(bounds):
            committed(store, writer, source.batch(start, end))
        letters = [dead.offset for _, dead_letters, _ in writer.commits for dead in dead_letters]
        outcomes.append((balances(store), letters, store.position))
        store.close()

    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("named", ["", "mine"])
def test_a_position_of_this_changelog_or_of_none_is_accepted(named: str) -> None:
    check_same_changelog("mine", named)


@pytest.mark.parametrize("named", ["another", None])
def test_a_position_of_another_changelog_is_rejected(named: str | None) -> None:
    with pytest.raises(RetriableError, match="recreated"):
        check_same_changelog("mine", named)


def test_a_commit_passes_the_stores_changelog_offset_to_the_writer(store: StateStore, writer: FakeWriter) -> None:
    source = Source(events("1.00", "2.00", "4.00"))
    holds = [store.changelog_offset]
    for start in range(3):
        commit(source.batch(start, start + 1), PARTITION, FOLDING, store, writer)
        holds.append(store.changelog_offset)

    assert writer.held == holds[:-1]


def is_full(*_: object) -> None:
    raise StoreFullError("make room")


def decide_on(store: StateStore, writer: FakeWriter) -> None:
    """Discards the dead letter at offset 0."""
    letters = FOLDING.letters
    decide(letters.on_decision(store, letters.at(store, [0]).values(), Status.DISCARDED), (), FOLDING, store, writer)


def test_a_decision_that_the_store_has_no_room_for_reopens_the_task(
    store: StateStore, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(store, writer, TaskBatch(0, PartitionUpdates(1, dead_letters=[letter(0)])))
    monkeypatch.setattr(store, "write", is_full)

    with pytest.raises(RetriableError, match="make room"):
        decide_on(store, writer)


def test_a_record_that_is_set_aside_and_that_the_store_has_no_room_for_reopens_the_task(
    store: StateStore, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "write", is_full)
    audit = [Output(0, "decisions", 0, None, None, 0, [])]

    with pytest.raises(RetriableError, match="make room"):
        commit(TaskBatch(0, PartitionUpdates(1, dead_letters=[letter(0)])), PARTITION, FOLDING, store, writer, audit)


def test_after_a_store_that_lacks_a_commit_nothing_puts_the_position_back(
    store: StateStore, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(store, writer, TaskBatch(0, PartitionUpdates(1, dead_letters=[letter(0)])))
    with monkeypatch.context() as full:
        full.setattr(store, "write", is_full)
        with pytest.raises(StoreFullError):
            committed(store, writer, TaskBatch(1, PartitionUpdates(2, dead_letters=[letter(1)])))
    written = len(writer.commits)

    with pytest.raises(TaskMigratedError):
        decide_on(store, writer)

    assert len(writer.commits) == written


def test_a_partly_stored_commit_is_not_folded_twice(
    store: StateStore, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source([(key, Decimal("1.00")) for key in MINE])
    monkeypatch.setattr("balance_service.engine.store._PART", 10)
    write, writes = Database.write, []

    def fail_at_the_second(database: Database, records: Collection[Record]) -> None:
        writes.append(records)
        if len(writes) == 2:
            raise RetriableError("the disk refuses")
        write(database, records)

    monkeypatch.setattr(Database, "write", fail_at_the_second)
    with pytest.raises(RetriableError, match="refuses"):
        commit(source.batch(), PARTITION, FOLDING, store, writer)
    monkeypatch.setattr(Database, "write", write)

    with pytest.raises(RetriableError, match="part of a commit"):
        commit(source.batch(), PARTITION, FOLDING, store, writer)

    assert len(writer.commits) == 1


def test_only_states_count_among_the_changed_keys() -> None:
    columns = [(pa.array([b"a", b"b"], pa.binary()), pa.array([b"1", None], pa.binary()))]
    others = [(b"b", None), (RESERVED_PREFIX + b"a marker", b"1")]
    outcome = BatchOutcome(0, columns=columns, others=others)

    assert sorted(outcome.changed_keys(2) or ()) == [b"a", b"b"]
    assert outcome.changed_keys(1) is None
