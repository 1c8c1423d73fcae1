"""Stages without states: events joined with rows as of their time, and scheduled retries of dead letters."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema
from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.commit import Committed, commit, decide, write_position
from balance_service.engine.dead_letter import GONE, Letter, Status
from balance_service.engine.decisions import Decision, Verdict
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.hosted_stage import HostedStage
from balance_service.engine.opening import starting_changes, starting_position
from balance_service.engine.outputs import Target, is_in_our_form
from balance_service.engine.records import DeadLetter, Output, Position
from balance_service.engine.stateless import JoinProcessor, RetryProcessor
from balance_service.engine.store import StateStore
from balance_service.engine.table_store import TableStore, Version
from balance_service.engine.tables import JoinedTables
from balance_service.kafka.topics import Topic
from balance_service.model.generations import Generations
from balance_service.model.keys import ColumnKey
from balance_service.model.placing import stages_of_retries
from balance_service.model.stream import Global, Join
from balance_service.settings import load_settings
from balance_service.testing.fakes import FakeRegistry
from tests.support.fakes import FakeWriter, letters, position_codec
from tests.support.models import ship

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from balance_service.engine.processor import BatchOutcome
    from balance_service.model.stream import Missing

    Headers = Sequence[tuple[str, bytes | None]]

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

# Joins

ship("NamedScore", {"score": "double", "product_id": "long", "player_id": "long", "playerName": ["null", "string"]})
PARTITION = 1
PLAYERS = 3
A_DAY_MS = 24 * 60 * 60 * 1000
ROWS = st.tuples(st.just("row"), st.integers(0, PLAYERS), st.integers(0, 40), st.booleans())
SCORES = st.tuples(st.just("score"), st.integers(0, PLAYERS), st.integers(0, 40), st.just(False))


class ScoreJoin:
    """A stage that joins scores with a table of players."""

    def __init__(self, folder: str, missing: Missing) -> None:
        registry = FakeRegistry()
        schema = load_schema("NamedScore")
        self.codec = AvroCodec(registry, "scores", schema)
        self.rows = AvroCodec(registry, "players", load_schema("Player"))
        self.store = TableStore(Path(folder), A_DAY_MS)
        followed = SimpleNamespace(note_joined=lambda _at: None)
        tables: Any = SimpleNamespace(
            reader=lambda _topic: self.rows, partition=lambda _table: followed, partition_of=lambda _topic, _key: 0
        )
        table = Global("players", "Player")
        joins = [Join(table=table, on="player_id", take={"name": "playerName"}, missing=missing)]
        topics: Any = None
        self._followed = followed
        self._processor = JoinProcessor(
            source="scores",
            record="ScoreEvent",
            joined=JoinedTables(joins=joins, tables=tables, topics=topics),
            schema=schema,
            codec=self.codec,
            key_type=ColumnKey("product_id", is_number=True),
            target=Target("joined", 1, 1 << 20, False, "app-joining"),
            position_codec=self.codec,
            letters=letters(registry),
        )
        self._offset = 0

    def put(self, player: int, timestamp_ms: int, name: str | None) -> None:
        frame = None if name is None else self.rows.encode({"id": player, "name": name})
        version = Version(timestamp_ms, self._offset, frame)
        self.store.apply([(str(player).encode(), version)], self._offset + 1)
        self._offset += 1

    def score(self, *scored: tuple[int | None, int], emitted_up_to: int = 0) -> BatchOutcome:
        """Returns the outcome of a batch of scores, each with a player and a time, from offset 0 on."""
        self._followed.view = self.store.view
        rows = [
            {
                "key": b"key",
                "offset": offset,
                "timestamp": at,
                "value": b"score",
                "headers": None,
                "ScoreEvent": {"score": 1.0, "product_id": 7, "player_id": player},
            }
            for offset, (player, at) in enumerate(scored)
        ]
        of_event = pa.struct([("score", pa.float64()), ("product_id", pa.int64()), ("player_id", pa.int64())])
        columns = {"offset": pa.int64(), "timestamp": pa.int64(), "value": pa.binary(), "headers": _HEADERS}
        columns |= {"key": pa.binary(), "ScoreEvent": of_event}
        table = pa.Table.from_pylist(rows, pa.schema(columns))
        no_store: Any = None
        return self._processor.outcome(
            TaskBatch(0, PartitionUpdates(len(rows), table)),
            PARTITION,
            Position(0, 1, "id", emitted_up_to=emitted_up_to),
            no_store,
        )

    def name(self, outcome: BatchOutcome) -> str | None:
        """Returns the name of the player in the only output or, without an output, the cause of the dead letter."""
        if outcome.dead_letters:
            return outcome.dead_letters[0].cause
        (made,) = outcome.outputs
        assert made.value is not None
        name: str | None = self.codec.decode(made.value)["playerName"]
        return name


@pytest.mark.shows("joined")
@given(history=st.lists(ROWS | SCORES, max_size=30))
def test_any_interleaving_of_rows_and_scores_joins_as_the_rule_says(history: list[tuple[str, int, int, bool]]) -> None:
    rows: dict[int, list[tuple[int, int, str | None]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        stage = ScoreJoin(folder, "dead-letter")
        for number, (kind, player, at, is_tombstone) in enumerate(history):
            if kind == "row":
                name = None if is_tombstone else f"name {number}"
                stage.put(player, at, name)
                rows.setdefault(player, []).append((at, number, name))
                continue
            versions = sorted(rows.get(player, []), key=lambda version: version[:2])
            before = [version for version in versions if version[0] <= at]
            expected = (before[-1:] or versions[:1] or [(0, 0, None)])[0][2]
            assert stage.name(stage.score((player, at))) == (expected or "join-missing")
        stage.store.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "players_0")


@pytest.mark.parametrize(
    ("missing", "made", "letters"), [("dead-letter", 0, ["join-missing"]), ("drop", 0, []), ("null", 1, [])]
)
def test_an_event_without_its_row_is_a_dead_letter_or_dropped_or_joined_with_null(
    folder: str, missing: Missing, made: int, letters: list[str]
) -> None:
    stage = ScoreJoin(folder, missing)
    outcome = stage.score((1, 5))

    assert (len(outcome.outputs), [letter.cause for letter in outcome.dead_letters]) == (made, letters)
    if made:
        assert stage.name(outcome) is None
        assert {name for name, _ in outcome.outputs[0].headers} == {"origin", "sent-by"}
    stage.store.close()


@pytest.mark.shows("joined")
def test_a_joined_record_names_its_origin_and_the_version_of_the_row(folder: str) -> None:
    stage = ScoreJoin(folder, "dead-letter")
    stage.put(1, 10, "first")
    stage.put(1, 20, "second")

    (made,) = stage.score((1, 15)).outputs

    assert (made.key, made.timestamp_ms) == (ColumnKey("product_id", is_number=True).encode(7), 15)
    assert dict(made.headers) == {
        "playerVersion": b"0:0",
        "origin": b"scores:1:0",
        "sent-by": b"app-joining",
    }
    stage.store.close()


def test_an_event_whose_join_field_is_null_is_a_dead_letter_with_its_bytes(folder: str) -> None:
    stage = ScoreJoin(folder, "null")

    (letter,) = stage.score((None, 5)).dead_letters

    assert (letter.cause, letter.key, letter.value, letter.timestamp_ms) == ("field-null", b"key", b"score", 5)
    stage.store.close()


@pytest.mark.shows("joined")
def test_events_passed_on_before_a_rebuild_are_not_joined_again(folder: str) -> None:
    stage = ScoreJoin(folder, "dead-letter")
    stage.put(1, 0, "known")

    outcome = stage.score((2, 5), (1, 5), (2, 5), (1, 5), emitted_up_to=2)

    assert [made.offset for made in outcome.outputs] == [3]
    assert [letter.offset for letter in outcome.dead_letters] == [2]
    stage.store.close()


# Retries

EVERY_MS = 300_000
SOURCE = "orders-dead-letters"
STAGE = f"retries-{SOURCE}"


class RetryStage:
    """A task of a retry stage with its own clock, and a changelog in memory."""

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
        """Commits new records (key, value, timestamp, headers), except those that are left out."""
        start = len(self.records)
        self.records += records
        end, left_out = len(self.records), self.processor.letters.left_out_from(self.store, start)
        taken = [at for at in range(start, end) if at not in left_out]
        skipped = frozenset(left_out)
        updates = PartitionUpdates(end, self._rows(taken), applied=len(taken))
        return self._commit(TaskBatch(start, updates, left_out=skipped))

    def retry(self, gone: frozenset[int] = frozenset()) -> Committed:
        """Commits the due dead letters. The records at the offsets `gone` are no longer in the topic."""
        due = self.processor.letters.due(self.store)
        there = [letter.offset for letter in due.again if letter.offset not in gone]
        lost = [DeadLetter(at, -1, None, None, GONE) for at in sorted(gone)]
        position = len(self.records)
        updates = PartitionUpdates(position, self._rows(there), applied=len(there), dead_letters=lost)
        retried = frozenset(letter.offset for letter in due.again)
        return self._commit(TaskBatch(position, updates, retried=retried, forgotten=due.forgotten))

    def decide(self, status: Status) -> None:
        """Carries out a decision about all dead letters."""
        changes = self.processor.letters.on_decision(self.store, self.letters, status)
        decide(changes, (), self.processor, self.store, self.writer)

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

    def _rows(self, offsets: Sequence[int]) -> pa.Table:
        found = [self.records[at] for at in offsets]
        columns = {
            "key": pa.array([key for key, *_ in found], pa.binary()),
            "offset": pa.array(offsets, pa.int64()),
            "timestamp": pa.array([timestamp for _, _, timestamp, _ in found], pa.int64()),
            "value": pa.array([value for _, value, _, _ in found], pa.binary()),
            "headers": pa.array(
                [[{"key": name, "value": of} for name, of in headers] or None for *_, headers in found], _HEADERS
            ),
        }
        return pa.table(columns)


@pytest.fixture
def retries(tmp_path: Path) -> Iterator[RetryStage]:
    made = RetryStage(tmp_path / "store")
    with closing(made.store):
        yield made


@pytest.mark.parametrize(("attempt", "waits"), [*enumerate([1, 2, 4, 8, 16, 32, 64, 72, 72, 72])])
def test_a_record_is_due_by_its_timestamp_and_its_earlier_attempts(
    retries: RetryStage, attempt: int, waits: int
) -> None:
    timestamp = retries.now_ms - 12_345
    done = retries.take((b"k", b"v", timestamp, [("retry-attempt", str(attempt).encode())]))

    (letter,) = retries.letters
    assert (letter.cause, letter.status, letter.attempt) == ("retry", Status.SCHEDULED, attempt)
    assert letter.due_ms == timestamp + waits * EVERY_MS
    assert done == Committed(0, 0, 0, 0, scheduled=1)
    assert (retries.sent, retries.dead_letters) == ([], [])


@pytest.mark.parametrize("attempt", [b"10", b"11", b"999999999"])
def test_after_ten_attempts_a_record_is_parked_until_an_operator_redrives_it(
    retries: RetryStage, attempt: bytes
) -> None:
    retries.take((b"k", b"v", 0, [("retry-attempt", attempt)]))
    retries.now_ms += 1_000 * EVERY_MS
    retries.retry()
    assert [letter.status for letter in retries.letters] == [Status.PARKED]
    assert retries.sent == []

    assert Verdict(Decision.REDRIVE, "me", "why").refusal(retries.letters[0]) is None
    retries.decide(Status.SCHEDULED)
    retries.retry()

    assert [dict(output.headers)["retry-attempt"] for output in retries.sent] == [b"%d" % (int(attempt) + 1)]


@pytest.mark.parametrize(
    ("headers", "attempt"),
    [
        ([], 0),
        ([("retry-attempt", b"2"), ("retry-attempt", b"3")], 3),
        *(([("retry-attempt", said)], 0) for said in (None, b"", b"two", b"-1", b"1.0", b" 1", b"\xb2", b"9" * 10)),
        ([("retry-attempts", b"3"), ("Retry-Attempt", b"3")], 0),
    ],
)
def test_the_last_attempt_header_counts_if_it_is_a_number(retries: RetryStage, headers: Headers, attempt: int) -> None:
    retries.take((b"k", b"v", 0, headers))

    assert [letter.attempt for letter in retries.letters] == [attempt]


@pytest.mark.parametrize("ahead", [1, 10**9, (1 << 62)])
def test_a_record_with_a_future_timestamp_waits_no_longer_than_a_present_one(retries: RetryStage, ahead: int) -> None:
    retries.take((b"k", b"v", retries.now_ms + ahead, []))

    assert [letter.due_ms for letter in retries.letters] == [retries.now_ms + EVERY_MS]


@pytest.mark.parametrize(
    ("headers", "form"),
    [
        ([], b"unchanged"),
        ([("key-format", b"long"), ("sent-by", b"app-days:id")], b"long"),
        # Of a record in the order of our stores, the key is not one of Java's.
        ([("sent-by", b"app-days:id")], None),
    ],
)
def test_the_key_of_a_retry_is_taken_for_what_it_was(
    retries: RetryStage, headers: list[tuple[str, bytes | None]], form: bytes | None
) -> None:
    retries.take((b"\0\0\0\0\0\0\0\5", b"v", 77, headers))
    retries.now_ms += 16 * EVERY_MS
    retries.retry()

    (sent,) = retries.sent
    assert dict(sent.headers).get("key-format") == form
    assert is_in_our_form(sent.headers) == (form is None)


def test_the_output_is_the_record_with_its_origin_and_one_more_attempt(retries: RetryStage) -> None:
    headers = [
        ("origin", b"elsewhere:0:1"),
        ("trace", b"t"),
        ("retry-attempt", b"x"),
        ("empty", None),
        ("retry-attempt", b"4"),
        ("trace", b"u"),
    ]
    retries.take((b"k", b"\xff\0v", 77, headers), (None, None, 78, []))
    retries.now_ms += 16 * EVERY_MS

    done = retries.retry()

    first, second = retries.sent
    assert first[:6] == (0, "app-retries", -1, b"k", b"\xff\0v", 77)
    assert first.headers == [
        ("trace", b"t"),
        ("empty", None),
        ("trace", b"u"),
        ("retry-attempt", b"5"),
        ("key-format", b"unchanged"),
        ("origin", f"{SOURCE}:1:0".encode()),
        ("sent-by", f"app-{STAGE}:id".encode()),
    ]
    assert second[:6] == (1, "app-retries", 1, None, None, 78)
    assert dict(second.headers)["retry-attempt"] == b"1"
    assert (done.applied, done.healed, done.sent, done.dead_lettered) == (2, 2, 2, 0)
    assert [letter.status for letter in retries.letters] == [Status.APPLIED] * 2


def test_a_record_is_sent_once_when_it_is_due(retries: RetryStage) -> None:
    retries.take((b"k", b"v", retries.now_ms, []))
    retries.now_ms += EVERY_MS - 1
    retries.retry()
    assert retries.sent == []

    retries.now_ms += 1
    for _ in range(3):
        retries.retry()

    assert len(retries.sent) == 1


def test_a_discarded_record_is_never_sent(retries: RetryStage) -> None:
    retries.take((b"k", b"v", 0, []))
    retries.decide(Status.DISCARDED)

    retries.now_ms += 1_000 * EVERY_MS
    retries.retry()

    assert retries.sent == []


def test_a_record_that_is_gone_when_it_is_due_can_only_be_discarded(retries: RetryStage) -> None:
    retries.take((b"k", b"v", 0, []), (b"l", b"w", 0, []))

    retries.retry(gone=frozenset({0}))

    gone, sent = retries.letters
    assert (gone.cause, gone.status, sent.status) == (GONE, Status.WAITING, Status.APPLIED)
    assert Verdict(Decision.REDRIVE, "me", "why").refusal(gone) is not None
    assert Verdict(Decision.DISCARD, "me", "why").refusal(gone) is None
    assert (retries.dead_letters, len(retries.sent)) == ([], 1)


def test_a_record_that_the_target_would_reject_waits_for_an_operator_and_blocks_no_others(tmp_path: Path) -> None:
    retries = RetryStage(tmp_path / "store", largest_bytes=4 << 10)
    with closing(retries.store):
        retries.take((b"k", b"v" * (4 << 10), 0, []), (b"l", b"w", 0, []))
        retries.retry()

        assert [(letter.cause, letter.status) for letter in retries.letters] == [
            ("output-does-not-fit", Status.WAITING),
            ("retry", Status.APPLIED),
        ]
        assert [output.key for output in retries.sent] == [b"l"]
        assert retries.dead_letters == []


# A lost changelog


class Broker:
    """The source topic with its present offsets."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def find_patiently(self, name: str) -> Topic | None:
        return Topic(name, "id", 2)

    def offsets(self, _name: str, partitions: Sequence[int], *, earliest: bool = False) -> dict[int, int]:
        return dict.fromkeys(partitions, self.start if earliest else self.end)


def context(retries: RetryStage, broker: Broker, decided: Mapping[int, Letter] | None = None) -> HostedStage:
    settings = load_settings(application_id="app", retry_topics=(SOURCE,))
    (of,) = stages_of_retries((), settings)
    topics: Any = broker
    decisions: Any = SimpleNamespace(decided_letters=lambda *_: {1: decided or {}})
    unused: Any = None
    return HostedStage(
        settings=settings,
        stage=of,
        read_model=None,
        lease=unused,
        watermarks=unused,
        topics=topics,
        source=Topic(SOURCE, "id", 2),
        processor=retries.processor,
        state_directory=unused,
        decisions=decisions,
        generations=HostedGenerations(lambda: Generations(of.owner)),
    )


@pytest.mark.shows("outputs-once")
@pytest.mark.usefixtures("no_environment")
def test_a_stage_that_lost_its_changelog_sends_only_records_that_were_not_sent(
    retries: RetryStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balance_service.engine.opening.sent_of", lambda *_: iter([4, 1, 4, 2]))
    redriven, discarded = (Letter.retry(at, None, 0, 0, 0, EVERY_MS) for at in (0, 3))
    decided = {0: redriven.closed(Status.APPLIED, 0), 3: discarded.closed(Status.DISCARDED, 0)}
    known = context(retries, Broker(2, 6), decided)

    position = starting_position(None, known, 1, "changelog", 1)
    empty = cast("StateStore", SimpleNamespace(position=None))
    ((position, carried),) = starting_changes(empty, known, 1, position, 0, lambda: False)

    assert (position.offset, position.emitted_up_to, position.inherited) == (2, 0, 0)
    assert {at: letter.status.value for at, letter in carried.after.items()} == {
        2: "applied",
        3: "discarded",
        4: "applied",
    }

    began = replace(position, offset=0)
    write_position(began, retries.processor.position_codec, retries.store, retries.writer, carried)
    retries.take(*[(b"k", b"v", 0, [])] * 6)
    retries.retry()
    assert sorted(output.offset for output in retries.sent) == [0, 1, 5]


@pytest.mark.usefixtures("no_environment")
def test_a_stage_continues_after_records_that_retention_removed_before_it_read_them(retries: RetryStage) -> None:
    stands_at = Position(3, 7, "id", source=f"{SOURCE}:1", changelog_topic_id="changelog")

    position = starting_position(stands_at, context(retries, Broker(5, 9)), 1, "changelog", 1)

    assert (position.offset, position.epoch) == (5, 8)
