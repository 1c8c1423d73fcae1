"""What an instance tells about itself: its process, settings, disk, halted tasks and latest warnings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from balance_service.http.route import Count, Time  # pydantic reads the annotations
from balance_service.structs import Struct, absent


@dataclass(frozen=True, slots=True, kw_only=True)
class Process(Struct):
    cpu_seconds: Annotated[float, Field(ge=0)]
    """Processor time since its start, of all its threads."""
    memory_bytes: Count
    """Resident memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Struct):
    name: Annotated[str, Field(examples=["BALANCE_HTTP_PORT"])]
    value: str
    """Secrets are hidden."""
    is_set: bool
    """Whether the instance was given the value; otherwise it is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltedTask(Struct):
    """A task that halted because the code of its read model failed. It may quote the event."""

    task: Annotated[str, Field(examples=["balance_0"])]
    since: Time
    key: str | None
    """The key of the event; null if it has none, or if it is not UTF-8."""
    key_base64: str = field(default_factory=absent)
    """The key, if it is not UTF-8."""
    line: Annotated[str, Field(examples=["/srv/shop/spending.py:31, in fold: return state.total / order.pieces"])]
    """The line of the read model's code that failed; empty if it is not known."""
    error: Annotated[str, Field(examples=["ZeroDivisionError: division by zero"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine(Struct):
    at: Time
    """When it was logged last."""
    level: str
    line: str
    """JSON, cut after 2,000 characters. It may quote events."""
    times: Annotated[int, Field(ge=1)]
    """How often it was logged. Lines that differ in numbers only count as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDetails(Struct):
    """What an instance tells about itself."""

    application_server: str
    """`host:port` under which peers reach it."""
    version: Annotated[str, Field(examples=["0.1.0"])]
    started_at: Time
    processors: Count | None
    """Of its machine."""
    python: Process | None
    """The process that serves HTTP and folds; null where the system does not tell."""
    jvm: Process | None
    """Spark's process; null while the instance is starting, too."""
    heap_bytes: Count | None
    """Heap of Spark's process that is in use; null while it is not known."""
    most_heap_bytes: Count | None
    free_bytes: Count | None
    """Free space on the disk of the stores; null before there is a directory."""
    disk_bytes: Count | None
    store_bytes: Count
    """Size of its stores on the disk."""
    settings: list[Setting]
    halted: list[HaltedTask]
    log: list[LogLine]
    """The last 50 different warnings and errors, the newest first."""
