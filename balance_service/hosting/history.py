"""What operators did, and what the service did by itself: from the topics that keep it permanently."""

from __future__ import annotations

import heapq
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from balance_service.http.instances import Action
from balance_service.process.runtime import iso_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime

    from balance_service.engine.decisions import DeadLetterDecision
    from balance_service.hosting.engine import Engine
    from balance_service.model.generations import Generations

_MOST = 200
_ITSELF = "the service"
_Told = tuple["datetime", Action]
"""An action with its time, which is more exact than what clients see."""
_WORDS = {"building": "being built", "ready": "ready", "kept": "kept"}


class History:
    """The history of an application, as one of its instances reads it. For one thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._decided: tuple[object, Sequence[_Told]] = (None, ())
        """The end of the topic of decisions before it was last read, and the last decisions."""

    def last(self) -> list[Action]:
        """Returns the last decisions about dead letters and steps of generations, the newest first.

        Reads the whole topic of decisions, if it has changed: only its beginning says which of its records count.

        Raises:
            RetriableError: the broker does not respond.
        """
        told = chain(self._decisions(), _steps(self._engine.generations.history))
        return [done for _, done in heapq.nlargest(_MOST, told, key=itemgetter(0))]

    def _decisions(self) -> Sequence[_Told]:
        engine = self._engine
        # All stages share the topic.
        log = next(iter(engine.stages.values())).hosted.decisions
        # Before the records: those that come during the read are read again.
        end = log.end(engine.topics)
        if end is None or end != self._decided[0]:
            last = heapq.nlargest(_MOST, log.read(engine.settings, engine.topics), key=attrgetter("decided_at"))
            self._decided = end, [*_told_decisions(last)]
        return self._decided[1]


def _told_decisions(decisions: Iterable[DeadLetterDecision]) -> Iterator[_Told]:
    for one in decisions:
        detail = f"its cause was {one.cause}"
        yield _action(one.decided_at, one.by, one.decision.value, one.id, detail, one.reason)


def _steps(states: Iterable[Generations]) -> Iterator[_Told]:
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


def _action(at: datetime, by: str, action: str, about: str, detail: str, reason: str) -> _Told:
    return at, Action(
        at=iso_time(int(1000 * at.timestamp())), by=by, action=action, about=about, detail=detail, reason=reason
    )
