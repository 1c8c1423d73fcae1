"""The topic of generations, with two instances that write it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from pydantic import SecretStr
from structlog.testing import capture_logs

from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import SchemaRegistry
from balance_service.cluster.directory import ServerTable
from balance_service.cluster.generations import GenerationLog
from balance_service.engine.records import TaskId
from balance_service.errors import BalanceServiceError, ConfigurationError, InvalidInputError, RetriableError
from balance_service.hosting import engine as module
from balance_service.hosting.engine import Engine
from balance_service.hosting.offline_rebuild import rebuild
from balance_service.hosting.online_rebuilds import Rebuilds
from balance_service.kafka.signing import vouch
from balance_service.kafka.topic_specs import prepare_topics
from balance_service.kafka.topics import Topics
from balance_service.model.events import EVENT, Emit
from balance_service.model.folds import RunningSum
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.model.placing import hosted_stages
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.model.versions import declaration_of
from balance_service.observability.metrics import Metrics
from balance_service.process import open_files
from balance_service.process.open_files import need_of
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from balance_service.spark.session import start_spark
from tests.integration.engines import balance_stage, running_engine, settings_for, startup_retries, state_directory
from tests.support.fakes import DECLARED
from tests.support.kafka import Writer, read_topic
from tests.support.service import PARTITIONS, application
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from balance_service.devtools.local.stack import LocalStack

_WRITERS = 4
# Two of each of the two read models.
_GENERATIONS = 4


@pytest.fixture
def log(stack: LocalStack) -> Iterator[Callable[..., GenerationLog]]:
    """Makes logs of one application, as its instances do."""
    given = application()
    settings = load_settings(
        bootstrap_servers=stack.bootstrap_servers,
        schema_registry_url=stack.schema_registry_url,
        application_id=given["BALANCE_APPLICATION_ID"],
        topic=given["BALANCE_TOPIC"],
    )
    registry = SchemaRegistry.from_settings(settings)

    def make(**secrets: Any) -> GenerationLog:
        of = settings.model_copy(update=secrets)
        log = GenerationLog(of, Topics(of), OwnSchemas(registry))
        log.begin({"balance": DECLARED})
        return log

    yield make
    registry.close()


SECRET, ANOTHER = (SecretStr(f"{name} secret of the instances") for name in ("the", "another"))


def forge(stack: LocalStack, log: GenerationLog, *values: bytes | None) -> None:
    """Writes records about `balance` as a user that may write to the topic, and knows no secret."""
    producer = Producer({"bootstrap.servers": stack.bootstrap_servers})
    for value in values:
        producer.produce(log.records.topic, value, b"balance", partition=0)
    producer.flush(10)


@pytest.mark.shows("control")
def test_forged_records_change_nothing_and_are_reported(stack: LocalStack, log: Callable[..., GenerationLog]) -> None:
    one = log(peer_secret=SECRET)
    follower = log(peer_secret=SECRET)
    follower.start()
    now = one.write("balance", rebuilt)
    (last,) = read_topic(stack, one.records.topic)[-1:]

    dropped = replace(now, number=now.number + 1, building=None, newest=2**31 - 1)
    forge(stack, one, one._codec.encode(dropped.record()), last.value(), b"no record", b"", None)
    try:
        eventually(lambda: len(follower.records.refused) == 5, lambda: str(follower.records.problems))
    finally:
        follower.stop(5)
    late = log(peer_secret=SECRET)

    assert follower.of("balance") == late.of("balance") == now
    assert late.records.problems == follower.records.problems
    assert late.write("balance", lambda known: known.dropped(2, "alice", "a test")).number == now.number + 1


@pytest.mark.shows("control")
def test_a_former_secret_verifies_and_without_it_no_history_is_made_up(log: Callable[..., GenerationLog]) -> None:
    now = log(peer_secret=SECRET).write("balance", rebuilt)

    with pytest.raises(ConfigurationError, match=r"at offset 0 of .* does not count: no known secret has signed it"):
        log(peer_secret=ANOTHER)
    changed = log(peer_secret=ANOTHER, peer_secrets_former=(SECRET,))

    assert changed.of("balance") == now
    assert vouch(changed._settings, changed._topics, changed.records.topic) == 2
    assert log(peer_secret=ANOTHER).of("balance") == now
    assert changed.write("balance", lambda known: known.dropped(2, "alice", "a test")).live == [1]


def test_records_from_before_there_was_a_secret_count(log: Callable[..., GenerationLog]) -> None:
    now = log().write("balance", rebuilt)

    assert log(peer_secret=SECRET).of("balance") == now


def rebuilt(now: Generations) -> Generations:
    return now.rebuilt(DECLARED, Switch.NEVER, 0, None, "alice", "a test")


def test_a_transition_applies_to_the_newest_state_whoever_wrote_it(log: Callable[[], GenerationLog]) -> None:
    one, other = log(), log()
    one.write("balance", rebuilt)

    # The other instance follows the topic later than it writes.
    with pytest.raises(InvalidInputError, match="generation 2 of 'balance' is being built"):
        other.write("balance", rebuilt)
    other.write("balance", lambda now: now.dropped(2, "bob", "over"))

    # Numbers of dropped generations are not used again.
    assert one.write("balance", rebuilt).live == [1, 3]


def test_instances_that_start_together_write_one_first_record(
    stack: LocalStack, log: Callable[[], GenerationLog]
) -> None:
    with ThreadPoolExecutor(_WRITERS) as pool:
        logs = [*pool.map(lambda _: log(), range(_WRITERS))]

    assert [known.of("balance").declarations for known in logs] == [{1: DECLARED}] * _WRITERS
    assert len(read_topic(stack, logs[0]._topic)) == 1


def test_concurrent_writers_lose_no_transition(stack: LocalStack, log: Callable[[], GenerationLog]) -> None:
    logs = [log() for _ in range(_WRITERS)]
    done: list[int] = []

    def begin_and_drop(of: GenerationLog) -> None:
        for _ in range(3):
            try:
                number = of.write("balance", rebuilt).newest
                of.write("balance", lambda now, number=number: now.dropped(number, "", "over"))  # type: ignore[misc]
            except BalanceServiceError:
                # Another writer fenced this one, or builds a generation.
                continue
            done.append(number)

    threads = [threading.Thread(target=begin_and_drop, args=(of,)) for of in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    last = log().of("balance")
    records = read_topic(stack, logs[0]._topic)
    assert last.number == len(records)
    assert len(set(done)) == len(done)


def test_requests_for_several_read_models_at_once_are_all_written(log: Callable[[], GenerationLog]) -> None:
    logs = [log() for _ in range(_WRITERS)]
    models = [f"model-{number}" for number in range(_WRITERS)]
    logs[0].begin(dict.fromkeys(models, DECLARED))
    failed: list[BalanceServiceError] = []

    def begin_and_drop(of: GenerationLog, model: str) -> None:
        try:
            for _ in range(3):
                number = of.write(model, rebuilt).newest
                of.write(model, lambda now, number=number: now.dropped(number, "", "over"))  # type: ignore[misc]
        except BalanceServiceError as error:
            failed.append(error)

    with ThreadPoolExecutor(_WRITERS) as pool:
        [*pool.map(begin_and_drop, logs, models)]

    assert failed == []
    last = log()
    assert [last.of(model).number for model in models] == [7] * _WRITERS


def test_all_instances_follow_what_one_writes(log: Callable[[], GenerationLog]) -> None:
    writer, follower = log(), log()
    follower.start()
    try:
        written = writer.write("balance", rebuilt)
        eventually(lambda: follower.of("balance").number == written.number, "the record is read", 20)
        assert follower.of("balance").live == [1, 2]
        assert log().of("balance") == written
    finally:
        follower.stop(5)


def test_an_instance_starts_although_a_generation_is_dropped_during_the_start(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    topics = Topics(settings)
    changelog = balance_stage(settings).of_generation(2).changelog
    with running_engine(settings) as engine:
        assert engine.generations.of("balance").live == [1]
        store = engine.state_directory.store_path(TaskId("balance.g2", 0))
    # It ran once while it had the second generation.
    store.mkdir()
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        written = GenerationLog(settings, topics, OwnSchemas(registry))
        written.write("balance", lambda now: now.rebuilt(now.declarations[1], Switch.NEVER, 0, None, "alice", "a test"))

        def start_spark_late(*arguments: Any) -> SparkSession:
            assert topics.find(changelog) is not None
            written.write("balance", lambda now: now.dropped(2, "alice", "over"))
            topics.delete(changelog)
            return start_spark(*arguments)

        monkeypatch.setattr(module, "start_spark", start_spark_late)
        with running_engine(settings) as engine:
            assert [*engine.stages] == ["balance"]
            assert not store.exists()
    assert topics.find(changelog) is None


@pytest.mark.parametrize(("missing_files", "hosted"), [(0, ["activity.g2", "balance.g2"]), (1, ["activity.g2"])])
def test_an_instance_hosts_as_many_second_generations_as_its_open_files_allow(
    stack: LocalStack,
    names: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing_files: int,
    hosted: list[str],
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", models="balance,activity")
    limit = need_of(_GENERATIONS * PARTITIONS) - missing_files
    monkeypatch.setattr(open_files, "limit", lambda: limit)
    with running_engine(settings) as engine:
        added = []
        for model in ("activity", "balance"):
            with suppress(RetriableError):
                engine.add_stage(engine.versions.stage(model, 2))
                added.append(f"{model}.g2")
        assert added == hosted
        assert {*hosted} < {*engine.stages}


class Quiet(ReadModel):
    """A sum that is not sent."""

    name = "test-announced"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = "BalanceState"
    amount = RunningSum("FundsAdded.amount")


@pytest.mark.shows("versions")
@pytest.mark.parametrize("during_the_start", [False, True])
def test_a_version_that_sends_to_a_topic_of_its_own_is_built_next_to_the_one_that_does_not(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, during_the_start: bool
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    announcements = f"{settings.topic}-announcements"

    class Announced(Quiet):
        """The sum, which is sent with each event."""

        version = 2
        emits = Emit(announcements, each=EVENT)

    # Another model is new: its first record is written at the start.
    models = [Quiet(), Announced(), Balance()]
    registry = SchemaRegistry.from_settings(settings)
    log = GenerationLog(settings, Topics(settings), OwnSchemas(registry))
    log.begin({Quiet.name: declaration_of(models[0])})

    def begin_to_sign(*_: Any) -> None:
        """Another instance begins the generation once this one has prepared its topics."""
        if during_the_start:
            log.write(Quiet.name, lambda now: now.upgraded(declaration_of(models[1]), Switch.NEVER, 60))

    monkeypatch.setattr(module, "begin_to_sign", begin_to_sign)
    engine = Engine(
        settings, state_directory(settings), hosted_stages(models, settings), models, Metrics(), startup_retries()
    )
    rebuilds = Rebuilds(engine, ServerTable(), Switch.NEVER)
    engine.start()
    rebuilds.start()
    try:
        eventually(lambda: f"{Quiet.name}.g2" in engine.stages, lambda: str(rebuilds.problems), 30)
        assert {*engine.stages} == {Quiet.name, f"{Quiet.name}.g2", "balance"}
        assert rebuilds.problems == {}
        assert engine.topics.find(announcements) is not None
    finally:
        rebuilds.stop(5)
        engine.stop()
        registry.close()


@pytest.mark.shows("rebuild")
def test_an_offline_rebuild_replaces_all_generations(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    topics = Topics(settings)
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        written = GenerationLog(settings, topics, OwnSchemas(registry))
        written.begin({"balance": DECLARED})
        prepare_topics(topics, settings, [balance_stage(settings).of_generation(2)])
        with Writer(stack, settings.topic) as writer:
            writer.add("alice", "1.00", "2.00")
        written.write("balance", rebuilt)
        written.write("balance", lambda now: now.compared(2, Comparison()))
        written.write("balance", lambda now: now.switched(2, "alice", "it is equal"))
        # A generation is kept for a day, and the switch has not ended.
        with capture_logs() as logs:
            assert rebuild(settings, Balance(), lambda _at, _of: None).done.applied == 2
        written.refresh()
        now = written.of("balance")
    said = "generation 3 of 'balance' serves from now on, and is folded; the changelogs of balance, balance.g2 are"
    assert [line["event"] for line in logs if said in line["event"]] != []
    assert (now.live, now.former, now.is_settled, now.action) == ([3], (), True, "settle")

    changelogs = [f"{settings.application_id}-balance{number}-changelog" for number in ("", ".g2", ".g3")]
    assert [topics.find(name) is not None for name in changelogs] == [False, False, True]
