"""A generation that begins to serve sends a partition's outputs, from where the former one was fenced on."""

from __future__ import annotations

import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine import inheritance, task
from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.commit import decide, write_position
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.decisions import Decision, Verdict
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.inheritance import Predecessor
from balance_service.engine.records import POSITION_KEY, Output, Position, TaskId
from balance_service.engine.store import StateStore
from balance_service.engine.task import Task, TaskState
from balance_service.errors import PoisonRecordError, RetriableError, StoreFullError, TaskMigratedError
from balance_service.kafka.topics import Topic
from balance_service.model.generations import Building, Declaration, Generations, Switch
from balance_service.testing import Driver, event
from balance_service.testing.rows import encoded
from tests.support.models import SCORED, Noted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import FrameType

    from balance_service.engine.commit import Committed
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.model.events import Event, State
    from balance_service.testing import InputEvent

LATE = "schema-id-unknown"


def paid(amount: str, *refused_by: str, key: str = "g") -> InputEvent:
    return event(SCORED, {"id": key, "paid": Decimal(amount), "tags": [*refused_by]})


def late(amount: str) -> InputEvent:
    """An event that becomes readable later."""
    return replace(paid(amount), unreadable=LATE)


class Old(Noted):
    """Refuses what is tagged for it."""

    refuses: str = "old"

    def emit(self, state: State, event: Event) -> Event | State:
        if self.refuses in event["tags"]:
            raise PoisonRecordError("refused", "a test")
        return super().emit(state, event)


class New(Old):
    refuses = "new"


class Generation:
    """The running task of a generation, with a store on disk and a changelog in memory."""

    the_task: Task

    def __init__(self, number: int, generations: HostedGenerations, model: Old) -> None:
        self.model = model
        self.driver = Driver(model)
        self.driven = self.driver.last_stage
        self._folder = tempfile.TemporaryDirectory()
        self.driven.store = self._store()
        ((_, _, begins_at),) = self.driven.writer.commits
        self.driven.store.write([(POSITION_KEY, begins_at)], self.driven.writer.end)
        self.driven.deliver = self.deliver  # type: ignore[method-assign]
        self.driven.commit = self.commit  # type: ignore[method-assign]
        stage = model.stages[-1].of_generation(number)
        decisions = SimpleNamespace(output=lambda *_: Output(0, "decisions", 0, None, None, 0, []))
        self.hosted: Any = SimpleNamespace(
            processor=self.driven.processor,
            stage=stage,
            generations=generations,
            decisions=decisions,
            source=Topic("scored", "source", 1),
            partitioner="murmur2",
        )
        self.hosted.settings = self.hosted.topics = None
        generations.add(number, self)
        self.opened(sends=number == 1)

    def opened(self, *, sends: bool) -> None:
        """The task is opened, again if there was one."""
        if self.driven.store.view is None:
            self.the_task._shown = None
            self.driven.store = self._store()
        self.the_task = Task(TaskId(self.hosted.stage.name, 0), self.hosted)
        self.the_task.replica.store = self.driven.store
        self.driven.writer.is_closed = False
        self.the_task._writer = self.driven.writer
        self.the_task._state = TaskState.RUNNING
        self.the_task._sends = sends
        self.the_task._following.limit = self.position.offset
        if sends:
            self.moves(inherited=max(self.position.inherited, 0))
        self.the_task._shown = self.driven.store.view

    def close(self) -> None:
        # Its view keeps the store open.
        self.the_task._shown = None
        self.driver.close()
        self._folder.cleanup()

    def _store(self) -> StateStore:
        return StateStore(Path(self._folder.name), self.driven.processor.position_codec)

    def task(self, _partition: int) -> Task:
        return self.the_task

    def commit(self, events: Sequence[InputEvent]) -> Committed:
        """As the runner: what the generation that sends has not applied is left out."""
        driven, start = self.driven, self.position.offset
        self.the_task.follow_sender()
        left_out = frozenset(self.the_task.left_out())
        some = [encoded(event, driven.stage) for event in events]
        driven.events[start:] = some
        kept = {at: event for at, event in enumerate(some, start) if at not in left_out}
        return self.deliver(replace(driven.batch(start, start + len(some), kept), left_out=left_out))

    def deliver(self, batch: TaskBatch) -> Committed:
        done = self.the_task.process(batch)
        if done.healed:
            self.followed(batch.retried)
        return done

    def followed(self, offsets: Iterable[int]) -> None:
        closed = {at: letter for at, letter in self.the_task.letters_at(offsets).items() if not letter.status.is_open}
        self.hosted.generations.follow(self.hosted.stage, 0, closed)

    @property
    def position(self) -> Position:
        position = self.driven.store.position
        assert position is not None
        return position

    def moves(self, **fields: Any) -> None:
        """Writes another position."""
        moved = replace(self.position, **fields)
        write_position(moved, self.driven.processor.position_codec, self.driven.store, self.driven.writer)
        self.the_task._shown = self.driven.store.view

    def given(self, *events: InputEvent) -> None:
        self.driver.given(*events)

    @property
    def sent(self) -> list[int]:
        """The offsets of the events whose outputs were sent."""
        return [output.offset for output in self.driven.writer.sent if output.topic == "notes"]

    @property
    def written(self) -> list[int]:
        """The offsets of the records in the topic of dead letters."""
        return [letter.offset for _, letters, _ in self.driven.writer.commits for letter in letters]

    @property
    def letters(self) -> dict[int, Letter]:
        return {letter.offset: letter for letter in self.driver.letters()}


@dataclass
class Pair:
    old: Generation
    new: Generation
    now: Generations
    has_lost: bool = False
    """Whether the changelog of the generation that does not serve is gone."""

    def given(self, *events: InputEvent) -> None:
        # A silent one follows.
        for generation in sorted((self.old, self.new), key=lambda one: not one.the_task.sends):
            generation.given(*events)

    def written(self) -> int:
        return len(self.old.driven.writer.commits) + len(self.new.driven.writer.commits)

    def switch(self, to: Generation | None = None) -> None:
        """Another generation serves, and its task begins to send."""
        to = to or self.new
        other = self.old if to is self.new else self.new
        number = self.now.number + 1
        serving = to.hosted.stage.generation
        self.now = replace(self.now, number=number, serving=serving, kept=3 - serving, serving_since=number)
        to.the_task.inherit()
        assert other.the_task.view is None
        other.opened(sends=False)

    def predecessors(self, hosted: HostedStage, *_: object) -> list[Predecessor]:
        """Fences the other generation."""
        other = self.old if hosted.stage.generation == 2 else self.new
        other.the_task.give_up()
        return [] if self.has_lost else [Predecessor(other.hosted.stage, other.position, other.letters)]


def declared(first: int, second: int) -> Generations:
    """Two generations, of these versions."""
    declarations = {1: Declaration(first, "", "", "", False), 2: Declaration(second, "", "", "", False)}
    building = Building(2, Switch.NEVER, 60)
    return Generations("test-noted", newest=2, declarations=declarations, building=building)


@pytest.fixture
def versions() -> tuple[int, int]:
    return 1, 2


def paired(old: Old, new: Old, now: Generations, patch: pytest.MonkeyPatch) -> Pair:
    pairs: list[Pair] = []
    generations = HostedGenerations(lambda: pairs[0].now if pairs else now)
    pairs.append(Pair(Generation(1, generations, old), Generation(2, generations, new), now))
    patch.setattr(inheritance, "predecessors", pairs[0].predecessors)
    patch.setattr(inheritance, "sent_of", lambda *_: iter(pairs[0].old.sent + pairs[0].new.sent))
    return pairs[0]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, versions: tuple[int, int]) -> Iterator[Pair]:
    with ExitStack() as stack:
        both = paired(Old(), New(), declared(*versions), monkeypatch)
        for generation in (both.old, both.new):
            stack.callback(generation.close)
        yield both


@pytest.mark.parametrize("ahead", [0, 2], ids=["at one position", "the old one is ahead"])
def test_the_new_task_sends_from_where_the_old_one_was_and_writes_into_its_own_changelog_alone(
    pair: Pair, ahead: int
) -> None:
    pair.given(paid("1.00"), paid("2.00"))
    pair.old.given(*[paid("3.00")] * ahead)
    before, commits = pair.old.position, pair.written()

    pair.switch()

    assert pair.written() == commits + 1
    assert (pair.new.position.offset, pair.new.position.emitted_up_to) == (2, 2 + ahead)
    assert (pair.new.position.inherited, pair.new.the_task.sends) == (pair.now.serving_since, True)
    assert pair.old.position == before


def test_what_the_old_task_sent_is_not_sent_again_and_the_rest_is_sent_once(pair: Pair) -> None:
    pair.given(paid("1.00"), paid("2.00"))
    pair.old.given(paid("3.00"), paid("4.00"))

    pair.switch()
    pair.new.given(paid("3.00"), paid("4.00"), paid("5.00"))

    assert (pair.old.sent, pair.new.sent) == ([0, 1, 2, 3], [4])


def test_what_was_sent_before_the_old_task_was_replayed_is_not_sent_again(pair: Pair) -> None:
    pair.old.moves(emitted_up_to=3)
    pair.given(paid("1.00"), paid("2.00"))

    pair.switch()
    pair.new.given(paid("3.00"), paid("4.00"))

    assert (pair.old.sent, pair.new.sent) == ([], [3])


def test_a_task_whose_write_fails_at_a_switch_is_given_up(pair: Pair) -> None:
    pair.new.driven.writer.fails_with = RetriableError("the broker does not respond")

    with pytest.raises(RetriableError, match="the broker does not respond"):
        pair.switch()

    # Whether it sends is unknown.
    assert (pair.new.the_task.view, pair.new.the_task.sends) == (None, False)


def test_a_task_that_sends_already_takes_nothing_over(pair: Pair) -> None:
    written = pair.written()

    assert pair.old.the_task.inherit() is False
    assert pair.written() == written


def test_a_task_of_a_generation_that_does_not_serve_takes_nothing_over(pair: Pair) -> None:
    written = pair.written()

    with pytest.raises(RetriableError, match=r"another generation than that of test-noted\.g2_0 serves"):
        pair.new.the_task.inherit()
    assert (pair.written(), pair.old.the_task.view is None) == (written, False)


def test_a_generation_that_never_sent_in_a_partition_says_nothing_about_what_was_sent(pair: Pair) -> None:
    # Generation 2 served for a while, and its task of this partition was not opened then.
    pair.old.given(paid("1.00"), paid("2.00"))
    pair.new.given(paid("1.00"))
    pair.now = replace(pair.now, number=2, serving=2, kept=1, serving_since=2)
    pair.old.opened(sends=False)

    pair.switch(pair.old)
    pair.old.given(paid("3.00"))

    assert (pair.old.sent, pair.new.sent) == ([0, 1, 2], [])
    assert pair.old.position.inherited == 3


def test_a_dead_letter_that_is_open_in_both_is_sent_once_by_the_new_task(pair: Pair) -> None:
    pair.given(paid("1.00"), late("2.00"))

    pair.switch()
    pair.new.driver.mend(LATE).redrive(1).redrive(1)

    assert (pair.old.sent, pair.new.sent) == ([0], [1])


def test_a_dead_letter_whose_outputs_were_sent_before_it_failed_is_not_sent_again(pair: Pair) -> None:
    # The old generation was replayed after both records had been sent, and one of them cannot be read any more.
    pair.old.moves(emitted_up_to=2)
    pair.given(paid("1.00"), late("2.00"))
    assert pair.old.sent == []

    pair.switch()
    pair.new.driver.mend(LATE).redrive(1)

    assert pair.new.sent == []


def test_a_silent_task_does_not_go_beyond_the_one_that_sends(pair: Pair) -> None:
    pair.old.given(paid("1.00"))
    pair.new.the_task.follow_sender()
    assert (pair.old.the_task.limit, pair.new.the_task.limit) == (None, 1)
    pair.new.given(paid("1.00"))

    with pytest.raises(RetriableError, match="no other generation has applied the records below 2"):
        pair.new.given(paid("2.00"))

    pair.old.given(paid("2.00"))
    assert (pair.new.the_task.limit, pair.new.the_task.goal) == (1, 2)
    pair.old.the_task.give_up()
    pair.new.the_task.follow_sender()
    assert (pair.new.the_task.limit, pair.new.the_task.goal) == (1, 1)


@pytest.mark.shows("discarded")
def test_a_silent_task_does_not_retry_a_record_that_it_has_not_yet_heard_to_be_discarded(pair: Pair) -> None:
    pair.given(late("2.00"))
    new = pair.new.driven
    due = new.processor.letters.on_decision(new.store, [pair.new.letters[0]], Status.SCHEDULED)
    write_position(pair.new.position, new.processor.position_codec, new.store, new.writer, due)
    assert pair.new.letters[0].due_ms == 0

    assert pair.old.the_task.decide([0], Verdict(Decision.DISCARD, "me", "a test")) == {}

    assert pair.new.the_task.due().again == []


def test_a_silent_task_catches_up_with_one_that_has_halted(pair: Pair) -> None:
    pair.old.given(paid("1.00"), late("2.00"))
    pair.old.the_task.halt("its code fails")

    pair.new.given(paid("1.00"), paid("2.00"))

    assert (pair.new.position.offset, [*pair.new.letters]) == (2, [1])
    pair.switch()
    pair.new.given(paid("3.00"))
    assert (pair.old.sent, pair.new.sent) == ([0], [2])


def test_a_record_that_the_old_task_could_not_apply_is_sent_once_by_the_task_that_applies_it(pair: Pair) -> None:
    # Its schema is known by the time when the new generation reads it.
    pair.old.given(late("1.00"), paid("2.00", "old"), late("3.00"))
    pair.new.given(paid("1.00"), paid("2.00", "old"), paid("3.00"))
    assert [letter.status.is_open for letter in pair.new.letters.values()] == [True, True, True]

    pair.old.driver.mend(LATE).redrive(0)
    # The new one follows.
    pair.new.the_task.carry_out()
    pair.new.driver.advance(minutes=0)
    assert pair.new.letters[0].status is Status.APPLIED
    pair.switch()
    pair.new.driver.advance(minutes=0)

    assert pair.new.driver.view("g") == {"paid": Decimal("6.00")} | pair.new.driver.view("g")
    assert (pair.old.sent, pair.new.sent) == ([0], [1, 2])
    assert (pair.old.written, pair.new.written) == ([0, 1, 2], [])


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "not read yet"])
@pytest.mark.parametrize(
    ("versions", "retried"), [((1, 1), [1]), ((1, 2), [0, 1])], ids=["same code", "another version"]
)
def test_a_switch_retries_what_the_fold_refused_only_if_the_code_differs(
    pair: Pair, retried: list[int], *, is_read: bool
) -> None:
    events = paid("1.00", "old"), late("2.00")
    pair.old.given(*events)
    if is_read:
        pair.new.given(*events)

    pair.switch()

    now = pair.new.driven.now_ms
    assert [at for at, letter in pair.new.letters.items() if letter.due_ms == now] == retried
    assert all(letter.status.is_open for letter in pair.new.letters.values())


@pytest.mark.parametrize("versions", [(1, 1)])
def test_a_switch_does_not_retry_what_the_fold_has_refused_since_the_new_generation_took_it_over(pair: Pair) -> None:
    pair.given(replace(paid("1.00", "old"), unreadable=LATE))
    assert pair.new.letters[0].status is Status.SCHEDULED
    # The retry is refused there, and waits for a decision.
    pair.old.driver.mend(LATE).advance(minutes=60)
    assert pair.old.letters[0].status.needs_decision

    pair.switch()
    pair.new.driver.mend(LATE).advance(minutes=60)

    assert pair.new.letters[0].status.needs_decision
    assert pair.new.sent == []


def test_a_dead_letter_of_the_new_generation_alone_is_written_to_the_topic_once_it_sends(pair: Pair) -> None:
    pair.given(paid("1.00", "new"), paid("2.00"))
    assert pair.new.written == []

    pair.switch()
    pair.new.driver.advance(minutes=0).advance(minutes=60)

    assert (pair.old.written, pair.new.written) == ([], [0])
    assert (pair.old.sent, pair.new.sent) == ([0, 1], [])
    # The old generation has sent it.
    pair.new.model.refuses = ""
    pair.new.driver.redrive(0)
    assert pair.new.letters[0].status is Status.APPLIED
    assert pair.new.sent == []


def test_a_dead_letter_that_the_old_task_closed_is_not_sent_again(pair: Pair) -> None:
    pair.given(late("1.00"))
    pair.old.driver.mend(LATE).redrive(0)

    pair.switch()
    pair.new.driver.mend(LATE).advance(minutes=0)

    assert (pair.old.sent, pair.new.sent) == ([0], [])
    assert pair.new.letters[0].status is Status.APPLIED


def test_a_dead_letter_that_the_old_task_discarded_is_discarded(pair: Pair) -> None:
    pair.given(late("1.00"))
    pair.old.the_task.decide([0], Verdict(Decision.DISCARD, "", ""))
    assert pair.new.letters[0].status.is_open

    pair.switch()
    pair.new.driver.mend(LATE).advance(minutes=0)

    assert pair.new.letters[0].status is Status.DISCARDED
    assert pair.new.sent == []


def test_dead_letters_of_records_that_the_new_task_has_not_read_are_taken_over(pair: Pair) -> None:
    pair.old.given(late("1.00"), late("2.00"), paid("4.00"))
    pair.old.the_task.decide([1], Verdict(Decision.DISCARD, "", ""))

    pair.switch()

    assert [letter.status for letter in pair.new.letters.values()] == [Status.SCHEDULED, Status.DISCARDED]
    assert pair.new.the_task.left_out() == [0, 1]
    # A batch that was gathered before would count them now, and again later.
    with pytest.raises(RetriableError, match="before it was read"):
        pair.new.deliver(TaskBatch(0, PartitionUpdates(3)))


def test_a_silent_task_retries_a_record_once_the_one_that_sends_is_as_far_and_has_applied_it(pair: Pair) -> None:
    pair.given(late("1.00"))
    pair.old.given(paid("2.00"))
    pair.switch()
    pair.old.driven.now_ms += 600_000

    due = [pair.old.the_task.due()]
    pair.new.given(paid("2.00"))
    due.append(pair.old.the_task.due())
    pair.new.driver.mend(LATE).advance(minutes=0)
    due.append(pair.old.the_task.due())

    assert [len(letters.again) for letters in due] == [0, 0, 1]


@pytest.mark.parametrize("opened", ["silent", "sending"])
def test_a_silent_task_follows_what_was_closed_while_one_of_the_two_was_not_open(
    pair: Pair, opened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.given(late("1.00"), late("2.00"))
    pair.new.the_task.follow_sender()
    # A task that is gone hears nothing, and one that ends right after its commit tells nothing.
    monkeypatch.setattr(pair.old, "followed", lambda _offsets: None)
    pair.old.the_task.decide([1], Verdict(Decision.DISCARD, "", ""))
    pair.old.driver.mend(LATE).advance(minutes=10)
    if opened == "silent":
        pair.new.opened(sends=False)
    else:
        pair.old.opened(sends=True)
        pair.old.moves(epoch=pair.old.position.epoch + 1)
    assert [letter.status for letter in pair.new.letters.values()] == [Status.SCHEDULED, Status.SCHEDULED]

    pair.new.the_task.follow_sender()
    commits = len(pair.new.driven.writer.commits)
    pair.new.the_task.follow_sender()

    assert len(pair.new.driven.writer.commits) == commits
    assert pair.new.letters[1].status is Status.DISCARDED
    assert [letter.offset for letter in pair.new.the_task.due().again] == [0]


def test_a_silent_task_holds_no_view_of_the_sending_task_while_a_commit_waits(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.old.given(late("1.00"), late("2.00"))
    silent, sending = pair.new.the_task, pair.old.the_task
    commits: list[bool] = []

    def committed(*given: Any) -> Any:
        view = sending.last_view
        frame: FrameType | None = sys._getframe(1)
        held: list[str] = []
        while frame is not None:
            if frame.f_locals.get("self") is silent:
                held += [name for name, value in frame.f_locals.items() if value is view]
            frame = frame.f_back
        commits.append(bool(held))
        return decide(*given)

    monkeypatch.setattr(task, "decide", committed)
    monkeypatch.setattr(pair.old, "followed", lambda _offsets: None)
    silent.follow_sender()
    assert commits == [False]

    sending.decide([1], Verdict(Decision.DISCARD, "", ""))
    pair.old.moves(epoch=pair.old.position.epoch + 1)
    commits.clear()
    silent.follow_sender()
    assert commits == [False]
    assert pair.new.letters[1].status is Status.DISCARDED


def test_a_record_that_is_discarded_before_it_is_read_is_not_applied_by_a_batch_that_was_gathered_before(
    pair: Pair,
) -> None:
    pair.old.given(late("1.00"))
    pair.old.the_task.decide([0], Verdict(Decision.DISCARD, "", ""))
    pair.old.followed([0])

    pair.new.the_task.follow_sender()
    with pytest.raises(RetriableError, match="before it was read"):
        pair.new.deliver(TaskBatch(0, PartitionUpdates(1)))


def found_in_topics(monkeypatch: pytest.MonkeyPatch, *offsets: int) -> None:
    """The topics of the outputs have those of these events."""
    monkeypatch.setattr(inheritance, "sent_of", lambda *_: iter(offsets))


def test_the_serving_task_sends_after_the_one_that_sent_lost_its_changelog(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.given(paid("1.00"), paid("2.00"))
    pair.old.given(paid("3.00"))
    found_in_topics(monkeypatch, 0, 2, 1)
    pair.has_lost = True

    pair.switch()
    pair.new.given(paid("3.00"), paid("4.00"))

    assert pair.new.sent == [3]


def test_what_lies_below_the_position_of_any_generation_was_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # The outputs expired, or there were none.
    pair.given(paid("1.00"), paid("2.00"))
    found_in_topics(monkeypatch)
    pair.has_lost = True

    pair.switch()
    pair.new.given(paid("3.00"))

    assert pair.new.sent == [2]


@pytest.mark.parametrize("found", [(0, 2), (0,)], ids=["sent", "sent but the last, or that one expired"])
def test_a_task_begins_to_send_the_dead_letters_that_were_not_sent_and_no_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, found: tuple[int, ...]
) -> None:
    pair.given(paid("1.00", "new"), late("2.00"), paid("3.00"))
    found_in_topics(monkeypatch, *found)
    pair.has_lost = True

    pair.switch()
    pair.new.driver.advance(minutes=0)

    # The new generation alone could not apply it.
    assert pair.new.written == [0]
    pair.new.model.refuses = ""
    pair.new.driver.redrive(0)
    pair.new.driver.mend(LATE).redrive(1)
    assert pair.new.sent == [1]


def test_a_task_that_was_closed_while_the_topics_were_read_does_not_begin_to_send(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(*_: object) -> Iterator[int]:
        pair.new.the_task.give_up()
        pair.new.driven.writer.close()
        yield 0

    pair.has_lost = True
    monkeypatch.setattr(inheritance, "sent_of", sent)
    written = pair.written()

    with pytest.raises(TaskMigratedError):
        pair.switch()

    assert pair.written() == written


def discards(pair: Pair, offset: int) -> None:
    """The old task discards a dead letter, and notifies the new one."""
    pair.old.the_task.decide([offset], Verdict(Decision.DISCARD, "", ""))
    pair.old.followed([offset])


@pytest.mark.parametrize("state", [TaskState.CREATED, TaskState.RESTORING])
def test_no_decision_waits_for_a_task_that_opens_and_it_is_carried_out_before_that_one_folds(
    pair: Pair, state: TaskState
) -> None:
    pair.given(late("1.00"))
    task = pair.new.the_task
    task._state = state
    with task._lock:
        other = threading.Thread(target=discards, args=(pair, 0), daemon=True)
        other.start()
        other.join(5)
        assert not other.is_alive()

    task.carry_out()
    assert pair.new.letters[0].status.is_open
    task._state = TaskState.RUNNING
    assert [*task.due().again] == []

    assert pair.new.letters[0].status is Status.DISCARDED


def test_a_task_that_waits_carries_decisions_out(pair: Pair) -> None:
    pair.given(late("1.00"))
    pair.new.the_task.wait("for a table")
    discards(pair, 0)

    pair.new.the_task.carry_out()

    assert pair.new.letters[0].status is Status.DISCARDED
    view = pair.new.the_task.view
    assert view is not None
    # The query shows it too.
    assert pair.new.hosted.processor.letters.all(view)[0].status is Status.DISCARDED


def test_decisions_are_carried_out_once_and_in_order(pair: Pair) -> None:
    pair.given(late("1.00"), late("2.00"))
    pair.old.the_task.decide([0, 1], Verdict(Decision.REDRIVE, "", ""))
    pair.old.hosted.generations.follow(pair.old.hosted.stage, 0, pair.old.letters)
    discards(pair, 0)
    commits = len(pair.new.driven.writer.commits)

    due = [pair.new.the_task.due() for _ in range(2)]

    # The generation that sends has not applied the other one yet.
    assert [[*letters.again] for letters in due] == [[], []]
    assert [letter.status for letter in pair.new.letters.values()] == [Status.DISCARDED, Status.SCHEDULED]
    assert len(pair.new.driven.writer.commits) == commits + 2


def test_a_record_that_another_generation_set_aside_is_left_out_until_an_operator_decides(pair: Pair) -> None:
    task = pair.new.the_task
    at = task.position
    set_aside = Letter.first(at, "set-aside", b"k", 0, 1)

    task.follow({at: set_aside})
    assert task.left_out() == [at]
    assert pair.new.letters[at].status is Status.WAITING

    task.follow({at: set_aside.closed(Status.DISCARDED, 0)})
    assert task.left_out() == [at]
    assert pair.new.letters[at].status is Status.DISCARDED


def test_a_replay_that_stops_at_a_redriven_record_goes_on_once_it_is_set_aside(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, task = pair.old, pair.old.the_task
    pair.given(paid("1.00"))
    redriven = Letter.first(1, "redriven", None, 0, 1).closed(Status.APPLIED, 0)
    processor, driven = generation.driven.processor, generation.driven
    decide(processor.letters.carry_over([redriven]), [], processor, driven.store, driven.writer)
    given = {"partition": 0, "offset": 1, "timestamp": (1, 0), "key": b"g", "value": b"it hangs"}
    record = SimpleNamespace(**{name: lambda value=value: value for name, value in given.items()})
    monkeypatch.setattr("balance_service.engine.task.first_record", lambda *_: record)
    set_aside = Verdict(Decision.SET_ASIDE, "ann", "it hangs")

    assert task.decide([1], set_aside) == {}

    assert task.position == 2
    letter = generation.letters[1]
    # A retry could stop the partition again.
    assert (letter.status, letter.cause, letter.key, letter.due_ms) == (Status.WAITING, "set-aside", b"g", -1)
    assert task.decide([1], set_aside) == {1: "it is a dead letter already: redrive or discard it"}


@pytest.mark.parametrize("successor", ["new", "old"])
def test_a_switch_begins_with_the_decisions_that_the_task_was_told(pair: Pair, successor: str) -> None:
    pair.given(late("1.00"))
    new, old = (pair.new, pair.old) if successor == "new" else (pair.old, pair.new)
    if successor == "old":
        pair.switch()
    old.the_task.decide([0], Verdict(Decision.DISCARD, "", ""))
    old.followed([0])

    pair.switch(new)

    assert not new.the_task._following.is_told
    assert new.letters[0].status is Status.DISCARDED


def test_a_task_that_has_halted_keeps_no_decisions_and_stays_halted(pair: Pair) -> None:
    pair.given(late("1.00"), late("2.00"))
    discards(pair, 0)
    pair.new.the_task.halt("for a person to look")

    discards(pair, 1)
    pair.new.the_task.carry_out()

    assert pair.new.the_task.state is TaskState.HALTED
    assert len(pair.new.the_task._following._told) == 1


@pytest.mark.shows("full-disk")
@pytest.mark.parametrize("serving", [1, 2])
def test_what_does_not_serve_leaves_the_last_room_of_a_disk_to_what_does(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, serving: int
) -> None:
    if serving == 2:
        pair.switch()
    serves, other = (pair.old, pair.new) if serving == 1 else (pair.new, pair.old)
    monkeypatch.setattr("balance_service.engine.database.room_bytes", lambda _path: 256 << 20)
    pair.given(paid("1.00"))
    assert [generation.position.offset for generation in (serves, other)] == [1, 1]

    monkeypatch.setattr("balance_service.engine.database.room_bytes", lambda _path: 255 << 20)
    serves.given(paid("1.00"))
    assert serves.position.offset == 2
    why = r"has 255 MiB left, and the last 256 are for the generation that serves; make room, 512 MiB at least, or drop"
    with pytest.raises(StoreFullError, match=why):
        other.given(paid("1.00"))
    assert other.position.offset == 1


def test_a_task_on_a_full_disk_keeps_answering_and_follows_a_decision_once_there_is_room(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_room() -> None:
        raise StoreFullError("make room")

    pair.given(late("1.00"))
    task = pair.new.the_task
    with monkeypatch.context() as full:
        full.setattr(pair.new.driven.store, "require_room", has_no_room)
        discards(pair, 0)
        # Its own thread meets the full disk, and waits for room.
        for meets in (task.due, task.left_out, task.carry_out):
            with pytest.raises(StoreFullError):
                meets()
        task.wait("make room")
        assert task.view is not None

    task.carry_out()

    assert pair.new.letters[0].status is Status.DISCARDED
