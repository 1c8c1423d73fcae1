"""Re-keyed streams and outputs, from the source topic to an independent consumer."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.cluster.directory import ServerTable
from balance_service.engine.task import TaskState
from balance_service.errors import ConfigurationError, InvalidInputError
from balance_service.hosting.offline_rebuild import rebuild
from balance_service.hosting.online_rebuilds import Rebuilds
from balance_service.kafka import topic_specs
from balance_service.kafka.topic_specs import prepare_topics
from balance_service.kafka.topics import Topics
from balance_service.model.generations import Switch
from balance_service.model.placing import stages_of
from tests.integration.engines import running_engine, settings_for
from tests.integration.purchases import (
    Named,
    Till,
    assert_notified_once,
    assert_shipped_once,
    invoice,
    named,
    points_of,
)
from tests.support.kafka import delete_before, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from decimal import Decimal
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings

pytestmark = pytest.mark.timeout(600)
# Starts one query per stage and partition.
_CATCH_UP_SECONDS = 150.0


def wait_until_caught_up(engine: Engine) -> None:
    eventually(lambda: caught_up(engine), lambda: f"caught up; {engine.problems}", _CATCH_UP_SECONDS)


def caught_up(engine: Engine) -> bool:
    """Whether every stage has reached the end of its source, earlier stages first."""
    for tasks in engine.stages.values():
        source = tasks.hosted.source
        ends = engine.topics.offsets(source.name, range(source.partitions))
        positions = {task.task_id.partition: task.position for task in tasks.all() if task.view is not None}
        if any(positions.get(partition, -1) < end for partition, end in ends.items()):
            return False
    return True


def states(engine: Engine, name: str) -> dict[bytes, bytes]:
    """Returns all framed states of a model."""
    views = [task.view for task in engine.stages_of(name)[-1].all()]
    return {key: frame for view in views if view for key, frame in view.scan(b"", b"\xff", 1_000)}


def points(engine: Engine, models: Named) -> dict[str, Decimal]:
    """Returns the points of each card in the stores of the engine."""
    hosted = engine.stages_of(models.rewards.name)[-1].hosted
    return {key.decode(): hosted.state(frame)["points"] for key, frame in states(engine, models.rewards.name).items()}


def sales(count: int, first: int = 1) -> list[dict[str, Any]]:
    """Returns invoices of seven customers; two of three are PRIME, and every other one is for delivery."""
    return [
        invoice(
            n,
            f"card-{n % 7}",
            f"{n}.10",
            kind="PRIME" if n % 3 else "REGULAR",
            delivery="Home-Delivery" if n % 2 else "TAKEAWAY",
        )
        for n in range(first, first + count)
    ]


@pytest.mark.shows("outputs-once")
def test_each_invoice_is_rekeyed_counted_and_notified_once(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    models = named(names["application_id"])
    settings = settings_for(stack, names, tmp_path / "state", models=(models.rewards.name,))
    sold = sales(60)
    with Till(stack, models.pos) as till, running_engine(settings) as engine:
        till.sell(*sold[:30])
        wait_until_caught_up(engine)
        till.sell(*sold[30:])
        wait_until_caught_up(engine)

        assert points(engine, models) == points_of(sold)
        rekeyed = engine.stages[models.rewards.name].hosted.source.name
        assert assert_notified_once(stack, till, models, rekeyed) == sum(s["customerType"] == "PRIME" for s in sold)


@pytest.mark.shows("rebuild")
def test_a_rebuild_restores_the_states_and_emits_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    models = named(names["application_id"])
    settings = settings_for(stack, names, tmp_path / "state", models=(models.rewards.name,))
    with Till(stack, models.pos) as till:
        with running_engine(settings) as engine:
            till.sell(*sales(40))
            wait_until_caught_up(engine)
            before, rekeyed = states(engine, models.rewards.name), engine.stages[models.rewards.name].hosted.source.name
        sent = places(read_topic(stack, models.notifications)), places(read_topic(stack, rekeyed))

        rebuild(settings, models.rewards(), lambda _at, _of: None)

        assert (places(read_topic(stack, models.notifications)), places(read_topic(stack, rekeyed))) == sent
        with running_engine(settings) as engine:
            wait_until_caught_up(engine)
            assert states(engine, models.rewards.name) == before
            till.sell(*sales(20, first=41))
            wait_until_caught_up(engine)
            assert points(engine, models) == points_of(sales(60))
        assert_notified_once(stack, till, models, rekeyed)

        # Records that were deleted from the output topic also count as sent.
        topics = Topics(settings)
        ends = topics.offsets(models.notifications, range(2))
        delete_before(stack.bootstrap_servers, models.notifications, ends)
        rebuild(settings, models.rewards(), lambda _at, _of: None)

        assert topics.offsets(models.notifications, range(2)) == ends


def test_a_repeated_rebuild_after_the_changelog_was_dropped_emits_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    models = named(names["application_id"])
    settings = settings_for(stack, names, tmp_path / "state", models=(models.rewards.name,))
    with Till(stack, models.pos) as till:
        with running_engine(settings) as engine:
            till.sell(*sales(40))
            wait_until_caught_up(engine)
            before = states(engine, models.rewards.name)
            changelog = engine.stages[models.rewards.name].hosted.stage.changelog
        topics = Topics(settings)
        sent = topics.offsets(models.notifications, range(2))
        topics.delete(changelog)

        rebuild(settings, models.rewards(), lambda _at, _of: None)

        assert topics.offsets(models.notifications, range(2)) == sent
        with running_engine(settings) as engine:
            wait_until_caught_up(engine)
            assert states(engine, models.rewards.name) == before


@pytest.mark.shows("outputs-once")
def test_a_stage_that_lost_its_changelog_sends_nothing_twice(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    models = named(names["application_id"])
    settings = settings_for(stack, names, tmp_path / "state", models=(models.rewards.name, models.purchases.name))
    with Till(stack, models.pos) as till:
        with running_engine(settings) as engine:
            till.sell(*sales(40))
            wait_until_caught_up(engine)
            changelogs = [tasks.hosted.stage.changelog for tasks in engine.stages.values()]
            for changelog in changelogs:
                engine.topics.delete(changelog)
        with running_engine(settings) as engine:
            till.sell(*sales(20, first=41))
            wait_until_caught_up(engine)

            assert points(engine, models) == points_of(sales(60))
            assert_notified_once(stack, till, models, engine.stages[models.rewards.name].hosted.source.name)
            assert_shipped_once(stack, till, models)


@pytest.mark.shows("outputs-once")
def test_delivered_invoices_are_shipped_unchanged_and_every_line_is_masked(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    models = named(names["application_id"])
    settings = settings_for(stack, names, tmp_path / "state", models=(models.purchases.name,))
    with Till(stack, models.pos) as till, running_engine(settings) as engine:
        till.sell(*sales(30))
        till.send(None, till.frame_of(invoice(31, "card", "1.00", delivery="home-delivery")), headers={"note": b"n"})
        till.send(b"garbage", b"no frame")
        wait_until_caught_up(engine)

        assert assert_shipped_once(stack, till, models) == 16
        (letter,) = read_topic(stack, engine.stages[models.purchases.name].hosted.stage.dead_letters)
        assert letter.value() == b"no frame"
        (noted,) = [m for m in read_topic(stack, models.shipments) if m.key() is None]
        assert ("note", b"n") in (noted.headers() or [])


def test_a_record_without_a_key_for_a_compacted_topic_is_a_dead_letter_and_stops_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    models = named(names["application_id"])
    settings = settings_for(stack, names, tmp_path / "state", models=(models.purchases.name,))
    topics = Topics(settings)
    compacted = {**topic_specs.config_with_headers({"max.message.bytes": str(1 << 20)}), "cleanup.policy": "compact"}
    topics.create(models.shipments, 2, compacted)
    with Till(stack, models.pos) as till, running_engine(settings) as engine:
        till.send(None, till.frame_of(invoice(1, "card", "1.00", delivery="home-delivery")))
        till.sell(invoice(2, "card", "1.00", delivery="home-delivery"))
        wait_until_caught_up(engine)

        (letter,) = read_topic(stack, engine.stages[models.purchases.name].hosted.stage.dead_letters)
        assert ("dead-letter-cause", b"output-does-not-fit") in (letter.headers() or [])
        (shipped,) = read_topic(stack, models.shipments)
        assert shipped.key() == b"store-2"


def test_a_record_that_exceeds_the_limit_once_decompressed_is_a_dead_letter_and_stops_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    models = named(names["application_id"])
    settings = settings_for(stack, names, tmp_path / "state", models=(models.rewards.name,))
    compressed = {"compression.type": "gzip", "message.max.bytes": 8 << 20}
    with Till(stack, models.pos, **compressed) as till, running_engine(settings) as engine:
        till.sell({**invoice(1, "card", "1.00"), "customerName": "x" * (2 << 20)}, invoice(2, "card", "2.00"))
        wait_until_caught_up(engine)

        (letter,) = read_topic(stack, f"{models.pos}-dead-letters")
        assert letter.key() == b"store-1"
        assert ("dead-letter-cause", b"output-does-not-fit") in (letter.headers() or [])
        assert points(engine, models) == points_of([invoice(2, "card", "2.00")])


def test_a_different_partition_count_is_refused_and_names_both_topics(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    models = named(names["application_id"])
    settings = settings_for(stack, names, tmp_path / "state", models=(models.rewards.name,))
    topics = Topics(settings)
    *_, last = stages_of(models.rewards(), settings)
    topics.create(last.source, 5, topic_specs.FOREVER)

    with pytest.raises(ConfigurationError, match=f"'{last.source}' has 5 partitions and '{models.pos}'.* 2"):
        prepare_topics(topics, settings, stages_of(models.rewards(), settings))


def test_a_model_without_states_is_not_rebuilt(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    models = named(names["application_id"])

    with pytest.raises(ConfigurationError, match="keeps no states, so there is nothing to rebuild"):
        rebuild(settings_for(stack, names, tmp_path / "state"), models.purchases(), lambda _at, _of: None)


def places(messages: list[Any]) -> list[tuple[int, int, bytes]]:
    """Returns partition, offset and value of each record."""
    return [(m.partition(), m.offset(), m.value()) for m in messages]


HALTS_WITHIN_SECONDS = 60.0


@pytest.fixture
def models(names: dict[str, str]) -> Named:
    return named(names["application_id"])


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], models: Named, tmp_path: Path) -> Settings:
    return settings_for(stack, names, tmp_path / "state", models=(models.rewards.name,))


def rekeyed(engine: Engine, models: Named) -> str:
    return engine.stages[models.rewards.name].hosted.source.name


def delete_applied(stack: LocalStack, engine: Engine, topic: str) -> None:
    """Deletes all applied records of a topic, as an operator may."""
    wait_until_caught_up(engine)
    ends = engine.topics.offsets(topic, range(2), committed=True)
    assert any(ends.values())
    delete_before(stack.bootstrap_servers, topic, ends)


def reason_of_halt(engine: Engine, stage: str) -> str:
    def halted() -> list[str]:
        return [t.reason for t in engine.stages[stage].snapshots() if t.state == TaskState.HALTED.value]

    eventually(lambda: bool(halted()), f"a task of {stage} is halted", HALTS_WITHIN_SECONDS)
    return halted()[0]


def test_a_rebuild_from_a_topic_between_stages_that_lost_records_is_refused_before_anything_is_dropped(
    stack: LocalStack, settings: Settings, models: Named
) -> None:
    with Till(stack, models.pos) as till, running_engine(settings) as engine:
        till.sell(*sales(20))
        delete_applied(stack, engine, rekeyed(engine, models))
        before = states(engine, models.rewards.name)
        with pytest.raises(InvalidInputError, match=r"are gone, and are not made again.*BALANCE_APPLICATION_ID"):
            Rebuilds(engine, ServerTable(), Switch.NEVER).checks.buildable(models.rewards.name)

    with pytest.raises(ConfigurationError, match=r"are gone, and are not made again.*BALANCE_APPLICATION_ID"):
        rebuild(settings, models.rewards(), lambda _at, _of: None)

    with running_engine(settings) as engine:
        wait_until_caught_up(engine)
        assert states(engine, models.rewards.name) == before


def test_a_changelog_lost_after_the_records_between_stages_halts_its_stage_and_sends_nothing_twice(
    stack: LocalStack, settings: Settings, models: Named
) -> None:
    # The setting allows a source that lost irrelevant records; these records make up half of the states.
    settings = settings.model_copy(update={"allow_finite_retention": True})
    with Till(stack, models.pos) as till, running_engine(settings) as engine:
        till.sell(*sales(20))
        topic, name = rekeyed(engine, models), models.rewards.name
        delete_applied(stack, engine, topic)
        passing = next(stage for stage in engine.stages if stage != name)
        changelogs = [tasks.hosted.stage.changelog for tasks in engine.stages.values()]
    for changelog in changelogs:
        Topics(settings).delete(changelog)
    shutil.rmtree(settings.state_dir)

    with running_engine(settings) as engine:
        assert "it is unknown what was passed on" in reason_of_halt(engine, passing)
        assert "are gone, and are not made again" in reason_of_halt(engine, name)
        assert read_topic(stack, topic) == []
