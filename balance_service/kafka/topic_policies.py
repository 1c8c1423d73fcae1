"""How topics have to be configured for the service to keep its promises: as made here, and as found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = structlog.get_logger(__name__)

FOR_EVER = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
_DAY_MS = 24 * 60 * 60 * 1000
_COMPACTION_LAG = "min.compaction.lag.ms"
_TOMBSTONES_KEPT = "delete.retention.ms"
# So that a table that is read anew still has the versions of a day, which is the history that tables have by default.
TABLE = {"cleanup.policy": "compact", _COMPACTION_LAG: str(_DAY_MS)}
DIRECTORY = {"cleanup.policy": "compact", "segment.ms": "60000", "min.cleanable.dirty.ratio": "0.1"}
MAX_MESSAGE_BYTES = "max.message.bytes"
BATCH_BYTES = 1 << 20
"""What a batch of small records may come to on its way to the broker."""
_TIMESTAMP_TYPE, _BEFORE, _AFTER = (
    "message.timestamp.type",
    "message.timestamp.before.max.ms",
    "message.timestamp.after.max.ms",
)
# The lag counts from the records' timestamps, which must not hang on the clocks of the instances.
CHANGELOG = {
    "cleanup.policy": "compact",
    _COMPACTION_LAG: str(60 * 60 * 1000),
    _TOMBSTONES_KEPT: str(_DAY_MS),
    _TIMESTAMP_TYPE: "LogAppendTime",
}
_UNBOUNDED = str((1 << 63) - 1)
# What is copied keeps its timestamp, however old or new it is.
_TIMESTAMPS_AS_GIVEN = {_TIMESTAMP_TYPE: "CreateTime", _BEFORE: _UNBOUNDED, _AFTER: _UNBOUNDED}
_HEADROOM_BYTES = 64 << 10


def dead_letters(*sources: Mapping[str, str]) -> dict[str, str]:
    """Of the topic that takes every record of sources of these configurations, with headers of our own."""
    return {**FOR_EVER, MAX_MESSAGE_BYTES: str(max(map(_largest, sources)) + _HEADROOM_BYTES)}


def copy_of(source: Mapping[str, str]) -> dict[str, str]:
    """Of a topic that takes every record of a source of this configuration as it is."""
    as_given = {name: value for name, value in _TIMESTAMPS_AS_GIVEN.items() if name in source}
    return {**FOR_EVER, **as_given, MAX_MESSAGE_BYTES: str(_largest(source))}


def with_headers(source: Mapping[str, str]) -> dict[str, str]:
    """Of a topic that takes every record of a source of this configuration, with a header of our own."""
    # What the source has let in is not further in the future when it is sent on.
    bounds = {name: value for name, value in source.items() if name == _AFTER}
    return {**copy_of(source), **bounds, MAX_MESSAGE_BYTES: str(_largest(source) + _HEADROOM_BYTES)}


def retries(sources: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Of a topic that takes every record of sources of these configurations, with headers of our own."""
    policies = [with_headers(source) for source in sources]
    bounds = {MAX_MESSAGE_BYTES, _AFTER} & policies[0].keys()
    return {**policies[0], **{name: str(max(int(policy[name]) for policy in policies)) for name in bounds}}


def tombstones_kept_ms(config: Mapping[str, str]) -> int:
    """For how long a compacted topic keeps a tombstone at least."""
    return int(config[_TOMBSTONES_KEPT])


def is_compacted(config: Mapping[str, str]) -> bool:
    """Whether a topic keeps the last record of each key, and so refuses those without one."""
    return "compact" in config["cleanup.policy"]


def check_source(name: str, config: Mapping[str, str], *, allow_finite_retention: bool) -> None:
    """Raises ConfigurationError if the read model cannot be rebuilt from a topic of this configuration for ever."""
    if allow_finite_retention:
        return
    way_out = "set BALANCE_ALLOW_FINITE_RETENTION=true to accept that"
    if is_compacted(config):
        raise ConfigurationError(
            f"the source topic '{name}' is compacted, so the model cannot be rebuilt from it; "
            f"use a topic with cleanup.policy=delete, or {way_out}"
        )
    finite = [key for key in ("retention.ms", "retention.bytes") if int(config[key]) >= 0]
    if finite:
        raise ConfigurationError(
            f"the source topic '{name}' has a finite {' and '.join(finite)}, so the model cannot be "
            f"rebuilt from it for ever; set {' and '.join(f'{key}=-1' for key in finite)}, or {way_out}"
        )


def warn_of_timestamps(name: str, config: Mapping[str, str]) -> None:
    """Say so where a source takes timestamps that Spark, or idempotency keys, cannot do with."""
    if config[_TIMESTAMP_TYPE] == "CreateTime" and int(config.get(_AFTER, 0)) > _DAY_MS:
        log.warning(
            "the source takes timestamps of any future: one that Spark cannot count in microseconds stops it; "
            f"set {_AFTER}=3600000",
            topic=name,
        )


def check_table(name: str, config: Mapping[str, str], *, allow_finite_retention: bool) -> None:
    """Raises ConfigurationError if a topic of this configuration may lose rows of a table."""
    policy = config["cleanup.policy"]
    if allow_finite_retention or policy == "compact":
        return
    if finite := [key for key in ("retention.ms", "retention.bytes") if int(config[key]) >= 0]:
        raise ConfigurationError(
            f"the table's topic '{name}' has cleanup.policy={policy} and a finite {' and '.join(finite)}, so rows are "
            "lost; set cleanup.policy=compact, or BALANCE_ALLOW_FINITE_RETENTION=true to accept that"
        )


def check_changelog(name: str, config: Mapping[str, str]) -> None:
    """Raises ConfigurationError if a restore from a topic of this configuration might miss states."""
    if config["cleanup.policy"] != "compact":
        raise ConfigurationError(
            f"the changelog '{name}' has a cleanup.policy other than 'compact', so states "
            "may be missing from it; set the policy and run `balance-service rebuild`"
        )
    wanted = [f"{_TIMESTAMP_TYPE}=LogAppendTime"] if config[_TIMESTAMP_TYPE] != "LogAppendTime" else []
    if int(config[_COMPACTION_LAG]) < int(CHANGELOG[_COMPACTION_LAG]):
        wanted.append(f"{_COMPACTION_LAG}={CHANGELOG[_COMPACTION_LAG]}")
    if wanted:
        log.warning(
            "the changelog may be compacted while a standby reads it, which then may see half of a transaction; "
            f"set {' and '.join(wanted)}",
            topic=name,
        )


def check_decisions(name: str, config: Mapping[str, str]) -> None:
    """Raises ConfigurationError if a topic of this configuration may lose what operators have decided."""
    if is_compacted(config) or any(int(config[key]) >= 0 for key in ("retention.ms", "retention.bytes")):
        wanted = ", ".join(f"{key}={value}" for key, value in FOR_EVER.items())
        raise ConfigurationError(
            f"topic '{name}' may drop what operators have decided about dead letters, and a read model that is built "
            f"anew would count what was discarded; set {wanted}"
        )


def check_dead_letters(
    name: str, partitions: int, config: Mapping[str, str], source_partitions: int, source: Mapping[str, str]
) -> None:
    """Raises ConfigurationError if a topic could not take what comes from the source, and so would stop its fold."""
    if partitions < source_partitions:
        raise ConfigurationError(
            f"topic '{name}' has {partitions} partitions and the source {source_partitions}, and each takes the dead "
            f"letters of its own; give it {source_partitions}"
        )
    largest, wanted = int(config[MAX_MESSAGE_BYTES]), dead_letters(source)[MAX_MESSAGE_BYTES]
    if largest < BATCH_BYTES:
        raise ConfigurationError(
            f"topic '{name}' takes batches of {largest} bytes at most, and several dead letters make up to "
            f"{BATCH_BYTES}; set its max.message.bytes={wanted}"
        )
    if largest < int(wanted):
        log.warning(
            f"dead letters that do not fit will lie there without their values; set max.message.bytes={wanted}",
            topic=name,
        )


def check_copy(name: str, config: Mapping[str, str], source_name: str, source: Mapping[str, str]) -> None:
    """Raises ConfigurationError if a topic would not take the records of another as they are."""
    _check_takes(name, config, f"records of '{source_name}'", _largest(source))


def check_with_headers(name: str, config: Mapping[str, str], source_name: str, source: Mapping[str, str]) -> None:
    """Raises ConfigurationError if a topic would not take the records of another with a header of our own."""
    _check_takes(name, config, f"records of '{source_name}'", _largest(source) + _HEADROOM_BYTES)


def check_output(name: str, config: Mapping[str, str], source_name: str, source: Mapping[str, str]) -> None:
    """Raises ConfigurationError if a topic would refuse what is sent to it of a source's events, or change its time."""
    _check_takes(name, config, "what is sent to it", BATCH_BYTES)
    if int(config.get(_BEFORE, _UNBOUNDED)) < int(_UNBOUNDED):
        raise ConfigurationError(
            f"topic '{name}' refuses records with old timestamps, and what is sent to it has those of its events; "
            f"set its {_BEFORE}={_UNBOUNDED}"
        )
    if int(config.get(_AFTER, _UNBOUNDED)) < (ahead := int(source.get(_AFTER, _UNBOUNDED))):
        raise ConfigurationError(
            f"topic '{name}' refuses records with timestamps that '{source_name}' takes, for they are too far in the "
            f"future, and what is sent to it has those of its events; set its {_AFTER}={ahead}"
        )


def _check_takes(name: str, config: Mapping[str, str], what: str, largest: int) -> None:
    if config[_TIMESTAMP_TYPE] != "CreateTime":
        raise ConfigurationError(
            f"topic '{name}' puts its own timestamps on records; set its message.timestamp.type=CreateTime"
        )
    if int(config[MAX_MESSAGE_BYTES]) < largest:
        raise ConfigurationError(
            f"topic '{name}' may refuse {what} as too large; set its max.message.bytes={largest} or more"
        )


def _largest(source: Mapping[str, str]) -> int:
    return max(int(source[MAX_MESSAGE_BYTES]), BATCH_BYTES)
