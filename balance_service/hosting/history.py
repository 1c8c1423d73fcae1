"""What operators did, and what the service did by itself: from the topics that keep it permanently."""

from __future__ import annotations

import heapq
from itertools import chain
from typing import TYPE_CHECKING, Any

from balance_service.process.runtime import iso_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime

    from balance_service.hosting.engine import Engine
    from balance_service.model.generations import Generations

_MOST = 200


def history_of(engine: Engine) -> list[Mapping[str, Any]]:
    """Returns the last decisions about dead letters and steps of generations, the newest first, as JSON.

    Each is an `http.instances.Action`. Reads the whole topic of decisions.

    Raises:
        RetriableError: the broker does not respond.
    """
    newest = heapq.nlargest(_MOST, chain(_decisions(engine), _steps(engine)), key=lambda done: done["at"])
    return [{**done, "at": iso_time(int(1000 * done["at"].timestamp()))} for done in newest]


def _decisions(engine: Engine) -> Iterator[dict[str, Any]]:
    # All stages share the topic.
    log = next(iter(engine.stages.values())).hosted.decisions
    for letter_id, record in log.read(engine.settings, engine.topics):
        detail = f"its cause was {record['cause']}"
        yield _action(record["decidedAt"], record["by"], record["decision"], str(letter_id), detail, record["reason"])


def _steps(engine: Engine) -> Iterator[dict[str, Any]]:
    for now in engine.generations.history:
        yield _action(now.at, now.by, now.action, now.model, _told(now), now.reason)


def _told(now: Generations) -> str:
    """Returns which generations there are after a step."""
    built = "" if now.building is None else f", {now.building.generation} is built"
    kept = "" if now.kept is None else f", {now.kept} is kept"
    return f"generation {now.serving} serves{built}{kept}"


def _action(at: datetime, by: str, action: str, about: str, detail: str, reason: str) -> dict[str, Any]:
    return {"at": at, "by": by, "action": action, "about": about, "detail": detail, "reason": reason}
