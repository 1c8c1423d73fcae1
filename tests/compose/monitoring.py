"""Queries Prometheus, as the compose file starts it, with the expressions of the dashboard."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from tests.compose.stack import HOST
from tests.compose.traffic import Events
from tests.support.api import Connection
from tests.support.observability import panels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.compose.stack import Stack
    from tests.compose.story import Report

_PATIENCE_SECONDS = 120.0
_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 2.0
# Grafana's values of the dashboard variables; the interval is four scrapes of prometheus.yml.
_VARIABLES = {"$job": "balance-service", "$instance": ".*", "$__rate_interval": "20s"}
# These metrics must be above zero by now.
_HAPPENED = (
    "balance_restored_records",
    "balance_records_to_restore",
    "balance_rebalances_total",
    "balance_dead_letters_total",
    "balance_dead_letters_open",
    "balance_proxied_requests_total",
    "balance_events_applied_total",
)


class Prometheus:
    """A Prometheus that is started on construction."""

    def __init__(self, stack: Stack) -> None:
        self._url = stack.prometheus_url
        stack.monitor()

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Returns labels and values of an expression, without NaN."""
        found = self._get("query", query=expression)["result"]
        samples = [(sample["metric"], float(sample["value"][1])) for sample in found]
        return [sample for sample in samples if not math.isnan(sample[1])]

    def firing(self) -> set[str]:
        return {a["labels"]["alertname"] for a in self._get("alerts")["alerts"] if a["state"] == "firing"}

    def broken_rules(self) -> list[str]:
        """Returns the alert rules that cannot be evaluated."""
        rules = [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
        return [rule["name"] for rule in rules if rule["health"] != "ok"]

    def _get(self, what: str, **parameters: str) -> Any:
        with urllib.request.urlopen(
            f"{self._url}/api/v1/{what}?{urlencode(parameters)}", timeout=_ANSWER_SECONDS
        ) as got:
            return json.load(got)["data"]


def check_dashboard(prometheus: Prometheus, stack: Stack, report: Report, folder: Path) -> None:
    """Checks under load that each dashboard query has data and that the expected alerts fire.

    Args:
        folder: gets `dashboard.txt`, each query with its result.
    """
    _spoil(stack)
    queries = list(_queries())
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        _add_funds(stack)
        try:
            found = [prometheus.query(expression) for _, expression in queries]
            alerts, broken = prometheus.firing(), prometheus.broken_rules()
        except urllib.error.URLError:
            found, alerts, broken = [[] for _ in queries], set(), []
        if (all(found) and "BalanceDeadLetters" in alerts) or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS)
    lines = [
        f"{title}\n    {expression}\n    {len(samples)} series, such as {samples[:1]}\n"
        for (title, expression), samples in zip(queries, found, strict=True)
    ]
    (folder / "dashboard.txt").write_text("".join(lines))
    without = [title for (title, _), samples in zip(queries, found, strict=True) if not samples]
    report.expect(
        "dashboard: data for every query",
        not without,
        f"{len(queries)} queries of {len(panels())} panels, {sum(map(len, found))} series; "
        f"without: {', '.join(without) or 'none'}",
    )
    nothing = [name for name in _HAPPENED if not any(value for _, value in prometheus.query(f"sum({name})"))]
    report.expect(
        "dashboard: events are counted", not nothing, f"zero of {len(_HAPPENED)} metrics: {nothing or 'none'}"
    )
    report.expect(
        "alerts: dead letters, and rules that can be evaluated",
        "BalanceDeadLetters" in alerts and not broken,
        f"firing: {', '.join(sorted(alerts)) or 'none'}; not evaluated: {broken or 'none'}",
    )
    tried = stack.promtool("test", "rules", "/etc/prometheus/alerts_test.yml")
    report.expect("alerts: on made-up series", "SUCCESS" in tried, " ".join(tried.split()))


def _queries() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in _VARIABLES.items():
                expression = expression.replace(variable, value)
            yield panel["title"], expression


def _spoil(stack: Stack) -> None:
    """Produces records that cannot be applied."""
    events = Events(stack)
    for number in range(100):
        events.append_raw(f"spoilt-{number}", b"no frame")
    events.flush()


def _add_funds(stack: Stack) -> None:
    for replica in stack.replicas():
        connection = Connection(HOST, replica.port, _ANSWER_SECONDS)
        connection.post("/api/balance.addFunds", {"customerId": "watched", "amount": "1.00"}, {})
        connection.close()
