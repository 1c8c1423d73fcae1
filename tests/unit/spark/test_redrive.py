"""Dead letters at which Spark fails during a retry: they block no others, and are not forgotten."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest

from balance_service.avro.frames import frame_header, schema_id_of
from balance_service.avro.schemas import load_schema
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.dead_letters import DueLetters
from balance_service.errors import FatalError
from balance_service.read_models.balance import Balance
from balance_service.spark.combine import UNRESOLVED, PartitionRows
from balance_service.spark.decode import Decoder
from balance_service.spark.redrive import Redrive
from balance_service.spark.row_query import QueryEndedError
from tests.support.fakes import FakeRegistry
from tests.unit.spark.decoded import row, table
from tests.unit.spark.spark_side import lone_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from balance_service.engine.batch import TaskBatch

LETTERS = 20
FAILED = "decoder-failed"


def message(offset: int) -> Any:
    return SimpleNamespace(
        key=lambda: b"alice",
        value=lambda: b"funds",
        offset=lambda: offset,
        partition=lambda: 0,
        timestamp=lambda: (1, 0),
        headers=lambda: None,
    )


def redrive(monkeypatch: pytest.MonkeyPatch, bad: set[int], session: Any = None) -> Redrive:
    """A Redrive whose Spark fails at some offsets."""

    def read(*given: Any) -> tuple[Sequence[int], Mapping[int, Any]]:
        return given[4], {offset: message(offset) for offset in given[4]}

    def decode(records: pa.Table, _seconds: float) -> pa.Table:
        if bad.intersection(records["offset"].to_pylist()):
            raise QueryEndedError("a job was aborted")
        return table([row(at) for at in records["offset"].to_pylist()])

    parts: Any = SimpleNamespace(
        resolve=lambda _: set(), framed=lambda record: record, ask_anew=lambda: None, schema_id=schema_id_of
    )
    made = Redrive(
        spark=session or lone_session(), settings=parts, topics=parts, source="balance", decoder=parts, has_states=False
    )
    monkeypatch.setattr("balance_service.spark.redrive.records_left_at", read)
    monkeypatch.setattr(made, "_rows", decode)
    return made


def batch(tried_by: Redrive, offsets: Sequence[int], folder: Path) -> TaskBatch:
    letters = [Letter.first(offset, "join-missing", None, 0, 1) for offset in offsets]
    return tried_by.batch(0, LETTERS, DueLetters(letters), folder / "suspects" / "balance_0.letters")


@pytest.mark.parametrize("bad", [{0}, {7}, {LETTERS - 1}, {0, 1, 12}, set(range(LETTERS)), set()])
def test_a_dead_letter_at_which_spark_fails_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int]
) -> None:
    tried_by = redrive(monkeypatch, bad)
    left, failed, tried = [*range(LETTERS)], [], []
    while left:
        done = batch(tried_by, left, tmp_path)
        failed += [(letter.offset, letter.cause) for letter in done.updates.dead_letters]
        tried += sorted(done.retried)
        left = [offset for offset in left if offset not in done.retried]

    assert failed == [(offset, FAILED) for offset in sorted(bad)]
    assert tried == [*range(LETTERS)]


@pytest.mark.shows("retried-once")
def test_a_dead_letter_is_retried_ten_times_at_most() -> None:
    letter, attempts = Letter.first(0, "schema-id-unknown", None, 0, 1), 0
    while letter.status is Status.SCHEDULED:
        letter, attempts = letter.failed_again("join-missing", 0, 1), attempts + 1

    assert (letter.status, attempts) == (Status.PARKED, 10)


def test_a_dead_letter_at_which_spark_fails_waits_for_an_operator() -> None:
    first = Letter.first(0, FAILED, b"c", 0, 1)
    again = Letter.first(0, "schema-id-unknown", b"c", 0, 1).failed_again(FAILED, 0, 1)

    assert {letter.status for letter in (first, again)} == {Status.WAITING}
    assert first.blocks_key
    assert first.due_at_once(1).status is Status.SCHEDULED


def test_a_dead_letter_of_an_earlier_version_at_which_spark_failed_still_blocks_its_key() -> None:
    record = {**Letter.first(0, "schema-id-unknown", b"c", 0, 1).record(), "cause": "spark-failed"}

    assert Letter.of(record, offset=0).blocks_key
    assert Letter.of(record, offset=0).status is Status.SCHEDULED


def test_the_end_of_spark_is_no_failure_of_a_dead_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FatalError):
        batch(redrive(monkeypatch, {0}, lone_session(exit_code=137)), [0], tmp_path)


def test_a_record_whose_time_is_beyond_sparks_is_read_as_a_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, late = redrive(monkeypatch, set()), message(4)
    late.timestamp = lambda: (1, 1 << 62)
    monkeypatch.setattr(reading, "_topics", SimpleNamespace(offsets=lambda *_, **__: {0: 5}))
    monkeypatch.setattr("balance_service.spark.redrive.records_from", lambda *_: [message(3), late])

    (good, _), (none, letter) = reading.read(0, 3)

    assert good is not None
    assert none is None
    assert (letter.offset, letter.cause) == (4, "time-out-of-range")
    assert letter.timestamp_ms == 1 << 62


def test_unresolved_records_get_their_frames_if_the_registry_knows_their_schema() -> None:
    registry, nobody = FakeRegistry(), MagicMock()
    schema_id = registry.register("balance", load_schema("FundsAdded"))
    nobody._jvm.parts.code.balance.Resolving.return_value.tell.return_value = None
    decoder = Decoder(nobody, Balance(), Balance().stages[-1], registry)
    made = Redrive(spark=nobody, settings=nobody, topics=nobody, source="balance", decoder=decoder, has_states=True)
    named, unknown = (
        [{"key": "a", "value": b"1"}, {"key": "__value_schema_id", "value": b"\1" + bytes(15) + last}]
        for last in (b"\1", b"\7")
    )
    rows = [
        row(1, None, cause=UNRESOLVED, schema_id=schema_id, value=frame_header(schema_id) + b"x"),
        row(2, None, cause=UNRESOLVED, schema_id=99, value=frame_header(99)),
        row(3, None, cause=UNRESOLVED, value=b"body", headers=named),
        row(4, None, cause=UNRESOLVED, value=b"body", headers=unknown),
    ]

    known = made.known(PartitionRows(table(rows)).unresolved()).to_pylist()

    assert [(record["offset"], record["value"], record["headers"]) for record in known] == [
        (1, frame_header(schema_id) + b"x", None),
        (3, frame_header(schema_id) + b"body", named[:1]),
    ]


def test_rows_that_are_decoded_again_take_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = [{"key": "idempotency-key", "value": b"k"}, {"key": "idempotency-key", "value": None}]
    note = {"schema_id": 7, "timestamp": 5, "record_key": b"c1", "value": b"v", "headers": headers}
    unresolved = {n: row(n, None, None, cause="unresolved", **note) for n in (1, 3)}
    rows = table([row(0, amount=Decimal(0)), unresolved[1], row(2, amount=Decimal(2)), unresolved[3]])
    redriving, decoded = redrive(monkeypatch, set()), list[pa.Table]()

    def decode(records: pa.Table, _seconds: float) -> pa.Table:
        decoded.append(records)
        return table(row(n, amount=Decimal(n), timestamp=5, idempotency_key=b"k") for n in (3, 1))

    monkeypatch.setattr(redriving, "_rows", decode)
    merged = PartitionRows(redriving.resolved(4, rows, PartitionRows(rows).unresolved()))

    assert merged.updates["offset"].to_pylist() == [0, 1, 2, 3]
    assert merged.updates["amount"].to_pylist() == [0, 1, 2, 3]
    assert [update.idempotency_key for update in merged.single_updates(merged.updates)] == [None, b"k", None, b"k"]
    assert merged.unresolved().num_rows == 0
    first = {"key": b"c1", "value": b"v", "offset": 1, "timestamp": datetime(1970, 1, 1, 0, 0, 0, 5_000, UTC)}
    assert decoded[0].to_pylist()[0] == {**first, "headers": headers, "partition": 4}
    assert decoded[0]["offset"].to_pylist() == [1, 3]
