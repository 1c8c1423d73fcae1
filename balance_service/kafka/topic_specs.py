"""The topics of an application: partitions, configuration, who creates them, and which configurations are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from balance_service.errors import ConfigurationError, NotAuthorizedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Partitioner, Table
    from balance_service.settings import Settings

    Config = Mapping[str, str]

log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = "max.message.bytes"
BATCH_BYTES = 1 << 20
"""The largest size of a batch of small records that a producer sends."""
# Room for the headers that the service adds to a record.
_HEADERS_BYTES = 64 << 10
_DAY_MS = 24 * 60 * 60 * 1000
_UNBOUNDED = str((1 << 63) - 1)
_RECOMMENDED_REPLICAS = 3

_CLEANUP_POLICY, _RETENTION = "cleanup.policy", ("retention.ms", "retention.bytes")
_COMPACTION_LAG, _TOMBSTONES_KEPT = "min.compaction.lag.ms", "delete.retention.ms"
_TIMESTAMP_TYPE = "message.timestamp.type"
_BEFORE, _AFTER = "message.timestamp.before.max.ms", "message.timestamp.after.max.ms"

FOREVER = {_CLEANUP_POLICY: "delete", "retention.ms": "-1", "retention.bytes": "-1"}
# A table keeps the versions of a day, which is its default history, so that it has them after it is read again.
_TABLE = {_CLEANUP_POLICY: "compact", _COMPACTION_LAG: str(_DAY_MS)}
_COMPACTED = {_CLEANUP_POLICY: "compact", _TOMBSTONES_KEPT: str(_DAY_MS)}
# A restart, and a move of a partition, take less.
_LEAST_TOMBSTONES_KEPT_MS = 10 * 60 * 1000
_DIRECTORY = {_CLEANUP_POLICY: "compact", "segment.ms": "60000", "min.cleanable.dirty.ratio": "0.1"}
# The lag counts from the records' timestamps, which must not depend on the clocks of the instances.
CHANGELOG = {
    _CLEANUP_POLICY: "compact",
    _COMPACTION_LAG: str(60 * 60 * 1000),
    _TOMBSTONES_KEPT: str(_DAY_MS),
    _TIMESTAMP_TYPE: "LogAppendTime",
}
# Copied records keep their timestamps, however old or new.
_ANY_TIMESTAMP = {_TIMESTAMP_TYPE: "CreateTime", _BEFORE: _UNBOUNDED, _AFTER: _UNBOUNDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """A topic as the application needs it."""

    name: str
    partitions: int = 1
    partitioner: Partitioner = "murmur2"
    """The function that assigns its keys to partitions. Topics that the service writes have murmur2."""
    config: Config
    """For creation. An existing topic is not changed."""
    not_created: str = ""
    """Why the service does not create the topic if it is missing; empty if it does."""
    checks: Sequence[Callable[[Topic, Config], None]] = ()
    """Called with the topic and its effective configuration.

    They raise ConfigurationError if the topic breaks a promise of the service.
    """

    def check(self, topic: Topic, config: Config) -> None:
        for check in self.checks:
            check(topic, config)


def source_spec(
    settings: Settings, name: str, partitioner: Partitioner = "murmur2", *, is_compacted: bool = False
) -> TopicSpec:
    """The events of a read model.

    Args:
        is_compacted: whether each read model of the topic takes it compacted.
    """
    return TopicSpec(
        name=name,
        partitions=settings.partitions,
        partitioner=partitioner,
        config=_COMPACTED if is_compacted else FOREVER,
        not_created=_not_created(settings),
        checks=(_source_check(settings, is_compacted=is_compacted), _warn_of_timestamps),
    )


def table_spec(settings: Settings, table: Table, partitions: int) -> TopicSpec:
    """The rows that events are joined with."""
    check = partial(_check_table, allow_finite_retention=settings.allow_finite_retention)
    return TopicSpec(
        name=table.topic,
        partitions=partitions,
        partitioner=table.partitioner,
        config=_TABLE,
        not_created=_not_created(settings),
        checks=(check,),
    )


def output_spec(
    settings: Settings, name: str, partitions: int, source: str, source_config: Config, *, is_table: bool = False
) -> TopicSpec:
    """The records that a read model emits; rows if another one joins them and none folds them (`is_table`)."""
    check = partial(_check_output, source=source, source_config=source_config)
    config = {**config_with_headers(source_config), **(_TABLE if is_table else {})}
    return TopicSpec(
        name=name, partitions=partitions, config=config, not_created=_not_created(settings), checks=(check,)
    )


def merged_spec(settings: Settings, name: str, sources: Iterable[tuple[Topic, Config]]) -> TopicSpec:
    """The records of several sources, which a read model folds. It may have any number of partitions.

    Sources that are added later may have more partitions.
    """
    sources = [*sources]
    checks: list[Callable[[Topic, Config], None]] = [_source_check(settings)]
    for source, config in sources:
        largest = _largest(config) + _HEADERS_BYTES
        checks.append(partial(_check_takes, records=f"records of '{source.name}'", largest=largest))
        checks.append(partial(_check_output, source=source.name, source_config=config))
    partitions = max(source.partitions for source, _ in sources)
    config = _config_for_all(config for _, config in sources)
    return TopicSpec(name=name, partitions=partitions, config=config, checks=checks)


def rekeyed_spec(
    settings: Settings, stage: Stage, source: Topic, source_config: Config, table: Topic | None
) -> TopicSpec:
    """The records that one stage of a read model passes on to the next, which may join them with a table."""

    def check_partitions(rekeyed: Topic, _config: Config) -> None:
        if table is None:
            _check_as_many(rekeyed, source)
        else:
            _check_co_partitioned(rekeyed, table)

    largest = _largest(source_config) + _HEADERS_BYTES
    takes = partial(_check_takes, records=f"records of '{source.name}'", largest=largest)
    checks = (check_partitions, _source_check(settings), takes)
    partitions, config = (table or source).partitions, config_with_headers(source_config)
    return TopicSpec(name=stage.rekeyed, partitions=partitions, config=config, checks=checks)


def changelog_spec(name: str, partitions: int) -> TopicSpec:
    """The states of a stage, which its stores are restored from."""
    return TopicSpec(name=name, partitions=partitions, config=CHANGELOG, checks=(_check_changelog,))


def dead_letters_spec(name: str, partitions: int, source_configs: Iterable[Config]) -> TopicSpec:
    """The records of sources that could not be applied."""
    largest = max(map(_largest, source_configs)) + _HEADERS_BYTES
    config = {**FOREVER, MAX_MESSAGE_BYTES: str(largest)}
    return TopicSpec(
        name=name, partitions=partitions, config=config, checks=(partial(_check_dead_letters, wanted=largest),)
    )


def directory_spec(settings: Settings) -> TopicSpec:
    """The instances of the application and their tasks."""
    return TopicSpec(name=settings.application_servers_topic, config=_DIRECTORY)


def decisions_spec(settings: Settings) -> TopicSpec:
    """The operators' decisions about dead letters."""
    return TopicSpec(name=settings.dead_letter_decisions_topic, config=FOREVER, checks=(_check_decisions,))


def generations_spec(settings: Settings) -> TopicSpec:
    """The generations of the read models, with who changed them, when and why."""
    return TopicSpec(name=settings.generations_topic, config=FOREVER, checks=(_check_generations,))


def foreign_dead_letters_spec(name: str) -> TopicSpec:
    """The dead letters of another producer."""
    not_created = (
        "BALANCE_RETRY_TOPICS names it, and it belongs to the producer that keeps its dead letters there; correct the "
        "name, or create the topic as that producer does"
    )
    return TopicSpec(name=name, partitioner="any", config={}, not_created=not_created, checks=(_warn_of_timestamps,))


def retries_spec(settings: Settings, partitions: int, sources: Mapping[str, Config]) -> TopicSpec:
    """The records of other producers' dead letters, sent when they are due."""
    checks = [partial(_check_output, source=name, source_config=config) for name, config in sources.items()]
    config = _config_for_all(sources.values())
    return TopicSpec(name=settings.retries_topic, partitions=partitions, config=config, checks=checks)


def copy_spec(settings: Settings, name: str, partitions: int, source: str, source_config: Config) -> TopicSpec:
    """The copy of a topic with another partition count."""
    takes = partial(_check_takes, records=f"records of '{source}'", largest=_largest(source_config))
    checks = (_source_check(settings), takes)
    return TopicSpec(name=name, partitions=partitions, config=_copy_config(source_config), checks=checks)


def config_with_headers(source: Config) -> dict[str, str]:
    """Of a topic that accepts every record of a source, with headers that the service adds."""
    # A timestamp that the source accepted is not further in the future when the record is sent on.
    bound = {_AFTER: source[_AFTER]} if _AFTER in source else {}
    return {**_copy_config(source), **bound, MAX_MESSAGE_BYTES: str(_largest(source) + _HEADERS_BYTES)}


def _config_for_all(sources: Iterable[Config]) -> dict[str, str]:
    """As `config_with_headers`, of a topic for several sources."""
    configs = [config_with_headers(source) for source in sources]
    bounds = {MAX_MESSAGE_BYTES, _AFTER} & configs[0].keys()
    return {**configs[0], **{name: str(max(int(config[name]) for config in configs)) for name in bounds}}


def tombstones_kept_ms(config: Config) -> int:
    """How long a compacted topic keeps a tombstone at least."""
    return int(config[_TOMBSTONES_KEPT])


def is_compacted(config: Config) -> bool:
    """Whether a topic keeps only the last record of each key, and so refuses records without a key."""
    return "compact" in config[_CLEANUP_POLICY]


def prepare_topics(topics: Topics, settings: Settings, stages: Iterable[Stage]) -> dict[str, Topic]:
    """Creates the topics that are missing and checks the others.

    Args:
        stages: each after the stages whose topic it reads.

    Returns:
        By name, the topics that the stages read, pass records on to and emit to.

    Raises:
        ConfigurationError: a topic is missing and may not be created, or its configuration is refused.
        RetriableError: the broker does not answer.
    """
    stages = [*stages]
    retrying, folding = [s for s in stages if s.retries], [s for s in stages if not s.retries]
    joined_topics = {table.topic for stage in folding for table in (*stage.tables, *stage.global_tables)}
    tables = joined_topics - {stage.source for stage in folding}
    prepared: dict[str, Topic] = {}
    configs: dict[str, Config] = {}
    partitioners: dict[str, Partitioner] = {}

    def prepare(spec: TopicSpec) -> Topic:
        _check_one_partitioner(spec.name, partitioners.setdefault(spec.name, spec.partitioner), spec.partitioner)
        prepared[spec.name], configs[spec.name] = _prepare(topics, spec)
        return prepared[spec.name]

    for stage in retrying:
        prepare(foreign_dead_letters_spec(stage.source))
    for stage in retrying:
        prepare_changelog(topics, stage, prepared[stage.source])
    if retrying:
        partitions = max(source.partitions for source in prepared.values())
        prepare(retries_spec(settings, partitions, dict(configs)))
    sources: dict[str, Topic] = {}
    lossless = {stage.source for stage in folding if not stage.compacted}
    changelogs: dict[str, Topic] = {}
    merging = Counter(stage.rekeyed for stage in folding if stage.passes_to)
    merged: dict[str, list[tuple[Topic, Config]]] = {}
    for stage in folding:
        # Not if it was prepared as an output or a table: a source has more checks.
        if stage.source not in sources:
            is_compacted = stage.source not in lossless
            spec = source_spec(settings, stage.source, stage.partitioner, is_compacted=is_compacted)
            sources[stage.source] = prepare(spec)
        _check_one_partitioner(stage.source, partitioners[stage.source], stage.partitioner)
        source, config = sources[stage.source], configs[stage.source]
        changelogs[stage.name] = changelog = prepare_changelog(topics, stage, source)
        for table in stage.tables:
            _check_co_partitioned(source, prepare(table_spec(settings, table, source.partitions)))
        for table in stage.global_tables:
            prepare(table_spec(settings, table, settings.partitions))
        if stage.passes_on:
            _check_not_lost(topics, stage, changelog)
        if stage.passes_to:
            merged.setdefault(stage.rekeyed, []).append((source, config))
            if len(merged[stage.rekeyed]) == merging[stage.rekeyed]:
                sources[stage.rekeyed] = prepare(merged_spec(settings, stage.rekeyed, merged[stage.rekeyed]))
        elif stage.passes_on:
            joined = None
            if stage.next_table is not None:
                joined = prepare(table_spec(settings, stage.next_table, source.partitions))
            sources[stage.rekeyed] = prepare(rekeyed_spec(settings, stage, source, config, joined))
        for output in stage.outputs:
            spec = output_spec(settings, output, source.partitions, source.name, config, is_table=output in tables)
            prepare(spec)
    for name in dict.fromkeys(stage.dead_letters for stage in folding):
        of_it = [stage for stage in folding if stage.dead_letters == name]
        most = max(sources[stage.source].partitions for stage in of_it)
        letters, _ = _prepare(topics, dead_letters_spec(name, most, [configs[stage.source] for stage in of_it]))
        for stage in of_it:
            # If the source has more partitions than the changelog, that is the actual fault. Each task reports it.
            _check_enough(letters, min(sources[stage.source].partitions, changelogs[stage.name].partitions))
    _prepare(topics, directory_spec(settings))
    _prepare(topics, decisions_spec(settings))
    prepare_generations(topics, settings)
    # At first use, as in `losses`.
    from balance_service.kafka.topics import MIN_IN_SYNC

    brokers = topics.brokers()
    if brokers >= _RECOMMENDED_REPLICAS > settings.replication_factor:
        log.warning(
            "few replicas: a lost broker may lose events",
            replication_factor=settings.replication_factor,
            brokers=brokers,
        )
    if brokers >= _RECOMMENDED_REPLICAS and (one := [n for n, c in configs.items() if c.get(MIN_IN_SYNC) == "1"]):
        log.warning(
            f"topics acknowledge a record that only one broker has, and lose it with that broker; set {MIN_IN_SYNC}=2",
            topics=sorted(one),
        )
    return prepared


def losses(topics: Topics, settings: Settings, stage: Stage, *, with_changelog: bool = True) -> list[str]:
    """Why topics of a stage may lose what it needs, by configurations that were changed since they were prepared.

    The next start refuses them. Raises as `Topics.config`.

    Args:
        with_changelog: whether to look at the changelog too, which a new generation does not read.
    """
    checks: dict[str, Callable[[Topic, Config], None]] = {
        table.topic: partial(_check_table, allow_finite_retention=settings.allow_finite_retention)
        for table in (*stage.tables, *stage.global_tables)
    }
    if not stage.retries:
        checks[stage.source] = _source_check(settings, is_compacted=stage.compacted)
    if with_changelog:
        checks[stage.changelog] = _check_states_kept
    checks[settings.dead_letter_decisions_topic] = _check_decisions
    checks[settings.generations_topic] = _check_generations
    # At first use: the test driver, which needs the names of this module, runs without Kafka's client.
    from balance_service.kafka.topics import Topic

    found = []
    for name, check in checks.items():
        try:
            check(Topic(name, "", 0), topics.config(name))
        except NotAuthorizedError:
            raise
        except ConfigurationError as lossy:
            found.append(str(lossy))
    return found


def prepare_generations(topics: Topics, settings: Settings) -> Topic:
    """The topic of generations, created if missing. Raises as `prepare_topics`."""
    return _prepare(topics, generations_spec(settings))[0]


def prepare_changelog(topics: Topics, stage: Stage, source: Topic) -> Topic:
    """The changelog of a stage, created if missing. Raises as `prepare_topics`."""
    return _prepare(topics, changelog_spec(stage.changelog, source.partitions))[0]


def prepare_copy(topics: Topics, settings: Settings, source: Topic, name: str, partitions: int | None) -> Topic:
    """The topic that a source is copied to, created if missing.

    Args:
        partitions: None for as many as the copy has, or as the source has if the copy is missing.

    Raises:
        ConfigurationError: the copy has another partition count, or its configuration is refused.
    """
    spec = copy_spec(settings, name, partitions or source.partitions, source.name, topics.config(source.name))
    copy = topics.find(name) or topics.create(name, spec.partitions, spec.config)
    if partitions not in (None, copy.partitions):
        raise ConfigurationError(
            f"topic '{name}' has {copy.partitions} partitions, not {partitions}; "
            "name a topic that does not exist yet, or leave --partitions out"
        )
    spec.check(copy, topics.config(name))
    return copy


def dead_letter_bytes(topics: Topics, stage: Stage, source: Topic) -> int:
    """The largest batch of dead letters that their topic accepts, in bytes; recreates the topic if it was deleted."""
    name = stage.dead_letters
    if topics.find(name) is None:
        spec = dead_letters_spec(name, source.partitions, [topics.config(source.name)])
        topics.create(name, spec.partitions, spec.config)
    return int(topics.config(name)[MAX_MESSAGE_BYTES])


def _prepare(topics: Topics, spec: TopicSpec) -> tuple[Topic, Config]:
    """The topic, created if missing, and its configuration if the spec has checks."""
    topic = topics.find_patiently(spec.name) if spec.not_created else topics.find(spec.name)
    if topic is None and spec.not_created:
        raise ConfigurationError(
            f"topic '{spec.name}' does not exist, and the service does not create it: {spec.not_created}"
        )
    if topic is None:
        topic = topics.create(spec.name, spec.partitions, spec.config)
    config = topics.config(spec.name) if spec.checks else {}
    spec.check(topic, config)
    return topic, config


def _not_created(settings: Settings) -> str:
    if settings.create_topics:
        return ""
    return (
        "BALANCE_CREATE_TOPICS is off; create it with `balance-service topics create`, or correct BALANCE_TOPIC or "
        "BALANCE_MODELS"
    )


def _copy_config(source: Config) -> dict[str, str]:
    """Of a topic that accepts every record of a source unchanged."""
    as_given = {name: value for name, value in _ANY_TIMESTAMP.items() if name in source}
    return {**FOREVER, **as_given, MAX_MESSAGE_BYTES: str(_largest(source))}


def _largest(source: Config) -> int:
    return max(int(source[MAX_MESSAGE_BYTES]), BATCH_BYTES)


def _finite(config: Config) -> list[str]:
    return [key for key in _RETENTION if int(config[key]) >= 0]


def _source_check(settings: Settings, *, is_compacted: bool = False) -> Callable[[Topic, Config], None]:
    check = _check_compacted_source if is_compacted else _check_source
    return partial(check, allow_finite_retention=settings.allow_finite_retention)


def _check_source(topic: Topic, config: Config, *, allow_finite_retention: bool) -> None:
    if allow_finite_retention:
        return
    way_out = "set BALANCE_ALLOW_FINITE_RETENTION=true to accept that"
    if is_compacted(config):
        raise ConfigurationError(
            f"the source topic '{topic.name}' is compacted, so the model cannot be rebuilt from it; "
            "if the newest record of a key is its state, declare `fold = Upsert(…)` and "
            f"`Stream(…, compacted=True)`; otherwise use a topic with cleanup.policy=delete, or {way_out}"
        )
    if finite := _finite(config):
        raise ConfigurationError(
            f"the source topic '{topic.name}' has a finite {' and '.join(finite)}, so the model cannot be rebuilt "
            f"from it later; set {' and '.join(f'{key}=-1' for key in finite)}, or {way_out}"
        )


def _check_compacted_source(topic: Topic, config: Config, *, allow_finite_retention: bool) -> None:
    if not is_compacted(config):
        _check_source(topic, config, allow_finite_retention=allow_finite_retention)
        return
    _check_rows_kept(topic, config, "source", allow_finite_retention=allow_finite_retention)
    if (kept_ms := tombstones_kept_ms(config)) < _LEAST_TOMBSTONES_KEPT_MS:
        raise ConfigurationError(
            f"the source topic '{topic.name}' has {_TOMBSTONES_KEPT}={kept_ms}, so a deletion may be gone before it is "
            f"read, and the deleted row would remain; set {_TOMBSTONES_KEPT}={_DAY_MS}, and at least "
            f"{_LEAST_TOMBSTONES_KEPT_MS}"
        )


def _warn_of_timestamps(topic: Topic, config: Config) -> None:
    if config[_TIMESTAMP_TYPE] == "CreateTime" and int(config.get(_AFTER, 0)) > _DAY_MS:
        log.warning(
            "the source accepts timestamps of any future: a record whose timestamp exceeds Spark's microseconds "
            f"becomes a dead letter; set {_AFTER}=3600000",
            topic=topic.name,
        )


def _check_table(topic: Topic, config: Config, *, allow_finite_retention: bool) -> None:
    _check_rows_kept(topic, config, "table's", allow_finite_retention=allow_finite_retention)


def _check_rows_kept(topic: Topic, config: Config, what: str, *, allow_finite_retention: bool) -> None:
    policy, finite = config[_CLEANUP_POLICY], _finite(config)
    if finite and policy != "compact" and not allow_finite_retention:
        raise ConfigurationError(
            f"the {what} topic '{topic.name}' has cleanup.policy={policy} and a finite {' and '.join(finite)}, so "
            "rows are lost; set cleanup.policy=compact, or BALANCE_ALLOW_FINITE_RETENTION=true to accept that"
        )


def _check_changelog(topic: Topic, config: Config) -> None:
    _check_states_kept(topic, config)
    wanted = [f"{_TIMESTAMP_TYPE}=LogAppendTime"] if config[_TIMESTAMP_TYPE] != "LogAppendTime" else []
    if int(config[_COMPACTION_LAG]) < int(CHANGELOG[_COMPACTION_LAG]):
        wanted.append(f"{_COMPACTION_LAG}={CHANGELOG[_COMPACTION_LAG]}")
    if wanted:
        log.warning(
            "the broker may compact the changelog while a standby reads it, which then may see half of a transaction; "
            f"set {' and '.join(wanted)}",
            topic=topic.name,
        )


def _check_states_kept(topic: Topic, config: Config) -> None:
    if config[_CLEANUP_POLICY] != "compact":
        raise ConfigurationError(
            f"the changelog '{topic.name}' has a cleanup.policy other than 'compact', so states "
            "may be missing from it; set the policy and run `balance-service rebuild --offline`"
        )


def _check_decisions(topic: Topic, config: Config) -> None:
    lost = "operators' decisions about dead letters, and a rebuilt read model would count discarded records"
    _check_forever(topic, config, lost=lost)


def _check_generations(topic: Topic, config: Config) -> None:
    lost = "which generation of a read model serves, and answers would come from another one"
    _check_forever(topic, config, lost=lost)


def _check_forever(topic: Topic, config: Config, *, lost: str) -> None:
    if is_compacted(config) or _finite(config):
        wanted = ", ".join(f"{key}={value}" for key, value in FOREVER.items())
        raise ConfigurationError(f"topic '{topic.name}' may drop {lost}; set {wanted}")


def _check_dead_letters(topic: Topic, config: Config, *, wanted: int) -> None:
    largest = int(config[MAX_MESSAGE_BYTES])
    if largest < BATCH_BYTES:
        raise ConfigurationError(
            f"topic '{topic.name}' accepts batches of {largest} bytes at most, and several dead letters make up to "
            f"{BATCH_BYTES}; set its max.message.bytes={wanted}"
        )
    if largest < wanted:
        log.warning(
            f"oversized dead letters are stored without their value; set max.message.bytes={wanted}", topic=topic.name
        )


def _check_output(topic: Topic, config: Config, *, source: str, source_config: Config) -> None:
    _check_takes(topic, config, records="records that are sent to it", largest=BATCH_BYTES)
    if int(config.get(_BEFORE, _UNBOUNDED)) < int(_UNBOUNDED):
        raise ConfigurationError(
            f"topic '{topic.name}' refuses old timestamps, and records sent to it have the timestamps of their "
            f"events; set its {_BEFORE}={_UNBOUNDED}"
        )
    if int(config.get(_AFTER, _UNBOUNDED)) < (ahead := int(source_config.get(_AFTER, _UNBOUNDED))):
        raise ConfigurationError(
            f"topic '{topic.name}' refuses future timestamps that '{source}' accepts, and records that are sent to it "
            f"have the timestamps of their events; set its {_AFTER}={ahead}"
        )


def _check_takes(topic: Topic, config: Config, *, records: str, largest: int) -> None:
    if config[_TIMESTAMP_TYPE] != "CreateTime":
        raise ConfigurationError(
            f"topic '{topic.name}' puts its own timestamps on records; set its message.timestamp.type=CreateTime"
        )
    if int(config[MAX_MESSAGE_BYTES]) < largest:
        raise ConfigurationError(
            f"topic '{topic.name}' may refuse {records} as too large; set its max.message.bytes={largest} or more"
        )


def _check_enough(letters: Topic, source_partitions: int) -> None:
    if letters.partitions < source_partitions:
        raise ConfigurationError(
            f"topic '{letters.name}' has {letters.partitions} partitions and the source {source_partitions}, and each "
            f"takes the dead letters of its own; give it {source_partitions}"
        )


def _check_one_partitioner(name: str, known: Partitioner, declared: Partitioner) -> None:
    """Raises ConfigurationError if two stages would look for a topic's keys on different partitions."""
    if declared != known:
        raise ConfigurationError(
            f"the read models declare topic '{name}' with the partitioners {known} and {declared}, but a topic has one "
            "(topics that the service writes have murmur2); correct `partitioner=` in the declarations, or "
            "BALANCE_PARTITIONER"
        )


def _check_co_partitioned(source: Topic, table: Topic) -> None:
    """Raises ConfigurationError if events and rows with the same key lie on different partitions."""
    if source.partitions != table.partitions:
        raise ConfigurationError(
            f"topic '{source.name}' has {source.partitions} partitions and the table '{table.name}', with which it is "
            f"joined, {table.partitions}: they must have as many. Recreate '{table.name}' with {source.partitions}, "
            "or start from scratch with another BALANCE_APPLICATION_ID"
        )


def _check_as_many(rekeyed: Topic, source: Topic) -> None:
    if rekeyed.partitions != source.partitions:
        raise ConfigurationError(
            f"topic '{rekeyed.name}' has {rekeyed.partitions} partitions and '{source.name}', whose records it takes, "
            f"{source.partitions}: they must have as many. If '{source.name}' was repartitioned, copy its events to a "
            "new topic with `balance-service topics copy`, and start from scratch with it and another "
            "BALANCE_APPLICATION_ID; otherwise start from scratch with another BALANCE_APPLICATION_ID"
        )


def _check_not_lost(topics: Topics, stage: Stage, changelog: Topic) -> None:
    """Raises ConfigurationError if the records that a stage passed on are gone: a new topic would lack them."""
    if topics.find(stage.rekeyed) is not None:
        return
    if any(topics.offsets(changelog.name, range(changelog.partitions)).values()):
        raise ConfigurationError(
            f"topic '{stage.rekeyed}' is gone, and with it the records that stage '{stage.name}' passed on; start from "
            "scratch with another BALANCE_APPLICATION_ID, which reads everything from its source again"
        )
