"""Halts the tasks whose source is no longer the log that they were folding.

It looks for owners and standbys alike, and without tasks too: that the source is gone may be why they were taken away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from balance_service.engine.opening import check_same_log
from balance_service.engine.records import Role
from balance_service.errors import BalanceServiceError, RetriableError, TaskHaltedError

if TYPE_CHECKING:
    from balance_service.engine.tasks import Tasks
    from balance_service.kafka.topics import Topic, Topics

log = structlog.get_logger(__name__)


class SourceCheck:
    """Looks at the source of some tasks. For one thread; any may read `problem`."""

    def __init__(self, topics: Topics, source: Topic, tasks: Tasks, *, may_drop: bool = False) -> None:
        """Args:
        may_drop: whether the tasks go on where the source has dropped what they have not read.
        """
        self._may_drop = may_drop
        self._topics = topics
        self._source = source
        self._tasks = tasks
        self.problem = ""
        """What became of the source; empty while all is well."""

    def look(self) -> None:
        """Halt the tasks whose source was cut short, made anew or repartitioned."""
        try:
            self._look()
        except BalanceServiceError as error:
            self.problem = str(error)
            log.warning("the source cannot be looked at", source=self._source.name, error=self.problem)

    def _look(self) -> None:
        topic = self._topics.find_patiently(self._source.name)
        try:
            check_same_log(self._source, topic)
        except TaskHaltedError as halted:
            self.problem = str(halted)
        else:
            self.problem = ""
        tasks = self._tasks.answering()
        if not tasks:
            return
        name = self._source.name
        exists = topic is not None and topic.partitions > max(tasks)
        start = self._topics.offsets(name, tasks, earliest=True) if exists else {}
        # A standby has no need of events that its owner has applied, and no position before the first commit. Asked
        # before the positions: meanwhile it may become the owner.
        needed = {p: start.get(p, 0) if task.role is Role.ACTIVE else -1 for p, task in tasks.items()}
        positions = {partition: task.position for partition, task in tasks.items()}
        end = self._topics.offsets(name, tasks) if exists else {}
        for partition, task in tasks.items():
            if self._may_drop and -1 < positions[partition] < needed[partition]:
                self._tasks.failed(task, RetriableError(f"{name}-{partition} begins at {needed[partition]} now"))
                continue
            task.check_log(topic, needed[partition], positions[partition], end.get(partition, 0))
