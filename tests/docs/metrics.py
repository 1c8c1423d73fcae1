"""The reference of metrics, from their declarations."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml
from prometheus_client import Counter, Histogram

from balance_service.cluster.directory import ServerTable
from balance_service.hosting.collectors import EngineCollector, InstanceCollector
from balance_service.kafka.signing import ControlRecords
from balance_service.observability.metrics import Metrics
from balance_service.settings import load_settings
from balance_service.spark.session import SparkSample
from tests.docs.markdown import joined, section, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

ALERTS = Path(__file__).parents[2] / "deploy/prometheus/alerts.yml"
_HEAD = """\
# Metrics

`GET /metrics` returns Prometheus text; a scrape blocks no task. `_total` marks counters, histograms have their own
section, and all others are gauges. Prometheus adds the labels `job` and `instance`. For a read model of several stages,
`read_model` is the name of the stage, such as `rewards-by-customerCardNo`; the last stage has the name of the model,
or `MODEL.gN` in generation N > 1.
`role` is `active` or `standby`. The series of a generation end when it is dropped. The [runbook](../runbook.md)
describes the alerts that read a metric.

"""
_OF_PROCESSES = """\
`process_NAME` is of the Python process and `balance_jvm_process_NAME` of Spark's JVM, as Linux reports them. The names:
{names}. The alert BalanceOpenFilesFull reads the last two.
"""
_PROCESS = {
    "cpu_seconds_total": "counter",
    "resident_memory_bytes": "gauge",
    "virtual_memory_bytes": "gauge",
    "start_time_seconds": "gauge",
    "open_fds": "gauge",
    "max_fds": "gauge",
}
_SECTIONS = {
    ("read_model", "partition", "role"): "Tasks: `read_model`, `partition`, `role`",
    ("read_model", "partition"): "Work of tasks: `read_model`, `partition`",
    ("table", "partition"): "Joined tables: `table`, `partition`",
}
"""By the first labels of a section's metrics, its title. Other metrics are of the instance."""
_NAME = re.compile(r"\b[a-z_]+")
_HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True)
class Described:
    """A metric as declared."""

    kind: str
    labels: tuple[str, ...]
    text: str


def alerts() -> Sequence[Mapping[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


@cache
def described() -> Mapping[str, Described]:
    """Returns all metrics of an instance, by name."""
    found = {name: Described(kind, (), "") for name, kind in _of_processes()}
    for metric in vars(Metrics()).values():
        if isinstance(metric, Counter | Histogram):
            (family,) = metric.describe()
            found[_name(family)] = Described(family.type, tuple(metric._labelnames), family.documentation)
    settings, engine = load_settings(state_dir=Path()), _engine()
    for collector in (InstanceCollector(_Instance(), settings), EngineCollector(engine, ServerTable())):
        for family in collector.collect():
            # Without a sample, only the family has the labels. The labels of an info are those of its sample.
            is_info = family.type == "info"
            labels = family.samples[0].labels if is_info else getattr(family, "_labelnames", ())
            found[_name(family)] = Described("gauge" if is_info else family.type, tuple(labels), family.documentation)
    return found


def page() -> str:
    sections: dict[str, list[Sequence[str]]] = {title: [] for title in ("Instance", *_SECTIONS.values(), "Histograms")}
    rules = {rule["alert"]: {*_NAME.findall(rule["expr"])} for rule in alerts()}
    of_processes = dict(_of_processes())
    for name, metric in sorted(described().items()):
        if name in of_processes:
            continue
        common = next((labels for labels in _SECTIONS if metric.labels[: len(labels)] == labels), ())
        title = "Histograms" if metric.kind == "histogram" else _SECTIONS.get(common, "Instance")
        labels = " ".join(f"`{label}`" for label in metric.labels[len(common) :])
        sections[title].append((f"`{name}`", labels, metric.text, ", ".join(_readers(name, metric, rules))))
    tables = [
        section(title, table(("metric", "more labels" if ":" in title else "labels", "meaning", "alerts"), rows))
        for title, rows in sections.items()
    ]
    names = ", ".join(f"`{name}`" for name in _PROCESS)
    return joined([_HEAD, *tables, section("Processes", _OF_PROCESSES.format(names=names))])


def _readers(name: str, metric: Described, rules: Mapping[str, set[str]]) -> Iterator[str]:
    """Yields the rules that read a metric."""
    series = {f"{name}{suffix}" for suffix in _HISTOGRAM_SUFFIXES} if metric.kind == "histogram" else {name}
    return (rule for rule, named in rules.items() if series & named)


def _of_processes() -> Iterator[tuple[str, str]]:
    for prefix in ("process_", "balance_jvm_process_"):
        yield from ((prefix + name, kind) for name, kind in _PROCESS.items())


def _name(family: Metric) -> str:
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


class _Instance:
    """An instance that has every metric."""

    open_streams = 0

    def unready(self) -> Sequence[str]:
        return []

    def stale_files(self) -> Mapping[str, bool]:
        return {}


def _engine() -> Any:
    """Returns an engine without tasks and tables, as far as its metrics need it."""
    return SimpleNamespace(
        stages={},
        models={},
        serving_stages=(),
        generations=SimpleNamespace(known={}),
        control_records=(ControlRecords("generations"),),
        tables=SimpleNamespace(snapshots=list),
        problems=(),
        memberships=SimpleNamespace(of={"": SimpleNamespace(lease=SimpleNamespace(holds=True), partitions={0})}),
        watermarks={"": SimpleNamespace(age_seconds=0.0)},
        spark_sampler=SimpleNamespace(sample=SparkSample(0, 0, 0, 0.0), jvm_pid=os.getpid()),
    )
