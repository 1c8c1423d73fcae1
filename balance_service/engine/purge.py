"""Deletes from the topic between two stages what the later one has applied (Kafka Streams: KAFKA-6150)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from balance_service.engine.records import Role
from balance_service.errors import BalanceServiceError

if TYPE_CHECKING:
    from balance_service.engine.letters.letters import Letters
    from balance_service.engine.store.store import StoreView
    from balance_service.engine.tasks import Tasks
    from balance_service.kafka.topics import Topics

log = structlog.get_logger(__name__)


class Purge:
    """Purges the source of some tasks. For one thread."""

    def __init__(self, topics: Topics, source: str, tasks: Tasks, letters: Letters) -> None:
        self._topics = topics
        self._source = source
        self._tasks = tasks
        self._letters = letters
        self._purged: dict[int, int] = {}

    def look(self) -> None:
        """Delete what is no longer needed of the partitions that are owned here."""
        try:
            needed = {
                partition: self._first_needed(view)
                for partition, task in self._tasks.answering().items()
                if task.role is Role.ACTIVE and (view := task.view) is not None
            }
            fresh = {p: offset for p, offset in needed.items() if offset > self._purged.get(p, 0)}
            self._topics.delete_before(self._source, fresh)
            self._purged |= fresh
        except BalanceServiceError as error:
            log.warning("what was applied is not deleted yet", topic=self._source, error=str(error))

    def _first_needed(self, view: StoreView) -> int:
        """The offset of the first record that is not applied: the position's, or an open dead letter's."""
        if view.position is None:
            return 0
        first_open = self._letters.first_open(view)
        return view.position.offset if first_open is None else min(first_open, view.position.offset)
