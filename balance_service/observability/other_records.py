"""Tells the operator which records a stage ignores because they are of other types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterable

log = structlog.get_logger(__name__)

# Names come from the schemas of producers.
_MOST_NAMES = 50


class OtherRecords:
    """Logs the name of each type that one stage ignores, once. Any thread may use it."""

    def __init__(self, stage: str, topic: str, read: Iterable[str]) -> None:
        """Args:
        read: the full names of the records that the stage reads.
        """
        self._stage = stage
        self._topic = topic
        self._read = sorted(read)
        self._told: set[str] = set()

    def tell(self, ignored: Iterable[str]) -> None:
        """Args:
        ignored: full names of ignored records.
        """
        for name in ignored:
            if name in self._told or len(self._told) == _MOST_NAMES:
                continue
            self._told.add(name)
            about = {"read_model": self._stage, "topic": self._topic, "record": name, "read": self._read}
            if name.rpartition(".")[2] in {own.rpartition(".")[2] for own in self._read}:
                log.warning("records are ignored: only the namespace differs from one that is read", **about)
            else:
                log.info("records of another type are ignored", **about)
