"""Compares the readers' answers with the promised response times around faults.

    silent   queries refused without a fault, or no new owner of a partition in time
    stuck    an owner that answers without events that were committed long before

The bounds follow from `docs/guarantees.md` for one processor per instance and one for the broker. With fewer, they grow
by the time that a cold JVM lacks.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos.checks import Ends, Violation
from tests.chaos.cluster import INSTANCES, SESSION_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.chaos.journal import Entry, Start
    from tests.chaos.readers import Answer

# CI shares its processors with other jobs.
_SHARED = 2.0 if os.environ.get("CI") else 1.0
SHARE = max(1.0, (INSTANCES + 1) / (os.cpu_count() or 1)) * _SHARED
"""Factor of the bounds on this machine."""
PROGRESS_SECONDS = (SESSION_TIMEOUT_SECONDS + 10) * SHARE
"""Covers the session timeout, the opening of the task by another instance, and its restore."""
_OWNED_SECONDS = (SESSION_TIMEOUT_SECONDS + 5) * SHARE
_REMOVED_SECONDS = 5 * SHARE
_FLAGGED_SECONDS = 3 * SHARE
_READY_SECONDS = 30 * SHARE
STRIKE_SECONDS = 3 * (_READY_SECONDS + PROGRESS_SECONDS)
"""Covers start, assignment, and folding up to a fail point, on a machine with other work."""
# Up to three faults in a row may strike the owner of a partition.
_STANDSTILL_SECONDS = 3 * PROGRESS_SECONDS
# One partition of four may still be moving.
_MOST_REFUSED = 0.1
_FEWEST = 50
_WATCHED_SECONDS = 2 * PROGRESS_SECONDS
# After these faults another instance must own a partition.
_ENDING = frozenset({"kill", "remove"})


class Succession(NamedTuple):
    """The time from a fault until a partition of its instance was answered for again."""

    entry: Entry
    partition: int
    owned: float | None
    """Seconds until the first answer of an owner with a higher epoch; None without one."""
    flagged: float | None
    """Seconds until the first answer to a query that accepts standbys."""
    is_alone: bool
    """Whether no other fault came in between."""
    observed: float
    """Seconds for which readers asked after the fault."""


def successions(answers: Iterable[Answer], entries: Sequence[Entry]) -> Iterator[Succession]:
    """Yields a succession for each fault and partition of its instance."""
    by_partition: dict[int, list[Answer]] = defaultdict(list)
    asked_until = 0.0
    for answer in sorted(answers, key=lambda a: a.received):
        asked_until = answer.received
        if answer.speaks:
            by_partition[answer.partition].append(answer)
    for entry in entries:
        for partition in entry.partitions:
            of_it = by_partition[partition]
            after = [a for a in of_it if entry.at < a.sent and a.received < entry.at + _WATCHED_SECONDS]
            before = max((a.epoch for a in of_it if a.received <= entry.at), default=0)
            owned = next((a.received for a in after if a.role == "active" and a.epoch > before), None)
            flagged = next((a.received for a in after if a.max_lag is not None), None)
            until = entry.at + _WATCHED_SECONDS if owned is None else owned
            others = [
                other for other in entries if other is not entry and entry.at - PROGRESS_SECONDS < other.at < until
            ]
            yield Succession(
                entry,
                partition,
                None if owned is None else owned - entry.at,
                None if flagged is None else flagged - entry.at,
                not others,
                min(asked_until - entry.at, _WATCHED_SECONDS),
            )


def check_successions(found: Iterable[Succession]) -> Iterator[Violation]:
    """Checks that each partition is answered for and owned in time after a fault without others close to it."""
    for one in found:
        fault = one.entry.fault
        owned = _REMOVED_SECONDS if fault == "remove" else _OWNED_SECONDS
        flagged = _FLAGGED_SECONDS if fault == "kill" and one.partition in one.entry.stood_by else owned
        for what, took, bound in (("a new owner", one.owned, owned), ("a standby's answer", one.flagged, flagged)):
            # A paused instance may continue before another takes over.
            never = math.inf if fault in _ENDING and one.observed > bound else 0.0
            late = never if took is None else took
            if one.is_alone and late > bound:
                detail = f"partition {one.partition} has {what} {late:.1f} s after {fault} of {one.entry.member}"
                yield Violation("silent", f"{detail}, and {bound:.0f} s are promised")


def check_starts(starts: Iterable[Start], outages: Sequence[tuple[float, float]]) -> Iterator[Violation]:
    """Checks that a started instance is ready in time, unless the broker was down."""
    for start in starts:
        had_broker = not any(down < start.at + start.seconds and start.at < up for down, up in outages)
        if had_broker and start.seconds > _READY_SECONDS:
            detail = f"{start.member} was ready {start.seconds:.1f} s after it was started"
            yield Violation("silent", f"{detail}, and {_READY_SECONDS:.0f} s are promised")


def check_undisturbed(answers: Iterable[Answer], windows: Iterable[tuple[float, float]]) -> Iterator[Violation]:
    """Checks that queries for owners are answered while no fault is played."""
    plain = [a for a in answers if a.max_lag is None and a.min_position is None]
    for start, end in windows:
        within = [a for a in plain if start <= a.sent and a.received <= end]
        refused = [a for a in within if not a.speaks]
        if len(within) < _FEWEST:
            yield Violation("silent", f"{len(within)} answers in {end - start:.0f} s without a fault")
        elif len(refused) > _MOST_REFUSED * len(within):
            detail = f"{len(refused)} of {len(within)} queries refused without a fault"
            yield Violation("silent", f"{detail}, such as {refused[0]}")


def check_movement(
    answers: Iterable[Answer], acks: Iterable[tuple[float, int, int]], outages: Sequence[tuple[float, float]] = ()
) -> Iterator[Violation]:
    """Checks that owners apply committed events in time, or do not answer. The clock stops while there is no broker.

    Args:
        acks: (time, partition, end), in order of time.
    """
    ends = Ends((_with_broker(at, outages), partition, end) for at, partition, end in acks)
    stuck: dict[int, Answer] = {}
    for answer in answers:
        is_owners = answer.speaks and answer.role == "active"
        since = _with_broker(answer.sent, outages) - _STANDSTILL_SECONDS
        if is_owners and ends.at(answer.partition, since) > answer.position:
            stuck.setdefault(answer.partition, answer)
    for partition, answer in sorted(stuck.items()):
        detail = f"partition {partition} lacks what was committed {_STANDSTILL_SECONDS:.0f} s before"
        yield Violation("stuck", f"{detail}: {answer}")


def _with_broker(at: float, outages: Iterable[tuple[float, float]]) -> float:
    """Returns the time of a clock that stops while there is no broker."""
    return at - sum(min(at, end) - start for start, end in outages if start < at)
