"""Where a task is in its life, and where it may go from there."""

from __future__ import annotations

from enum import Enum


class TaskState(Enum):
    """Where a task is in its life.

    ```
     CREATED ──► RESTORING ◄──► TAILING ──┐
        │            │  │        │   │    │
        │            │  └──► RUNNING │ ◄──┘
        │            │        ▲  │   ▼
        │            │        └──┼► WAITING
        │            ├───────────┼──► HALTED  (from TAILING and WAITING too)
        ▼            ▼           ▼      ▼
     CLOSED ◄────────────────────────────     (from every state)
    ```
    RESTORING replays the changelog and answers nobody. RUNNING folds and answers. TAILING, a standby's state, applies
    what the owner commits and answers those who accept that. WAITING answers as before, but applies nothing until
    something outside is back. HALTED does neither, until a person has looked. CLOSED is final: a partition that comes
    back gets a new task.
    """

    CREATED = "CREATED"
    RESTORING = "RESTORING"
    RUNNING = "RUNNING"
    TAILING = "TAILING"
    WAITING = "WAITING"
    HALTED = "HALTED"
    CLOSED = "CLOSED"


_ENDS = {TaskState.HALTED, TaskState.CLOSED}
TRANSITIONS = {
    TaskState.CREATED: {TaskState.RESTORING, TaskState.CLOSED},
    TaskState.RESTORING: {TaskState.RUNNING, TaskState.TAILING, *_ENDS},
    TaskState.RUNNING: {TaskState.WAITING, *_ENDS},
    TaskState.TAILING: {TaskState.RESTORING, TaskState.RUNNING, TaskState.WAITING, *_ENDS},
    TaskState.WAITING: {TaskState.RUNNING, *_ENDS},
    TaskState.HALTED: {TaskState.CLOSED},
    TaskState.CLOSED: set(),
}
ANSWERING = frozenset({TaskState.RUNNING, TaskState.TAILING, TaskState.WAITING})
