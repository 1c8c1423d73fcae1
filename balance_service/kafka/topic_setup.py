"""The topics that the service needs: created if missing, refused if they cannot keep its promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from balance_service.errors import ConfigurationError
from balance_service.kafka import topic_policies

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

_RECOMMENDED_REPLICAS = 3


def prepare_topics(topics: Topics, settings: Settings, stages: Iterable[Stage]) -> dict[str, Topic]:
    """Create what is missing, check what is there.

    Args:
        stages: each after the one whose topic it reads.

    Returns:
        The topics that they read, and those that they pass records on to or emit to, by name.

    Raises:
        ConfigurationError: a topic is missing and may not be created, or cannot keep our promises.
        RetriableError: the broker does not answer.
    """
    stages = [*stages]
    prepared = _prepare_retries(topics, settings, [stage for stage in stages if stage.retries])
    configs: dict[str, Mapping[str, str]] = {}
    changelogs: dict[str, Topic] = {}
    for stage in (stage for stage in stages if not stage.retries):
        if stage.source not in configs:
            prepared[stage.source], configs[stage.source] = _prepare_source(topics, settings, stage.source)
        source, config = prepared[stage.source], configs[stage.source]
        changelogs[stage.name] = changelog = prepare_changelog(topics, stage, source)
        prepared |= _prepare_tables(topics, settings, stage, source)
        if stage.passes_on:
            _check_not_lost(topics, stage, changelog)
            rekeyed = _prepare_rekeyed(topics, settings, stage, source, config)
            prepared[stage.rekeyed], configs[stage.rekeyed] = rekeyed, topics.config(stage.rekeyed)
        for output in stage.outputs:
            prepared[output] = _found_or_created(
                topics, settings, output, source.partitions, topic_policies.with_headers(config)
            )
            topic_policies.check_output(output, topics.config(output), stage.source, config)
    read = [stage for stage in stages if not stage.retries]
    for name in dict.fromkeys(stage.dead_letters for stage in read):
        of_it = [stage for stage in read if stage.dead_letters == name]
        _prepare_dead_letters(topics, name, of_it, prepared, configs, changelogs)
    topics.ensure(settings.application_servers_topic, 1, topic_policies.DIRECTORY)
    decisions = topics.ensure(settings.dead_letter_decisions_topic, 1, topic_policies.FOR_EVER)
    topic_policies.check_decisions(decisions.name, topics.config(decisions.name))
    brokers = topics.brokers()
    if brokers >= _RECOMMENDED_REPLICAS > settings.replication_factor:
        log.warning(
            "few replicas: a lost broker may lose events",
            replication_factor=settings.replication_factor,
            brokers=brokers,
        )
    return prepared


def prepare_changelog(topics: Topics, stage: Stage, source: Topic) -> Topic:
    """The changelog of a stage, created if missing.

    Raises:
        ConfigurationError: it is not compacted, so that a restore might miss states.
    """
    changelog = topics.ensure(stage.changelog, source.partitions, topic_policies.CHANGELOG)
    topic_policies.check_changelog(changelog.name, topics.config(changelog.name))
    return changelog


def dead_letter_bytes(topics: Topics, stage: Stage, source: Topic) -> int:
    """What a batch of dead letters may come to, in bytes; their topic is made again if it was deleted since."""
    name = stage.dead_letters
    if topics.find(name) is None:
        topics.create(name, source.partitions, topic_policies.dead_letters(topics.config(source.name)))
    return int(topics.config(name)[topic_policies.MAX_MESSAGE_BYTES])


def prepare_copy(topics: Topics, settings: Settings, source: Topic, name: str, partitions: int | None) -> Topic:
    """A topic that takes every record of `source` as it is and keeps it for ever, created if missing.

    Args:
        source: what is to be copied.
        name: of the copy.
        partitions: None for as many as the copy has, or the source if the copy is missing.

    Raises:
        ConfigurationError: it is there and has another partition count, or its policies are not such.
    """
    source_config = topics.config(source.name)
    copy = topics.find(name)
    if copy is None:
        copy = topics.create(name, partitions or source.partitions, topic_policies.copy_of(source_config))
    if partitions not in (None, copy.partitions):
        raise ConfigurationError(
            f"topic '{name}' has {copy.partitions} partitions, not {partitions}; "
            "name a topic that does not exist yet, or leave --partitions out"
        )
    config = topics.config(name)
    topic_policies.check_source(name, config, allow_finite_retention=settings.allow_finite_retention)
    topic_policies.check_copy(name, config, source.name, source_config)
    return copy


def _found_or_created(
    topics: Topics, settings: Settings, name: str, partitions: int, policy: Mapping[str, str]
) -> Topic:
    """A topic that is not ours alone."""
    topic = topics.find(name)
    if topic is not None:
        return topic
    if not settings.create_topics:
        raise ConfigurationError(
            f"topic '{name}' does not exist and BALANCE_CREATE_TOPICS is off; "
            "create it with `balance-service topics create`, or correct BALANCE_TOPIC or BALANCE_MODELS"
        )
    return topics.create(name, partitions, policy)


def _prepare_source(topics: Topics, settings: Settings, name: str) -> tuple[Topic, Mapping[str, str]]:
    """The source and its configuration."""
    source = _found_or_created(topics, settings, name, settings.partitions, topic_policies.FOR_EVER)
    config = topics.config(name)
    topic_policies.check_source(name, config, allow_finite_retention=settings.allow_finite_retention)
    topic_policies.warn_of_timestamps(name, config)
    return source, config


def _prepare_retries(topics: Topics, settings: Settings, stages: Sequence[Stage]) -> dict[str, Topic]:
    """Where other producers keep their dead letters, and the topic that those are sent to, by name."""
    if not stages:
        return {}
    prepared = {stage.source: _found_of_others(topics, stage.source) for stage in stages}
    configs = {name: topics.config(name) for name in prepared}
    for stage in stages:
        prepare_changelog(topics, stage, prepared[stage.source])
        topic_policies.warn_of_timestamps(stage.source, configs[stage.source])
    name, partitions = settings.retries_topic, max(source.partitions for source in prepared.values())
    retries = topics.ensure(name, partitions, topic_policies.retries([*configs.values()]))
    for source, config in configs.items():
        topic_policies.check_output(name, topics.config(name), source, config)
    return {**prepared, name: retries}


def _found_of_others(topics: Topics, name: str) -> Topic:
    """A topic that others write. Raises ConfigurationError: it does not exist."""
    topic = topics.find_patiently(name)
    if topic is None:
        raise ConfigurationError(
            f"BALANCE_RETRY_TOPICS: topic '{name}' does not exist, and is not created here, for it belongs to the "
            "producer that keeps its dead letters there; correct the name, or create the topic as that producer does"
        )
    return topic


def _prepare_tables(topics: Topics, settings: Settings, stage: Stage, source: Topic) -> dict[str, Topic]:
    """The tables that a stage joins with, by name."""
    tables = {name: _prepare_table(topics, settings, name, source.partitions) for name in stage.tables}
    for table in tables.values():
        _check_co_partitioned(source, table)
    return tables | {name: _prepare_table(topics, settings, name, settings.partitions) for name in stage.global_tables}


def _prepare_table(topics: Topics, settings: Settings, name: str, partitions: int) -> Topic:
    table = _found_or_created(topics, settings, name, partitions, topic_policies.TABLE)
    config = topics.config(name)
    topic_policies.check_table(name, config, allow_finite_retention=settings.allow_finite_retention)
    return table


def _check_co_partitioned(source: Topic, table: Topic) -> None:
    """Raises ConfigurationError if the rows of a key lie on another partition than its events."""
    if source.partitions != table.partitions:
        raise ConfigurationError(
            f"topic '{source.name}' has {source.partitions} partitions and the table '{table.name}', with which it is "
            f"joined, {table.partitions}: they must have as many. Make '{table.name}' anew with {source.partitions}, "
            "or start anew with another BALANCE_APPLICATION_ID"
        )


def _check_not_lost(topics: Topics, stage: Stage, changelog: Topic) -> None:
    """Raises ConfigurationError if what a stage has passed on is gone: a new topic would have only what comes next."""
    if topics.find(stage.rekeyed) is not None:
        return
    if any(topics.offsets(changelog.name, range(changelog.partitions)).values()):
        raise ConfigurationError(
            f"topic '{stage.rekeyed}' is gone, and with it what stage '{stage.name}' has passed on; start anew with "
            "another BALANCE_APPLICATION_ID, which reads everything from its source again"
        )


def _prepare_rekeyed(
    topics: Topics, settings: Settings, stage: Stage, source: Topic, source_config: Mapping[str, str]
) -> Topic:
    """The topic that a stage passes its records on to."""
    policy = topic_policies.with_headers(source_config)
    if stage.next_table is not None:
        table = _prepare_table(topics, settings, stage.next_table, source.partitions)
        rekeyed = topics.ensure(stage.rekeyed, table.partitions, policy)
        _check_co_partitioned(rekeyed, table)
    else:
        rekeyed = topics.ensure(stage.rekeyed, source.partitions, policy)
    if stage.next_table is None and rekeyed.partitions != source.partitions:
        raise ConfigurationError(
            f"topic '{rekeyed.name}' has {rekeyed.partitions} partitions and '{source.name}', whose records it takes, "
            f"{source.partitions}: they must have as many. Where '{source.name}' was given more, copy its events to a "
            "new topic with `balance-service topics copy`, and start anew with it and another BALANCE_APPLICATION_ID; "
            "otherwise start anew with another BALANCE_APPLICATION_ID"
        )
    config = topics.config(rekeyed.name)
    topic_policies.check_source(rekeyed.name, config, allow_finite_retention=settings.allow_finite_retention)
    topic_policies.check_with_headers(rekeyed.name, config, source.name, source_config)
    return rekeyed


def _prepare_dead_letters(
    topics: Topics,
    name: str,
    stages: Sequence[Stage],
    prepared: Mapping[str, Topic],
    configs: Mapping[str, Mapping[str, str]],
    changelogs: Mapping[str, Topic],
) -> None:
    """The topic of some stages' dead letters."""
    sources = [prepared[stage.source] for stage in stages]
    policy = topic_policies.dead_letters(*(configs[source.name] for source in sources))
    letters = topics.ensure(name, max(source.partitions for source in sources), policy)
    config = topics.config(name)
    for stage, source in zip(stages, sources, strict=True):
        # Where the source has more partitions than the changelog, that is what is wrong, and each task says so.
        partitions = min(source.partitions, changelogs[stage.name].partitions)
        topic_policies.check_dead_letters(name, letters.partitions, config, partitions, configs[source.name])
