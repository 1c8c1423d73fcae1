"""Keeps tasks waiting whose read model cannot be folded here, because the class of its version is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.errors import RetriableError

if TYPE_CHECKING:
    import threading

    from balance_service.engine.task import Task


class StalledStage:
    """Runs tasks that answer, and fold nothing. Implements `engine.tasks.Runner`."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def run(self, task: Task, _interrupted: threading.Event) -> None:
        task.wait(self._reason)

    def check_resumption(self, _partition: int, _interrupted: threading.Event) -> None:
        raise RetriableError(self._reason)

    def has_begun(self, _partition: int) -> bool:
        return True

    def stop(self, _timeout_seconds: float) -> bool:
        return True
