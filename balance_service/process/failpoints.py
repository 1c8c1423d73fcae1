"""Fail points: places between the steps of the commit protocol where a test can kill or suspend the process.

A test can also share a fail point among several processes, so that only the first to reach it dies, and can reduce the
size of parts, so that small commits take the code path of large ones. Fail points are disarmed unless
`BALANCE_FAILPOINTS` names them; a disarmed one costs one look-up in an empty dict. Thread-safe. Source: FreeBSD's
`fail(9)`, TiKV's `fail-rs`.
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
    "batch-read": "Spark has handed over a batch; it is not processed yet",
    "letters-read": "due dead letters are read; they are not retried yet",
    "folded": "new states are computed; the transaction is not begun",
    "begun": "the transaction is begun; nothing is produced",
    "produced": "every record of the transaction is delivered; it is not committed",
    "committed": "the transaction is committed; the store is not written yet",
    "part-stored": "the store has a part of a large commit, not all of it",
    "stored": "the store is written",
    "load-begun": "a load from files is in the changelog; it has none of them",
    "part-committed": "the changelog has a part of the files; the store does not have it yet",
    "part-ingested": "the store has a part of the files, and not its position",
    "files-loaded": "the changelog has all records of the files, and not the position that they belong to",
    "files-deleted": "the files of a loaded generation are deleted; the topic of generations still names them",
    "fenced": "an opening task has fenced earlier producers; its store is not restored yet",
    "restored": "an opening task's store is restored; its new epoch is not written yet",
    "position-written": "an opening task's new epoch is written; the task does not run yet",
    "generations-changed": "the next record of a read model's generations is made; it is not written",
    "generations-written": "that record is committed; this instance has not applied it",
    "generation-hosted": "a generation is hosted; its tasks may not have opened yet",
    "compared": "two generations of a partition are compared; the result is not published yet",
    "successor-held": "a running task is to send the outputs, and folds no more; the one that sends still does",
    "others-fenced": "a task that is to send has fenced those of other generations, and read their changelogs",
    "taken-over": "a running task sends the outputs; the one that sent them before has not been opened again",
    "store-removed": "a store of a dropped generation is removed; others may be left",
    "subjects-deleted": "the subjects of a dropped generation's changelog are deleted; the changelog is not",
    "changelog-deleted": "the changelog of a dropped generation is deleted",
}
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_SPEC = re.compile(r"(?P<name>[a-z-]+)(?:/(?P<thread>[^=@]+))?=(?P<action>kill|stop)(?:@(?P<turn>[1-9][0-9]{0,8}))?")
_PARTS = re.compile(r"parts=(?P<size>[1-9][0-9]{0,8})")
_CLAIMS = re.compile(r"claims=(?P<folder>.+)")

_lock = threading.Lock()
_armed: dict[str, tuple[str, int, str | None]] = {}
_claims: Path | None = None
_part_size = sys.maxsize


def arm(specification: str) -> None:
    """Arm the fail points of a specification and disarm all others.

    Args:
        specification: comma-separated. `name=action` or `name=action@n`: the process sends itself SIGKILL (`kill`) or
            SIGSTOP (`stop`) the n-th time that it reaches the point (default: the first time), once.
            `name/thread=action`: only that thread counts. `parts=n`: parts have at most about n records.
            `claims=folder`: from its n-th time on, a point fires only if the folder contains a file of its name. The
            process removes the file, so the point fires in only one of the processes that share the folder.

    Raises:
        ConfigurationError: there is no such point or action.
    """
    global _claims, _part_size
    armed, claims, parts = {}, None, sys.maxsize
    for part in filter(None, (p.strip() for p in specification.split(","))):
        if sized := _PARTS.fullmatch(part):
            parts = int(sized["size"])
            continue
        if claimed := _CLAIMS.fullmatch(part):
            claims = Path(claimed["folder"])
            continue
        match = _SPEC.fullmatch(part)
        if match is None or match["name"] not in FAILPOINTS:
            raise ConfigurationError(
                f"BALANCE_FAILPOINTS: '{part}' is not name=kill or name=stop (with @n for the n-th time, and with "
                "/thread after the name for one thread alone), parts=n or claims=folder; the names are "
                f"{', '.join(FAILPOINTS)}"
            )
        armed[match["name"]] = (match["action"], int(match["turn"] or 1), match["thread"])
    with _lock:
        _armed.clear()
        _armed.update(armed)
        _claims = claims
        _part_size = parts
    if specification:
        log.warning("fail points are armed", failpoints=specification)


def part_size(records: int) -> int:
    """The number of records in a part: `records`, or fewer if a test has armed `parts=n`."""
    return min(records, _part_size)


def failpoint(name: str) -> None:
    """Marks a fail point: a key of `FAILPOINTS`. Kills or suspends the process if it is armed."""
    if name not in _armed:
        return
    with _lock:
        action, turns, thread = _armed.get(name, ("", 0, None))
        if thread not in (None, threading.current_thread().name):
            return
        if turns > 1:
            _armed[name] = (action, turns - 1, thread)
        elif turns == 1 and _claimed(name):
            del _armed[name]
            log.warning("a fail point strikes", failpoint=name, action=action)
            # Under the lock: no other thread may claim another point for a process that dies of this one.
            os.kill(os.getpid(), _SIGNALS[action])


def _claimed(name: str) -> bool:
    """Claim the point for this process; False if another process has claimed it. Always True without `claims=`."""
    if _claims is None:
        return True
    with suppress(FileNotFoundError):
        (_claims / name).unlink()
        return True
    return False
