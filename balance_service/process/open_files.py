"""Open files: how many this process may have, how many its tasks need, and what is left for connections and stores.

A process without a descriptor left does not fail cleanly: a Kafka client that is made then stays slow for as long as it
lives. Hence the need is checked first. `tests/e2e/test_open_files.py` compares the figures with a real instance.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

from balance_service.errors import ConfigurationError

# Of Python's process without a task, and of one task while it folds: six for RocksDB, eight for a producer of Kafka's,
# one for the rows, one for calls of the JVM; and one file of a small store.
_BASE, _TASK = 96, 17
# A client has a pipe for each broker, and the connections of a task go to three brokers at most.
_BROKER, _MOST_CONNECTED = 2, 2
# While it opens, a task has a consumer as well.
_OPENING = 10
_LEAST_OPENINGS = 6
# Of the JVM, which inherits the limit and has its jars open; and of one query.
_JVM_BASE, _JVM_TASK = 400, 12
_LEAST_CONNECTIONS = 64
# RocksDB keeps ten of what it is given for itself, and takes no less than twenty.
_STORES_OWN, _MOST_PER_STORE = 10, 512
# What macOS grants where the hard limit is infinite.
_OPEN_MAX = 10_240


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """How the open files that a process may have are divided."""

    limit: int
    need: int
    """Of all tasks that may be here, with the least that connections need."""
    openings: int
    """Tasks that may open at once."""
    per_store: int
    """Files that RocksDB may keep open for each store."""
    connections: int
    """Connections of HTTP, those that are accepted and those to peers together."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns the limit that counts now. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_MAX if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            # macOS has a further bound, which its hard limit does not tell.
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, _OPEN_MAX)), hard))
    return limit()


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def need_of(tasks: int, brokers: int = 1) -> int:
    """How many open files an instance needs that works on so many tasks, tables' partitions included."""
    python = _BASE + tasks * _each(brokers) + min(tasks, _LEAST_OPENINGS) * _opening(brokers) + _LEAST_CONNECTIONS
    return max(python, _JVM_BASE + tasks * _JVM_TASK)


def divided(tasks: int, brokers: int, most: int) -> OpenFiles:
    """How `most` open files are divided among so many tasks and what else there is.

    Raises:
        ConfigurationError: they are too few.
    """
    need = need_of(tasks, brokers)
    if most < need:
        raise ConfigurationError(
            f"this instance needs {need} open files for the {tasks} tasks that it may have to work on, and "
            f"`ulimit -Hn` allows {most}: raise it to {need} or more (systemd: LimitNOFILE, compose: ulimits.nofile)"
        )
    spare = most - need
    openings = min(tasks, _LEAST_OPENINGS + spare // 4 // _opening(brokers))
    per_store = min(_MOST_PER_STORE, 2 * _STORES_OWN + spare // 4 // max(1, tasks))
    in_stores = (per_store - 2 * _STORES_OWN) * tasks
    in_openings = max(0, openings - _LEAST_OPENINGS) * _opening(brokers)
    return OpenFiles(most, need, max(1, openings), per_store, _LEAST_CONNECTIONS + spare - in_stores - in_openings)


def _each(brokers: int) -> int:
    return _TASK + _BROKER * (brokers - 1) + min(brokers - 1, _MOST_CONNECTED)


def _opening(brokers: int) -> int:
    return _OPENING + _BROKER * (brokers - 1) + min(brokers - 1, _MOST_CONNECTED)
