"""The topics of tables: created to fit what is joined with them, refused where rows would be missed or lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from balance_service.errors import ConfigurationError
from balance_service.kafka import topic_policies
from balance_service.kafka.topic_setup import prepare_topics
from balance_service.kafka.topics import Topic
from balance_service.model.placing import stages_of
from balance_service.read_models.leaderboard import Leaderboard
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_DEFAULTS = {
    "max.message.bytes": str(1 << 20),
    "message.timestamp.type": "CreateTime",
    "message.timestamp.after.max.ms": "3600000",
    "min.compaction.lag.ms": "0",
}


class Topics:
    """A broker's topics, in memory."""

    def __init__(self, **partitions: int) -> None:
        self.configs: dict[str, dict[str, str]] = {}
        self.partitions: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        for name, count in partitions.items():
            self.create(name.replace("_", "-"), count, topic_policies.FOR_EVER)

    def find(self, name: str) -> Topic | None:
        return Topic(name, name, self.partitions[name]) if name in self.partitions else None

    def create(self, name: str, partitions: int, config: Mapping[str, str]) -> Topic:
        self.configs[name] = {**_DEFAULTS, **topic_policies.FOR_EVER, **config}
        self.partitions[name] = partitions
        return Topic(name, name, partitions)

    def ensure(self, name: str, partitions: int, config: Mapping[str, str]) -> Topic:
        return self.find(name) or self.create(name, partitions, config)

    def config(self, name: str) -> dict[str, str]:
        return self.configs[name]

    def offsets(self, name: str, partitions: Iterable[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, self.ends.get(name, 0))

    def brokers(self) -> int:
        return 1


def prepare(topics: Any, **settings: Any) -> dict[str, Topic]:
    loaded = load_settings(application_id="app", **settings)
    return prepare_topics(topics, loaded, stages_of(Leaderboard(), loaded))


def test_a_missing_table_is_created_compacted_and_what_goes_by_its_keys_has_as_many_partitions() -> None:
    topics = Topics(score_events=3)

    prepared = prepare(topics, partitions=5)

    assert (prepared["players"].partitions, prepared["products"].partitions) == (3, 5)
    assert prepared["app-leaderboard-by-player_id"].partitions == 3
    assert topics.configs["players"]["cleanup.policy"] == topics.configs["products"]["cleanup.policy"] == "compact"


def test_what_goes_by_a_tables_keys_takes_the_tables_partitions() -> None:
    prepared = prepare(Topics(score_events=3, players=4))

    assert prepared["app-leaderboard-by-player_id"].partitions == 4


def test_a_table_with_other_partitions_than_what_is_joined_with_it_is_refused_by_both_names() -> None:
    topics = Topics(score_events=3, players=4)
    topics.create("app-leaderboard-by-player_id", 3, topic_policies.FOR_EVER)

    with pytest.raises(ConfigurationError) as refused:
        prepare(topics)

    assert "'app-leaderboard-by-player_id' has 3 partitions and the table 'players'" in str(refused.value)
    assert "4: they must have as many" in str(refused.value)


def test_a_table_that_would_lose_rows_is_refused_unless_that_is_accepted() -> None:
    topics = Topics(score_events=2, products=2)
    topics.configs["products"]["retention.ms"] = "604800000"

    with pytest.raises(ConfigurationError, match=r"'products' has cleanup.policy=delete and a finite retention\.ms"):
        prepare(topics)
    assert prepare(topics, allow_finite_retention=True)["products"].partitions == 2


def test_a_re_keyed_topic_that_is_gone_is_not_made_anew_without_what_it_had() -> None:
    topics = Topics(score_events=2)
    prepare(topics)
    del topics.partitions["app-leaderboard-by-player_id"]
    topics.ends["app-leaderboard-by-player_id-changelog"] = 1

    with pytest.raises(ConfigurationError) as refused:
        prepare(topics)

    assert str(refused.value) == (
        "topic 'app-leaderboard-by-player_id' is gone, and with it what stage 'leaderboard-by-player_id' has passed "
        "on; start anew with another BALANCE_APPLICATION_ID, which reads everything from its source again"
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
def test_an_output_that_would_refuse_what_is_sent_is_refused_itself(config: str, value: str) -> None:
    topics = Topics(score_events=2, high_scores=2)
    prepare(topics)
    topics.configs["high-scores"][config] = value

    with pytest.raises(ConfigurationError, match=rf"'high-scores'.*set its {config}="):
        prepare(topics)
