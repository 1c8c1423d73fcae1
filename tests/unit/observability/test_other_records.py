"""What the log says of records that a stage does not read."""

from __future__ import annotations

from structlog.testing import capture_logs

from balance_service.observability.other_records import OtherRecords


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
