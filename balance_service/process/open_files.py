"""The limit of open files, the number that tasks need, and the division of the rest among connections and stores.

A process that runs out of file descriptors does not fail cleanly: a Kafka client that is created then remains slow.
Hence the need is checked at start. `tests/e2e/test_files.py` compares the figures with a real instance.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

from balance_service.errors import ConfigurationError

# RocksDB reserves ten of `max_open_files` for itself, and requires at least twenty: it keeps ten tables open.
_ROCKSDB_RESERVES, _LEAST_TABLES, _MOST_PER_STORE = 10, 10, 512
# The Python process without tasks, and each task while it folds: six for RocksDB, one for a table that it writes, eight
# for a Kafka producer, one for rows, one for those of the query that replaces it, one for calls to the JVM, and tables.
# A small store has several tables as well: each opening writes one.
_BASE, _TASK = 96, 18 + _LEAST_TABLES
# A client has a pipe for each broker; a task connects to three brokers at most.
_BROKER, _MOST_CONNECTED = 2, 2
# A task also has a consumer while it opens; the group of each source topic always has one.
_OPENING = 10
_GROUP = 8
_LEAST_OPENINGS = 6
# The JVM, which inherits the limit and keeps its jars open, and each query.
_JVM_BASE, _JVM_TASK = 400, 12
_LEAST_CONNECTIONS = 64
# The most that macOS allows where the hard limit is infinite.
_OPEN_MAX = 10_240


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """The division of the open files of this process."""

    limit: int
    need: int
    """The files that the tasks need, with the minimum of connections."""
    openings: int
    """Tasks that may open concurrently."""
    per_store: int
    """RocksDB's `max_open_files` of each store."""
    connections: int
    """HTTP connections, accepted and to peers together."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit; returns the new soft limit. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_MAX if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            # macOS has a lower bound than its hard limit.
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, _OPEN_MAX)), hard))
    return limit()


def limit() -> int:
    """The soft limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def need_of(tasks: int, brokers: int = 1, groups: int = 1) -> int:
    """The number of open files that an instance needs for these tasks, which include partitions of tables.

    Args:
        groups: the number of source topics, each of which has a consumer group.
    """
    python = (
        _BASE
        + groups * (_GROUP + _more(brokers))
        + tasks * (_TASK + _more(brokers))
        + min(tasks, _LEAST_OPENINGS) * _per_opening(brokers)
        + _LEAST_CONNECTIONS
    )
    return max(python, _JVM_BASE + tasks * _JVM_TASK)


def divided(tasks: int, brokers: int, most: int, groups: int = 1) -> OpenFiles:
    """Divide `most` open files among tasks, stores and connections.

    Raises:
        ConfigurationError: there are too few.
    """
    need = need_of(tasks, brokers, groups)
    if most < need:
        raise ConfigurationError(
            f"this instance needs {need} open files for the {tasks} tasks that it may run, and "
            f"`ulimit -Hn` allows {most}: raise it to {need} or more (systemd: LimitNOFILE, compose: ulimits.nofile)"
        )
    spare = most - need
    openings = min(tasks, _LEAST_OPENINGS + spare // 4 // _per_opening(brokers))
    least_per_store = _ROCKSDB_RESERVES + _LEAST_TABLES
    per_store = min(_MOST_PER_STORE, least_per_store + spare // 4 // max(1, tasks))
    in_stores = (per_store - least_per_store) * tasks
    in_openings = max(0, openings - _LEAST_OPENINGS) * _per_opening(brokers)
    return OpenFiles(most, need, max(1, openings), per_store, _LEAST_CONNECTIONS + spare - in_stores - in_openings)


def _per_opening(brokers: int) -> int:
    return _OPENING + _more(brokers)


def _more(brokers: int) -> int:
    """Returns the files that a client needs for the brokers after the first."""
    return _BROKER * (brokers - 1) + min(brokers - 1, _MOST_CONNECTED)
