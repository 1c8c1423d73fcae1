"""What a task that opens takes over from the other generations of its partition, and the order of its questions."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.engine import inheritance, opening
from balance_service.engine import task as task_module
from balance_service.engine.commit import write_position
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.inheritance import inherit, predecessors
from balance_service.engine.opening import starting_changes
from balance_service.engine.records import MISPLACED, NEVER, POSITION_KEY, Position, Role, TaskId
from balance_service.engine.schema_records import NO_SCHEMAS
from balance_service.engine.store import StateStore
from balance_service.engine.task import Task
from balance_service.errors import RetriableError, TaskHaltedError, TaskMigratedError
from balance_service.kafka.topics import Topic
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.read_models.rewards import Rewards
from balance_service.testing.fakes import FakeWriter
from tests.support.fakes import DECLARED, letters, position_codec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from balance_service.errors import BalanceServiceError
    from balance_service.model.stage import Stage

FIRST = Rewards().stages[-1]
SOURCE = Topic("scored", "source", 1)
NOW_MS = 10**9
ONE = Generations("rewards").begun(DECLARED)
BUILT = ONE.rebuilt(DECLARED, Switch.NEVER, 60, None, "", "")
SWITCHED = BUILT.compared(2, Comparison()).switched(2, "", "")
REPLACED = ONE.replaced(DECLARED)
UNKNOWN = "schema-id-unknown"


def never() -> bool:
    return False


def stage(generation: int) -> Stage:
    return FIRST.of_generation(generation)


def letter(offset: int, status: Status = Status.SCHEDULED, cause: str = UNKNOWN, **more: Any) -> Letter:
    return replace(Letter.first(offset, cause, b"k", 0, 300_000), status=status, **more)


class Broker:
    """The changelogs of a partition's generations, and the topics of their outputs, in memory; notes the questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.changelogs: dict[str, tuple[Position, Sequence[Letter]]] = {}
        self.sent: list[int] = []
        self.now = ONE
        self.newest: Generations | None = None
        self.cannot_fence: BalanceServiceError | None = None
        self.writers: list[FakeWriter] = []
        for module in (inheritance, task_module):
            monkeypatch.setattr(module, "open_writer", self._open_writer)
            monkeypatch.setattr(module, "last_positions", self._last_positions)
        monkeypatch.setattr(inheritance, "reader_to_end", self._letters)
        for using in (inheritance, opening):
            monkeypatch.setattr(using, "sent_of", lambda *_: iter(self.sent))

    def has(self, generation: int, offset: int, *some: Letter, **more: Any) -> None:
        """A generation stands at an offset."""
        position = Position(
            offset,
            7,
            more.pop("source_topic_id", SOURCE.topic_id),
            source="scored:0",
            owner=more.pop("owner", stage(generation).mark),
            letters={one.counter: 1 for one in some},
            **more,
        )
        self.changelogs[stage(generation).changelog] = (position, some)

    def read_newest(self) -> Generations:
        self.asked.append("read generations")
        if self.newest is not None:
            self.now = self.newest
        return self.now

    def find(self, name: str) -> Topic | None:
        return Topic(name, name, 1) if name in self.changelogs else None

    find_patiently = find

    def offsets(self, _name: str, partitions: Sequence[int], *, earliest: bool = False) -> dict[int, int]:
        return dict.fromkeys(partitions, 0 if earliest else 100)

    def _open_writer(self, _task_id: TaskId, _settings: object, of: Stage, *_: object) -> FakeWriter:
        def fence(_should_stop: object) -> None:
            self.asked.append(f"fence {of.name}")
            if self.cannot_fence is not None:
                raise self.cannot_fence

        writer: Any = FakeWriter()
        writer.fence = fence
        writer.expect = lambda end: self.asked.append(f"expect {end}")
        self.writers.append(writer)
        return cast("FakeWriter", writer)

    def _last_positions(self, *args: Any) -> dict[int, Position]:
        changelog = args[3]
        self.asked.append(f"read {changelog.removeprefix('-').removesuffix('-changelog')}")
        found = self.changelogs.get(changelog)
        return {} if found is None else {0: found[0]}

    def _letters(self, _settings: object, _topics: object, changelog: Topic, _partitions: object) -> Any:
        codec = letters().codec
        messages = [
            SimpleNamespace(
                key=lambda one=one: b"\xffletter-at" + one.offset.to_bytes(8, "big"),
                value=lambda one=one: codec.encode(one.record()),
            )
            for one in self.changelogs[changelog.name][1]
        ]
        position = SimpleNamespace(key=lambda: POSITION_KEY, value=lambda: b"")
        return closing(cast("Any", _Reader([position, *messages])))


class _Reader(list[Any]):
    def close(self) -> None: ...


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    return Broker(monkeypatch)


class Opening:
    """A generation's partition with a store on disk, whose task opens."""

    def __init__(self, broker: Broker, path: Path, generation: int, **more: Any) -> None:
        self.broker = broker
        self.codec = position_codec()
        self.letters = letters(now_ms=lambda: NOW_MS)
        self.store = StateStore(path / f"store{generation}", self.codec)
        self.decided: Mapping[int, Letter] = {}
        self.writer = FakeWriter()
        self.hosted: Any = SimpleNamespace(
            schemas=NO_SCHEMAS,
            stage=stage(generation),
            settings=SimpleNamespace(allow_finite_retention=False),
            topics=broker,
            source=SOURCE,
            partitioner=more.get("partitioner", "murmur2"),
            processor=SimpleNamespace(letters=self.letters, position_codec=self.codec),
            decisions=SimpleNamespace(decided_letters=lambda *_: {0: self.decided}),
            generations=HostedGenerations(lambda: broker.now, broker.read_newest),
        )
        if more.get("is_new"):
            self.hosted.generations.begin(self.hosted.stage)

    def opens(self, offset: int = 0) -> Position:
        """Writes what the task starts with; returns its position."""
        start = self.store.position or Position(offset, 1, SOURCE.topic_id, source="scored:0")
        since = self.hosted.generations.serves_since(self.hosted.stage)
        for position, changes in starting_changes(self.store, self.hosted, 0, start, since, never):
            write_position(position, self.codec, self.store, self.writer, changes)
        assert self.store.position is not None
        return self.store.position

    def has(self, *some: Letter) -> None:
        """The store has dead letters."""
        assert self.store.position is not None
        write_position(self.store.position, self.codec, self.store, self.writer, self.letters.carry_over(some))

    @property
    def known(self) -> dict[int, Letter]:
        return {one.offset: one for one in self.letters.between(self.store, 0)}


@pytest.fixture
def opening_of(broker: Broker, tmp_path: Path) -> Iterator[Any]:
    made: list[Opening] = []

    def of(generation: int, **more: Any) -> Opening:
        made.append(Opening(broker, tmp_path, generation, **more))
        return made[-1]

    yield of
    for one in made:
        one.store.close()


# A generation without a position


def test_the_first_generation_of_a_new_model_sends_from_the_first_event(broker: Broker, opening_of: Any) -> None:
    position = opening_of(1).opens()

    assert (position.offset, position.emitted_up_to, position.inherited) == (0, 0, 0)
    assert broker.asked == []


@pytest.mark.shows("outputs-once")
def test_a_generation_that_lost_its_changelog_sends_what_the_topics_of_its_outputs_lack(
    broker: Broker, opening_of: Any
) -> None:
    broker.sent = [0, 6, 2]
    opened = opening_of(1)
    opened.decided = {3: letter(3, Status.DISCARDED)}

    position = opened.opens()

    assert (position.emitted_up_to, position.inherited) == (7, 0)
    assert {at: one.status for at, one in opened.known.items()} == {3: Status.DISCARDED}


@pytest.mark.parametrize("found", [[], [0, 8]], ids=["outputs expired", "outputs are there"])
def test_a_generation_that_is_built_sends_nothing_and_asks_no_other_one(
    broker: Broker, opening_of: Any, found: list[int]
) -> None:
    broker.now, broker.sent = BUILT, found
    broker.has(1, 9, letter(4), inherited=0)
    opened = opening_of(2)
    opened.decided = {4: letter(4, Status.DISCARDED)}

    position = opened.opens()

    assert (position.offset, position.emitted_up_to, position.inherited) == (0, 0, NEVER)
    assert (broker.asked, [*opened.known]) == ([], [4])


@pytest.mark.shows("rebuild", "outputs-once")
def test_an_offline_rebuild_takes_over_what_was_sent_and_the_dead_letters(broker: Broker, opening_of: Any) -> None:
    broker.now = REPLACED
    open_one, applied = letter(4, is_in_topic=True), letter(5, Status.APPLIED, is_sent=True)
    broker.has(1, 9, open_one, applied, letter(6, Status.DISCARDED), emitted_up_to=7, inherited=0)
    # A decision that the changelog has already, and one about a record that it has no dead letter of.
    opened = opening_of(2, is_new=True)
    opened.decided = {4: letter(4, Status.DISCARDED), 2: letter(2, Status.DISCARDED)}

    position = opened.opens()

    assert (position.offset, position.emitted_up_to, position.inherited) == (0, 9, REPLACED.serving_since)
    assert {at: one.status for at, one in opened.known.items()} == {
        2: Status.DISCARDED,
        4: Status.SCHEDULED,
        5: Status.APPLIED,
        6: Status.DISCARDED,
    }
    # Each record is skipped or applied as before, and what was sent is not sent again.
    assert [*opened.letters.left_out_from(opened.store, 0)] == [2, 4, 6]
    assert [(one.is_in_topic, one.is_sent, one.due_ms) for one in opened.known.values()][1] == (True, False, NOW_MS)


@pytest.mark.shows("rebuild", "outputs-once")
def test_the_generation_that_sent_last_says_what_was_sent_of_dead_letters(broker: Broker, opening_of: Any) -> None:
    broker.now = SWITCHED.replaced(DECLARED)
    # The switch to generation 2 had begun, and generation 1 still sent in this partition.
    broker.has(1, 9, letter(4), inherited=0)
    broker.has(2, 7, letter(4), letter(3, is_sent=False))
    silent = opening_of(3)

    position = silent.opens()

    assert (position.emitted_up_to, [*silent.known]) == (9, [4])


@pytest.mark.shows("outputs-once")
def test_a_generation_that_lost_its_changelog_in_an_offline_rebuild_reads_the_topics_of_its_outputs(
    broker: Broker, opening_of: Any
) -> None:
    broker.now, broker.sent = REPLACED, [0, 10]
    broker.has(1, 9, inherited=0)

    assert opening_of(2).opens().emitted_up_to == 11


@pytest.mark.shows("outputs-once")
def test_a_generation_that_has_served_and_seems_to_have_sent_nothing_may_have_lost_its_changelog(
    broker: Broker, opening_of: Any
) -> None:
    opened = opening_of(1)
    opened.opens()
    # Opened again after the switch back, as a silent one.
    broker.now, broker.sent = SWITCHED.switched(1, "", ""), [0, 10]
    broker.has(2, 0)

    assert opened.opens().emitted_up_to == 11


@pytest.mark.shows("outputs-once")
def test_a_generation_that_is_folded_again_and_sent_last_has_not_the_dead_letters_of_all_that_was_sent(
    broker: Broker, opening_of: Any
) -> None:
    broker.now = BUILT
    opened = opening_of(2)
    opened.opens()
    opened.has(letter(7, is_in_topic=True))
    broker.now, broker.sent = SWITCHED, [7]
    broker.has(1, 5, emitted_up_to=9, inherited=0)

    position = opened.opens()

    assert (position.emitted_up_to, opened.known[7].is_sent) == (9, True)


def test_a_task_that_is_closed_while_it_reads_the_topics_of_its_outputs_does_not_open(
    broker: Broker, opening_of: Any
) -> None:
    broker.sent = [0, 1]
    opened = opening_of(1)

    with pytest.raises(TaskMigratedError, match="closed while it read the topics"):
        inherit(opened.hosted, 0, opened.store, 0, {}, lambda: True)


def test_of_two_that_have_sent_the_one_that_took_over_last_says_what_was_sent(broker: Broker, opening_of: Any) -> None:
    broker.now = SWITCHED.replaced(DECLARED)
    broker.has(1, 9, letter(4), inherited=0)
    broker.has(2, 3, letter(4, Status.DISCARDED), emitted_up_to=9, inherited=SWITCHED.number)
    opened = opening_of(3)

    position = opened.opens()

    assert position.emitted_up_to == 9
    assert [one.status for one in opened.known.values()] == [Status.DISCARDED]


@pytest.mark.shows("partitioner")
@pytest.mark.parametrize(("partitioner", "is_replayed"), [("crc32", True), ("murmur2", False)])
def test_a_record_that_was_misplaced_is_applied_in_its_turn_only_if_the_partitioner_has_changed(
    broker: Broker, opening_of: Any, partitioner: str, *, is_replayed: bool
) -> None:
    broker.now = REPLACED
    misplaced = letter(4, Status.WAITING, MISPLACED, is_in_topic=True)
    broker.has(1, 9, misplaced, letter(5), inherited=0, partitioner="murmur2")
    opened = opening_of(2, partitioner=partitioner)

    position = opened.opens()

    assert position.emitted_up_to == 9
    assert opened.letters.left_out_from(opened.store, 0) == ([5] if is_replayed else [4, 5])
    # Its outputs were never sent.
    assert not opened.known[4].is_sent


@pytest.mark.shows("rebuild")
def test_nothing_is_taken_over_from_a_generation_whose_source_was_another_topic(
    broker: Broker, opening_of: Any
) -> None:
    broker.now = REPLACED
    broker.has(1, 9, letter(4), inherited=0, source_topic_id="recreated since")
    opened = opening_of(2)

    position = opened.opens()

    assert (position.emitted_up_to, opened.known) == (0, {})
    assert broker.asked == ["read rewards", "fence rewards", "read rewards"]


def test_nothing_is_taken_over_from_a_changelog_of_another_application(broker: Broker, opening_of: Any) -> None:
    broker.now = REPLACED
    broker.has(1, 9, inherited=0, owner="another\0rewards")

    with pytest.raises(TaskHaltedError, match="belongs to 'rewards' of application id 'another'"):
        opening_of(2).opens()
    assert broker.asked == ["read rewards"]


# A generation with a position


def test_a_task_that_sent_before_and_serves_on_asks_no_other_generation(broker: Broker, opening_of: Any) -> None:
    broker.now = BUILT
    opened = opening_of(1)
    opened.opens()

    again = opened.opens()

    assert (again.inherited, broker.asked) == (0, ["fence rewards.g2"])


def test_a_task_that_opens_after_a_switch_takes_over_what_it_missed(broker: Broker, opening_of: Any) -> None:
    broker.now = BUILT
    opened = opening_of(2)
    opened.opens()
    broker.now = SWITCHED
    broker.has(1, 9, letter(4), inherited=0)

    position = opened.opens()

    assert (position.emitted_up_to, position.inherited) == (9, SWITCHED.serving_since)
    assert (broker.asked, [*opened.known]) == (["read rewards", "fence rewards", "read rewards"], [4])


def test_a_task_that_opens_silent_after_a_switch_back_keeps_since_when_it_sent(broker: Broker, opening_of: Any) -> None:
    opened = opening_of(1)
    opened.opens()
    broker.now = SWITCHED

    position = opened.opens()

    # What it sent counts as long as no other one has taken over.
    assert (position.inherited, broker.asked) == (0, [])


def test_the_changelog_of_another_generation_with_fewer_partitions_has_nothing_to_take_over(
    broker: Broker, opening_of: Any
) -> None:
    broker.now = REPLACED
    broker.has(1, 9, inherited=0)

    hosted = opening_of(2).hosted

    assert [one.position.offset for one in predecessors(hosted, 0, never)] == [9]
    assert predecessors(hosted, 1, never) == []


# The order of the questions of a task that opens


class Restored:
    """The copy of a changelog that ends at an offset; notes when it is caught up."""

    def __init__(self, opened: Opening, end: int = 40) -> None:
        self.store: StateStore | None = opened.store
        self.end, self.changelog_topic_id = end, "changelog"
        self._asked = opened.broker.asked
        self.restoration = SimpleNamespace(restored=0, to_restore=0, seconds_left=None)

    def check_same_logs(self) -> None: ...

    def catch_up(self, *_: object, **__: object) -> list[Any]:
        self._asked.append("catch up")
        return []

    def tail(self) -> list[Any]:
        self._asked.append("tail")
        return []

    is_complete = True

    def stop_reading(self) -> None: ...

    def close(self) -> None: ...


def promoted(opened: Opening) -> Task:
    """A standby that becomes the owner."""
    task = Task(TaskId(opened.hosted.stage.name, 0), opened.hosted, Role.STANDBY)
    task.replica = cast("Any", Restored(opened))
    task._state = task_module.TaskState.TAILING
    task.promote()
    return task


def test_a_standby_goes_on_tailing_while_it_is_unknown_who_serves(broker: Broker, opening_of: Any) -> None:
    def fails() -> Generations:
        raise RetriableError("the partition has no leader")

    opened = opening_of(2)
    opened.hosted.generations = HostedGenerations(lambda: BUILT, fails)

    task = promoted(opened)

    assert (task.role, task.snapshot().reason) == (Role.STANDBY, "the partition has no leader")
    assert broker.asked == ["tail"]


@pytest.mark.shows("outputs-once")
def test_a_task_fences_its_own_predecessor_then_asks_who_serves_then_fences_the_others_and_then_reads_them(
    broker: Broker, opening_of: Any
) -> None:
    broker.now, broker.newest = BUILT, SWITCHED
    broker.has(1, 9, inherited=0)

    task = promoted(opening_of(2))

    assert broker.asked == [
        # While that fails, the standby goes on answering.
        "read generations",
        "read rewards.g2",
        "fence rewards.g2",
        "catch up",
        "expect 40",
        "read generations",
        # Another application may have a changelog of that name.
        "read rewards",
        "fence rewards",
        "read rewards",
    ]
    assert (task.sends, task.snapshot().sends_as_of) == (True, SWITCHED.serving_since)


@pytest.mark.shows("outputs-once")
def test_a_task_that_opens_does_not_send_if_another_generation_began_to_serve_that_is_unknown_here(
    broker: Broker, opening_of: Any
) -> None:
    broker.now = BUILT
    opened = opening_of(1)
    opened.opens()
    broker.newest = SWITCHED
    broker.asked.clear()

    task = promoted(opened)

    assert (task.sends, task.snapshot().sends_as_of, task.limit) == (False, NEVER, 0)
    # The serving generation fences it.
    assert "fence rewards.g2" not in broker.asked


@pytest.mark.shows("outputs-once")
def test_a_task_that_opens_as_the_only_one_that_serves_sends(broker: Broker, opening_of: Any) -> None:
    broker.newest = BUILT
    task = promoted(opening_of(1))

    assert (task.sends, task.limit, task.snapshot().sends_as_of) == (True, None, 0)


def test_a_task_does_not_open_while_it_cannot_fence_the_one_that_may_send(broker: Broker, opening_of: Any) -> None:
    broker.now = SWITCHED
    opened = opening_of(2)
    broker.cannot_fence = RetriableError("the coordinator does not respond")

    with pytest.raises(RetriableError, match="does not respond"):
        promoted(opened)

    assert opened.store.position is None


def test_the_writers_that_fence_other_generations_are_closed(broker: Broker, opening_of: Any) -> None:
    broker.now = REPLACED

    hosted = opening_of(2).hosted
    assert predecessors(hosted, 0, never) == []
    broker.cannot_fence = TaskMigratedError("the task was closed before it fenced its predecessor")
    with pytest.raises(TaskMigratedError):
        predecessors(hosted, 0, never)

    assert [writer.is_closed for writer in broker.writers] == [True, True]
