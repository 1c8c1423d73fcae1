"""Fail points: places between the steps of the commit protocol where a test can have the process die or stall.

A test can offer a point to several processes: the first that reaches it dies. A test can also have records go together
in parts of a few, so that small commits go the way of large ones. Off unless `BALANCE_FAILPOINTS` names them, and then
nothing but a look into an empty mapping. Any thread may reach one. Source: fail points as FreeBSD's `fail(9)` and
TiKV's `fail-rs` have them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import structlog

from balance_service.errors import ConfigurationError

log = structlog.get_logger(__name__)

FAILPOINTS = {
    "batch-read": "Spark has handed over a batch; nothing is done with it yet",
    "letters-read": "dead letters that are due are read again; nothing is done with them yet",
    "folded": "new states are computed; no transaction is begun",
    "begun": "the transaction is begun; nothing is produced",
    "produced": "every record of the transaction is delivered; it is not committed",
    "committed": "the transaction is committed; the store is not written",
    "part-stored": "a part of a large commit is in the store; its end is not",
    "stored": "the store is written",
    "fenced": "an opening task has fenced its predecessors; its store is not up to date",
    "restored": "an opening task's store is up to date; its new epoch is not written",
    "position-written": "an opening task's new epoch is written; it does not run yet",
}
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_SPEC = re.compile(r"(?P<name>[a-z-]+)=(?P<action>kill|stop)(?:@(?P<turn>[1-9][0-9]{0,8}))?")
_PARTS = re.compile(r"parts=(?P<most>[1-9][0-9]{0,8})")
_CLAIMS = re.compile(r"claims=(?P<folder>.+)")

_lock = threading.Lock()
_armed: dict[str, tuple[str, int]] = {}
_claims: Path | None = None
_most_in_a_part = sys.maxsize


def arm(specification: str) -> None:
    """Arm fail points, disarm all others, and say how large parts are.

    Args:
        specification: comma-separated `name=action` or `name=action@n`; `kill` is SIGKILL, `stop` SIGSTOP, both sent to
            this process the n-th time that the point is reached (the first, by default), once. `parts=n` has at most
            about n records go together wherever many go in parts. With `claims=folder` a point strikes, from its
            n-th time on, only if the folder holds a file of its name. The process removes the file, so that one of
            several processes with the same folder is struck.

    Raises:
        ConfigurationError: no such point or action.
    """
    global _claims, _most_in_a_part
    armed, claims, most = {}, None, sys.maxsize
    for part in filter(None, (p.strip() for p in specification.split(","))):
        if parts := _PARTS.fullmatch(part):
            most = int(parts["most"])
            continue
        if claimed := _CLAIMS.fullmatch(part):
            claims = Path(claimed["folder"])
            continue
        match = _SPEC.fullmatch(part)
        if match is None or match["name"] not in FAILPOINTS:
            raise ConfigurationError(
                f"BALANCE_FAILPOINTS: '{part}' is not name=kill or name=stop, with @n for the n-th time, nor parts=n, "
                f"nor claims=folder; the names are {', '.join(FAILPOINTS)}"
            )
        armed[match["name"]] = (match["action"], int(match["turn"] or 1))
    with _lock:
        _armed.clear()
        _armed.update(armed)
        _claims = claims
        _most_in_a_part = most
    if specification:
        log.warning("fail points are armed", failpoints=specification)


def in_a_part(records: int) -> int:
    """How many records go together, where many go in parts: so many, or fewer if a test says so."""
    return min(records, _most_in_a_part)


def reach(name: str) -> None:
    """Say that a fail point is reached."""
    if name not in _armed:
        return
    with _lock:
        action, turns = _armed.get(name, ("", 0))
        strikes = turns == 1 and _is_ours(name)
        if strikes:
            del _armed[name]
        elif turns > 1:
            _armed[name] = (action, turns - 1)
    if strikes:
        log.warning("a fail point strikes", failpoint=name, action=action)
        os.kill(os.getpid(), _SIGNALS[action])


def _is_ours(name: str) -> bool:
    """Whether this process is struck: always, unless points are claimed and another process has claimed this one."""
    if _claims is None:
        return True
    with suppress(FileNotFoundError):
        (_claims / name).unlink()
        return True
    return False
