"""Tells the operator which records a stage ignores because they are of other types, and which it cannot apply."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import structlog

from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from balance_service.engine.records import DeadLetter

log = structlog.get_logger(__name__)

# Names come from the schemas of producers.
_MOST_NAMES = 50
_AGAIN_SECONDS = 60.0


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


class DeadRecords:
    """Logs the dead letters of one stage: a line for each cause, at most one a minute. Any thread may use it."""

    def __init__(self, stage: str, topic: str, clock: Callable[[], float] = elapsed) -> None:
        """Args:
        clock: seconds.
        """
        self._stage = stage
        self._topic = topic
        self._clock = clock
        self._lock = threading.Lock()
        self._told_at: dict[str, float] = {}
        self._untold: dict[str, int] = {}
        """Records since the last line, by cause."""

    def tell(self, partition: int, causes: Mapping[str, int], first: Mapping[str, DeadLetter]) -> None:
        """Args:
        causes: how many records became dead letters, by cause.
        first: the first of them, by cause.
        """
        for cause, letter in first.items():
            with self._lock:
                # Own code may name any causes.
                if cause not in self._told_at and len(self._told_at) == _MOST_NAMES:
                    continue
                self._untold[cause] = self._untold.get(cause, 0) + causes[cause]
                if self._clock() - self._told_at.get(cause, float("-inf")) < _AGAIN_SECONDS:
                    continue
                self._told_at[cause], records = self._clock(), self._untold.pop(cause)
            log.warning(
                "records are dead letters",
                read_model=self._stage,
                topic=self._topic,
                records=records,
                cause=cause,
                partition=partition,
                offset=letter.offset,
                detail=letter.detail,
            )
