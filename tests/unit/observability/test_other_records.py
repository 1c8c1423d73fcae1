"""The lines of the log about records that a stage does not read."""

from __future__ import annotations

from structlog.testing import capture_logs

from balance_service.engine.records import DeadLetter
from balance_service.observability.other_records import DeadRecords, OtherRecords


def test_each_type_is_logged_once_with_the_types_that_are_read() -> None:
    others = OtherRecords("balance", "funds", ["b.FundsAdded", "a.FundsMoved"])

    with capture_logs() as logs:
        others.tell(["a.Other", "c.Third"])
        others.tell(["a.Other"])

    assert [(line["log_level"], line["topic"], line["record"]) for line in logs] == [
        ("info", "funds", "a.Other"),
        ("info", "funds", "c.Third"),
    ]
    assert logs[0]["read"] == ["a.FundsMoved", "b.FundsAdded"]


def test_a_type_in_another_namespace_or_none_is_a_warning_that_says_so() -> None:
    others = OtherRecords("balance", "funds", ["b.FundsAdded"])

    with capture_logs() as logs:
        others.tell(["other.FundsAdded", "FundsAdded"])

    assert [line["record"] for line in logs] == ["other.FundsAdded", "FundsAdded"]
    assert all(line["log_level"] == "warning" and "namespace" in line["event"] for line in logs)


def test_the_number_of_logged_names_is_bounded() -> None:
    others = OtherRecords("balance", "funds", ["b.FundsAdded"])

    with capture_logs() as logs:
        others.tell(f"a.R{n}" for n in range(1000))

    assert len(logs) == 50


def test_dead_letters_are_logged_once_a_minute_for_each_cause_with_what_is_wrong() -> None:
    now = 0.0
    dead = DeadRecords("balance", "funds", lambda: now)

    def tell(offset: int, records: int, cause: str = "too-much") -> None:
        dead.tell(1, {cause: records}, {cause: DeadLetter(offset, 0, b"ada", None, cause, f"{offset} is too much")})

    with capture_logs() as logs:
        tell(7, 2)
        tell(9, 3)
        tell(10, 1, "key-null")
        now = 60.0
        tell(20, 4)

    assert [(line["cause"], line["offset"], line["records"], line["detail"]) for line in logs] == [
        ("too-much", 7, 2, "7 is too much"),
        ("key-null", 10, 1, "10 is too much"),
        ("too-much", 20, 7, "20 is too much"),
    ]
    assert {(line["log_level"], line["read_model"], line["topic"], line["partition"]) for line in logs} == {
        ("warning", "balance", "funds", 1)
    }


def test_the_number_of_logged_causes_is_bounded() -> None:
    dead = DeadRecords("balance", "funds")

    with capture_logs() as logs:
        for cause in map(str, range(1000)):
            dead.tell(0, {cause: 1}, {cause: DeadLetter(0, 0, None, None, cause)})

    assert len(logs) == 50
