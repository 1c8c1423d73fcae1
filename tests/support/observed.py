"""What is documented of metrics, and what dashboard and alerts ask for; read from the files that ship."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from balance_service.devtools.local.instances import LocalInstance

    Exported = dict[str, tuple[str, frozenset[str] | None]]

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/dashboards/balance-service.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
RUNBOOK = ROOT / "docs/runbook.md"
OBSERVABILITY = ROOT / "docs/observability.md"

OF_OTHERS = "balance_table_"
"""What the metrics begin with of which only read models that join have samples."""

# Prometheus' own: what it adds to what it scrapes, and what it makes of alerts.
_OF_PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate", "job", "instance", "partition"}}
_ADDED_LABELS = {"job", "instance"}
_HISTOGRAM = {"_bucket": {"le"}, "_sum": set[str](), "_count": set[str]()}

_ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<type>\w+) \|(?P<labels>[^|]*)\|", re.MULTILINE)
_TEXT = re.compile(r'"[^"]*"')
_MATCHERS = re.compile(r"\{([^}]*)\}")
_LABEL_LIST = re.compile(r"\b(by|without|on|ignoring|group_left|group_right) \(([^)]*)\)")
_MATCHED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_RANGE = re.compile(r"\[[^]]*]")
_WORD = re.compile(r"(?<![\w.])[a-zA-Z_]\w*")
_OF_PROMQL = {
    *("and", "or", "unless", "bool", "offset"),
    *("absent", "sum", "count", "max", "min", "rate", "increase", "delta", "deriv", "vector", "histogram_quantile"),
}


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Metric → its type and its labels, as the table in docs/observability.md has them."""
    rows = _ROW.finditer(OBSERVABILITY.read_text(encoding="utf-8"))
    return {row["name"]: (row["type"], frozenset(re.findall(r"`(\w+)`", row["labels"]))) for row in rows}


def exported(instances: Iterable[LocalInstance]) -> Exported:
    """Metric → type and labels, as any instance has it; no labels at all where there is no sample of it yet."""
    found: Exported = {}
    for instance in instances:
        for family in text_string_to_metric_families(httpx.get(f"{instance.url}/metrics", timeout=60).text):
            if family.name.endswith("_created"):
                continue
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = [frozenset(sample.labels) - {"le"} for sample in family.samples]
            if labels or name not in found:
                found[name] = (family.type, labels[0] if labels else None)
    return found


def documented_series() -> dict[str, set[str]]:
    """Series → the labels it has once it is scraped."""
    series: dict[str, set[str]] = {name: set(labels) for name, labels in _OF_PROMETHEUS.items()}
    for name, (kind, labels) in documented().items():
        suffixes: Mapping[str, set[str]] = _HISTOGRAM if kind == "histogram" else {"": set()}
        for suffix, more in suffixes.items():
            series[name + suffix] = {*labels, *more, *_ADDED_LABELS}
    return series


def alerts() -> list[dict[str, Any]]:
    """All alert rules."""
    rules: list[dict[str, Any]] = []
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]:
        rules += group["rules"]
    return rules


def panels() -> list[dict[str, Any]]:
    """All panels of the dashboard but its rows."""
    every: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in every if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Where an expression stands, and the expression."""
    for rule in alerts():
        yield f"alert {rule['alert']}", rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]


def unknown_in(expression: str, series: Mapping[str, set[str]]) -> set[str]:
    """The names in an expression that no series, no label of its series and no function of PromQL has."""
    plain = _RANGE.sub("", _TEXT.sub('""', expression))
    labels = {name for matchers in _MATCHERS.findall(plain) for name in _MATCHED.findall(matchers)}
    labels |= {name.strip() for _, names in _LABEL_LIST.findall(plain) for name in names.split(",") if name.strip()}
    words = set(_WORD.findall(_LABEL_LIST.sub("", _MATCHERS.sub("", plain)))) - _OF_PROMQL
    known = {label for word in words for label in series.get(word, ())}
    return {word for word in words if word not in series} | (labels - known)
