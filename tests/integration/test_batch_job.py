"""A batch job on a real broker, compared record by record with the online rebuild of the same events."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

from balance_service.cluster.directory import ServerTable
from balance_service.engine.decisions import Decision, Verdict
from balance_service.engine.records import RESERVED_PREFIX
from balance_service.hosting.online_rebuilds import Rebuilds
from balance_service.kafka.messages import IDEMPOTENCY_HEADER
from balance_service.model.generations import Switch
from tests.integration.engines import customers_in, running_engine, settings_for
from tests.integration.purchases import Till, invoice
from tests.integration.test_leaderboard import Games
from tests.support.batch import JobFailedError, folder_of, run_batch
from tests.support.batch_models import InOrder
from tests.support.kafka import Writer, admin
from tests.support.shipped import KNOWN
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from balance_service.bulk.manifest import Manifest
    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.records import Position
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings

_SECONDS = 90.0
_ALL = RESERVED_PREFIX * 2
_AT, _DUE, _TIME = (RESERVED_PREFIX + name for name in (b"letter-at", b"letter-due", b"once-by-time"))
_REFUSED = Decimal("13.00")
_OWN = (b"identity", b"changelog-offset", b"reaches", b"position")


class Built:
    """What the online rebuild has made of a partition."""

    def __init__(self, position: Position, records: dict[bytes, bytes]) -> None:
        self.position = position
        self.records = records


@contextmanager
def rebuilding(settings: Settings) -> Iterator[tuple[Engine, Rebuilds]]:
    with running_engine(settings) as engine:
        rebuilds = Rebuilds(engine, ServerTable(), Switch.NEVER)
        rebuilds.start()
        try:
            yield engine, rebuilds
        finally:
            rebuilds.stop(5)


def built_online(engine: Engine, model: str) -> dict[int, Built]:
    """Rebuilds a read model online, and returns what that makes, once it has caught up."""
    now = engine.generations.of(model)
    declaration = engine.versions.declaration(model)
    engine.generations.write(model, lambda of: of.rebuilt(declaration, Switch.NEVER, 0, None, "alice", "a test"))
    serving, name = engine.models[engine.versions.stage(model, now.serving).name], f"{model}.g2"
    partitions = range(serving.hosted.source.partitions)

    def positions(of: Any) -> list[int | None]:
        tasks = [of.task(p) for p in partitions]
        return [None if task is None or task.view is None else task.position for task in tasks]

    def has_read_all(stage: Any) -> bool:
        ends, tasks = stage.hosted.watermarks, [stage.task(p) for p in range(stage.hosted.source.partitions)]
        ends.refresh()
        return all(
            task is not None and task.view is not None and ends.lag(p, task.position) == 0
            for p, task in enumerate(tasks)
        )

    def has_caught_up() -> bool:
        if name not in engine.models or not all(map(has_read_all, engine.stages_of(model))):
            return False
        return None not in positions(serving) and positions(engine.models[name]) == positions(serving)

    eventually(has_caught_up, lambda: f"{positions(serving)}, {engine.problems}", _SECONDS)
    found = {}
    for partition in partitions:
        view = engine.models[name].task(partition).view  # type: ignore[union-attr]
        assert view is not None
        assert view.position is not None
        pairs = view.scan(b"", _ALL, 1_000_000)
        found[partition] = Built(view.position, {k: v for k, v in pairs if k[1:] not in _OWN})
    return found


def assert_equal(engine_codecs: Any, online: Mapping[int, Built], manifest: Manifest, files: Path) -> None:
    """Compares states, markers, dead letters and positions; times by the clock and epochs aside."""
    folder = folder_of(manifest, files)
    letters = engine_codecs.letters
    assert [one.partition for one in manifest.partitions] == sorted(online)
    for one in manifest.partitions:
        theirs = online[one.partition]
        ours = {}
        for file in one.files:
            for part in folder.records(file):
                pairs = zip(part["key"].to_pylist(), part["value"].to_pylist(), strict=True)
                for key, value in pairs:
                    assert key not in ours
                    ours[key] = value

        def plain(records: Mapping[bytes, bytes]) -> dict[bytes, object]:
            found: dict[bytes, object] = {}
            for key, value in records.items():
                if key.startswith(_DUE):
                    continue
                found[key] = value
                if key.startswith(_AT):
                    letter = letters.decode(int.from_bytes(key[-8:]), value)
                    # The clock says when it was written, and when it is due.
                    found[key] = replace(letter, written_ms=0, due_ms=0)
            return found

        assert plain(ours) == plain(theirs.records)
        assert sum(key.startswith(_DUE) for key in ours) == sum(key.startswith(_DUE) for key in theirs.records)
        position = theirs.position
        assert (one.position, one.stream_time_ms, one.keys, one.letters) == (
            position.offset,
            position.stream_time_ms,
            position.keys,
            position.letters,
        )
        assert (manifest.source, manifest.source_topic_id) == (
            position.source.rpartition(":")[0],
            position.source_topic_id,
        )
        assert manifest.partitioner == position.partitioner


def discard_first(engine: Engine, model: str) -> None:
    """Discards the first open dead letter of each partition that has one, once the topic is applied."""
    tasks = engine.models[model]
    ends = engine.topics.offsets(tasks.hosted.source.name, range(tasks.hosted.source.partitions))
    eventually(
        lambda: {task.task_id.partition: task.position for task in tasks.all()} == ends,
        lambda: f"{tasks.snapshots()}, {engine.problems}",
        _SECONDS,
    )
    discarded = 0
    for task in tasks.all():
        assert task.view is not None
        found = [one for one in tasks.hosted.processor.letters.all(task.view).values() if one.status.needs_decision]
        for letter in found[:1]:
            assert (
                tasks.decide(task.task_id.partition, [letter.offset], Verdict(Decision.DISCARD, "me", "a test")) == {}
            )
            discarded += 1
    assert discarded > 0


def processor(engine: Engine, model: str) -> Any:
    return engine.models[model].hosted.processor


@pytest.mark.shows("rebuild", "idempotency-key", "discarded")
def test_a_job_makes_what_an_online_rebuild_makes_of_balances_and_activity(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", models="balance,activity")
    with Writer(stack, settings.topic) as writer, rebuilding(settings) as (engine, _):
        for number in range(300):
            customer = f"customer-{number % 41}"
            once = [(IDEMPOTENCY_HEADER, f"key-{number % 29}".encode())] if number % 3 == 0 else []
            # The producer's time goes back now and then.
            at = 1_700_000_000_000 + 1_000 * (number if number % 5 else number // 2)
            frame = writer.frame(customer, f"{number % 7}.01", occurredOn=datetime.fromtimestamp(at / 1000, UTC))
            writer.send(customer, frame, headers=once, timestamp=at)
        # Records that cannot be decoded, without a key, and misplaced.
        writer.send("customer-1", b"no frame")
        writer.send(None, writer.frame("customer-1", "1.00"), partition=0)
        writer.send("customer-2", b"\0" + (10**9).to_bytes(4, "big") + b"unknown")
        writer.send("customer-3", writer.frame("customer-4", "1.00"))
        for partition in (0, 1):
            writer.send("misplaced", writer.frame("misplaced", "1.00"), partition=partition)
        assert writer.producer.flush(20) == 0
        for model in ("balance", "activity"):
            discard_first(engine, model)
        online = {model: built_online(engine, model) for model in ("balance", "activity")}
        codecs = {model: processor(engine, model) for model in online}

    for model, built in online.items():
        # Splits so small that repeats and streams of time cross them.
        manifest = run_batch(settings, model, tmp_path / "files", split_records=23)
        assert_equal(codecs[model], built, manifest, tmp_path / "files")
    assert sum(len(one.letters) for one in manifest.partitions) > 0


@pytest.mark.shows("rebuild")
def test_a_job_makes_what_an_online_rebuild_makes_of_rewards(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    """A transform, conditions, the topic of a re-key, and an output of each event, which no silent generation sends."""
    settings = settings_for(stack, names, tmp_path / "state", models="rewards")
    with Till(stack, "pos") as till, rebuilding(settings) as (engine, _):
        till.sell(*(invoice(n, f"card-{n % 17}", f"{2 * n}.50") for n in range(200)))
        till.sell(*(invoice(n, f"card-{n % 17}", "9.00", kind="GUEST") for n in range(20)))
        serving = engine.models["rewards"]
        eventually(
            lambda: sum(task.position for task in serving.all()) >= 200, lambda: str(serving.snapshots()), _SECONDS
        )
        online = built_online(engine, "rewards")
        codecs = processor(engine, "rewards")

    manifest = run_batch(settings, "rewards", tmp_path / "files")
    assert manifest.keys >= 17
    assert_equal(codecs, online, manifest, tmp_path / "files")


@pytest.mark.shows("rebuild", "joined")
def test_a_job_makes_what_an_online_rebuild_makes_of_the_leaderboard(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", models="leaderboard")
    with Games(stack) as games, rebuilding(settings) as (engine, _):
        players = range(1, 6)
        for player in players:
            games.player(player, f"player {player}")
        products = [games.game(f"game {number}") for number in range(5)]
        for number in range(60):
            games.score(products[number % 5], 1 + number % 5, float(number % 13))
        games.score(products[0], 1, float("nan"))
        serving = engine.models["leaderboard"]
        eventually(
            lambda: sum(task.position for task in serving.all()) >= 60, lambda: str(serving.snapshots()), _SECONDS
        )
        online = built_online(engine, "leaderboard")
        codecs = processor(engine, "leaderboard")

    manifest = run_batch(settings, "leaderboard", tmp_path / "files", split_records=7)
    assert_equal(codecs, online, manifest, tmp_path / "files")


KNOWN.setdefault(InOrder.name, InOrder())


@pytest.mark.shows("rebuild", "key-order", "discarded")
def test_a_job_makes_what_an_online_rebuild_makes_of_a_fold_of_ones_own_in_order(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", models=InOrder.name)
    unknown = b"\0" + (10**9).to_bytes(4, "big") + b"unknown"
    with Writer(stack, settings.topic) as writer, rebuilding(settings) as (engine, _):
        for number in range(120):
            customer = f"customer-{number % 11}"
            amount = "13.00" if number % 30 == 7 else f"{number}.00"
            writer.send(customer, unknown if number in (40, 41, 42) else writer.frame(customer, amount))
        assert writer.producer.flush(20) == 0
        discard_first(engine, InOrder.name)
        online = built_online(engine, InOrder.name)
        codecs = processor(engine, InOrder.name)

    of_letters = Counter(name for built in online.values() for name in built.position.letters)
    assert {"behind-another/behind", "unlucky/waiting"} <= of_letters.keys()
    model = f"{InOrder.__module__}:{InOrder.__name__}"
    manifest = run_batch(settings, model, tmp_path / "files", split_records=17)
    assert_equal(codecs, online, manifest, tmp_path / "files")


@pytest.mark.shows("rebuild", "dead-letter")
def test_a_record_at_which_spark_fails_becomes_a_dead_letter_within_the_job(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with rebuilding(settings) as (engine, _), Writer(stack, settings.topic) as writer:
        topic = ConfigResource(ConfigResource.Type.TOPIC, settings.topic)
        topic.add_incremental_config(
            ConfigEntry("message.timestamp.after.max.ms", str(2**63 - 1), incremental_operation=AlterConfigOpType.SET)
        )
        admin(stack).incremental_alter_configs([topic])[topic].result()
        customer = customers_in(0)[0]
        for number in range(40):
            # No time of Spark is so late.
            at = 1 << 61 if number in (7, 8, 30) else 0
            writer.send(customer, writer.frame(customer, "1.00"), partition=0, timestamp=at)
        assert writer.producer.flush(20) == 0
        served = engine.models["balance"]
        eventually(
            lambda: (task := served.task(0)) is not None and task.view is not None and task.position == 40,
            lambda: str(engine.problems),
            _SECONDS,
        )
        online = built_online(engine, "balance")
        codecs = processor(engine, "balance")

    assert online[0].position.letters == {"time-out-of-range/waiting": 3}
    manifest = run_batch(settings, "balance", tmp_path / "files", split_records=10)
    assert_equal(codecs, online, manifest, tmp_path / "files")
    assert manifest.events == 40


def test_a_job_that_cannot_begin_says_why_and_leaves_no_manifest(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer, running_engine(settings):
        writer.add("alice", "1.00")

    with pytest.raises(JobFailedError, match="ConfigurationError: --master: 'mesos://x' is none that is known"):
        run_batch(settings, "balance", tmp_path / "files", master="mesos://x")
    with pytest.raises(JobFailedError, match=r"spark\.authenticate\.secret is missing"):
        run_batch(settings, "balance", tmp_path / "files", master="spark://localhost:1")
    with pytest.raises(JobFailedError, match=r"spark\.sql\.ansi\.enabled is set by the service"):
        run_batch(settings, "balance", tmp_path / "files", conf={"spark.sql.ansi.enabled": "false"})
    assert not (tmp_path / "files").exists()
