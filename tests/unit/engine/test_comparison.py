"""Two generations of a partition are compared at one position, key by key."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.engine import comparison as module
from balance_service.engine.comparison import MOST_DIFFERENCES, aligned, compare
from balance_service.engine.fold import FoldProcessor
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.hosted_stage import HostedStage
from balance_service.engine.misplaced import MisplacedKeys
from balance_service.engine.processor import Tolerance
from balance_service.engine.records import POSITION_KEY, Compared, Position, TaskId
from balance_service.engine.state_frames import StateFrames
from balance_service.engine.store import StateStore
from balance_service.engine.task import Task
from balance_service.errors import RetriableError, StoreCorruptedError
from balance_service.kafka.partitioner import Partitioning
from balance_service.kafka.topics import Topic
from balance_service.model.events import HALT
from balance_service.model.generations import Comparison, Generations
from balance_service.read_models.balance import Balance
from tests.support.fakes import FakeRegistry, letters, position_codec

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from pathlib import Path

    from balance_service.engine.store import StoreView
    from balance_service.engine.tasks import Tasks
    from balance_service.errors import BalanceServiceError

REGISTRY = FakeRegistry()
POSITIONS = position_codec(REGISTRY)
STATE = load_schema("BalanceState")
STATES = AvroCodec(REGISTRY, "states", STATE)
# Another version of the schema: the same fields in another order.
OTHER_STATES = AvroCodec(REGISTRY, "states", {**STATE, "fields": STATE["fields"][::-1]})
AT = 40


def processor() -> FoldProcessor:
    return FoldProcessor(
        read_model=Balance(),
        acceleration=None,
        frames=StateFrames(STATES, 1 << 20, are_of_standard_folds=True),
        position_codec=POSITIONS,
        letters=letters(REGISTRY),
        marker_codec=AvroCodec(REGISTRY, "markers", load_schema("IdempotencyMarker")),
        misplaced=MisplacedKeys("balance", Partitioning(1, "murmur2")),
        idempotency_window_ms=1_000,
        tolerance=Tolerance(HALT),
    )


def hosted(generation: int) -> HostedStage:
    unused: Any = None
    return HostedStage(
        stage=Balance().stages[-1].of_generation(generation),
        read_model=Balance(),
        settings=unused,
        topics=unused,
        source=Topic("balance", "id", 1),
        lease=unused,
        watermarks=unused,
        processor=processor(),
        decisions=unused,
        state_directory=unused,
        generations=HostedGenerations(lambda: Generations("balance")),
    )


def state(amount: str | int, codec: AvroCodec = STATES) -> bytes:
    return codec.encode({"customerId": "any", "amount": Decimal(amount)})


@dataclass
class Side:
    """A generation of the partition: its task, with a store that a test fills."""

    folder: Path
    generation: int
    held: dict[bytes, bytes] = field(default_factory=dict)
    failures: list[BalanceServiceError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hosted = hosted(self.generation)
        self.store = StateStore(self.folder / str(self.generation), POSITIONS)
        self.task = Task(TaskId(self.hosted.name, 0), self.hosted)
        self.task.replica.store = self.store
        failed = lambda _task, error: self.failures.append(error)  # noqa: E731
        self.tasks = cast("Tasks", SimpleNamespace(hosted=self.hosted, failed=failed))
        self.hold({})

    def hold(self, states: Mapping[bytes, bytes], position: int = AT) -> None:
        """Replaces the states, and moves the task."""
        stands_at = Position(position, self.generation, "id", source="balance:0", keys=len(states))
        gone: list[tuple[bytes, bytes | None]] = [(key, None) for key in self.held.keys() - states.keys()]
        self.store.write([*gone, *states.items(), (POSITION_KEY, POSITIONS.encode(stands_at.record()))], 1)
        self.held = {**states}
        self.task._shown = self.store.view


def result_of(comparing: Generator[None, None, Compared]) -> Compared:
    while True:
        try:
            next(comparing)
        except StopIteration as end:
            found: Compared = end.value
            return found


@dataclass
class Pair:
    serving: Side
    building: Side

    def hold(self, serving: Mapping[bytes, bytes], building: Mapping[bytes, bytes]) -> None:
        self.serving.hold(serving)
        self.building.hold(building)

    def comparing(self) -> Generator[None, None, Compared]:
        tasks = self.serving.task, self.building.task
        with stopping(self.building):
            return (yield from compare(self.serving.tasks, self.building.tasks, tasks))

    def compared(self) -> Compared:
        return result_of(self.comparing())


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    both = Pair(Side(tmp_path, 1), Side(tmp_path, 2))
    yield both
    for side in (both.serving, both.building):
        side.task._shown = None
        side.store.close()


def test_two_empty_generations_are_equal(pair: Pair) -> None:
    assert pair.compared() == Compared(AT, Comparison(), ())


def test_each_key_counts_once_as_equal_different_or_on_one_side_only(pair: Pair) -> None:
    pair.hold(
        {b"a": state("1"), b"b": state("2"), b"c": state("3")},
        {b"b": state("2"), b"c": state("4"), b"d": state("5"), b"e": state("6")},
    )

    found = pair.compared()

    assert found.counts == Comparison(equal=1, different=1, only_serving=1, only_building=2)
    assert found.position == AT
    assert found.differences == (
        (b"a", {"amount": Decimal("1.00")}, None),
        (b"c", {"amount": Decimal("3.00")}, {"amount": Decimal("4.00")}),
        (b"d", None, {"amount": Decimal("5.00")}),
        (b"e", None, {"amount": Decimal("6.00")}),
    )


def test_states_under_two_versions_of_the_schema_are_equal_if_their_values_are(pair: Pair) -> None:
    other = state("1", OTHER_STATES)
    assert other != state("1")
    pair.hold({b"a": state("1"), b"b": state("2")}, {b"a": other, b"b": state("3", OTHER_STATES)})

    found = pair.compared()

    assert found.counts == Comparison(equal=1, different=1)
    assert [difference.key for difference in found.differences] == [b"b"]


@pytest.mark.shows("rebuild")
def test_a_comparison_writes_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.hold({b"a": state(1), b"b": state(2)}, {b"a": state(1), b"c": state(3)})
    both = pair.serving, pair.building

    def kept() -> list[Any]:
        return [
            (side.store.view.scan(b"", b"\xff" * 32, 100), side.store.changelog_offset)
            for side in both
            if side.store.view
        ]

    def writes(*_: object, **__: object) -> None:
        raise AssertionError("a comparison writes")

    before = kept()
    # Two states each, with the position and the offset of the changelog.
    assert [len(records) for records, _ in before] == [4, 4]
    for name in ("write", "apply"):
        monkeypatch.setattr(StateStore, name, writes)
    # Neither to a changelog: nothing else has a task's writer.
    for side in both:
        side.task._writer = cast("Any", SimpleNamespace(commit=writes))

    assert pair.compared().counts == Comparison(1, 0, 1, 1)

    assert kept() == before


def test_only_the_first_twenty_differences_are_kept(pair: Pair) -> None:
    pair.hold({b"%03d" % n: state(n) for n in range(99)}, {b"%03d" % n: state(n + n % 3) for n in range(99)})

    found = pair.compared()

    assert found.counts == Comparison(equal=33, different=66)
    assert [difference.key for difference in found.differences] == [b"%03d" % n for n in range(99) if n % 3][
        :MOST_DIFFERENCES
    ]


def test_positions_markers_and_dead_letters_are_no_states(pair: Pair) -> None:
    pair.hold({b"a": state("1"), b"\xffanything": b"one"}, {b"a": state("1"), b"\xffanything": b"another"})

    assert pair.compared() == Compared(AT, Comparison(equal=1), ())


_STATES = st.dictionaries(st.binary(max_size=2).filter(lambda key: key < b"\xff"), st.integers(0, 2), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_STATES, _STATES, st.integers(1, 5))
@example({b"%d" % n: 0 for n in range(8)}, {}, 4)
@example({}, {b"%d" % n: 0 for n in range(8)}, 4)
@example({b"a": 0, b"b": 0}, {b"a": 0, b"b": 0, b"c": 0}, 2)
@example({b"": 0, b"\0": 0, b"\0\0": 1}, {b"": 1, b"\0": 0, b"\0\0": 1}, 1)
def test_a_comparison_page_by_page_is_that_of_all_states_at_once(
    pair: Pair, serving: dict[bytes, int], building: dict[bytes, int], page: int
) -> None:
    pair.hold({key: state(n) for key, n in serving.items()}, {key: state(n) for key, n in building.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PAGE", page)
        found = pair.compared()

    both = serving.keys() & building.keys()
    assert found.counts == Comparison(
        equal=sum(serving[key] == building[key] for key in both),
        different=sum(serving[key] != building[key] for key in both),
        only_serving=len(serving.keys() - building.keys()),
        only_building=len(building.keys() - serving.keys()),
    )
    differing = [key for key in sorted(serving.keys() | building.keys()) if serving.get(key) != building.get(key)]
    assert [difference.key for difference in found.differences] == differing[:MOST_DIFFERENCES]
    for key, left, right in found.differences:
        assert left == (None if key not in serving else {"amount": serving[key]})
        assert right == (None if key not in building else {"amount": building[key]})


def test_commits_during_a_comparison_do_not_change_its_result(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)
    states = {b"%d" % n: state(n) for n in range(8)}
    pair.hold(states, states)
    comparing = pair.comparing()
    next(comparing)

    pair.serving.hold({key: state("9") for key in states}, AT + 8)

    assert result_of(comparing) == Compared(AT, Comparison(equal=8), ())


@pytest.mark.parametrize("closed", ["serving", "building"])
def test_a_comparison_ends_if_a_task_is_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)
    states = {b"%d" % n: state(n) for n in range(8)}
    pair.hold(states, states)
    comparing = pair.comparing()
    next(comparing)

    getattr(pair, closed).task.give_up()

    with pytest.raises(RetriableError, match="closed during the comparison"):
        next(comparing)


@pytest.mark.parametrize("damaged", ["serving", "building"])
def test_a_damaged_store_is_restored_by_its_task(pair: Pair, monkeypatch: pytest.MonkeyPatch, damaged: str) -> None:
    side, damage = getattr(pair, damaged), StoreCorruptedError("block checksum mismatch")

    def scan(*_: object) -> None:
        raise damage

    monkeypatch.setattr(side.task._shown, "scan", scan)

    with pytest.raises(StoreCorruptedError):
        pair.compared()

    assert side.failures == [damage]
    assert pair.serving.failures + pair.building.failures == [damage]


@contextmanager
def stopping(side: Side, in_hand: int | None = None) -> Iterator[None]:
    """Plays the thread of a task: it stops where it is to, after what it has in hand."""
    stopped = threading.Event()

    def fold() -> None:
        seen, beyond = None, in_hand
        while not stopped.is_set():
            if (stop := side.task.stop) is None or stop is seen:
                continue
            to = max(stop.offset, side.task.position if beyond is None else beyond)
            if to != side.task.position:
                side.hold(side.held, to)
            beyond, seen = None, stop
            stop.reached.set()

    thread = threading.Thread(target=fold)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def offsets(views: tuple[StoreView, StoreView]) -> list[tuple[int, int] | None]:
    return [None if view.position is None else (view.position.offset, view.position.epoch) for view in views]


@pytest.mark.parametrize(("building", "serving"), [(AT - 10, AT), (AT, AT)])
def test_the_generation_that_is_built_is_brought_to_the_position_of_the_serving_one(
    pair: Pair, building: int, serving: int
) -> None:
    pair.building.hold({}, building)
    pair.serving.hold({}, serving)

    with stopping(pair.building):
        views = aligned(pair.serving.task, pair.building.task)

    assert offsets(views) == [(AT, 1), (AT, 2)]
    assert pair.building.task.stop is None
    assert pair.serving.task.stop is None


def test_the_serving_generation_is_waited_for_if_the_other_one_is_ahead(pair: Pair) -> None:
    pair.building.hold({}, AT - 10)

    # It had rows in hand when it was to stop.
    with stopping(pair.building, in_hand=AT + 10):
        moving = threading.Timer(0.2, lambda: pair.serving.hold({}, AT + 20))
        moving.start()
        views = aligned(pair.serving.task, pair.building.task)
        moving.join()

    assert offsets(views) == [(AT + 20, 1), (AT + 20, 2)]


def test_a_task_that_does_not_stop_in_time_folds_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ALIGN_SECONDS", 0.01)

    with pytest.raises(RetriableError, match=rf"balance.g2_0 did not reach position {AT} in time"):
        aligned(pair.serving.task, pair.building.task)

    assert pair.building.task.stop is None


def test_a_serving_task_that_stays_behind_does_not_hold_the_other_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ALIGN_SECONDS", 0.1)
    pair.serving.hold({}, AT - 10)

    with stopping(pair.building), pytest.raises(RetriableError, match=rf"balance_0 did not reach position {AT}"):
        aligned(pair.serving.task, pair.building.task)

    assert pair.building.task.stop is None


@pytest.mark.parametrize("closed", ["serving", "building"])
def test_a_task_that_does_not_answer_is_not_compared(pair: Pair, closed: str) -> None:
    getattr(pair, closed).task.give_up()

    with stopping(pair.building), pytest.raises(RetriableError, match="does not answer now"):
        aligned(pair.serving.task, pair.building.task)

    assert (pair.serving.task.stop, pair.building.task.stop) == (None, None)


def test_a_stage_answers_while_it_is_halted_if_its_read_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hosted(1).answers_when_halted

    monkeypatch.setattr(Balance, "answers_when_halted", True)

    assert hosted(1).answers_when_halted
