"""Where a task is in its life, and where it may go from there."""

from __future__ import annotations

from enum import Enum


class TaskState(Enum):
    """Where a task is in its life.

    ```
     CREATED ──► RESTORING ──► RUNNING ◄──► WAITING
        │            │           │             │
        │            ├───────────┼──► HALTED ◄─┤
        ▼            ▼           ▼      │      ▼
     CLOSED ◄────────────────────────── ┴ ─────
    ```
    RESTORING replays the changelog and answers nobody. RUNNING folds and answers. WAITING answers, but folds
    nothing until something outside is back. HALTED does neither, until a person has looked. CLOSED is final:
    a partition that comes back gets a new task.
    """

    CREATED = "CREATED"
    RESTORING = "RESTORING"
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    HALTED = "HALTED"
    CLOSED = "CLOSED"


TRANSITIONS = {
    TaskState.CREATED: {TaskState.RESTORING, TaskState.CLOSED},
    TaskState.RESTORING: {TaskState.RUNNING, TaskState.HALTED, TaskState.CLOSED},
    TaskState.RUNNING: {TaskState.WAITING, TaskState.HALTED, TaskState.CLOSED},
    TaskState.WAITING: {TaskState.RUNNING, TaskState.HALTED, TaskState.CLOSED},
    TaskState.HALTED: {TaskState.CLOSED},
    TaskState.CLOSED: set(),
}
ANSWERING = frozenset({TaskState.RUNNING, TaskState.WAITING})
