"""What an instance tells operators about itself: its process, its settings, and what it logged last."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from prometheus_client import ProcessCollector

from balance_service.kafka.messages import text_or_base64
from balance_service.observability.logs import last_warnings
from balance_service.process.package import __version__
from balance_service.process.runtime import iso_time
from balance_service.settings import variable_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balance_service.engine.records import FailedAt, TaskSnapshot
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings


def details_of(settings: Settings, began_ms: int, engine: Engine | None) -> dict[str, Any]:
    """Returns an `http.instances.InstanceDetails`, as JSON.

    Args:
        began_ms: when the instance was started, in ms since 1970.
        engine: None while the instance is starting.
    """
    sampler = None if engine is None else engine.spark_sampler
    heap = None if sampler is None else sampler.sample
    disk = shutil.disk_usage(settings.state_dir) if settings.state_dir.exists() else None
    tasks = [] if engine is None else [task for stage in engine.stages.values() for task in stage.snapshots()]
    return {
        "applicationServer": settings.application_server,
        "version": __version__,
        "startedAt": iso_time(began_ms),
        "processors": os.cpu_count(),
        "python": _process("self"),
        "jvm": None if sampler is None else _process(str(sampler.jvm_pid)),
        "heapBytes": None if heap is None else heap.heap_used,
        "mostHeapBytes": None if heap is None else heap.heap_max,
        "freeBytes": None if disk is None else disk.free,
        "diskBytes": None if disk is None else disk.total,
        "storeBytes": sum(task.sizes.store_bytes for task in tasks),
        "settings": [*_settings(settings)],
        "halted": [_halted(task, task.failed_at) for task in tasks if task.failed_at is not None],
        "log": [
            {
                "at": iso_time(int(1000 * kept.at.timestamp())),
                "level": kept.level,
                "line": kept.line,
                "times": kept.times,
            }
            for kept in last_warnings()
        ],
    }


def _process(pid: str) -> dict[str, float] | None:
    """Returns the processor time and the memory of a process; None where the system does not tell."""
    metrics = ProcessCollector(pid=lambda: pid, registry=None).collect()
    found = {sample.name: sample.value for metric in metrics for sample in metric.samples}
    try:
        return {
            "cpuSeconds": found["process_cpu_seconds_total"],
            "memoryBytes": int(found["process_resident_memory_bytes"]),
        }
    except KeyError:
        return None


def _settings(settings: Settings) -> Iterator[Mapping[str, Any]]:
    given = {variable_of(name) for name in settings.model_fields_set}
    for name, value in settings.printable().items():
        yield {"name": name, "value": value, "isSet": name in given}


def _halted(task: TaskSnapshot, at: FailedAt) -> dict[str, Any]:
    return {
        "task": str(task.task_id),
        "since": iso_time(task.state_since_ms),
        "key": None,
        **text_or_base64("key", at.key),
        "line": at.line,
        "error": at.error,
    }
