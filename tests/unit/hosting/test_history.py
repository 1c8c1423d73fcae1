"""What operators and the service did is told from both topics, the newest first."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from pydantic import TypeAdapter

from balance_service.engine.decisions import LetterId
from balance_service.hosting.history import history_of
from balance_service.http.instances import Action
from balance_service.model.generations import Building, Generations, Switch

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def engine(decisions: list[tuple[LetterId, dict[str, Any]]], steps: list[Generations]) -> Any:
    log = SimpleNamespace(read=lambda _settings, _topics: iter(decisions))
    stage = SimpleNamespace(hosted=SimpleNamespace(decisions=log))
    return SimpleNamespace(
        stages={"m": stage, "n": stage}, settings=None, topics=None, generations=SimpleNamespace(history=steps)
    )


def decision(seconds: int, offset: int = 42) -> tuple[LetterId, dict[str, Any]]:
    at = BEGAN + timedelta(seconds=seconds)
    record = {"decision": "discard", "cause": "key-null", "decidedAt": at, "by": "alice", "reason": "a test"}
    return LetterId("m", 1, offset), record


def test_decisions_and_steps_are_told_in_one_order() -> None:
    begun = Generations("m", action="begin", at=BEGAN)
    building = Building(2, Switch.NEVER, 60)
    built = replace(
        begun, building=building, action="rebuild", by="bob", reason="lost", at=BEGAN + timedelta(seconds=9)
    )
    served = replace(built, building=None, serving=2, kept=1, action="switch", by="", at=BEGAN + timedelta(seconds=99))

    found = history_of(engine([decision(50)], [begun, built, served]))

    TypeAdapter(list[Action]).validate_python(found, strict=True)
    assert [(one["action"], one["by"], one["about"], one["detail"], one["reason"]) for one in found] == [
        ("switch", "", "m", "generation 2 serves, 1 is kept", "lost"),
        ("discard", "alice", "m/1:42", "its cause was key-null", "a test"),
        ("rebuild", "bob", "m", "generation 1 serves, 2 is built", "lost"),
        ("begin", "", "m", "generation 1 serves", ""),
    ]
    assert found[1]["at"] == "2026-01-01T00:00:50.000Z"


def test_no_more_than_the_last_two_hundred_are_told() -> None:
    found = history_of(engine([decision(n, offset=n) for n in range(300)], []))

    assert [one["about"] for one in found] == [f"m/1:{n}" for n in range(299, 99, -1)]
