"""The search for the record at which Spark fails, also over ends of the instance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.errors import FatalError
from balance_service.spark import trials as module
from balance_service.spark.row_query import QueryEndedError, QueryInterruptedError
from balance_service.spark.session import JvmEndedError
from balance_service.spark.trials import Trials

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

RECORDS = [{"offset": offset} for offset in range(0, 3_000, 3)]
MOST_FAILURES = 50


def jvm_ended() -> JvmEndedError:
    return JvmEndedError("Spark's JVM has ended")


class Decoder:
    """Fails at some offsets: it raises, or its JVM ends, and the instance with it."""

    def __init__(self, *bad: int, raises: Callable[[], BaseException] = lambda: QueryEndedError("failed")) -> None:
        self.bad = set(bad)
        self.raises = raises
        self.attempts: list[list[int]] = []
        self.failures = 0
        self.is_broken = False

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> Any:
        offsets = [record["offset"] for record in records]
        self.attempts.append(offsets)
        if self.is_broken or self.bad.intersection(offsets):
            self.failures += 1
            raise self.raises()
        return offsets

    def harmless(self) -> None:
        if self.is_broken:
            raise QueryEndedError("broken")


def path(folder: Path) -> Path:
    return folder / "suspects" / "balance_0.json"


def trials(folder: Path, decoder: Decoder) -> Trials:
    return Trials(path(folder), decoder, decoder.harmless, lambda: None)


def read(folder: Path, decoder: Decoder, records: Sequence[Mapping[str, Any]]) -> tuple[list[int], dict[int, str]]:
    """Decodes all records; returns the offsets of the decoded and of the blamed ones. Starts again after each end."""
    decoded: list[int] = []
    blamed: dict[int, str] = {}
    made, left = trials(folder, decoder), list(records)
    while left:
        assert decoder.failures < MOST_FAILURES
        try:
            trial = made.decoded(left)
        except JvmEndedError:
            made = trials(folder, decoder)
            continue
        offsets = [record["offset"] for record in trial.records]
        if trial.rows is None:
            blamed[offsets[0]] = trial.detail
        else:
            decoded += offsets
        left = left[len(offsets) :]
    return decoded, blamed


BAD = [(0,), (2_997,), (1_500,), (0, 3, 6), (300, 1_500, 1_503, 2_997), ()]
ENDS = pytest.mark.parametrize("raises", [lambda: QueryEndedError("failed"), jvm_ended], ids=["fails", "ends"])


@ENDS
@pytest.mark.parametrize("bad", BAD)
def test_only_the_records_at_which_spark_fails_are_to_blame(
    tmp_path: Path, bad: tuple[int, ...], raises: Callable[[], BaseException]
) -> None:
    decoder = Decoder(*bad, raises=raises)

    decoded, blamed = read(tmp_path, decoder, RECORDS)

    assert sorted(blamed) == [*bad]
    assert decoded == [record["offset"] for record in RECORDS if record["offset"] not in bad]
    assert not path(tmp_path).exists()


@ENDS
def test_a_record_is_to_blame_only_after_two_failures_alone(
    tmp_path: Path, raises: Callable[[], BaseException]
) -> None:
    decoder = Decoder(1_500, raises=raises)

    read(tmp_path, decoder, RECORDS)

    assert decoder.attempts.count([1_500]) == 2
    # All, a part of them, and twice the record.
    assert decoder.failures == 4


def test_a_record_that_fails_once_is_decoded(tmp_path: Path) -> None:
    decoder = Decoder(0)

    def recovered() -> QueryEndedError:
        decoder.bad.clear()
        return QueryEndedError("failed")

    decoder.raises = recovered

    assert read(tmp_path, decoder, RECORDS[:1]) == ([0], {})


def test_no_record_is_to_blame_for_a_spark_that_decodes_nothing(tmp_path: Path) -> None:
    decoder = Decoder()
    decoder.is_broken = True
    broken = trials(tmp_path, decoder)

    for _ in range(2):
        with pytest.raises(QueryEndedError, match="broken"):
            broken.decoded(RECORDS[:1])
    with pytest.raises(FatalError, match="Spark decodes nothing any more: broken"):
        broken.decoded(RECORDS[:1])

    decoder.is_broken = False
    assert read(tmp_path, decoder, RECORDS[:1]) == ([0], {})


def test_a_full_disk_is_no_failure_of_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_room", lambda _path: False)
    decoder = Decoder()
    decoder.is_broken = True
    broken = trials(tmp_path, decoder)

    for _ in range(5):
        with pytest.raises(QueryEndedError, match="broken"):
            broken.decoded(RECORDS[:1])


def test_a_dead_letter_names_the_failure(tmp_path: Path) -> None:
    _, failed = read(tmp_path, Decoder(0), RECORDS[:1])
    _, ended = read(tmp_path, Decoder(0, raises=jvm_ended), RECORDS[:1])

    assert failed == {0: "failed"}
    assert ended == {0: "Spark's JVM ended while it decoded the record"}


def test_the_end_of_the_jvm_that_only_the_harmless_record_meets_counts(tmp_path: Path) -> None:
    decoder = Decoder(0)

    def harmless() -> None:
        raise jvm_ended()

    for _ in range(2):
        made = Trials(path(tmp_path), decoder, harmless, lambda: None)
        with pytest.raises(JvmEndedError):
            made.decoded(RECORDS[:1])

    assert read(tmp_path, decoder, RECORDS[:1]) == ([], {0: "Spark's JVM ended while it decoded the record"})
    assert decoder.failures == 2


@pytest.mark.parametrize("is_new", [False, True], ids=["one process", "a new process each time"])
def test_after_two_queries_that_failed_at_a_position_its_records_are_read_apart(tmp_path: Path, is_new: bool) -> None:
    made = trials(tmp_path, Decoder())

    may = []
    for _ in range(3):
        made = trials(tmp_path, Decoder()) if is_new else made
        may.append(made.may_query(7))
        made.query_failed(7)

    assert may == [True, True, False]


def test_a_query_that_moved_the_position_has_not_failed_where_it_began(tmp_path: Path) -> None:
    made = trials(tmp_path, Decoder())

    for position in (7, 8, 9, 10):
        made.query_failed(position)
        assert made.may_query(position)


class KilledError(BaseException):
    """The end of the instance, by a signal or of the machine."""


def test_no_record_is_to_blame_for_the_ends_of_an_instance_that_is_killed(tmp_path: Path) -> None:
    decoder = Decoder(0, raises=KilledError)

    for _ in range(10):
        made = trials(tmp_path, decoder)
        assert made.may_query(0)
        with pytest.raises(KilledError):
            made.decoded(RECORDS[:1])
    decoder.bad.clear()

    assert read(tmp_path, decoder, RECORDS[:1]) == ([0], {})


def test_a_query_that_ended_for_another_reason_does_not_count(tmp_path: Path) -> None:
    made = trials(tmp_path, Decoder())

    for _ in range(5):
        made.query_failed(7)
        assert made.may_query(7)
        made.forget()


def test_no_query_begins_before_a_suspect_record(tmp_path: Path) -> None:
    decoder = Decoder(3, raises=jvm_ended)
    with pytest.raises(JvmEndedError):
        trials(tmp_path, decoder).decoded(RECORDS[:5])

    assert not trials(tmp_path, decoder).may_query(0)
    assert trials(tmp_path, decoder).may_query(13)


def test_records_before_the_suspect_ones_are_decoded_first(tmp_path: Path) -> None:
    path(tmp_path).parent.mkdir()
    path(tmp_path).write_text(json.dumps({"offset": 9, "end": 13, "attempts": 1}))
    decoder = Decoder()

    assert read(tmp_path, decoder, RECORDS[:6])[0] == [0, 3, 6, 9, 12, 15]
    assert decoder.attempts == [[0, 3, 6], [9], [12], [15]]


def test_a_damaged_file_says_nothing(tmp_path: Path) -> None:
    path(tmp_path).parent.mkdir()
    for text in ("", "{", "[]", '{"offset": 1}'):
        path(tmp_path).write_text(text)
        assert trials(tmp_path, Decoder()).may_query(7)


def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path) -> None:
    decoder = Decoder(1_500)
    for attempts in range(1, 4):

        def is_interrupted(so_far: int = attempts) -> bool:
            return len(decoder.attempts) == so_far

        with pytest.raises(QueryInterruptedError):
            trials(tmp_path, decoder).decoded(RECORDS[500:], is_interrupted)

    assert [len(attempt) for attempt in decoder.attempts] == [500, 15, 1]


def test_no_record_is_to_blame_for_the_end_of_the_jvm_in_another_partitions_attempt(tmp_path: Path) -> None:
    decoder = Decoder(0, raises=jvm_ended)

    def ended() -> None:
        raise jvm_ended()

    for _ in range(10):
        with pytest.raises(JvmEndedError):
            Trials(path(tmp_path), decoder, decoder.harmless, ended).decoded(RECORDS[:1])

    assert decoder.attempts == []
    assert not path(tmp_path).exists()


def test_an_attempt_that_a_hanging_jvm_does_not_survive_counts(tmp_path: Path) -> None:
    decoder = Decoder(0)

    def hang() -> None:
        raise KilledError

    for _ in range(2):
        with pytest.raises(KilledError):
            Trials(path(tmp_path), decoder, hang, lambda: None).decoded(RECORDS[:1])

    assert read(tmp_path, decoder, RECORDS[:1]) == ([], {0: "Spark's JVM ended while it decoded the record"})
