"""Deletes the files that generations were loaded from, once these have all of them, or are dropped."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import structlog

from balance_service.errors import BalanceServiceError
from balance_service.process.failpoints import failpoint

if TYPE_CHECKING:
    from balance_service.hosting.engine import Engine
    from balance_service.hosting.rebuild_checks import RebuildChecks
    from balance_service.model.generations import Generations, Load

log = structlog.get_logger(__name__)

_DELETE_AGAIN_SECONDS = 5.0


class LoadedFiles:
    """The files that the topic of generations names. For one thread."""

    def __init__(self, engine: Engine, checks: RebuildChecks) -> None:
        self._engine = engine
        self._checks = checks
        self._failures: dict[Load, tuple[float, BalanceServiceError]] = {}
        """When the files of a generation could not be deleted, and why."""

    def delete(self, generations: Generations) -> None:
        """Deletes the files of a read model that no generation needs, and notes that.

        Raises BalanceServiceError: some cannot be deleted now; it is tried again.
        """
        for load in generations.loads:
            number = load.generation
            if number in generations.live and not self._checks.is_loaded(generations, number):
                continue
            if not load.keeps_files:
                self._delete(generations.model, load)
            failpoint("files-deleted")
            self._engine.generations.write(generations.model, partial(_loaded, number))

    def _delete(self, model: str, load: Load) -> None:
        from balance_service.bulk.folder import Folder

        at, failure = self._failures.get(load, (float("-inf"), None))
        if failure is not None and time.monotonic() - at < _DELETE_AGAIN_SECONDS:
            raise failure
        folder = Folder.of(load.files, self._engine.settings.application_id, model, load.generation)
        try:
            folder.delete()
        except BalanceServiceError as error:
            self._failures[load] = time.monotonic(), error
            raise
        self._failures.pop(load, None)
        log.info("the files of a generation are deleted", files=folder.uri)


def _loaded(number: int, now: Generations) -> Generations:
    return now.loaded(number)
