"""One transaction has another generation send a partition's outputs, from the position of the former one on."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.engine import opening
from balance_service.engine import task as module
from balance_service.engine.commit import write_position
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.decisions import Decision, Verdict
from balance_service.engine.opening import starting_letters
from balance_service.engine.records import POSITION_KEY, SILENT, KeyedUpdate, Output, Position, TaskBatch, TaskId
from balance_service.engine.siblings import Siblings
from balance_service.engine.store import StateStore
from balance_service.engine.task import Task, TaskState
from balance_service.errors import PoisonRecordError, RetriableError, StoreFullError, TaskMigratedError
from balance_service.model.generations import Declaration, Generations
from balance_service.testing import Driver, event
from tests.support.models import SCORED, Noted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from balance_service.engine.commit import Committed
    from balance_service.engine.tasks import Tasks
    from balance_service.errors import BalanceServiceError
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

    def __init__(self, number: int, siblings: Siblings, model: Old) -> None:
        self.model = model
        self.driver = Driver(model)
        self.driven = self.driver._last
        self.driven.deliver = self.deliver  # type: ignore[method-assign]
        stage = model.stages[-1].of_generation(number)
        decisions = SimpleNamespace(output=lambda *_: Output(0, "decisions", 0, None, None, 0, []))
        self.hosted: Any = SimpleNamespace(
            processor=self.driven._processor, stage=stage, siblings=siblings, decisions=decisions, stands_still=""
        )
        self.hosted.settings = self.hosted.topics = self.hosted.source = None
        siblings.add(cast("Tasks", self))
        self.opened(0 if number == 1 else SILENT)

    def opened(self, sends_from: int) -> None:
        """The task is opened, again if there was one."""
        if self.driven.store.view is None:
            self.the_task._shown = None
            self.driven.store = StateStore(self.driven.store.path, self.driven._processor.position_codec)
        self.the_task = Task(TaskId(self.hosted.stage.name, 0), self.hosted)
        self.the_task.replica.store = self.driven.store
        self.driven.writer.is_closed = False
        self.the_task._writer = self.driven.writer
        self.the_task._state = TaskState.RUNNING
        self.sends_from(sends_from)

    def close(self) -> None:
        # Its view keeps the store open.
        self.the_task._shown = None
        self.driver.close()

    def task(self, _partition: int) -> Task:
        return self.the_task

    def deliver(self, batch: TaskBatch) -> Committed:
        done = self.the_task.process(batch)
        if done.healed:
            self.followed(batch.retried)
        return done

    def followed(self, offsets: Iterable[int]) -> None:
        closed = {at: letter for at, letter in self.the_task.letters_at(offsets).items() if not letter.status.is_open}
        self.hosted.siblings.follow(self.hosted.stage, 0, closed)

    @property
    def position(self) -> Position:
        position = self.driven.store.position
        assert position is not None
        return position

    def sends_from(self, offset: int) -> None:
        moved = replace(self.position, emitted_up_to=offset)
        write_position(moved, self.driven._processor.position_codec, self.driven.store, self.driven.writer)
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

    def given(self, *events: InputEvent) -> None:
        for generation in (self.old, self.new):
            generation.given(*events)

    def written(self) -> int:
        return len(self.old.driven.writer.commits) + len(self.new.driven.writer.commits)


def declared(first: int, second: int) -> Generations:
    """Two generations, of these versions."""
    declarations = {1: Declaration(first, "", "", "", False), 2: Declaration(second, "", "", "", False)}
    return Generations("test-noted", declarations=declarations)


@pytest.fixture
def versions() -> tuple[int, int]:
    return 1, 2


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, versions: tuple[int, int]) -> Iterator[Pair]:
    monkeypatch.setattr(module, "_BEHIND_SECONDS", 0.01)
    with ExitStack() as stack:
        siblings = Siblings(lambda: declared(*versions))
        both = Pair(Generation(1, siblings, Old()), Generation(2, siblings, New()))
        for generation in (both.old, both.new):
            stack.callback(generation.close)
        yield both


def refused(pair: Pair, error: type[BalanceServiceError], why: str) -> None:
    """Checks that a switch is refused, and that the old generation goes on as before."""
    written, before = pair.written(), (pair.old.position, pair.new.position)

    with pytest.raises(error, match=why):
        pair.new.the_task.take_over(pair.old.the_task)

    assert pair.written() == written
    assert (pair.old.position, pair.new.position) == before
    # It may commit on.
    assert pair.old.the_task._running()


@pytest.mark.parametrize("ahead", [0, 2], ids=["at one position", "the old one is ahead"])
def test_one_transaction_makes_the_new_task_send_and_the_old_one_silent(pair: Pair, ahead: int) -> None:
    pair.given(paid("1.00"), paid("2.00"))
    pair.old.given(*[paid("3.00")] * ahead)
    before, commits = pair.old.position, len(pair.new.driven.writer.commits)

    assert pair.new.the_task.take_over(pair.old.the_task) is True

    assert len(pair.new.driven.writer.commits) == commits + 1
    assert (pair.new.position.offset, pair.new.position.emitted_up_to) == (2, 2 + ahead)
    (record,) = [output for output in pair.new.driven.writer.sent if output.topic != "notes"]
    assert (record.topic, record.partition, record.key) == (pair.old.the_task._hosted.stage.changelog, 0, POSITION_KEY)
    assert record.value is not None
    silent = Position.of(pair.old.driven._processor.position_codec.decode(record.value))
    assert silent == replace(before, emitted_up_to=SILENT)


def test_what_the_old_task_sent_is_not_sent_again_and_the_rest_is_sent_once(pair: Pair) -> None:
    pair.given(paid("1.00"), paid("2.00"))
    pair.old.given(paid("3.00"), paid("4.00"))

    pair.new.the_task.take_over(pair.old.the_task)
    pair.new.given(paid("3.00"), paid("4.00"), paid("5.00"))

    assert (pair.old.sent, pair.new.sent) == ([0, 1, 2, 3], [4])


def test_what_was_sent_before_the_old_task_was_replayed_is_not_sent_again(pair: Pair) -> None:
    pair.old.sends_from(3)
    pair.given(paid("1.00"), paid("2.00"))

    pair.new.the_task.take_over(pair.old.the_task)
    pair.new.given(paid("3.00"), paid("4.00"))

    assert (pair.old.sent, pair.new.sent) == ([], [3])


def test_the_old_task_commits_nothing_after_the_switch(pair: Pair) -> None:
    pair.new.the_task.take_over(pair.old.the_task)

    with pytest.raises(TaskMigratedError):
        pair.old.the_task._running()
    assert pair.old.the_task.view is None


def test_both_tasks_are_given_up_if_the_transaction_fails(pair: Pair) -> None:
    pair.new.driven.writer.fails_with = RetriableError("the broker does not respond")

    with pytest.raises(RetriableError, match="the broker does not respond"):
        pair.new.the_task.take_over(pair.old.the_task)

    # Its writer is closed, so that it would never take the outputs over.
    assert (pair.old.the_task.view, pair.new.the_task.view) == (None, None)


def test_a_task_that_sends_already_takes_nothing_over(pair: Pair) -> None:
    pair.new.sends_from(0)
    written = pair.written()

    assert pair.new.the_task.take_over(pair.old.the_task) is False
    assert pair.written() == written


def test_nothing_is_taken_over_from_a_task_that_is_behind(pair: Pair) -> None:
    # As a generation is that sent until a moment ago.
    pair.new.sends_from(0)
    pair.new.given(paid("1.00"))
    pair.new.sends_from(SILENT)

    refused(pair, RetriableError, "test-noted_0 is behind test-noted.g2_0")


def test_nothing_is_taken_over_from_a_task_that_does_not_send(pair: Pair) -> None:
    pair.old.sends_from(SILENT)

    refused(pair, RetriableError, "test-noted_0 does not send")


def test_a_dead_letter_that_is_open_in_both_is_sent_once_by_the_new_task(pair: Pair) -> None:
    pair.given(paid("1.00"), late("2.00"))

    pair.new.the_task.take_over(pair.old.the_task)
    pair.new.driver.mend(LATE).redrive(1).redrive(1)

    assert (pair.old.sent, pair.new.sent) == ([0], [1])


def test_a_dead_letter_whose_outputs_were_sent_before_it_failed_is_not_sent_again(pair: Pair) -> None:
    # The old generation was replayed after both records had been sent, and one of them cannot be read any more.
    pair.old.sends_from(2)
    pair.given(paid("1.00"), late("2.00"))
    assert pair.old.sent == []

    pair.new.the_task.take_over(pair.old.the_task)
    pair.new.driver.mend(LATE).redrive(1)

    assert pair.new.sent == []


def starts_with(emitted_up_to: int, on_decision: Callable[[Iterable[int]], list[int]]) -> list[Any]:
    """The changes of a task that opens, of whose records one was discarded elsewhere and one redriven.

    Args:
        on_decision: returns the records that decisions about some offsets change.
    """
    known = {5: Status.DISCARDED, 7: Status.APPLIED}
    decided = {at: cast("Letter", SimpleNamespace(status=status)) for at, status in known.items()}
    letters = SimpleNamespace(
        on_decision_elsewhere=lambda _store, decided: SimpleNamespace(records=on_decision(decided)),
        on_open=lambda _store: "opened",
        now_ms=lambda: 0,
    )
    hosted: Any = SimpleNamespace(
        processor=SimpleNamespace(letters=letters), siblings=SimpleNamespace(decided=lambda *_: decided)
    )
    store: Any = SimpleNamespace(position=Position(9, 1, "id", emitted_up_to=emitted_up_to))
    return [*cast("Any", starting_letters(store, hosted, 0))]


@pytest.mark.parametrize(("emitted_up_to", "carried_out"), [(0, [5]), (SILENT, [5, 7])])
def test_an_opening_task_that_sends_does_not_carry_out_a_redrive_again(
    emitted_up_to: int, carried_out: list[int]
) -> None:
    opened, decided_elsewhere = starts_with(emitted_up_to, list)

    # A model may have begun, or ceased, to keep order too.
    assert (opened, decided_elsewhere.records) == ("opened", carried_out)


@pytest.mark.parametrize("emitted_up_to", [0, SILENT])
def test_a_task_that_opens_writes_no_position_for_decisions_that_change_nothing(emitted_up_to: int) -> None:
    assert starts_with(emitted_up_to, lambda _: []) == ["opened"]


def test_a_silent_task_does_not_go_beyond_the_one_that_sends(pair: Pair) -> None:
    pair.old.given(paid("1.00"))
    assert (pair.old.the_task.limit, pair.new.the_task.limit) == (None, 1)
    pair.new.given(paid("1.00"))

    with pytest.raises(RetriableError, match="no other generation has applied the records below 2"):
        pair.new.given(paid("2.00"))

    pair.old.the_task.give_up()
    assert pair.new.the_task.limit == 0


def test_the_task_that_sends_goes_on_while_the_one_that_stands_still_is_not_open(pair: Pair) -> None:
    pair.given(paid("1.00"))
    pair.new.the_task.take_over(pair.old.the_task)
    pair.old.hosted.stands_still = "its class is not here"

    assert pair.old.the_task.position == -1
    assert pair.new.the_task.limit is None


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
    pair.new.the_task.take_over(pair.old.the_task)
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

    pair.new.the_task.take_over(pair.old.the_task)

    now = pair.new.driven.now_ms
    assert [at for at, letter in pair.new.letters.items() if letter.due_ms == now] == retried
    assert all(letter.status.is_open for letter in pair.new.letters.values())


def test_events_that_are_read_again_lack_those_that_the_old_task_could_not_apply(pair: Pair) -> None:
    pair.old.given(late("1.00"), paid("2.00"), paid("4.00", "old"))
    # Without their records, the events of a key are read again once one of them cannot be applied.
    single = [KeyedUpdate(b"g", {}, offset=offset) for offset in range(3)]
    left = TaskBatch(0, 3, events=single, applied=3, singles=lambda _: single).without(pair.old.letters)

    assert [event.offset for event in left.events] == [event.offset for event in left.singles([b"g"])] == [1]
    assert (left.applied, [letter.offset for letter in left.dead_letters]) == (1, [0, 2])


def test_a_dead_letter_of_the_new_generation_alone_is_written_to_the_topic_once_it_sends(pair: Pair) -> None:
    pair.given(paid("1.00", "new"), paid("2.00"))
    assert pair.new.written == []

    pair.new.the_task.take_over(pair.old.the_task)
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

    pair.new.the_task.take_over(pair.old.the_task)
    pair.new.driver.mend(LATE).advance(minutes=0)

    assert (pair.old.sent, pair.new.sent) == ([0], [])
    assert pair.new.letters[0].status is Status.APPLIED


def test_a_dead_letter_that_the_old_task_discarded_is_discarded(pair: Pair) -> None:
    pair.given(late("1.00"))
    pair.old.the_task.decide([0], Verdict(Decision.DISCARD, "", ""))
    assert pair.new.letters[0].status.is_open

    pair.new.the_task.take_over(pair.old.the_task)
    pair.new.driver.mend(LATE).advance(minutes=0)

    assert pair.new.letters[0].status is Status.DISCARDED
    assert pair.new.sent == []


def test_dead_letters_of_records_that_the_new_task_has_not_read_are_taken_over(pair: Pair) -> None:
    pair.old.given(late("1.00"), late("2.00"), paid("4.00"))
    pair.old.the_task.decide([1], Verdict(Decision.DISCARD, "", ""))

    pair.new.the_task.take_over(pair.old.the_task)

    assert [letter.status for letter in pair.new.letters.values()] == [Status.SCHEDULED, Status.DISCARDED]
    assert pair.new.the_task.left_out() == [0, 1]
    # A batch that was gathered before would count them now, and again later.
    with pytest.raises(RetriableError, match="before it was read"):
        pair.new.given(paid("1.00"), paid("2.00"), paid("4.00"))


def test_a_task_retries_nothing_while_it_is_ahead_of_the_one_that_sends(pair: Pair) -> None:
    pair.given(late("1.00"))
    pair.old.given(paid("2.00"))
    pair.new.the_task.take_over(pair.old.the_task)
    pair.old.opened(SILENT)
    pair.old.driven.now_ms += 600_000

    before = pair.old.the_task.due()
    pair.new.given(paid("2.00"))

    assert (len(before.again), len(pair.old.the_task.due().again)) == (0, 1)


def test_a_record_that_is_discarded_before_it_is_read_is_not_applied_by_a_batch_that_was_gathered_before(
    pair: Pair,
) -> None:
    pair.old.given(late("1.00"))
    pair.old.the_task.decide([0], Verdict(Decision.DISCARD, "", ""))
    pair.old.followed([0])

    with pytest.raises(RetriableError, match="before it was read"):
        pair.new.given(paid("1.00"))


def found_in_topics(monkeypatch: pytest.MonkeyPatch, *offsets: int) -> None:
    """The topics of the outputs have those of these events."""
    monkeypatch.setattr(opening, "sent_of", lambda *_: iter(offsets))


def test_the_serving_task_sends_after_the_one_that_sent_lost_its_changelog(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.given(paid("1.00"), paid("2.00"))
    found_in_topics(monkeypatch, 0, 2, 1)
    # The old one is folded again from the start.
    moved = replace(pair.old.position, offset=0, emitted_up_to=SILENT)
    write_position(moved, pair.old.driven._processor.position_codec, pair.old.driven.store, pair.old.driven.writer)
    commits = len(pair.new.driven.writer.commits)

    pair.new.the_task.begin_to_send([pair.old.the_task])
    pair.new.given(paid("3.00"), paid("4.00"))

    assert len(pair.new.driven.writer.commits) == commits + 2
    assert (pair.new.the_task.sends, pair.old.the_task.sends) == (True, False)
    assert pair.new.sent == [3]


def test_the_serving_task_sends_after_its_changelog_lost_the_end_that_says_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The former one followed, and the outputs expired.
    pair.old.given(paid("1.00"), paid("2.00"))
    pair.old.sends_from(SILENT)
    found_in_topics(monkeypatch)

    pair.new.the_task.begin_to_send([pair.old.the_task])
    pair.new.given(paid("1.00"), paid("2.00"), paid("3.00"))

    assert pair.new.sent == [2]
    # The other one may apply the same.
    assert pair.old.the_task.limit == 3


def test_the_only_generation_that_is_left_sends_what_lies_behind_its_position(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.given(paid("1.00"), paid("2.00"))
    found_in_topics(monkeypatch)

    pair.new.the_task.begin_to_send([])
    pair.new.given(paid("3.00"))

    assert pair.new.sent == [2]


@pytest.mark.parametrize("found", [(0, 2), (2,)], ids=["sent", "applied without an output, or expired"])
def test_a_task_begins_to_send_the_dead_letters_that_were_not_sent_and_no_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, found: tuple[int, ...]
) -> None:
    pair.given(paid("1.00", "new"), late("2.00"), paid("3.00"))
    pair.old.sends_from(SILENT)
    found_in_topics(monkeypatch, *found)

    pair.new.the_task.begin_to_send([pair.old.the_task])
    pair.new.driver.advance(minutes=0)

    # The new generation alone could not apply it.
    assert pair.new.written == [0]
    pair.new.model.refuses = ""
    pair.new.driver.redrive(0)
    pair.new.driver.mend(LATE).redrive(1)
    assert pair.new.sent == [1]


def test_a_dead_letter_that_the_lost_end_had_is_sent_once_it_can_be_applied(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The former generation followed: it has the one that was not sent, and one that it alone could not apply.
    pair.old.given(late("1.00"), paid("2.00", "old"))
    pair.old.the_task.decide([0], Verdict(Decision.REDRIVE, "", ""))
    pair.old.sends_from(SILENT)
    found_in_topics(monkeypatch, 1)

    pair.new.the_task.begin_to_send([pair.old.the_task])

    assert pair.new.the_task.left_out() == [0]
    assert [(at, letter.is_sent) for at, letter in pair.new.letters.items()] == [(0, False)]


def test_no_task_begins_to_send_while_another_one_does_or_is_not_open(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_in_topics(monkeypatch)
    written = pair.written()

    with pytest.raises(RetriableError, match="test-noted_0 sends"):
        pair.new.the_task.begin_to_send([pair.old.the_task])
    pair.old.sends_from(SILENT)
    written += 1
    pair.old.the_task._state = TaskState.RESTORING
    with pytest.raises(TaskMigratedError, match="RESTORING"):
        pair.new.the_task.begin_to_send([pair.old.the_task])

    assert (pair.written(), pair.new.the_task.sends) == (written, False)


def test_a_task_is_given_up_if_it_is_unknown_whether_it_begins_to_send(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.old.sends_from(SILENT)
    found_in_topics(monkeypatch)
    pair.new.driven.writer.fails_with = RetriableError("the broker does not respond")

    with pytest.raises(RetriableError, match="the broker does not respond"):
        pair.new.the_task.begin_to_send([pair.old.the_task])

    assert pair.new.the_task.view is None
    assert pair.old.the_task.view is not None


def test_a_task_that_was_closed_while_the_topics_were_read_does_not_begin_to_send(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(*_: object) -> Iterator[int]:
        pair.new.the_task.give_up()
        yield 0

    pair.old.sends_from(SILENT)
    monkeypatch.setattr(opening, "sent_of", sent)
    written = pair.written()

    with pytest.raises(TaskMigratedError):
        pair.new.the_task.begin_to_send([pair.old.the_task])

    assert pair.written() == written


def discards(pair: Pair, offset: int) -> None:
    """The old task discards a dead letter, and the new one is told."""
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
    assert pair.new.hosted.processor.letters.first_needed(view) == 1


def test_decisions_are_carried_out_once_and_in_order(pair: Pair) -> None:
    pair.given(late("1.00"), late("2.00"))
    pair.old.the_task.decide([0, 1], Verdict(Decision.REDRIVE, "", ""))
    pair.old.hosted.siblings.follow(pair.old.hosted.stage, 0, pair.old.letters)
    discards(pair, 0)
    commits = len(pair.new.driven.writer.commits)

    due = [pair.new.the_task.due() for _ in range(2)]

    assert [[letter.offset for letter in letters.again] for letters in due] == [[1], [1]]
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


@pytest.mark.parametrize("successor", ["new", "old"])
def test_a_switch_begins_with_the_decisions_that_both_tasks_were_told(pair: Pair, successor: str) -> None:
    pair.given(late("1.00"))
    new, old = (pair.new, pair.old) if successor == "new" else (pair.old, pair.new)
    if successor == "old":
        new.sends_from(SILENT)
        old.sends_from(1)
    old.the_task.decide([0], Verdict(Decision.DISCARD, "", ""))
    old.followed([0])
    new.hosted.siblings.follow(new.hosted.stage, 0, old.letters)

    assert new.the_task.take_over(old.the_task)

    assert [[*generation.the_task._decided_elsewhere] for generation in (new, old)] == [[], []]
    assert new.letters[0].status is Status.DISCARDED


def test_a_task_that_has_halted_keeps_no_decisions_and_stays_halted(pair: Pair) -> None:
    pair.given(late("1.00"), late("2.00"))
    discards(pair, 0)
    pair.new.the_task.halt("for a person to look")

    discards(pair, 1)
    pair.new.the_task.carry_out()

    assert pair.new.the_task.state is TaskState.HALTED
    assert len(pair.new.the_task._decided_elsewhere) == 1


@pytest.mark.shows("full-disk")
@pytest.mark.parametrize("serving", [1, 2])
def test_what_does_not_serve_leaves_the_last_room_of_a_disk_to_what_does(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, serving: int
) -> None:
    now = replace(declared(1, 2), serving=serving)
    monkeypatch.setattr(pair.old.hosted.siblings, "_now", lambda: now)
    serves, other = (pair.old, pair.new) if serving == 1 else (pair.new, pair.old)
    monkeypatch.setattr("balance_service.engine.database.room_bytes", lambda _path: 256 << 20)
    pair.given(paid("1.00"))
    assert [generation.position.offset for generation in (serves, other)] == [1, 1]

    monkeypatch.setattr("balance_service.engine.database.room_bytes", lambda _path: 255 << 20)
    if serves is pair.old:
        # The other one follows it, because it sends.
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
