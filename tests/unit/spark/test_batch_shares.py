"""What the workers of a batch job do with rows, without Spark: dealt out in splits, and folded in shares."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from balance_service.bulk.folder import Folder
from balance_service.engine.assembly import processor_of
from balance_service.engine.dead_letter import OWN_CODE_FAILED, Letter, Status
from balance_service.engine.fold import FoldProcessor
from balance_service.engine.records import RESERVED_PREFIX, DeadLetter
from balance_service.errors import ConfigurationError, FatalError, PoisonRecordError, TaskHaltedError
from balance_service.model.events import DEAD_LETTER, HALT
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.process import failpoints
from balance_service.read_models.balance import Balance
from balance_service.spark.batch_plan import Answers, Asked, Plan, UnresolvedError, code_of, told
from balance_service.spark.batch_share import FoldedShare, folded
from balance_service.spark.batch_split import SHARE, dealt
from balance_service.testing import Driver, event
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import InputEvent, encoded, key_of, rows_of
from tests.support.models import ship

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from balance_service.testing.driver import DrivenTask

_SHARES = 3
_MINUTE_MS = 60_000
ONCE = RESERVED_PREFIX + b"once-by-name"
_CONFIG = {"max.message.bytes": str(1 << 20), "cleanup.policy": "delete"}


@pytest.fixture(autouse=True, params=["", "parts=2"], ids=["one batch", "batches of two"])
def _batches(request: pytest.FixtureRequest) -> Iterator[None]:
    failpoints.arm(request.param)
    yield
    failpoints.arm("")


class Names(ReadModel):
    """Keeps all names of an id in order. Refuses an empty name, and fails at a wrong one."""

    name = "test-batch-names"
    source = Stream("test-named", ship("NameTold", {"id": "string", "name": "string"}))
    key = "id"
    state = ship("NamesKept", {"id": "string", "names": {"type": "array", "items": "string"}})
    on_failure = DEAD_LETTER

    def fold(self, state: Any, told: Any) -> Any:
        if not told["name"]:
            raise PoisonRecordError("name-empty", "a name has letters")
        return {"id": told["id"], "names": [*(state["names"] if state else []), told["name"].removeprefix("!")]}


class Halting(Names):
    """The same, with code that fails."""

    name = "test-batch-halting"
    on_failure = HALT

    def fold(self, state: Any, told: Any) -> Any:
        return super().fold(state, {**told, "name": told["name"][0]})


def funds(amount: str, customer: str = "alice", once: str | None = None, at: int = 0) -> InputEvent:
    fields = {"customerId": customer, "amount": Decimal(amount)}
    given = event("FundsAdded", fields, timestamp_ms=at)
    return replace(given, idempotency_key=None if once is None else once.encode())


def named(name: str, of: str = "a", **more: Any) -> InputEvent:
    return event("NameTold", {"id": of, "name": name}, **more)


_DRIVERS = ExitStack()


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    _DRIVERS.close()


def driven(model: ReadModel, window_ms: int = 1 << 40) -> Driver:
    """Returns a test driver that is closed after the test."""
    return _DRIVERS.enter_context(Driver(model, idempotency_window_ms=window_ms))


class Batch:
    """A job of one partition, whose tasks run one after the other, as Spark would run them."""

    def __init__(self, model: ReadModel, path: Path, task: DrivenTask, **of_plan: Any) -> None:
        assert isinstance(task.processor, FoldProcessor)
        self._model = model
        self._registry = FakeRegistry()
        self._stage = task.stage
        answers = Answers(
            largest_bytes=1 << 20,
            retry_every_ms=300_000,
            idempotency_window_ms=task.processor.idempotency_window_ms,
            asked=Asked(self._registry, lambda _: 1, lambda _: "source", lambda _: _CONFIG),
            is_set=True,
            has_fingerprints=False,
        )
        processor_of(self._stage, model, answers.services())
        plan = Plan(
            stage=self._stage,
            read_model=model,
            code=code_of(model),
            answers=replace(answers, asked=None),
            folder=Folder(str(path / "files")),
            source_topic_id="source",
            partitioner="murmur2",
            begins={0: 0},
            ends={0: 1 << 40},
            letters={0: {}},
            shares=_SHARES,
        )
        self.plan = replace(plan, **of_plan)
        # As Spark hands it to a worker.
        self.plan = cloudpickle.loads(cloudpickle.dumps(self.plan))  # type: ignore[no-untyped-call]

    def rows(self, events: Sequence[InputEvent], first: int) -> pa.Table:
        """Returns the rows that Spark would make of events."""
        given = {at: encoded(one, self._stage) for at, one in enumerate(events, first)}
        rows = rows_of(self._model, self._stage, given, self._registry)
        keys = [key_of(self._model, self._stage, one) for one in given.values()]
        shares = pa.array([self.plan.share_of(key) for key in keys], pa.int32())
        return rows.append_column("partition", pa.array([0] * len(given), pa.int32())).append_column(SHARE, shares)

    def deal(self, *splits: Sequence[InputEvent]) -> list[tuple[int, int, bytes]]:
        """Deals out splits that follow each other."""
        found, first = [], 0
        for events in splits:
            batches = self.rows(events, first).to_batches(max_chunksize=2)
            found += [tuple(one.values()) for batch in dealt(self.plan, iter(batches)) for one in batch.to_pylist()]
            first += len(events)
        return found

    def fold(self, parts: Sequence[tuple[int, int, bytes]]) -> list[FoldedShare]:
        done = []
        for share in range(_SHARES):
            ours = sorted(part for part in parts if part[0] == share)
            columns = {"share": pa.int32(), "first": pa.int64(), "rows": pa.binary()}
            rows: list[dict[str, Any]] = [{"share": share, "first": -1, "rows": None}]
            rows += [dict(zip(columns, part, strict=True)) for part in ours]
            (result,) = folded(self.plan, iter([pa.RecordBatch.from_pylist([one], pa.schema(columns)) for one in rows]))
            done.append(FoldedShare.of(json.loads(result["done"][0].as_py())))
        return done

    def records(self, done: Sequence[FoldedShare]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for file in (file for share in done for file in share.files):
            last = b""
            for part in self.plan.folder.records(file):
                for key, value in zip(part["key"].to_pylist(), part["value"].to_pylist(), strict=True):
                    assert key > last, "a file is sorted"
                    assert key not in found, "no key is in two files"
                    last, found[key] = key, value
        return found


def compared(
    model: ReadModel,
    path: Path,
    splits: Sequence[Sequence[InputEvent]],
    *,
    window_ms: int = 1 << 40,
    **of_plan: Any,
) -> tuple[Batch, Driver, list[FoldedShare]]:
    """Folds events in a job and in the test driver, and compares states, markers, dead letters and their counts."""
    driver = driven(model, window_ms)
    task, processor = driver.last_stage, driver.last_stage.processor
    assert isinstance(processor, FoldProcessor)
    batch = Batch(model, path, task, **of_plan)
    for events in splits:
        driver.commit([*events])
    done = batch.fold(batch.deal(*splits))

    position, records = task.store.position, batch.records(done)
    assert position is not None
    states = {key: value for key, value in records.items() if not key.startswith(RESERVED_PREFIX)}
    assert states == task.states()
    assert sum(one.keys for one in done) == position.keys == len(states)
    counts = Counter[str]()
    for one in done:
        counts.update(one.letters)
    assert dict(counts) == position.letters
    found = [
        replace(processor.letters.decode(int.from_bytes(key[-8:]), value), written_ms=0, due_ms=0)
        for key, value in sorted(records.items())
        if key.startswith(RESERVED_PREFIX + b"letter-at")
    ]
    assert found == [replace(one, written_ms=0, due_ms=0) for one in driver.letters()]
    markers = {key: of for page in task.store.pages() for key, of in page if key.startswith(ONCE)}
    assert {key: of for key, of in records.items() if key.startswith(ONCE)} == {
        key: of
        for key, of in markers.items()
        if processor.marker_codec.decode(of)["timestamp"] + window_ms >= position.stream_time_ms
    }, "the same idempotency keys are remembered, but for some that have expired"
    assert max((split.stream_time_ms for split in batch.plan.folder.splits(0)), default=-1) == position.stream_time_ms
    return batch, driver, done


@pytest.mark.shows("rebuild")
def test_shares_of_several_splits_have_the_states_of_one_task(tmp_path: Path) -> None:
    events = [funds(f"{n}.01", f"customer-{n % 7}") for n in range(1, 60)]

    _, _, done = compared(Balance(), tmp_path, [events[:20], events[20:21], events[21:]])

    assert sum(one.rows for one in done) == len(events)
    assert all(one.files for one in done), "each share has some of the keys"


@pytest.mark.shows("rebuild", "idempotency-key")
def test_an_event_that_is_repeated_in_a_later_split_counts_once(tmp_path: Path) -> None:
    splits = [
        [funds("1.00", once="a"), funds("2.00", "bob", once="a"), funds("5.00")],
        [funds("1.00", once="a"), funds("3.00", "bob", once="a"), funds("1.00", once="b")],
    ]

    compared(Balance(), tmp_path, splits)


@pytest.mark.shows("rebuild", "idempotency-key")
def test_idempotency_keys_expire_by_the_time_of_the_whole_partition(tmp_path: Path) -> None:
    """Events of other keys, in other shares and in earlier splits, make the keys of one customer expire, or not."""
    others = [f"customer-{n}" for n in range(9)]
    splits = [
        [funds("1.00", once="a", at=0), funds("1.00", "bob", once="x", at=90_000)],
        # The time goes back, and the stream time does not.
        [funds("1.00", once="a", at=10_000), *(funds("1.00", of, once="y", at=20_000) for of in others)],
        [funds("1.00", once="b", at=95_000), funds("1.00", once="b", at=99_000), funds("1.00", "bob", once="x", at=0)],
        [funds("1.00", "carol", once="z", at=2**62), funds("1.00", once="b", at=160_000)],
    ]

    _, driver, _ = compared(Balance(), tmp_path, splits, window_ms=_MINUTE_MS)

    assert driver.view("alice") == {"amount": 4}, "a and b counted twice"


@pytest.mark.shows("rebuild", "key-order")
def test_events_wait_behind_a_dead_letter_of_their_key_in_an_earlier_split(tmp_path: Path) -> None:
    splits = [
        [named("one"), named("two", unreadable="schema-id-unknown"), named("first", "b")],
        [named("three"), named("second", "b"), named("", "b"), named("third", "b")],
    ]

    _, driver, _ = compared(Names(), tmp_path, splits)

    assert [one.status for one in driver.letters()] == [Status.SCHEDULED, Status.BEHIND, Status.WAITING]


@pytest.mark.shows("rebuild", "discarded")
def test_discarded_and_open_dead_letters_are_taken_over_and_their_records_are_not_applied(tmp_path: Path) -> None:
    splits = [[named("one"), named("discarded"), named("two")], [named("open", "b"), named("three", "b")]]
    carried = {
        1: Letter(1, "name-empty", Status.DISCARDED, 1, 0, 0, b"a"),
        3: Letter(3, "field-null", Status.WAITING, 1, 0, -1, b"b"),
        # It was redriven, and is applied in its turn now.
        2: Letter(2, "name-empty", Status.APPLIED, 1, 0, 0, None),
    }
    driver = driven(Names())
    batch = Batch(Names(), tmp_path, driver.last_stage, letters={0: carried})

    done = batch.fold(batch.deal(*splits))

    states = {key: of for key, of in batch.records(done).items() if not key.startswith(RESERVED_PREFIX)}
    decode = batch.plan.processor().frames.codec.decode
    assert {key: decode(of)["names"] for key, of in states.items()} == {b"a": ["one", "two"]}
    letters = Counter[str]()
    for one in done:
        letters.update(one.letters)
    assert letters == {
        "name-empty/discarded": 1,
        "field-null/waiting": 1,
        "name-empty/applied": 1,
        "behind-another/behind": 1,
    }
    assert [offset for one in done for offset in one.replayed] == [2]


def test_a_record_at_which_spark_fails_is_a_dead_letter_and_blocks_its_key(tmp_path: Path) -> None:
    failing = {1: DeadLetter(1, 0, b"a", b"", "decoder-failed", "it fails")}
    batch = Batch(Names(), tmp_path, driven(Names()).last_stage, failing={0: failing})

    done = batch.fold(batch.deal([named("one"), named("two"), named("three")]))

    letters = Counter[str]()
    for one in done:
        letters.update(one.letters)
    assert letters == {"decoder-failed/waiting": 1, "behind-another/behind": 1}


def test_an_applied_dead_letter_at_whose_record_spark_fails_now_is_open_again(tmp_path: Path) -> None:
    failing = {1: DeadLetter(1, 0, b"a", b"", "decoder-failed", "it fails")}
    applied = {at: Letter(at, "value-null", Status.APPLIED, 1, 0, 0, b"a") for at in (1, 7)}
    plan = Batch(Names(), tmp_path, driven(Names()).last_stage, failing={0: failing}, letters={0: applied}).plan

    assert plan.applied(0) == {7: applied[7]}


def test_a_job_reads_the_ranges_between_the_records_at_which_spark_fails(tmp_path: Path) -> None:
    letters = {at: DeadLetter(at, 0, b"a", b"", "decoder-failed", "it fails") for at in (9, 8, 30, 10, 19)}
    plan = Batch(Names(), tmp_path, driven(Names()).last_stage, failing={0: letters}).plan

    assert plan.readable(0, 0, 40) == [(0, 8), (11, 19), (20, 30), (31, 40)]
    assert plan.readable(0, 10, 20) == [(11, 19)]
    assert plan.readable(0, 8, 11) == []
    assert plan.readable(1, 0, 40) == [(0, 40)]


@pytest.mark.shows("exactly-once")
def test_a_split_that_is_read_twice_is_noticed(tmp_path: Path) -> None:
    batch = Batch(Balance(), tmp_path, driven(Balance()).last_stage)
    events = [funds("1.00", f"customer-{n}") for n in range(9)]
    parts = batch.deal(events)

    with pytest.raises(RuntimeError, match=r"has rows of share 0, from offset \d on"):
        batch.fold([*parts, *parts])

    list(dealt(batch.plan, iter(batch.rows(events[4:], 4).to_batches())))
    with pytest.raises(FatalError, match="offset 4 of partition 0 was read twice"):
        batch.plan.folder.splits(0)


def test_a_task_that_is_tried_again_leaves_the_same_mark(tmp_path: Path) -> None:
    batch = Batch(Balance(), tmp_path, driven(Balance()).last_stage)
    events = [funds("1.00", f"customer-{n}") for n in range(9)]

    assert batch.deal(events) == batch.deal(events)

    (split,) = batch.plan.folder.splits(0)
    assert split == (0, 0, 8, 9, 9, -1)


def test_code_that_fails_ends_the_job_with_the_sentence_of_a_halted_task(tmp_path: Path) -> None:
    model = Halting()
    batch = Batch(model, tmp_path, driven(model).last_stage)

    with pytest.raises(RuntimeError) as failed:
        batch.fold(batch.deal([named("one"), named("")]))

    found = told(failed.value)
    assert isinstance(found, TaskHaltedError)
    assert "fails at offset 1 of" in str(found)


def test_schemas_that_are_not_known_are_told_once_and_then_make_dead_letters(tmp_path: Path) -> None:
    model = Names()
    batch = Batch(model, tmp_path, driven(model).last_stage)
    rows = batch.rows([named("one", unreadable="unresolved")], 0)

    with pytest.raises(RuntimeError) as failed:
        list(dealt(batch.plan, iter(rows.to_batches())))
    found = told(failed.value)
    assert isinstance(found, UnresolvedError)
    batch.plan = replace(batch.plan, unknown=frozenset(found.names))

    parts = [tuple(one.values()) for of in dealt(batch.plan, iter(rows.to_batches())) for one in of.to_pylist()]
    (letters,) = [one.letters for one in batch.fold(parts) if one.letters]
    assert letters == {"schema-guid-unknown/scheduled": 1}


def test_an_executor_with_other_code_than_the_driver_folds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive of an executor may be older than the class that the command has."""
    file = tmp_path / "packed_names.py"
    file.write_text("from balance_service.read_models.balance import Balance\n\nclass Packed(Balance):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "packed_names", None)
    monkeypatch.delitem(sys.modules, "packed_names")
    model: ReadModel = importlib.import_module("packed_names").Packed()
    batch = Batch(model, tmp_path, driven(model).last_stage)
    dealt_out = batch.deal([funds("1.00")])
    assert sum(one.rows for one in batch.fold(dealt_out)) == 1

    file.write_text(f"{file.read_text()}\nrounds = True\n")

    for works in (lambda: batch.fold(dealt_out), lambda: batch.deal([funds("1.00")])):
        with pytest.raises(RuntimeError) as failed:
            works()
        found = told(failed.value)
        assert isinstance(found, ConfigurationError)
        assert "other code than this process in packed_names: pack" in str(found)


def test_failures_of_the_models_code_are_told(tmp_path: Path) -> None:
    class Failing(Names):
        name = "test-batch-failing"

        def fold(self, state: Any, told: Any) -> Any:
            return super().fold(state, {**told, "name": told["name"][0]})

    model = Failing()
    batch = Batch(model, tmp_path, driven(model).last_stage)

    done = batch.fold(batch.deal([named("one"), named(""), named("two")]))

    assert [offset for one in done for offset in one.own_code_failed] == [1]
    (letters,) = [one.letters for one in done if one.letters]
    assert letters[f"{OWN_CODE_FAILED}/waiting"] == 1
