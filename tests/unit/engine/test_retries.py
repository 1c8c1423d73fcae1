"""Other producers' dead letters: when each is due, what is sent of it and how often."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from balance_service.engine.commit import Committed, commit, decide, write_position
from balance_service.engine.dead_letter import GONE, Letter, Status
from balance_service.engine.decisions import Decision, Verdict
from balance_service.engine.hosted_stage import HostedStage
from balance_service.engine.opening import starting_letters, starting_position
from balance_service.engine.outputs import Target
from balance_service.engine.records import CombinedUpdates, DeadLetter, Output, Position, Role, TaskBatch
from balance_service.engine.source_watch import SourceCheck
from balance_service.engine.stateless import RetryProcessor
from balance_service.engine.store import StateStore
from balance_service.errors import RetriableError, StoreFullError, TaskMigratedError
from balance_service.kafka.topics import Topic
from balance_service.model.placing import stages_of_retries
from balance_service.settings import load_settings
from tests.support.fakes import FakeWriter, letters, position_codec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    Headers = Sequence[tuple[str, bytes | None]]

pytestmark = pytest.mark.usefixtures("no_environment")

EVERY_MS = 300_000
SOURCE = "orders-dead-letters"
STAGE = f"retries-{SOURCE}"
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Stage:
    """One task of retries, with a changelog in memory and a clock of its own."""

    def __init__(self, folder: Path, largest_bytes: int = 1 << 20) -> None:
        self.now_ms = 1_000_000_000
        self.writer = FakeWriter()
        keeping = letters(every_ms=EVERY_MS, now_ms=lambda: self.now_ms)
        target = Target("app-retries", 3, largest_bytes, is_compacted=False, sender=f"app-{STAGE}:id")
        self.processor = RetryProcessor(source=SOURCE, target=target, position_codec=position_codec(), letters=keeping)
        self.store = StateStore(folder, self.processor.position_codec)
        write_position(
            Position(0, 1, "id", source=f"{SOURCE}:1"), self.processor.position_codec, self.store, self.writer
        )
        self.records: list[tuple[bytes | None, bytes | None, int, Headers]] = []

    def take(self, *records: tuple[bytes | None, bytes | None, int, Headers]) -> Committed:
        """Commit records as they come, those that are left out aside: key, value, timestamp, headers."""
        start = len(self.records)
        self.records += records
        end, left_out = len(self.records), self.processor.letters.left_out_from(self.store, start)
        taken = [at for at in range(start, end) if at not in left_out]
        return self._commit(TaskBatch(start, end, self._updates(taken), applied=len(taken)))

    def retry(self, gone: frozenset[int] = frozenset()) -> Committed:
        """Commit those that are due, without any that are gone."""
        due = self.processor.letters.due(self.store)
        there = [letter.offset for letter in due.again if letter.offset not in gone]
        return self._commit(
            TaskBatch(
                len(self.records),
                len(self.records),
                self._updates(there),
                applied=len(there),
                dead_letters=[DeadLetter(at, -1, None, None, GONE) for at in sorted(gone)],
                retried=frozenset(letter.offset for letter in due.again),
                forgotten=due.forgotten,
            )
        )

    @property
    def letters(self) -> list[Letter]:
        return [*self.processor.letters.between(self.store, 0)]

    @property
    def sent(self) -> list[Output]:
        return self.writer.sent

    @property
    def dead_letters(self) -> list[DeadLetter]:
        return [letter for _, written, _ in self.writer.commits for letter in written]

    def _commit(self, batch: TaskBatch) -> Committed:
        return commit(batch, 1, self.processor, self.store, self.writer)

    def _updates(self, offsets: Sequence[int]) -> list[CombinedUpdates]:
        found = [self.records[at] for at in offsets]
        columns = {
            "offset": pa.array(offsets, pa.int64()),
            "timestamp": pa.array([timestamp for _, _, timestamp, _ in found], pa.int64()),
            "value": pa.array([value for _, value, _, _ in found], pa.binary()),
            "headers": pa.array(
                [[{"key": name, "value": of} for name, of in headers] or None for *_, headers in found], _HEADERS
            ),
        }
        keys = pa.array([key for key, *_ in found], pa.binary())
        return [CombinedUpdates(keys, pa.RecordBatch.from_pydict(columns))]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path / "store")
    with closing(made.store):
        yield made


@pytest.mark.parametrize(("attempt", "waits"), [*enumerate([1, 2, 4, 8, 16, 32, 64, 72, 72, 72])])
def test_a_record_is_due_by_its_own_timestamp_and_the_attempts_before(stage: Stage, attempt: int, waits: int) -> None:
    timestamp = stage.now_ms - 12_345
    done = stage.take((b"k", b"v", timestamp, [("retry-attempt", str(attempt).encode())]))

    (letter,) = stage.letters
    assert (letter.cause, letter.status, letter.attempt) == ("retry", Status.SCHEDULED, attempt)
    assert letter.due_ms == timestamp + waits * EVERY_MS
    assert done == Committed(0, 0, 0, 0, scheduled=1)
    assert (stage.sent, stage.dead_letters) == ([], [])


def is_full(*_: object) -> None:
    raise StoreFullError("make room")


def test_a_decision_that_the_store_has_no_room_for_has_the_task_opened_anew(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.take((b"k", b"v", 0, []))
    monkeypatch.setattr(stage.store, "write", is_full)

    with pytest.raises(RetriableError, match="the decision is written, and the store lacks it: make room"):
        decide(stage.letters, Status.DISCARDED, (), stage.processor, stage.store, stage.writer)


def test_after_a_store_that_lacks_a_commit_nothing_puts_the_position_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.take((b"k", b"v", 0, []))
    with monkeypatch.context() as full:
        full.setattr(stage.store, "write", is_full)
        with pytest.raises(StoreFullError):
            stage.take((b"k", b"w", 0, []))
    written = len(stage.writer.commits)

    with pytest.raises(TaskMigratedError):
        decide(stage.letters, Status.DISCARDED, (), stage.processor, stage.store, stage.writer)

    assert len(stage.writer.commits) == written


@pytest.mark.parametrize("attempt", [b"10", b"11", b"999999999"])
def test_after_ten_attempts_a_record_is_parked_and_an_operator_may_have_it_sent(stage: Stage, attempt: bytes) -> None:
    stage.take((b"k", b"v", 0, [("retry-attempt", attempt)]))
    stage.now_ms += 1_000 * EVERY_MS
    stage.retry()
    assert [letter.status for letter in stage.letters] == [Status.PARKED]
    assert stage.sent == []

    assert Verdict(Decision.REDRIVE, "me", "why").refusal(stage.letters[0]) is None
    decide(stage.letters, Status.SCHEDULED, (), stage.processor, stage.store, stage.writer)
    stage.retry()

    assert [dict(output.headers)["retry-attempt"] for output in stage.sent] == [b"%d" % (int(attempt) + 1)]


@pytest.mark.parametrize(
    ("headers", "attempt"),
    [
        ([], 0),
        ([("retry-attempt", b"2"), ("retry-attempt", b"3")], 3),
        *(([("retry-attempt", said)], 0) for said in (None, b"", b"two", b"-1", b"1.0", b" 1", b"\xb2", b"9" * 10)),
        ([("retry-attempts", b"3"), ("Retry-Attempt", b"3")], 0),
    ],
)
def test_a_header_that_says_no_number_says_that_there_was_no_attempt(
    stage: Stage, headers: Headers, attempt: int
) -> None:
    stage.take((b"k", b"v", 0, headers))

    assert [letter.attempt for letter in stage.letters] == [attempt]


@pytest.mark.parametrize("ahead", [1, 10**9, (1 << 62)])
def test_a_record_of_the_future_waits_no_longer_than_one_of_now(stage: Stage, ahead: int) -> None:
    stage.take((b"k", b"v", stage.now_ms + ahead, []))

    assert [letter.due_ms for letter in stage.letters] == [stage.now_ms + EVERY_MS]


def test_what_is_sent_is_the_record_with_where_it_came_from_and_one_attempt_more(stage: Stage) -> None:
    headers = [
        ("origin", b"elsewhere:0:1"),
        ("trace", b"t"),
        ("retry-attempt", b"x"),
        ("empty", None),
        ("retry-attempt", b"4"),
        ("trace", b"u"),
    ]
    stage.take((b"k", b"\xff\0v", 77, headers), (None, None, 78, []))
    stage.now_ms += 16 * EVERY_MS

    done = stage.retry()

    first, second = stage.sent
    assert first[:6] == (0, "app-retries", -1, b"k", b"\xff\0v", 77)
    assert first.headers == [
        ("trace", b"t"),
        ("empty", None),
        ("trace", b"u"),
        ("retry-attempt", b"5"),
        ("origin", f"{SOURCE}:1:0".encode()),
        ("sent-by", f"app-{STAGE}:id".encode()),
    ]
    assert second[:6] == (1, "app-retries", 1, None, None, 78)
    assert dict(second.headers)["retry-attempt"] == b"1"
    assert (done.applied, done.healed, done.sent, done.dead_lettered) == (2, 2, 2, 0)
    assert [letter.status for letter in stage.letters] == [Status.APPLIED] * 2


def test_a_record_is_sent_when_it_is_due_and_once(stage: Stage) -> None:
    stage.take((b"k", b"v", stage.now_ms, []))
    stage.now_ms += EVERY_MS - 1
    stage.retry()
    assert stage.sent == []

    stage.now_ms += 1
    for _ in range(3):
        stage.retry()

    assert len(stage.sent) == 1


def test_a_discarded_record_is_never_sent(stage: Stage) -> None:
    stage.take((b"k", b"v", 0, []))
    decide(stage.letters, Status.DISCARDED, (), stage.processor, stage.store, stage.writer)

    stage.now_ms += 1_000 * EVERY_MS
    stage.retry()

    assert stage.sent == []


def test_a_record_that_is_gone_when_it_is_due_can_only_be_discarded_and_becomes_no_further_dead_letter(
    stage: Stage,
) -> None:
    stage.take((b"k", b"v", 0, []), (b"l", b"w", 0, []))

    stage.retry(gone=frozenset({0}))

    gone, sent = stage.letters
    assert (gone.cause, gone.status, sent.status) == (GONE, Status.WAITING, Status.APPLIED)
    assert Verdict(Decision.REDRIVE, "me", "why").refusal(gone) is not None
    assert Verdict(Decision.DISCARD, "me", "why").refusal(gone) is None
    assert (stage.dead_letters, len(stage.sent)) == ([], 1)


def test_what_the_topic_would_refuse_waits_for_an_operator_and_stops_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "store", largest_bytes=4 << 10)
    with closing(stage.store):
        stage.take((b"k", b"v" * (4 << 10), 0, []), (b"l", b"w", 0, []))
        stage.retry()

        assert [(letter.cause, letter.status) for letter in stage.letters] == [
            ("output-does-not-fit", Status.WAITING),
            ("retry", Status.APPLIED),
        ]
        assert [output.key for output in stage.sent] == [b"l"]
        assert stage.dead_letters == []


def test_a_key_that_the_changelog_might_refuse_is_not_kept_in_the_letter(stage: Stage) -> None:
    stage.take((b"k" * (64 << 10), b"v", 0, []), (b"k" * ((64 << 10) + 1), b"v", 0, []))

    kept, left_out = stage.letters
    assert (len(kept.key or b""), left_out.key) == (64 << 10, None)
    assert Letter.first(0, "key-null", b"k" * (1 << 20), 0, EVERY_MS).key is None


# A changelog that is lost


class Broker:
    """The source as it is now."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def find_patiently(self, name: str) -> Topic | None:
        return Topic(name, "id", 2)

    def offsets(self, _name: str, partitions: Sequence[int], *, earliest: bool = False) -> dict[int, int]:
        return dict.fromkeys(partitions, self.start if earliest else self.end)


def context(stage: Stage, broker: Broker, decided: Mapping[int, Letter] | None = None) -> HostedStage:
    settings = load_settings(application_id="app", retry_topics=(SOURCE,))
    (of,) = stages_of_retries((), settings)
    topics: Any = broker
    decisions: Any = SimpleNamespace(closed_letters=lambda *_: {1: decided or {}})
    nobody: Any = None
    return HostedStage(
        settings=settings,
        stage=of,
        read_model=None,
        watermarks=nobody,
        topics=topics,
        source=Topic(SOURCE, "id", 2),
        processor=stage.processor,
        state_directory=nobody,
        decisions=decisions,
    )


def test_a_stage_that_has_lost_its_changelog_sends_what_was_not_sent_in_whatever_order_that_was(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balance_service.engine.opening.sent_of", lambda *_: iter([4, 1, 4, 2]))
    redriven, discarded = (Letter.retry(at, None, 0, 0, 0, EVERY_MS) for at in (0, 3))
    decided = {0: redriven.closed(Status.APPLIED, 0), 3: discarded.closed(Status.DISCARDED, 0)}
    known = context(stage, Broker(2, 6), decided)

    position = starting_position(None, known, 1, "changelog", 1)
    carried = starting_letters(cast("StateStore", SimpleNamespace(position=None)), known, 1)

    assert (position.offset, position.emitted_up_to) == (2, 0)
    assert {at: letter.status.value for at, letter in carried.after.items()} == {
        2: "applied",
        3: "discarded",
        4: "applied",
    }

    began = replace(position, offset=0)
    write_position(began, stage.processor.position_codec, stage.store, stage.writer, carried)
    stage.take(*[(b"k", b"v", 0, [])] * 6)
    stage.retry()
    assert sorted(output.offset for output in stage.sent) == [0, 1, 5]


def test_a_stage_goes_on_after_what_was_dropped_before_it_came_there(stage: Stage) -> None:
    stands_at = Position(3, 7, "id", source=f"{SOURCE}:1", changelog_topic_id="changelog")

    position = starting_position(stands_at, context(stage, Broker(5, 9)), 1, "changelog", 1)

    assert (position.offset, position.epoch) == (5, 8)


@pytest.mark.parametrize(("position", "is_opened_anew"), [(3, True), (5, False), (6, False)])
def test_a_task_whose_next_records_are_dropped_is_opened_anew_and_not_halted(
    position: int, is_opened_anew: bool
) -> None:
    asked: list[Any] = []
    task = SimpleNamespace(role=Role.ACTIVE, position=position, check_log=lambda *said: asked.append(said))
    failed: list[Any] = []
    hosted = SimpleNamespace(topics=Broker(5, 9), source=Topic(SOURCE, "id", 2), stage=SimpleNamespace(retries=True))
    tasks: Any = SimpleNamespace(hosted=hosted, answering=lambda: {1: task}, failed=lambda *said: failed.append(said))

    SourceCheck(tasks).run_once()

    assert (len(failed), len(asked)) == (is_opened_anew, not is_opened_anew)
