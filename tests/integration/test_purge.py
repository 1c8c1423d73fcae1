"""Purged topics between two stages: applied records are deleted, answers and outputs stay the same."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.task import TaskState
from balance_service.errors import ConfigurationError
from balance_service.hosting import engine as engine_module
from balance_service.hosting.rebuild import rebuild
from balance_service.kafka.topics import Topics
from tests.integration.engines import running_engine, settings_for
from tests.integration.purchases import Named, Till, named, points_of
from tests.integration.test_outputs import points, sales, states, wait_until_caught_up
from tests.support.kafka import read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings

pytestmark = pytest.mark.timeout(600)
PURGED_WITHIN_SECONDS = 20.0
HALTS_WITHIN_SECONDS = 60.0


@pytest.fixture
def models(names: dict[str, str]) -> Named:
    return named(names["application_id"])


@pytest.fixture
def settings(
    stack: LocalStack, names: dict[str, str], models: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    monkeypatch.setattr(engine_module, "_PURGE_EVERY_SECONDS", 0.2)
    return settings_for(stack, names, tmp_path / "state", models=(models.rewards.name,), purge_rekeyed=True)


def rekeyed(engine: Engine, models: Named) -> str:
    return engine.stages[models.rewards.name].hosted.source.name


def wait_until_purged(engine: Engine, topic: str) -> None:
    """Waits until all applied records are deleted."""
    wait_until_caught_up(engine)
    ends = engine.topics.offsets(topic, range(2), committed=True)
    assert any(ends.values())

    def starts() -> dict[int, int]:
        return engine.topics.offsets(topic, range(2), earliest=True)

    eventually(lambda: starts() == ends, lambda: f"{topic} begins at {ends}, not {starts()}", PURGED_WITHIN_SECONDS)


def reason_of_halt(engine: Engine, stage: str) -> str:
    def halted() -> list[str]:
        return [t.reason for t in engine.stages[stage].snapshots() if t.state == TaskState.HALTED.value]

    eventually(lambda: bool(halted()), f"a task of {stage} is halted", HALTS_WITHIN_SECONDS)
    return halted()[0]


def test_applied_records_are_deleted_and_every_event_still_counts_once(
    stack: LocalStack, settings: Settings, models: Named
) -> None:
    with Till(stack, models.pos) as till:
        with running_engine(settings) as engine:
            topic = rekeyed(engine, models)
            till.sell(*sales(40))
            wait_until_purged(engine, topic)
            till.sell(*sales(20, first=41))
            wait_until_purged(engine, topic)
        shutil.rmtree(settings.state_dir)

        with running_engine(settings) as engine:
            till.sell(*sales(20, first=61))
            wait_until_purged(engine, topic)
            assert points(engine, models) == points_of(sales(80))

    assert len(read_topic(stack, models.notifications)) == sum(s["customerType"] == "PRIME" for s in sales(80))
    assert read_topic(stack, topic) == []


def test_a_rebuild_from_a_purged_topic_is_refused_before_anything_is_dropped(
    stack: LocalStack, settings: Settings, models: Named
) -> None:
    with Till(stack, models.pos) as till, running_engine(settings) as engine:
        till.sell(*sales(20))
        wait_until_purged(engine, rekeyed(engine, models))
        before = states(engine, models.rewards.name)

    with pytest.raises(ConfigurationError, match=r"were deleted after they were applied.*another"):
        rebuild(settings, models.rewards(), lambda _at, _of: None)

    with running_engine(settings) as engine:
        wait_until_caught_up(engine)
        assert states(engine, models.rewards.name) == before


def test_a_changelog_lost_after_a_purge_halts_its_stage_and_sends_nothing_twice(
    stack: LocalStack, settings: Settings, models: Named
) -> None:
    # The setting allows a source that lost irrelevant records; these records make up half of the states.
    settings = settings.model_copy(update={"allow_finite_retention": True})
    with Till(stack, models.pos) as till, running_engine(settings) as engine:
        till.sell(*sales(20))
        topic, name = rekeyed(engine, models), models.rewards.name
        wait_until_purged(engine, topic)
        passing = next(stage for stage in engine.stages if stage != name)
        changelogs = [tasks.hosted.stage.changelog for tasks in engine.stages.values()]
    for changelog in changelogs:
        Topics(settings).delete(changelog)
    shutil.rmtree(settings.state_dir)

    with running_engine(settings) as engine:
        assert "it is unknown what was passed on" in reason_of_halt(engine, passing)
        assert "were deleted after they were applied" in reason_of_halt(engine, name)
        assert read_topic(stack, topic) == []
