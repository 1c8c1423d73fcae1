"""Dashboard, alerts and runbook: about metrics that there are, and about each other."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.observability import (
    ALERTS,
    DASHBOARD,
    RUNBOOK,
    alerts,
    documented_series,
    expressions,
    panels,
    unknown_in,
)


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_an_expression_names_series_and_labels_that_are_documented(where: str, expression: str) -> None:
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
def test_what_there_is_not_is_found(expression: str, unknown: set[str]) -> None:
    assert unknown_in(expression, documented_series()) == unknown


def test_each_alert_has_a_section_in_the_runbook_and_each_section_an_alert() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]

    assert sorted(section.partition("\n")[0] for section in sections) == sorted(rule["alert"] for rule in alerts())
    for section in sections:
        for part in ("**Means.**", "**Check.**", "**Do.**"):
            assert section.count(part) == 1, section.partition("\n")[0]


def test_each_alert_says_how_bad_it_is_what_is_wrong_and_where_to_read_on() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names))
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_links_within_the_runbook_lead_somewhere() -> None:
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
    assert "__inputs" not in dashboard  # which a provisioned dashboard must not have
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def test_no_two_panels_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells


def test_alerts_expect_the_job_that_the_documentation_names() -> None:
    assert 'job="balance-service"' in ALERTS.read_text(encoding="utf-8")
