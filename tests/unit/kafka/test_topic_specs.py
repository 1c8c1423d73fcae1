"""Topic configurations: as created, as accepted with or without a warning, and as refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from balance_service.engine.assembly import processor_of
from balance_service.engine.stateless import RetryProcessor
from balance_service.errors import ConfigurationError
from balance_service.kafka.topic_specs import (
    CHANGELOG,
    FOREVER,
    changelog_spec,
    copy_spec,
    dead_letters_spec,
    losses,
    prepare_topics,
    source_spec,
)
from balance_service.kafka.topics import MIN_IN_SYNC, Topic
from balance_service.model.events import LAST, Emit
from balance_service.model.placing import stages_of, stages_of_retries
from balance_service.model.read_model import ReadModel
from balance_service.model.record_folds import Upsert
from balance_service.model.record_keys import RECORD_KEY
from balance_service.model.stream import Global, Stream
from balance_service.read_models.balance import Balance
from balance_service.read_models.leaderboard import Leaderboard
from balance_service.read_models.purchases import Purchases
from balance_service.settings import load_settings
from tests.support.fakes import FakeRegistry, InMemoryTopics, refusal
from tests.support.shipped import stages_in, surroundings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.kafka.topic_specs import TopicSpec

pytestmark = pytest.mark.usefixtures("no_environment")

DEFAULTS = InMemoryTopics.DEFAULTS


@dataclass
class Row:
    name: str


class Kept(ReadModel):
    name = "kept"
    source = Stream("rows", Row, compacted=True)
    key = RECORD_KEY
    state = Row
    fold = Upsert(Row)


class NeedsAll(Kept):
    name = "needs-all"
    source = Stream("rows", Row)


SOURCE = {**DEFAULTS, **FOREVER}
THEIRS = "orders-dead-letters"
STAGE = f"retries-{THEIRS}"


def check(spec: TopicSpec, config: Mapping[str, str]) -> None:
    spec.check(Topic(spec.name, "id", spec.partitions), config)


def warnings(spec: TopicSpec, config: Mapping[str, str]) -> list[str]:
    """The warnings about a topic with this configuration."""
    with capture_logs() as logs:
        check(spec, config)
    return [line["event"] for line in logs]


def source() -> TopicSpec:
    return source_spec(load_settings(), "t")


def copy_of(config: Mapping[str, str]) -> TopicSpec:
    return copy_spec(load_settings(), "n", 2, "t", config)


@pytest.mark.parametrize("largest", ["1000", "1048588", "20000000"])
def test_a_created_topic_passes_its_checks_without_a_warning(largest: str) -> None:
    config = {**SOURCE, "max.message.bytes": largest}

    assert warnings(source(), config) == []
    for spec in (changelog_spec("c", 2), dead_letters_spec("d", 2, [config]), copy_of(config)):
        assert warnings(spec, {**DEFAULTS, **spec.config}) == []


@pytest.mark.parametrize("bound", ["9223372036854775807", "86400001"])
def test_a_source_that_accepts_any_timestamp_causes_a_warning(bound: str) -> None:
    unbounded = {**SOURCE, "message.timestamp.after.max.ms": bound}

    (warning,) = warnings(source(), unbounded)

    assert "set message.timestamp.after.max.ms=3600000" in warning
    assert warnings(source(), {**unbounded, "message.timestamp.type": "LogAppendTime"}) == []


def test_a_broker_without_timestamp_bounds_is_not_asked_for_one() -> None:
    old = {name: value for name, value in SOURCE.items() if not name.startswith("message.timestamp.")}
    old["message.timestamp.type"] = "CreateTime"

    assert warnings(source(), old) == []
    assert "message.timestamp.after.max.ms" not in copy_of(old).config


def test_a_dead_letter_topic_for_small_records_causes_a_warning_and_for_small_batches_is_refused() -> None:
    spec = dead_letters_spec("d", 2, [SOURCE])

    (warning,) = warnings(spec, DEFAULTS)

    assert f"max.message.bytes={1048588 + 65536}" in warning
    with pytest.raises(ConfigurationError, match="accepts batches of 100 bytes at most"):
        check(spec, {**DEFAULTS, "max.message.bytes": "100"})


def test_a_dead_letter_topic_with_fewer_partitions_than_the_source_is_refused() -> None:
    settings = load_settings()
    topics: Any = InMemoryTopics(balance=2, balance_dead_letters=1)

    with pytest.raises(ConfigurationError, match="has 1 partitions and the source 2"):
        prepare_topics(topics, settings, stages_of(Balance(), settings))


@pytest.mark.parametrize(("brokers", "in_sync", "warned"), [(3, "1", True), (3, "2", False), (1, "1", False)])
def test_topics_that_lose_records_with_one_broker_of_three_cause_a_warning(
    monkeypatch: pytest.MonkeyPatch, brokers: int, in_sync: str, *, warned: bool
) -> None:
    settings = load_settings(replication_factor=3)
    topics: Any = InMemoryTopics(balance=2)
    monkeypatch.setattr(topics, "brokers", lambda: brokers)
    config = topics.config
    monkeypatch.setattr(topics, "config", lambda name: {**config(name), MIN_IN_SYNC: in_sync})

    with capture_logs() as logs:
        prepare_topics(topics, settings, stages_of(Balance(), settings))

    assert [line["topics"] for line in logs if "set min.insync.replicas=2" in line["event"]] == [["balance"]] * warned


@pytest.mark.parametrize("wanted", ["min.compaction.lag.ms=3600000", "message.timestamp.type=LogAppendTime"])
def test_a_changelog_that_may_be_compacted_early_causes_a_warning(wanted: str) -> None:
    name = wanted.partition("=")[0]

    (warning,) = warnings(changelog_spec("c", 2), {**CHANGELOG, name: DEFAULTS[name]})

    assert warning.endswith(f"; set {wanted}")
    assert warnings(changelog_spec("c", 2), CHANGELOG) == []


def test_a_copy_accepts_records_as_large_as_the_source_does() -> None:
    large = {**SOURCE, "max.message.bytes": "5000000"}

    assert copy_of(large).config["max.message.bytes"] == "5000000"
    with pytest.raises(ConfigurationError, match=r"max\.message\.bytes=5000000 or more"):
        check(copy_of(large), SOURCE)
    with pytest.raises(ConfigurationError, match=r"message\.timestamp\.type=CreateTime"):
        check(copy_of(SOURCE), {**SOURCE, "message.timestamp.type": "LogAppendTime"})


# Tables and outputs


def prepare_leaderboard(topics: Any, **settings: Any) -> dict[str, Topic]:
    loaded = load_settings(application_id="app", **settings)
    return prepare_topics(topics, loaded, stages_of(Leaderboard(), loaded))


def test_two_partitioners_of_one_topic_are_refused() -> None:
    class ByCrc(ReadModel):
        name = "test-by-crc"
        source = Stream("pos", "PosInvoice", partitioner="crc32")
        emits = Emit("test-by-crc")

    settings = load_settings()
    stages = [*stages_of(Purchases(), settings), *stages_of(ByCrc(), settings)]

    with pytest.raises(ConfigurationError, match="declare topic 'pos' with the partitioners murmur2 and crc32"):
        prepare_topics(InMemoryTopics(pos=2), settings, stages)  # type: ignore[arg-type]


def test_a_source_that_another_model_writes_has_the_partitioner_of_the_service() -> None:
    class OfShipments(ReadModel):
        name = "test-of-shipments"
        source = Stream("shipments", "PosInvoice", partitioner="fnv1a")
        emits = Emit("test-again")

    settings = load_settings()
    stages = [*stages_of(Purchases(), settings), *stages_of(OfShipments(), settings)]

    with pytest.raises(ConfigurationError, match="declare topic 'shipments' with the partitioners murmur2 and fnv1a"):
        prepare_topics(InMemoryTopics(pos=2), settings, stages)  # type: ignore[arg-type]


def test_a_missing_table_is_created_compacted_and_co_partitioned() -> None:
    topics = InMemoryTopics(score_events=3)

    prepared = prepare_leaderboard(topics, partitions=5)

    assert (prepared["players"].partitions, prepared["products"].partitions) == (3, 5)
    assert prepared["app-leaderboard-by-player_id"].partitions == 3
    assert topics.configs["players"]["cleanup.policy"] == topics.configs["products"]["cleanup.policy"] == "compact"


def test_a_rekeyed_topic_gets_the_partition_count_of_the_table_it_is_joined_with() -> None:
    prepared = prepare_leaderboard(InMemoryTopics(score_events=3, players=4))

    assert prepared["app-leaderboard-by-player_id"].partitions == 4


def test_a_table_that_is_not_co_partitioned_is_refused_with_both_names() -> None:
    topics = InMemoryTopics(score_events=3, players=4)
    topics.create("app-leaderboard-by-player_id", 3, FOREVER)

    with pytest.raises(ConfigurationError) as refused:
        prepare_leaderboard(topics)

    assert "'app-leaderboard-by-player_id' has 3 partitions and the table 'players'" in str(refused.value)
    assert "4: they must have as many" in str(refused.value)


def test_a_table_that_would_lose_rows_is_refused_unless_finite_retention_is_allowed() -> None:
    topics = InMemoryTopics(score_events=2, products=2)
    topics.configs["products"]["retention.ms"] = "604800000"

    with pytest.raises(ConfigurationError, match=r"'products' has cleanup.policy=delete and a finite retention\.ms"):
        prepare_leaderboard(topics)
    assert prepare_leaderboard(topics, allow_finite_retention=True)["products"].partitions == 2


def test_a_deleted_rekeyed_topic_is_not_recreated_without_its_records() -> None:
    topics = InMemoryTopics(score_events=2)
    prepare_leaderboard(topics)
    del topics.partitions["app-leaderboard-by-player_id"]
    topics.ends["app-leaderboard-by-player_id-changelog"] = 1

    with pytest.raises(ConfigurationError) as refused:
        prepare_leaderboard(topics)

    assert str(refused.value) == (
        "topic 'app-leaderboard-by-player_id' is gone, and with it the records that stage 'leaderboard-by-player_id' "
        "passed on; start from scratch with another BALANCE_APPLICATION_ID, which reads everything from its source "
        "again"
    )


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ("max.message.bytes", "262144"),
        ("message.timestamp.type", "LogAppendTime"),
        ("message.timestamp.before.max.ms", "3600000"),
        ("message.timestamp.after.max.ms", "60000"),
    ],
)
def test_an_output_topic_that_would_refuse_emitted_records_is_refused(config: str, value: str) -> None:
    topics = InMemoryTopics(score_events=2, high_scores=2)
    prepare_leaderboard(topics)
    topics.configs["high-scores"][config] = value

    with pytest.raises(ConfigurationError, match=rf"'high-scores'.*set its {config}="):
        prepare_leaderboard(topics)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("reads", "policy"), [("score-events", "compact"), ("high-scores", "delete")])
def test_an_output_that_a_read_model_joins_is_created_as_a_table_unless_one_folds_it(
    reads: str, policy: str, *, is_first: bool
) -> None:
    class Joining(Leaderboard):
        name = "test-joining"
        source = (
            Stream(reads, "ScoreEvent")
            .join(Global("high-scores", "Player"), on="player_id", take={"name": "playerName"})
            .join(Global("products", "Product"), on="product_id", take={"name": "gameName"})
            .by("product_id", record="ScoredGame")
        )
        emits = Emit("test-others", each=LAST)

    settings, topics = load_settings(application_id="app"), InMemoryTopics(score_events=2)
    models = [Joining(), Leaderboard()] if is_first else [Leaderboard(), Joining()]

    prepare_topics(topics, settings, [stage for model in models for stage in stages_of(model, settings)])  # type: ignore[arg-type]

    assert topics.configs["high-scores"]["cleanup.policy"] == policy


def test_an_output_that_another_read_model_reads_is_checked_as_a_source_too() -> None:
    topics: Any = InMemoryTopics(score_events=2, high_scores=2)
    topics.configs["high-scores"]["retention.ms"] = "1000"
    settings = load_settings(application_id="app", topic="high-scores")
    stages = [*stages_of(Leaderboard(), settings), *stages_of(Balance(), settings)]

    with pytest.raises(ConfigurationError, match=r"the source topic 'high-scores' has a finite retention\.ms"):
        prepare_topics(topics, settings, stages)


# Retries of other producers' dead letters


def others(**partitions: int) -> InMemoryTopics:
    """The topics of other producers."""
    topics = InMemoryTopics(**partitions)
    for config in topics.configs.values():
        config |= {"cleanup.policy": "compact", "retention.ms": "60000", "message.timestamp.before.max.ms": "1"}
    return topics


def test_retry_topics_are_listed_with_commas_and_none_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().retry_topics == ()

    monkeypatch.setenv("BALANCE_RETRY_TOPICS", f"{THEIRS}, b,")

    assert load_settings().retry_topics == (THEIRS, "b")
    assert load_settings().printable()["BALANCE_RETRY_TOPICS"] == f"{THEIRS},b"


@pytest.mark.parametrize(
    ("topics", "said"),
    [
        ("a,b,a", "BALANCE_RETRY_TOPICS: 'a,b,a' names 'a' twice; name it once"),
        ("a b", "has 'a b', which is no topic name; list names, separated by commas"),
        ("x" * 250, "which is no topic name"),
    ],
)
def test_a_malformed_list_of_topics_is_refused(monkeypatch: pytest.MonkeyPatch, topics: str, said: str) -> None:
    assert said in refusal(monkeypatch, BALANCE_RETRY_TOPICS=topics)


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("app-retries", "'app-retries' is the topic that retries are sent to, so each would be sent again and again"),
        ("funds-dead-letters", "'funds-dead-letters' has dead letters of the read model"),
        ("pos-dead-letters", "'pos-dead-letters' has dead letters of the read model"),
        ("app-dead-letters", "'app-dead-letters' has dead letters of the read model"),
        (
            "x" * 240,
            f"is too long: a topic name has at most 249 characters, and 'app-retries-{'x' * 240}",
        ),
    ],
)
def test_a_topic_of_the_service_is_no_retry_topic(topic: str, said: str) -> None:
    settings = load_settings(application_id="app", topic="funds", retry_topics=("orders-dead-letters", topic))

    with pytest.raises(ConfigurationError) as caught:
        stages_in(settings)

    assert str(caught.value).startswith("BALANCE_RETRY_TOPICS: ")
    assert said in str(caught.value)


def test_each_retry_topic_has_a_stage_after_the_stages_of_the_read_models() -> None:
    stages = stages_in(load_settings(application_id="app", retry_topics=(THEIRS, "b")))

    assert [(stage.name, stage.owner) for stage in stages] == [
        ("balance", "balance"),
        (STAGE, STAGE),
        ("retries-b", "retries-b"),
    ]
    assert [stage.retries for stage in stages] == [False, True, True]
    assert stages[1].changelog == f"app-{STAGE}-changelog"
    assert stages[1].targets == ("app-retries",)


def prepare_retries(topics: Any, *retry_topics: str) -> dict[str, Topic]:
    settings = load_settings(application_id="app", retry_topics=retry_topics, create_topics=True)
    return prepare_topics(topics, settings, stages_in(settings))


def test_a_missing_topic_of_another_producer_is_refused_and_nothing_is_created() -> None:
    topics = others(there=2)

    with pytest.raises(ConfigurationError) as caught:
        prepare_retries(topics, "there", "not-there")

    assert "topic 'not-there' does not exist, and the service does not create it" in str(caught.value)
    assert [*topics.partitions] == ["there"]


def test_the_retries_topic_has_the_most_partitions_and_the_largest_bounds_of_its_sources_and_no_retention() -> None:
    topics = others(a=2, b=5, c=3)
    topics.configs["c"]["max.message.bytes"] = str(5 << 20)
    topics.configs["b"]["message.timestamp.after.max.ms"] = "7200000"

    prepared = prepare_retries(topics, "a", "b", "c")

    assert {name: prepared[name].partitions for name in ("a", "b", "c", "app-retries")} == {
        "a": 2,
        "b": 5,
        "c": 3,
        "app-retries": 5,
    }
    config = topics.configs["app-retries"]
    assert FOREVER.items() <= config.items()
    assert int(config["max.message.bytes"]) >= (5 << 20) + (64 << 10)
    assert config["message.timestamp.after.max.ms"] == "7200000"
    assert topics.partitions.keys() >= {"app-retries-a-changelog", "app-retries-b-changelog"}
    assert not [name for name in topics.partitions if name.endswith("-dead-letters") and name != "balance-dead-letters"]


def test_the_largest_retried_record_is_the_largest_that_the_producer_accepts() -> None:
    topics: Any = others(a=2)
    topics.configs["a"]["max.message.bytes"] = str(64 << 20)
    prepared = prepare_retries(topics, "a")
    settings = load_settings(application_id="app", retry_topics=("a",))
    registry: Any = FakeRegistry()

    processor = processor_of(
        stages_of_retries((), settings)[0], None, surroundings(settings, topics, prepared, registry)
    )

    assert isinstance(processor, RetryProcessor)
    assert (processor.target.largest_bytes, processor.target.partitions) == (16 << 20, 2)


def test_a_retries_topic_that_would_change_timestamps_is_refused() -> None:
    topics = others(a=2)
    topics.create("app-retries", 2, {"message.timestamp.type": "LogAppendTime"})

    with pytest.raises(ConfigurationError, match="'app-retries' puts its own timestamps on records"):
        prepare_retries(topics, "a")


KEPT = stages_of(Kept(), load_settings())
ALL = stages_of(NeedsAll(), load_settings())


@pytest.mark.shows("lossy-topics")
def test_a_compacted_source_is_accepted_for_the_models_that_declare_it_and_no_others() -> None:
    settings = load_settings()
    topics: Any = InMemoryTopics()
    prepare_topics(topics, settings, KEPT)
    assert topics.configs["rows"]["cleanup.policy"] == "compact"
    assert losses(topics, settings, KEPT[0]) == []

    (told,) = losses(topics, settings, ALL[0], with_changelog=False)
    assert "the source topic 'rows' is compacted" in told
    for stages in ([*KEPT, *ALL], [*ALL, *KEPT]):
        with pytest.raises(ConfigurationError, match="is compacted, so the model cannot be rebuilt"):
            prepare_topics(topics, settings, stages)
    both: Any = InMemoryTopics()
    prepare_topics(both, settings, [*KEPT, *ALL])
    assert both.configs["rows"]["cleanup.policy"] == "delete"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"delete.retention.ms": "599999"}, "so a deletion may be gone before it is read"),
        ({"cleanup.policy": "compact,delete", "retention.ms": "86400000"}, "so rows are lost"),
        ({"cleanup.policy": "delete", "retention.ms": "86400000"}, "has a finite retention.ms"),
    ],
    ids=["deletions", "rows", "events"],
)
def test_a_compacted_source_that_loses_rows_or_deletions_is_refused(changed: dict[str, str], why: str) -> None:
    settings = load_settings()
    topics: Any = InMemoryTopics()
    prepare_topics(topics, settings, KEPT)
    topics.configs["rows"] |= changed

    with pytest.raises(ConfigurationError, match=why):
        prepare_topics(topics, settings, KEPT)
    assert why in losses(topics, settings, KEPT[0])[0]
