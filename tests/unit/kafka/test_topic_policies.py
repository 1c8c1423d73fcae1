"""Which topics are refused, which are only warned of, and how those are made that are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from balance_service.errors import ConfigurationError
from balance_service.kafka.topic_policies import (
    CHANGELOG,
    FOR_EVER,
    check_changelog,
    check_copy,
    check_dead_letters,
    check_source,
    copy_of,
    dead_letters,
    warn_of_timestamps,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# As Kafka has them by default.
DEFAULTS = {
    "message.timestamp.type": "CreateTime",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.after.max.ms": "3600000",
    "max.message.bytes": "1048588",
    "min.compaction.lag.ms": "0",
}
SOURCE = {**DEFAULTS, **FOR_EVER}


def warnings(check: Callable[[], None]) -> list[str]:
    with capture_logs() as logs:
        check()
    return [line["event"] for line in logs]


@pytest.mark.parametrize("largest", ["1000", "1048588", "20000000"])
def test_what_is_made_here_is_accepted_without_a_word(largest: str) -> None:
    source = {**SOURCE, "max.message.bytes": largest}

    assert warnings(lambda: check_source("t", source, allow_finite_retention=False)) == []
    assert warnings(lambda: warn_of_timestamps("t", source)) == []
    assert warnings(lambda: check_changelog("c", {**DEFAULTS, **CHANGELOG})) == []
    assert warnings(lambda: check_dead_letters("d", 2, {**DEFAULTS, **dead_letters(source)}, 2, source)) == []
    assert warnings(lambda: check_copy("n", {**DEFAULTS, **copy_of(source)}, "t", source)) == []


@pytest.mark.parametrize("bound", ["9223372036854775807", "86400001"])
def test_of_a_source_that_takes_any_timestamp_it_is_warned(bound: str) -> None:
    unbounded = {**SOURCE, "message.timestamp.after.max.ms": bound}

    (said,) = warnings(lambda: warn_of_timestamps("t", unbounded))

    assert "set message.timestamp.after.max.ms=3600000" in said
    stamped_by_the_broker = {**unbounded, "message.timestamp.type": "LogAppendTime"}
    assert warnings(lambda: warn_of_timestamps("t", stamped_by_the_broker)) == []


def test_a_broker_that_knows_no_such_bound_is_not_asked_for_one() -> None:
    old = {name: value for name, value in SOURCE.items() if not name.startswith("message.timestamp.")}
    old["message.timestamp.type"] = "CreateTime"

    assert warnings(lambda: warn_of_timestamps("t", old)) == []
    assert "message.timestamp.after.max.ms" not in copy_of(old)


def test_dead_letters_that_do_not_all_fit_are_warned_of_and_too_few_partitions_refused() -> None:
    (said,) = warnings(lambda: check_dead_letters("d", 2, DEFAULTS, 2, SOURCE))

    assert f"max.message.bytes={1048588 + 65536}" in said
    with pytest.raises(ConfigurationError, match="has 1 partitions and the source 2"):
        check_dead_letters("d", 1, DEFAULTS, 2, SOURCE)
    with pytest.raises(ConfigurationError, match="takes batches of 100 bytes at most"):
        check_dead_letters("d", 2, {**DEFAULTS, "max.message.bytes": "100"}, 2, SOURCE)


@pytest.mark.parametrize("wanted", ["min.compaction.lag.ms=3600000", "message.timestamp.type=LogAppendTime"])
def test_a_changelog_that_may_be_compacted_early_is_warned_of(wanted: str) -> None:
    name = wanted.partition("=")[0]

    (said,) = warnings(lambda: check_changelog("c", {**CHANGELOG, name: DEFAULTS[name]}))

    assert said.endswith(f"; set {wanted}")
    assert warnings(lambda: check_changelog("c", CHANGELOG)) == []


def test_a_copy_takes_what_the_source_takes() -> None:
    large = {**SOURCE, "max.message.bytes": "5000000"}

    assert copy_of(large)["max.message.bytes"] == "5000000"
    with pytest.raises(ConfigurationError, match=r"max\.message\.bytes=5000000 or more"):
        check_copy("n", DEFAULTS, "t", large)
    with pytest.raises(ConfigurationError, match=r"message\.timestamp\.type=CreateTime"):
        check_copy("n", {**DEFAULTS, "message.timestamp.type": "LogAppendTime"}, "t", SOURCE)
