"""Watches the topics of a stage: halts tasks whose source was replaced, and tells what topics may lose."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from balance_service.engine.opening import check_same_log
from balance_service.engine.records import Role
from balance_service.errors import BalanceServiceError, RetriableError, TaskHaltedError
from balance_service.kafka.topic_specs import losses
from balance_service.process.runtime import Attempts

if TYPE_CHECKING:
    from balance_service.engine.tasks import Tasks
    from balance_service.kafka.topics import Topic

log = structlog.get_logger(__name__)

_CONFIGURATIONS_EVERY_SECONDS = 15.0


class SourceCheck:
    """Halts the tasks, owners and standbys, whose source was truncated, recreated or repartitioned. For one thread.

    It checks the source even if there are no tasks: the group revokes the partitions of a deleted topic.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._topics = tasks.hosted.topics
        self._source = tasks.hosted.source
        self._attempts = Attempts(log, "the source cannot be looked at", "the source can be looked at again")

    def run_once(self) -> None:
        try:
            self._check()
        except BalanceServiceError as error:
            self._tasks.source_problem = str(error)
            self._attempts.failed(error, source=self._source.name)
        else:
            self._attempts.succeeded()

    def _check(self) -> None:
        topic = self._topics.find_patiently(self._source.name)
        problem = ""
        try:
            check_same_log(self._source, topic)
        except TaskHaltedError as halted:
            problem = str(halted)
        self._look_at_log(topic)
        self._tasks.source_problem = problem

    def _look_at_log(self, topic: Topic | None) -> None:
        tasks = self._tasks.with_states()
        if not tasks:
            return
        name = self._source.name
        exists = topic is not None and topic.partitions > max(tasks)
        start = self._topics.offsets(name, tasks, earliest=True) if exists else {}
        # A standby does not need events that its owner has applied, and has no position before the first commit. Its
        # role is read before the positions, because it may become the owner in between.
        needed = {p: start.get(p, 0) if task.role is Role.ACTIVE else -1 for p, task in tasks.items()}
        positions = {partition: task.position for partition, task in tasks.items()}
        end = self._topics.offsets(name, tasks) if exists else {}
        for partition, task in tasks.items():
            # A topic of retries drops records after its retention, read or not.
            if self._tasks.hosted.stage.retries and -1 < positions[partition] < needed[partition]:
                self._tasks.failed(task, RetriableError(f"{name}-{partition} begins at {needed[partition]} now"))
                continue
            task.check_log(topic, needed[partition], positions[partition], end.get(partition, 0))


class LossCheck:
    """Tells that topics of a stage may lose what it needs, since somebody has changed their configuration.

    What is applied stays right, so the tasks go on; those of a generation that is built halt, because it would fold
    what is left. For one thread.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._next = 0.0
        failed = "the configuration of topics cannot be looked at"
        works = "the configuration of topics can be looked at again"
        self._attempts = Attempts(log, failed, works)

    def run_once(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _CONFIGURATIONS_EVERY_SECONDS
        hosted = self._tasks.hosted
        try:
            # A generation that is built from the remaining records is wrong, even if its own changelog keeps all.
            builds = hosted.generations.builds(hosted.stage)
            found = losses(hosted.topics, hosted.settings, hosted.stage, with_changelog=not builds)
        except BalanceServiceError as error:
            self._attempts.failed(error, stage=hosted.name)
            return
        self._attempts.succeeded()
        for loss in found:
            if loss not in self._tasks.losses:
                log.warning("a topic may lose records: the next start is refused", stage=hosted.name, reason=loss)
        self._tasks.losses = found
        if found and builds:
            for task in self._tasks.answering().values():
                task.halt(f"it would be built from what is left: {found[0]}; then drop this generation")
