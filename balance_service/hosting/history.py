"""What operators did, and what the service did by itself: from the topics that keep it permanently."""

from __future__ import annotations

import heapq
from itertools import chain
from typing import TYPE_CHECKING, Any

from balance_service.process.runtime import iso_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from balance_service.engine.decisions import LetterId
    from balance_service.hosting.engine import Engine
    from balance_service.model.generations import Generations

_MOST = 200
_ITSELF = "the service"
_WORDS = {"building": "being built", "ready": "ready", "kept": "kept"}


class History:
    """The history of an application, as one of its instances reads it. For one thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._decided: tuple[object, Sequence[dict[str, Any]]] = (None, ())
        """The end of the topic of decisions before it was last read, and the last decisions."""

    def last(self) -> list[Mapping[str, Any]]:
        """Returns the last decisions about dead letters and steps of generations, the newest first, as JSON.

        Each is an `http.instances.Action`. Reads the whole topic of decisions, if it has changed: only its beginning
        says which of its records count.

        Raises:
            RetriableError: the broker does not respond.
        """
        newest = _newest(chain(self._decisions(), _steps(self._engine.generations.history)))
        return [{**done, "at": iso_time(int(1000 * done["at"].timestamp()))} for done in newest]

    def _decisions(self) -> Sequence[dict[str, Any]]:
        engine = self._engine
        # All stages share the topic.
        log = next(iter(engine.stages.values())).hosted.decisions
        # Before the records: those that come during the read are read again.
        end = log.end(engine.topics)
        if end is None or end != self._decided[0]:
            self._decided = end, _newest(_told_decisions(log.read(engine.settings, engine.topics)))
        return self._decided[1]


def _newest(actions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return heapq.nlargest(_MOST, actions, key=lambda done: done["at"])


def _told_decisions(records: Iterable[tuple[LetterId, Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    for letter_id, record in records:
        detail = f"its cause was {record['cause']}"
        yield _action(record["decidedAt"], record["by"], record["decision"], str(letter_id), detail, record["reason"])


def _steps(states: Iterable[Generations]) -> Iterator[dict[str, Any]]:
    before: dict[str, Generations] = {}
    for now in states:
        dropped = {*before.get(now.model, now).live} - {*now.live}
        before[now.model] = now
        yield _action(now.at, now.by or _ITSELF, now.action, now.model, _told(now, sorted(dropped)), now.reason)


def _told(now: Generations, dropped: Iterable[int]) -> str:
    """Returns which generations there are after a step, and which it dropped."""
    others = [f", {one} is {_WORDS[now.status_of(one)]}" for one in now.live if one != now.serving]
    gone = [f", {one} is dropped" for one in dropped]
    return f"generation {now.serving} serves{''.join(others)}{''.join(gone)}{_counts(now)}"


def _counts(now: Generations) -> str:
    if now.action != "compare" or now.comparison is None or now.building is None:
        return ""
    counts = now.comparison
    return (
        f"; keys: {counts.equal} equal, {counts.different} different, {counts.only_serving} in generation "
        f"{now.serving} alone, {counts.only_building} in generation {now.building.generation} alone"
    )


def _action(at: datetime, by: str, action: str, about: str, detail: str, reason: str) -> dict[str, Any]:
    return {"at": at, "by": by, "action": action, "about": about, "detail": detail, "reason": reason}
