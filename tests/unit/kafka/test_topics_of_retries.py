"""The topics of other producers' dead letters, and that of retries: what is refused at start, what is created."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.assembly import work_of
from balance_service.engine.passing import Retrying
from balance_service.errors import ConfigurationError
from balance_service.kafka import topic_policies
from balance_service.kafka.topic_setup import prepare_topics
from balance_service.model.placing import stages_of_retries
from balance_service.settings import load_settings
from tests.support.fakes import FakeRegistry, refusal
from tests.support.shipped import stages_in, surroundings
from tests.unit.kafka.test_tables_topics import Topics

if TYPE_CHECKING:
    from balance_service.kafka.topics import Topic

pytestmark = pytest.mark.usefixtures("no_environment")

SOURCE = "orders-dead-letters"
STAGE = f"retries-{SOURCE}"

# Settings


def test_retry_topics_are_listed_with_commas_and_none_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().retry_topics == ()

    monkeypatch.setenv("BALANCE_RETRY_TOPICS", f"{SOURCE}, b,")

    assert load_settings().retry_topics == (SOURCE, "b")
    assert load_settings().printable()["BALANCE_RETRY_TOPICS"] == f"{SOURCE},b"


@pytest.mark.parametrize(
    ("topics", "said"),
    [
        ("a,b,a", "BALANCE_RETRY_TOPICS: 'a,b,a' names 'a' twice; name it once"),
        ("a b", "has 'a b', which is no topic's name; list names, separated by commas"),
        ("x" * 250, "which is no topic's name"),
    ],
)
def test_what_cannot_be_a_list_of_topics_is_refused(monkeypatch: pytest.MonkeyPatch, topics: str, said: str) -> None:
    assert said in refusal(monkeypatch, BALANCE_RETRY_TOPICS=topics)


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("app-retries", "'app-retries' is where retries are sent, so that each would be sent again and again"),
        ("funds-dead-letters", "'funds-dead-letters' has dead letters of the read model"),
        ("pos-dead-letters", "'pos-dead-letters' has dead letters of the read model"),
        ("app-dead-letters", "'app-dead-letters' has dead letters of the read model"),
        (
            "x" * 240,
            f"is too long, for a topic's name may have 249 characters and ours would be 'app-retries-{'x' * 240}",
        ),
    ],
)
def test_a_topic_that_is_not_another_producers_is_refused_in_a_sentence(topic: str, said: str) -> None:
    settings = load_settings(application_id="app", topic="funds", retry_topics=("orders-dead-letters", topic))

    with pytest.raises(ConfigurationError) as caught:
        stages_in(settings)

    assert str(caught.value).startswith("BALANCE_RETRY_TOPICS: ")
    assert said in str(caught.value)


def test_each_topic_has_a_stage_without_a_read_model_after_those_of_the_models() -> None:
    stages = stages_in(load_settings(application_id="app", retry_topics=(SOURCE, "b")))

    assert [(stage.name, stage.owner) for stage in stages] == [
        ("balance", "balance"),
        (STAGE, STAGE),
        ("retries-b", "retries-b"),
    ]
    assert [stage.retries for stage in stages] == [False, True, True]
    assert stages[1].changelog == f"app-{STAGE}-changelog"
    assert stages[1].targets == ("app-retries",)


# Topics


class Others(Topics):
    """Other producers' topics."""

    def __init__(self, **partitions: int) -> None:
        super().__init__(**partitions)
        for config in self.configs.values():
            config |= {"cleanup.policy": "compact", "retention.ms": "60000", "message.timestamp.before.max.ms": "1"}

    def find_patiently(self, name: str) -> Topic | None:
        return self.find(name)


def prepare(topics: Any, *retry_topics: str) -> dict[str, Topic]:
    settings = load_settings(application_id="app", retry_topics=retry_topics, create_topics=True)
    return prepare_topics(topics, settings, stages_in(settings))


def test_another_producers_topic_that_does_not_exist_is_refused_and_nothing_is_created() -> None:
    topics = Others(there=2)

    with pytest.raises(ConfigurationError) as caught:
        prepare(topics, "there", "not-there")

    assert "topic 'not-there' does not exist, and is not created here" in str(caught.value)
    assert [*topics.partitions] == ["there"]


def test_retries_have_a_topic_with_the_most_partitions_that_is_kept_for_ever_and_takes_the_largest() -> None:
    topics = Others(a=2, b=5, c=3)
    topics.configs["c"]["max.message.bytes"] = str(5 << 20)
    topics.configs["b"]["message.timestamp.after.max.ms"] = "7200000"

    prepared = prepare(topics, "a", "b", "c")

    assert {name: prepared[name].partitions for name in ("a", "b", "c", "app-retries")} == {
        "a": 2,
        "b": 5,
        "c": 3,
        "app-retries": 5,
    }
    config = topics.configs["app-retries"]
    assert topic_policies.FOR_EVER.items() <= config.items()
    assert int(config["max.message.bytes"]) >= (5 << 20) + (64 << 10)
    assert config["message.timestamp.after.max.ms"] == "7200000"
    assert topics.partitions.keys() >= {"app-retries-a-changelog", "app-retries-b-changelog"}
    assert not [name for name in topics.partitions if name.endswith("-dead-letters") and name != "balance-dead-letters"]


def test_no_record_is_larger_than_the_producer_takes() -> None:
    topics: Any = Others(a=2)
    topics.configs["a"]["max.message.bytes"] = str(64 << 20)
    prepared = prepare(topics, "a")
    settings = load_settings(application_id="app", retry_topics=("a",))
    registry: Any = FakeRegistry()

    work = work_of(stages_of_retries((), settings)[0], None, surroundings(settings, topics, prepared, registry))

    assert isinstance(work, Retrying)
    assert (work.target.largest_bytes, work.target.partitions) == (16 << 20, 2)


def test_a_topic_of_retries_that_would_change_timestamps_is_refused() -> None:
    topics = Others(a=2)
    topics.create("app-retries", 2, {"message.timestamp.type": "LogAppendTime"})

    with pytest.raises(ConfigurationError, match="'app-retries' puts its own timestamps on records"):
        prepare(topics, "a")
