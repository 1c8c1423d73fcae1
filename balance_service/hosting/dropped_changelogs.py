"""Deletes what dropped generations of the read models here leave: changelogs and their subjects."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from balance_service.engine.inheritance import owners_of
from balance_service.errors import BalanceServiceError
from balance_service.hosting.rebuild_checks import StepWaitsError
from balance_service.process.failpoints import failpoint

if TYPE_CHECKING:
    from balance_service.cluster.directory import ServerTable
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.hosting.engine import Engine
    from balance_service.kafka.topics import Topic
    from balance_service.model.generations import Generations
    from balance_service.model.stage import Stage

_LOOK_AGAIN_SECONDS = 60.0
_DELETE_AGAIN_SECONDS = 5.0


class DroppedChangelogs:
    """The changelogs of generations that no instance may use any more. For one thread."""

    def __init__(self, engine: Engine, servers: ServerTable) -> None:
        self._engine = engine
        self._servers = servers
        self._deletions: dict[str, tuple[float, BalanceServiceError | None]] = {}
        """When the changelog of a dropped generation was last deleted or not, and why not, by the stage's name."""

    def delete(self, generations: Generations, hosted: HostedStage) -> None:
        """Deletes those of a read model that no instance uses, and their subjects. Brokers forget transactional ids.

        Args:
            hosted: a generation of the read model that is hosted here.

        Raises:
            RetriableError: an instance, or another application, may use one; it is tried again.
            BalanceServiceError: the brokers or the registry refuse a deletion; it is tried again.
        """
        topics, live, waiting = self._engine.topics, set(generations.writable), None
        # The group has given the partitions of an instance that is silent for longer to others.
        alive = self._servers.heard_within(self._engine.settings.session_timeout_ms / 1000)
        published = {task.stage for server in alive for task in server.tasks}
        for number in range(1, generations.newest + 1):
            stage = self._engine.versions.stage(generations.model, number)
            if number in live or stage.name in published:
                # An instance that is late creates the changelog again.
                self._deletions.pop(stage.name, None)
                continue
            # It may also drop the generation before its task is known here.
            at, failure = self._deletions.get(stage.name, (float("-inf"), None))
            if time.monotonic() - at < (_LOOK_AGAIN_SECONDS if failure is None else _DELETE_AGAIN_SECONDS):
                waiting = failure or waiting
                continue
            try:
                # In this order: once the topic is gone, none looks for its subjects.
                if (changelog := topics.find(stage.changelog)) is not None:
                    self._check_ours(stage, changelog, hosted)
                    self._engine.registry.forget(stage.changelog)
                    failpoint("subjects-deleted")
                    topics.delete(stage.changelog)
                    failpoint("changelog-deleted")
            except BalanceServiceError as error:
                self._deletions[stage.name] = time.monotonic(), error
                waiting = error
            else:
                self._deletions[stage.name] = time.monotonic(), None
        if waiting is not None:
            raise waiting

    def _check_ours(self, stage: Stage, changelog: Topic, hosted: HostedStage) -> None:
        """Checks that a changelog is not one of another application that has the same name."""
        owners = owners_of(self._engine.settings, self._engine.topics, hosted.processor.position_codec, changelog)
        if owners - {stage.mark}:
            named = ", ".join(sorted(owner.replace("\0", "/") or "no stage" for owner in owners))
            raise StepWaitsError(
                f"the changelog '{changelog.name}' of a dropped generation is not deleted, because its positions name "
                f"{named} as owner: if no other application uses the topic, delete it"
            )
