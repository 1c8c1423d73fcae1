"""Metrics as documented, exported and queried, and a collector of traces."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.metrics import alerts, described

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from balance_service.devtools.local.stack import LocalInstance

    Exported = dict[str, tuple[str, frozenset[str] | None]]
    from collections.abc import Sequence

    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/dashboards/balance-service.json"
RUNBOOK = ROOT / "docs/runbook.md"

JOIN_METRICS_PREFIX = "balance_table_"
"""Only read models with joins have samples of these metrics."""

# Prometheus' own series, and the labels that it adds to scraped series.
_OF_PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate", "job", "instance", "partition"}}
_ADDED_LABELS = {"job", "instance"}
_HISTOGRAM = {"_bucket": {"le"}, "_sum": set[str](), "_count": set[str]()}

_TEXT = re.compile(r'"[^"]*"')
_MATCHERS = re.compile(r"\{([^}]*)\}")
_LABEL_LIST = re.compile(r"\b(by|without|on|ignoring|group_left|group_right) \(([^)]*)\)")
_MATCHED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_RANGE = re.compile(r"\[[^]]*]")
_WORD = re.compile(r"(?<![\w.])[a-zA-Z_]\w*")
_OF_PROMQL = {
    *("and", "or", "unless", "bool", "offset"),
    *(
        "absent",
        "sum",
        "count",
        "max",
        "min",
        "rate",
        "increase",
        "delta",
        "deriv",
        "vector",
        "histogram_quantile",
        "last_over_time",
    ),
}


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Returns metric → type and labels, as docs/reference/metrics.md lists them."""
    return {name: (metric.kind, frozenset(metric.labels)) for name, metric in described().items()}


def exported(instances: Iterable[LocalInstance]) -> Exported:
    """Returns metric → type and labels over all instances; the labels are None if no instance has a sample yet."""
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
    """Returns series → the labels that it has in Prometheus."""
    series: dict[str, set[str]] = {name: set(labels) for name, labels in _OF_PROMETHEUS.items()}
    for name, (kind, labels) in documented().items():
        suffixes: Mapping[str, set[str]] = _HISTOGRAM if kind == "histogram" else {"": set()}
        for suffix, more in suffixes.items():
            series[name + suffix] = {*labels, *more, *_ADDED_LABELS}
    return series


def panels() -> list[dict[str, Any]]:
    """Returns the panels of the dashboard without its rows."""
    every: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in every if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Yields each PromQL expression of the alerts and the dashboard, with its place."""
    for rule in alerts():
        yield f"alert {rule['alert']}", rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]


def unknown_in(expression: str, series: Mapping[str, set[str]]) -> set[str]:
    """Returns the names in an expression that are no series, no label of its series and no PromQL function."""
    plain = _RANGE.sub("", _TEXT.sub('""', expression))
    labels = {name for matchers in _MATCHERS.findall(plain) for name in _MATCHED.findall(matchers)}
    labels |= {name.strip() for _, names in _LABEL_LIST.findall(plain) for name in names.split(",") if name.strip()}
    words = set(_WORD.findall(_LABEL_LIST.sub("", _MATCHERS.sub("", plain)))) - _OF_PROMQL
    known = {label for word in words for label in series.get(word, ())}
    return {word for word in words if word not in series} | (labels - known)


_KINDS = {2: "server", 3: "client", 4: "producer", 5: "consumer"}


@dataclass(frozen=True)
class Collected:
    """A received span; ids in hexadecimal."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    links: Sequence[tuple[str, str]]
    attributes: Mapping[str, str | int]
    failed: bool
    remarks: str
    """Status message and events: an exception text would appear here."""


class Collector:
    """Receives spans by OTLP over HTTP while the context is open."""

    def __init__(self) -> None:
        collected = self.spans = list[Collected]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                collected.extend(_spans(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (as the base class has it)
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def trace(self, trace_id: str) -> list[Collected]:
        """Returns the spans of a trace received so far."""
        return [span for span in list(self.spans) if span.trace_id == trace_id]


def _spans(request: ExportTraceServiceRequest) -> list[Collected]:
    return [
        _collected(str(_plain(resource.resource.attributes)["service.instance.id"]), span)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _collected(service: str, span: Span) -> Collected:
    return Collected(
        service,
        span.name,
        _KINDS.get(span.kind, "internal"),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        _plain(span.attributes),
        span.status.code == span.status.STATUS_CODE_ERROR,
        span.status.message + "".join(str(event) for event in span.events),
    )


def _plain(attributes: Sequence[KeyValue]) -> dict[str, str | int]:
    return {
        pair.key: pair.value.int_value if pair.value.HasField("int_value") else pair.value.string_value
        for pair in attributes
    }
