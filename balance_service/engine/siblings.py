"""The generations of a read model in this instance, one of which sends its outputs.

Which one, each partition's changelogs say: `Position.emitted_up_to` is `SILENT` in all generations but one. A task that
takes over writes to two changelogs in one transaction, so a task that opens must know that no such transaction of a
predecessor is still open, by its own transactional id or by one of another generation.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import closing
from typing import TYPE_CHECKING

from balance_service.engine.opening import open_writer
from balance_service.engine.records import SILENT, Role, TaskId
from balance_service.errors import RetriableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.store import StoreView
    from balance_service.engine.task import Task
    from balance_service.engine.tasks import Tasks
    from balance_service.model.generations import Generations
    from balance_service.model.stage import Stage


_NO_OFFSET = 2**63 - 1


class Siblings:
    """The tasks of the last stage of one read model, by generation. Any thread may call it."""

    def __init__(self, now: Callable[[], Generations]) -> None:
        """Args:
        now: returns the model's generations. The one that serves should send.
        """
        self._now = now
        self._tasks: dict[int, Tasks] = {}
        self._pacing = threading.Lock()
        self._due = 0.0
        self._fencing: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def add(self, tasks: Tasks) -> None:
        self._tasks = {**self._tasks, tasks.hosted.stage.generation: tasks}

    def remove(self, generation: int) -> None:
        self._tasks = {number: tasks for number, tasks in self._tasks.items() if number != generation}

    def fencing(self, partition: int) -> AbstractContextManager[bool]:
        """A lock: tasks of two generations must not fence each other."""
        return self._fencing[partition]

    def fence_others(self, hosted: HostedStage, partition: int, should_stop: Callable[[], bool]) -> None:
        """Fences the predecessors of the other generations' tasks that have not done so themselves.

        Args:
            should_stop: as in `ChangelogWriter.fence`. Raises as that.
        """
        live = {*self._now().live, *self._tasks}
        for stage in [hosted.stage.of_generation(number) for number in sorted(live - {hosted.stage.generation})]:
            # One that is not hosted here yet may be elsewhere.
            tasks = self._tasks.get(stage.generation)
            task = None if tasks is None else tasks.task(partition)
            if task is None or not task.has_fenced:
                task_id = TaskId(stage.name, partition)
                with closing(open_writer(task_id, hosted.settings, stage, hosted.topics, hosted.source)) as writer:
                    writer.fence(should_stop)

    def starts_silent(self, stage: Stage, partition: int) -> bool:
        """Whether a task without a position must not send.

        Raises:
            RetriableError: that depends on a task that has not opened yet.
        """
        if self._now().serving != stage.generation:
            return True
        return any(self._opened(tasks, partition).sends for tasks in self._others(stage))

    def follow(self, stage: Stage, partition: int, decided: Mapping[int, Letter]) -> None:
        """Has the other generations follow a decision about dead letters, or retry those that were applied.

        Returns at once. A task that has not fenced its predecessors yet reads the topic of decisions afterwards.

        Args:
            decided: the dead letters after it.
        """
        for tasks in self._others(stage) if decided else ():
            task = tasks.task(partition)
            # A standby that is promoted may have read the topic already.
            if task is not None and (task.role is Role.ACTIVE or task.has_fenced):
                task.follow(decided)

    def decided(self, hosted: HostedStage, partition: int) -> Mapping[int, Letter]:
        """Returns what was decided about dead letters of a partition, if other generations may have carried it out.

        Raises:
            RetriableError: the broker does not respond.
        """
        if not self._others(hosted.stage):
            return {}
        now_ms = hosted.processor.letters.now_ms()
        return hosted.decisions.decided_letters(hosted.settings, hosted.topics, [partition], now_ms)[partition]

    def sender(self, stage: Stage, partition: int) -> StoreView | None:
        """Returns the view of the task that sends the outputs in place of a silent one; None if it does not answer."""
        for tasks in self._others(stage):
            task = tasks.task(partition)
            view = None if task is None or task.role is not Role.ACTIVE else task.view
            if view is not None and view.position is not None and view.position.emitted_up_to != SILENT:
                return view
        return None

    def first_needed(self, stage: Stage, partition: int) -> int:
        """Returns the first record that another generation has not applied in a partition, 0 while that is unknown."""
        others = [self._tasks.get(number) for number in self._now().live if number != stage.generation]
        return min((_first_needed(tasks, partition) for tasks in others), default=_NO_OFFSET)

    def still_at(self, stage: Stage, partition: int) -> int | None:
        """Returns the position where the generation that sends stands still, 0 while it is unknown.

        None if none does.
        """
        for tasks in self._others(stage):
            if tasks.hosted.stands_still:
                task = tasks.task(partition)
                if task is None or task.position < 0:
                    return 0
                if task.sends:
                    return task.position
        return None

    def have_same_code(self, one: Stage, other: Stage) -> bool:
        """Whether two generations are folded by one version of the model with one declaration."""
        declared = self._now().declarations
        return declared.get(one.generation) == declared.get(other.generation)

    def serves(self, stage: Stage) -> bool:
        """Whether a generation serves. An earlier stage always does."""
        return self._now().serving == stage.generation

    def builds(self, stage: Stage) -> bool:
        """Whether a generation is being built, and has not caught up with the one that serves."""
        now = self._now()
        is_it = now.building is not None and now.building.generation == stage.generation
        return is_it and now.comparison is None

    def max_rate(self, stage: Stage) -> int | None:
        """Returns how many events a second the tasks of a generation that is built apply together at most."""
        building = self._now().building
        return None if building is None or building.generation != stage.generation else building.max_rate

    def seconds_after(self, stage: Stage, events: int) -> float:
        """Returns how long a task of a generation that is built must wait after some events, to keep its rate."""
        max_rate = self.max_rate(stage)
        if max_rate is None:
            return 0.0
        with self._pacing:
            now = time.monotonic()
            self._due = max(self._due, now) + events / max_rate
            return self._due - now

    def _others(self, stage: Stage) -> list[Tasks]:
        return [tasks for number, tasks in sorted(self._tasks.items()) if number != stage.generation]

    @staticmethod
    def _opened(tasks: Tasks, partition: int) -> Task:
        task = tasks.task(partition)
        if task is None or task.view is None or task.role is not Role.ACTIVE:
            sent = tasks.hosted.stage.sent
            raise RetriableError(f"{tasks.name}_{partition} must open first: it may send {sent}")
        return task


def _first_needed(tasks: Tasks | None, partition: int) -> int:
    task = None if tasks is None else tasks.task(partition)
    view = None if task is None else task.view
    return 0 if tasks is None or view is None else tasks.hosted.processor.letters.first_needed(view)
