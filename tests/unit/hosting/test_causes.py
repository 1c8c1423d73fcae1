"""A cause of trouble, as clients get it, and those that depend on no status."""

from __future__ import annotations

from balance_service.hosting.causes import Cause, Kind, Urgency, starting, unknown_settings
from balance_service.process.package import resource
from tests.unit.hosting.statuses import NOW_MS


def test_an_instance_that_starts_says_what_it_waits_for_and_since_when() -> None:
    plain, waits = starting("", NOW_MS), starting("Kafka at k:9092 does not answer", NOW_MS)

    assert (plain.what, plain.urgency, plain.heals) == ("This instance is starting", Urgency.NONE, True)
    assert waits.what == "This instance is starting, and waits: Kafka at k:9092 does not answer"
    assert (waits.urgency, waits.heals, waits.since_ms) == (Urgency.SOON, False, NOW_MS)


def test_variables_that_are_no_settings_are_one_cause() -> None:
    assert [*unknown_settings([])] == []
    (one,), (two,) = unknown_settings(["BALANCE_X"]), unknown_settings(["BALANCE_X", "BALANCE_Y"])

    assert one.what == "BALANCE_X begins like a setting and is none: ignored"
    assert two.what == "BALANCE_X, BALANCE_Y begin like settings and are none: ignored"


def test_a_cause_in_json_has_the_time_and_at_most_twenty_consequences() -> None:
    follows = tuple(str(n) for n in range(30))
    cause = Cause(
        kind=Kind.HALTED, urgency=Urgency.SOON, what="w", action="a", since_ms=NOW_MS, tasks=("m_0",), follows=follows
    )

    assert cause.shown().record() == {
        "kind": "halted",
        "urgency": "soon",
        "what": "w",
        "since": "2026-01-01T00:00:00.000Z",
        "action": "a",
        "heals": False,
        "section": "BalanceTaskHalted",
        "tasks": ["m_0"],
        "servers": [],
        "follows": [*follows[:20]],
    }


def test_each_cause_leads_to_a_section_of_the_runbook() -> None:
    text = resource("docs/runbook.md").read_text()

    assert [kind.section for kind in Kind if kind.section and f"## {kind.section}\n" not in text] == []
