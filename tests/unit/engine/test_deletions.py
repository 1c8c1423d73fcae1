"""The states of a compacted source: known to have every deletion, or begun again without any of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.engine import deletions
from balance_service.engine import task as task_module
from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.commit import write_position
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.deletions import Deletions
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.records import POSITION_KEY, Position, Role, TaskId
from balance_service.engine.schema_records import NO_SCHEMAS
from balance_service.engine.store import StateStore
from balance_service.engine.task import Task, TaskState
from balance_service.errors import RetriableError
from balance_service.kafka.topic_specs import CHANGELOG
from balance_service.kafka.topics import Topic, Watermarks
from balance_service.model.generations import Generations
from balance_service.model.stage import Stage
from balance_service.testing.fakes import FakeWriter
from tests.support.fakes import DECLARED, Clock, InMemoryTopics, letters, position_codec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOUR_MS = 3_600_000
# A moment of 2026.
NOW_MS = 1_800_000_000_000
SOURCE = Topic("rows", "source", 1)
STAGE = Stage(name="rows", owner="rows", source="rows", application_id="app", compacted=True)
ONE = Generations("rows").begun(DECLARED)
END = 50


class Compacted:
    """The owner of a compacted source's only partition, which keeps deletions for a day, with a store on disk."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = NOW_MS
        monkeypatch.setattr(deletions, "now_ms", lambda: self.now_ms)
        monkeypatch.setattr("balance_service.engine.opening.now_ms", lambda: self.now_ms)
        monkeypatch.setattr(task_module, "open_writer", lambda *_: self._writer())
        monkeypatch.setattr(task_module, "last_positions", lambda *_: {})
        self.path = path
        self.decided: dict[int, Letter] = {}
        self.codec, self.clock = position_codec(), Clock()
        self.topics = InMemoryTopics(rows=1)
        self.topics.configs["rows"] |= {**CHANGELOG}
        self.topics.ends["rows"] = END
        self.watermarks = Watermarks("rows", lambda: {0: END}, self.clock)
        self.writer = FakeWriter()
        self.store = StateStore(path, self.codec)
        self.hosted: Any = SimpleNamespace(
            stage=STAGE,
            settings=SimpleNamespace(allow_finite_retention=False),
            stands_still="",
            decisions=SimpleNamespace(decided_letters=lambda *_: {0: self.decided}),
            topics=self.topics,
            source=SOURCE,
            partitioner="murmur2",
            schemas=NO_SCHEMAS,
            watermarks=self.watermarks,
            processor=SimpleNamespace(letters=letters(keeps_newest=True), position_codec=self.codec),
            generations=HostedGenerations(lambda: ONE, lambda: ONE),
        )
        self.deletions = Deletions(cast("Any", self.hosted), 0)

    def passes(self, hours: float) -> None:
        self.now_ms += int(hours * HOUR_MS)
        self.clock.now += 3600 * hours

    def stands_at(self, offset: int, seen_to_ms: int = NOW_MS, *some: Letter) -> Position:
        """The store has two states, a marker and a position."""
        position = Position(
            offset, 7, SOURCE.topic_id, source="rows:0", keys=2, seen_to_ms=seen_to_ms, changelog_topic_id="changelog"
        )
        kept = [(b"a", b"one"), (b"b", b"two"), (b"\xffonce-by-name1", b""), (b"\xffonce-by-time1", b"")]
        changes = self.hosted.processor.letters.carry_over(some)
        self.store.write([*kept, (POSITION_KEY, self.codec.encode(position.record()))], 5)
        write_position(position, self.codec, self.store, self.writer, changes)
        return position

    def opened(self) -> Task:
        task = Task(TaskId("rows", 0), self.hosted)
        task._to(TaskState.RESTORING)
        task.replica = cast("Any", Restored(self.store))
        task._own()
        return task

    @property
    def keys(self) -> list[bytes]:
        """The keys of states and markers."""
        return [*self.store.keys(b"", b"\xff", 100), *self.store.keys(b"\xffonce", b"\xffoncf", 100)]

    def _writer(self) -> FakeWriter:
        writer: Any = self.writer
        writer.fence = writer.expect = lambda *_: None
        return cast("FakeWriter", writer)


def unavailable(*_: object) -> Any:
    raise RetriableError("the broker does not respond")


class Restored:
    """A store that the changelog has nothing more for."""

    changelog_topic_id, end = "changelog", 0
    restoration = SimpleNamespace(restored=0, to_restore=0, seconds_left=None)

    def __init__(self, store: StateStore) -> None:
        self.store = store

    def catch_up(self, *_: object, **__: object) -> list[Any]:
        return []

    def stop_reading(self) -> None: ...


@pytest.fixture
def compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compacted]:
    made = Compacted(tmp_path / "store", monkeypatch)
    yield made
    made.store.close()


# What is known


@pytest.mark.parametrize(
    ("hours", "why"),
    [(0, ""), (22.9, ""), (23.1, "was not read to its end for 23.1 h, and keeps deletions for 24 h")],
)
def test_deletions_may_be_gone_an_hour_before_the_topic_may_drop_them(
    compacted: Compacted, hours: float, why: str
) -> None:
    position = compacted.stands_at(9)
    compacted.passes(hours)

    found = compacted.deletions.gone(position)

    assert bool(found) == bool(why)
    assert why in found


def test_a_position_of_a_version_that_noted_no_time_may_lack_deletions(compacted: Compacted) -> None:
    assert "since a time that is not known" in compacted.deletions.gone(compacted.stands_at(9, -1))


@pytest.mark.parametrize("stage", [STAGE, replace(STAGE, compacted=False)])
def test_a_topic_that_drops_nothing_has_all_deletions(compacted: Compacted, stage: Stage) -> None:
    compacted.hosted.stage = stage
    compacted.topics.configs["rows"]["cleanup.policy"] = "delete"
    assert compacted.deletions.gone(compacted.stands_at(9, -1)) == ""
    compacted.topics.configs["rows"]["cleanup.policy"] = "compact,delete"
    assert bool(Deletions(compacted.hosted, 0).gone(compacted.stands_at(9, -1))) is stage.compacted


def test_half_of_a_short_time_is_the_margin(compacted: Compacted) -> None:
    compacted.topics.configs["rows"]["delete.retention.ms"] = "10000"
    position = compacted.stands_at(9)
    compacted.now_ms += 4_999
    assert compacted.deletions.gone(position) == ""
    compacted.now_ms += 1
    assert compacted.deletions.gone(position)


def test_the_ends_that_were_read_say_when_the_states_had_everything(compacted: Compacted) -> None:
    position = compacted.stands_at(END)
    compacted.passes(30)
    assert compacted.deletions.gone(position)
    compacted.watermarks.refresh()
    compacted.passes(1)

    assert compacted.deletions.seen_at(END) == compacted.now_ms - HOUR_MS
    assert compacted.deletions.seen_at(END - 1) == -1
    assert compacted.deletions.gone(position) == ""


def test_a_shorter_time_counts_for_a_task_that_is_behind_within_a_minute(compacted: Compacted) -> None:
    position = compacted.stands_at(9)
    compacted.passes(2)
    assert compacted.deletions.gone(position) == ""
    compacted.topics.configs["rows"]["delete.retention.ms"] = str(2 * HOUR_MS)
    compacted.passes(0.02)
    assert compacted.deletions.gone(position)


def test_states_that_are_none_lack_no_deletion(compacted: Compacted) -> None:
    position = compacted.stands_at(9, -1)

    assert compacted.deletions.gone(replace(position, keys=0)) == ""


# A task


@pytest.mark.shows("deleted-keys")
@pytest.mark.parametrize("some", [[], [Letter.first(3, "schema-incompatible", b"a", 0, 300_000)]])
def test_a_task_that_was_away_for_too_long_begins_again_without_states(
    compacted: Compacted, some: list[Letter]
) -> None:
    compacted.stands_at(9, NOW_MS, *some)
    before = len(compacted.writer.commits)
    compacted.passes(24)

    task = compacted.opened()

    position = compacted.store.position
    assert position is not None
    assert (position.offset, position.keys, position.emitted_up_to) == (0, 0, 9)
    assert position.seen_to_ms == compacted.now_ms
    # A standby shows each of them.
    epochs = [Position.of(compacted.codec.decode(frame)).epoch for *_, frame in compacted.writer.commits[before:]]
    assert (epochs[0], {*epochs[1:]}) == (8, {9})
    assert (compacted.keys, task.snapshot().again_up_to) == ([], 9)
    deleted, *_ = compacted.writer.commits[before]
    assert sorted(deleted) == [(b"a", None), (b"b", None), (b"\xffonce-by-name1", None), (b"\xffonce-by-time1", None)]
    assert [*compacted.hosted.processor.letters.between(compacted.store, 0)] == some
    assert position.letters == {one.counter: 1 for one in some}


@pytest.mark.shows("discarded")
def test_a_task_that_begins_again_applies_no_record_whose_discarded_dead_letter_is_forgotten(
    compacted: Compacted,
) -> None:
    compacted.stands_at(40)
    compacted.decided = {7: Letter.first(7, "schema-id-unknown", b"k", 0, 300_000).closed(Status.DISCARDED, 0)}
    compacted.passes(hours=8 * 24)
    decided_letters, compacted.hosted.decisions.decided_letters = (
        compacted.hosted.decisions.decided_letters,
        unavailable,
    )
    # The states are gone then; the next opening has no other sign of it than the position.
    with pytest.raises(RetriableError):
        compacted.opened()
    compacted.hosted.decisions.decided_letters = decided_letters

    task = compacted.opened()

    assert task.position == 0
    assert task.left_out() == [7]


def test_a_task_without_the_class_of_its_model_keeps_the_states_that_may_lack_deletions(compacted: Compacted) -> None:
    compacted.stands_at(40)
    compacted.hosted.stands_still = "BALANCE_MODELS has only version 2"
    compacted.passes(hours=8 * 24)

    task = compacted.opened()

    assert (task.position, compacted.keys) == (40, [b"a", b"b", b"\xffonce-by-name1", b"\xffonce-by-time1"])


def test_a_task_that_was_away_for_a_short_time_goes_on(compacted: Compacted) -> None:
    compacted.stands_at(9)
    compacted.passes(22)

    task = compacted.opened()

    assert (task.position, len(compacted.keys), task.snapshot().again_up_to) == (9, 4, 0)


def test_a_new_task_notes_when_it_began(compacted: Compacted) -> None:
    compacted.hosted.decisions = SimpleNamespace(decided_letters=lambda *_: {0: {}})

    compacted.opened()

    assert compacted.store.position is not None
    assert compacted.store.position.seen_to_ms == NOW_MS


@pytest.mark.shows("deleted-keys")
def test_a_task_that_stood_for_too_long_applies_nothing_until_it_is_opened_again(compacted: Compacted) -> None:
    compacted.stands_at(9)
    task = compacted.opened()
    compacted.passes(24)

    with pytest.raises(RetriableError, match="the partition is folded again from its beginning"):
        task.process(TaskBatch(9, PartitionUpdates(20)))

    assert task.position == 9
    assert compacted.opened().position == 0


def is_down(_topic: str) -> dict[str, str]:
    raise RetriableError("the broker is down")


def test_a_task_without_events_notes_at_intervals_that_it_has_everything(
    compacted: Compacted, monkeypatch: pytest.MonkeyPatch
) -> None:
    compacted.stands_at(END)
    task = compacted.opened()
    before = len(compacted.writer.commits)
    for _ in range(4):
        compacted.passes(0.05)
        compacted.watermarks.refresh()
        task.note_seen()

    assert len(compacted.writer.commits) == before + 1
    monkeypatch.setattr(compacted.topics, "config", is_down)
    compacted.passes(0.5)
    task.note_seen()
    assert len(compacted.writer.commits) == before + 1
    assert compacted.store.position is not None
    assert compacted.store.position.seen_to_ms == compacted.now_ms - HOUR_MS // 2
    assert task.role is Role.ACTIVE
