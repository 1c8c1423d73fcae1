"""What an instance tells operators about itself: its process, its settings, and what it logged last."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector

from balance_service.http.instance_details import HaltedTask, InstanceDetails, LogLine, Process, Setting
from balance_service.http.stage_dead_letters import shown_key
from balance_service.observability.logs import last_warnings
from balance_service.process.package import __version__
from balance_service.process.runtime import iso_time
from balance_service.settings import variable_of
from balance_service.structs import absent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings


def details_of(settings: Settings, began_ms: int, engine: Engine | None) -> InstanceDetails:
    """Returns what an instance tells about itself.

    Args:
        began_ms: when the instance was started, in ms since 1970.
        engine: None while the instance is starting.
    """
    sampler = None if engine is None else engine.spark_sampler
    heap = None if sampler is None else sampler.sample
    disk = shutil.disk_usage(settings.state_dir) if settings.state_dir.exists() else None
    tasks = [] if engine is None else [task for stage in engine.stages.values() for task in stage.snapshots()]
    return InstanceDetails(
        application_server=settings.application_server,
        version=__version__,
        started_at=iso_time(began_ms),
        processors=os.cpu_count(),
        python=_process("self"),
        jvm=None if sampler is None else _process(str(sampler.jvm_pid)),
        heap_bytes=None if heap is None else heap.heap_used,
        most_heap_bytes=None if heap is None else heap.heap_max,
        free_bytes=None if disk is None else disk.free,
        disk_bytes=None if disk is None else disk.total,
        store_bytes=sum(task.sizes.store_bytes for task in tasks),
        settings=[*_settings(settings)],
        halted=[] if engine is None else [*_halted(engine)],
        log=[
            LogLine(at=iso_time(int(1000 * kept.at.timestamp())), level=kept.level, line=kept.line, times=kept.times)
            for kept in last_warnings()
        ],
    )


def _process(pid: str) -> Process | None:
    """Returns the processor time and the memory of a process; None where the system does not tell."""
    metrics = ProcessCollector(pid=lambda: pid, registry=None).collect()
    found = {sample.name: sample.value for metric in metrics for sample in metric.samples}
    try:
        return Process(
            cpu_seconds=found["process_cpu_seconds_total"], memory_bytes=int(found["process_resident_memory_bytes"])
        )
    except KeyError:
        return None


def _settings(settings: Settings) -> Iterator[Setting]:
    given = {variable_of(name) for name in settings.model_fields_set}
    for name, value in settings.printable().items():
        yield Setting(name=name, value=value, is_set=name in given)


def _halted(engine: Engine) -> Iterator[HaltedTask]:
    for stage in engine.stages.values():
        for task in stage.snapshots():
            if (at := task.failed_at) is not None:
                key = shown_key(at.key, stage.hosted.key_type)
                yield HaltedTask(
                    task=str(task.task_id),
                    since=iso_time(task.state_since_ms),
                    key=key.get("key"),
                    key_base64=key.get("keyBase64", absent()),
                    line=at.line,
                    error=at.error,
                )
