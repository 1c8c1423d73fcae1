"""Dashboard, alerts and runbook name existing metrics and each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.docs.metrics import ALERTS, alerts
from tests.support.observability import (
    DASHBOARD,
    RUNBOOK,
    documented_series,
    expressions,
    panels,
    unknown_in,
)


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_use_documented_series_and_labels(where: str, expression: str) -> None:
    assert unknown_in(expression, documented_series()) == set(), where


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("balance_typo > 0", {"balance_typo"}),
        ('balance_lag{rolle="active"} > 0', {"rolle"}),
        ("sum by (partitoin) (rate(balance_events_read_total[5m]))", {"partitoin"}),
        ("balance_lag and on (job, stat) balance_ready", {"stat"}),
        ("rat(balance_lag[5m])", {"rat"}),
        ("balance_query_duration_seconds", {"balance_query_duration_seconds"}),
        ('up{job="balance_nothing"} == 0', set()),
    ],
)
def test_unknown_series_and_labels_are_found(expression: str, unknown: set[str]) -> None:
    assert unknown_in(expression, documented_series()) == unknown


SECTIONS = re.findall(r"^## (.*)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_runbook_has_a_section_for_each_alert_and_behind_them_for_generations_without_one() -> None:
    others = ["GenerationBuilding", "GenerationReady", "GenerationKept"]

    assert sorted(SECTIONS[: -len(others)]) == sorted(rule["alert"] for rule in alerts())
    assert SECTIONS[-len(others) :] == others


def test_the_runbook_says_what_to_do_about_a_kept_generation_that_blocks_the_next_one() -> None:
    section = section_of("GenerationKept")

    assert "`balance-service drop MODEL --generation N --reason R`" in section
    assert "(#generationkept)" in section_of("BalanceGenerationStalled")


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_says_what_to_check_what_to_do_and_when_it_is_done(name: str) -> None:
    section = section_of(name)
    means, check, done = (section.find(f"**{part}.** ") for part in ("Means", "Check", "Done"))
    steps = [int(number) for number in re.findall(r"^(\d+)\. ", section[check:done], re.MULTILINE)]

    assert [section.count(f"**{part}.**") for part in ("Means", "Urgency", "Check", "Done")] == [1, 1, 1, 1]
    assert 0 <= means < check < done
    assert re.match(r"\*\*Check\.\*\* `(curl|balance-service) ", section[check:]), (
        "the first thing to look at is a command"
    )
    assert steps == list(range(1, len(steps) + 1)) != []


def test_misplaced_keys_are_not_among_the_causes_to_discard() -> None:
    kept, _, discarded = RUNBOOK.read_text(encoding="utf-8").partition("| the causes below |")

    assert "`key-not-of-this-partition`" in kept
    assert "`key-not-of-this-partition`" not in discarded


def test_the_runbook_names_panels_of_the_dashboard() -> None:
    prose = re.sub(r"`[^`]*`", "", RUNBOOK.read_text(encoding="utf-8"))
    named = {" ".join(name.split()) for name in re.findall(r'"([^"]+)"', prose)}

    assert named
    assert named <= {panel["title"] for panel in panels()}


def section_of(alert: str) -> str:
    """The section of an alert, up to the next heading."""
    return re.split(r"^##+ ", RUNBOOK.read_text(encoding="utf-8").partition(f"## {alert}\n")[2], flags=re.MULTILINE)[0]


def test_each_alert_has_a_severity_a_summary_and_a_link() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names))
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "runbook_url"}
        address = '{{ or $externalLabels.runbook "/console/runbook.md of any instance, " }}'
        assert rule["annotations"]["runbook_url"] == f"{address}#{rule['alert'].lower()}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_alerts_fire_as_their_tests_say() -> None:
    tried = subprocess.run(
        ["promtool", "test", "rules", ALERTS.with_name("alerts_test.yml")], capture_output=True, text=True, check=False
    )

    assert tried.returncode == 0, tried.stdout + tried.stderr


@pytest.mark.parametrize("rule", list(alerts()), ids=lambda rule: rule["alert"])
def test_a_section_says_how_urgent_its_alert_is(rule: dict[str, Any]) -> None:
    (urgency,) = re.findall(r"\*\*Urgency\.\*\* (\w+)", section_of(rule["alert"]))

    assert (urgency == "Now") == (rule["labels"]["severity"] == "critical")


def test_the_runbook_has_all_instances_corrected_when_a_fold_fails() -> None:
    (action,) = re.findall(
        r"^\| the read model's own code failed \| (.*) \|$", section_of("BalanceTaskHalted"), re.MULTILINE
    )

    assert "on all instances" in action
    assert "moves" in action


def test_links_within_the_runbook_are_valid() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    headings = {heading.lower() for heading in re.findall(r"^## (\w+)$", text, re.MULTILINE)}

    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= headings


def test_the_dashboard_can_be_provisioned() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    (source,) = [v for v in dashboard["templating"]["list"] if v["type"] == "datasource"]

    assert (source["name"], source["query"], source["current"]["value"]) == (
        "DS_PROMETHEUS",
        "prometheus",
        "prometheus",
    )
    assert "__inputs" not in dashboard  # not allowed in a provisioned dashboard
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells


def test_alerts_use_the_documented_job() -> None:
    assert 'job="balance-service"' in ALERTS.read_text(encoding="utf-8")
