"""Whether the service answered as soon and as often as it promises: readers' answers, held against the faults.

    silent   queries refused while nothing was disturbed, or nobody new who owns a partition in time
    stuck    an owner that answers, and has not applied what was committed long before

The bounds follow from `docs/guarantees.md`, for a processor to each instance and the broker; with fewer, what a cold
JVM needs is not there, and they are longer by that.
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

# CI's processors are shared with others.
_SHARED = 2.0 if os.environ.get("CI") else 1.0
SHARE = max(1.0, (INSTANCES + 1) / (os.cpu_count() or 1)) * _SHARED
"""By what bounds are longer here."""
PROGRESS_SECONDS = (SESSION_TIMEOUT_SECONDS + 10) * SHARE
"""The group's session ends, another instance opens the task, and restores what its store lacks."""
_OWNED_SECONDS = (SESSION_TIMEOUT_SECONDS + 5) * SHARE
_REMOVED_SECONDS = 5 * SHARE
_FLAGGED_SECONDS = 3 * SHARE
_READY_SECONDS = 30 * SHARE
STRIKE_SECONDS = 3 * (_READY_SECONDS + PROGRESS_SECONDS)
"""An instance is started, owns partitions, and folds until it reaches a fail point; other work may slow that."""
# As many faults in a row may strike what owns a partition.
_STANDSTILL_SECONDS = 3 * PROGRESS_SECONDS
# A partition of four may be moving for the last time.
_MOST_REFUSED = 0.1
_FEWEST = 50
_WATCHED_SECONDS = 2 * PROGRESS_SECONDS
# Faults after which another instance has to own a partition.
_ENDING = frozenset({"kill", "remove"})


class Succession(NamedTuple):
    """How long after a fault a partition of its instance was answered for again."""

    entry: Entry
    partition: int
    owned: float | None
    """By an owner under a higher epoch; None if none was seen."""
    flagged: float | None
    """By anybody, to a query that takes standbys."""
    is_alone: bool
    """Whether no other fault came before that."""
    observed: float
    """For how long after the fault anybody asked."""


def successions(answers: Iterable[Answer], entries: Sequence[Entry]) -> Iterator[Succession]:
    """For every fault and partition of the instance that it struck."""
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
    """Somebody answers for each partition in time, and owns it in time, where one fault was alone to strike."""
    for one in found:
        fault = one.entry.fault
        owned = _REMOVED_SECONDS if fault == "remove" else _OWNED_SECONDS
        flagged = _FLAGGED_SECONDS if fault == "kill" and one.partition in one.entry.stood_by else owned
        for what, took, bound in (("a new owner", one.owned, owned), ("a standby's answer", one.flagged, flagged)):
            # What was paused may go on before it has a successor.
            never = math.inf if fault in _ENDING and one.observed > bound else 0.0
            late = never if took is None else took
            if one.is_alone and late > bound:
                told = f"partition {one.partition} has {what} {late:.1f} s after {fault} of {one.entry.member}"
                yield Violation("silent", f"{told}, and {bound:.0f} s are promised")


def check_starts(starts: Iterable[Start], outages: Sequence[tuple[float, float]]) -> Iterator[Violation]:
    """What is started wants queries in time, while there is a broker."""
    for start in starts:
        had_broker = not any(down < start.at + start.seconds and start.at < up for down, up in outages)
        if had_broker and start.seconds > _READY_SECONDS:
            told = f"{start.member} was ready {start.seconds:.1f} s after it was started"
            yield Violation("silent", f"{told}, and {_READY_SECONDS:.0f} s are promised")


def check_undisturbed(answers: Iterable[Answer], windows: Iterable[tuple[float, float]]) -> Iterator[Violation]:
    """While nothing is disturbed, what only owners may answer is answered."""
    plain = [a for a in answers if a.max_lag is None and a.min_position is None]
    for start, end in windows:
        within = [a for a in plain if start <= a.sent and a.received <= end]
        refused = [a for a in within if not a.speaks]
        if len(within) < _FEWEST:
            yield Violation("silent", f"{len(within)} answers in {end - start:.0f} s in which nothing was disturbed")
        elif len(refused) > _MOST_REFUSED * len(within):
            told = f"{len(refused)} of {len(within)} queries refused while nothing was disturbed"
            yield Violation("silent", f"{told}, such as {refused[0]}")


def check_movement(
    answers: Iterable[Answer], acks: Iterable[tuple[float, int, int]], outages: Sequence[tuple[float, float]] = ()
) -> Iterator[Violation]:
    """What was committed is applied in time, or nobody answers as the owner; what passes without a broker is no time.

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
        told = f"partition {partition} lacks what was committed {_STANDSTILL_SECONDS:.0f} s before"
        yield Violation("stuck", f"{told}: {answer}")


def _with_broker(at: float, outages: Iterable[tuple[float, float]]) -> float:
    """A moment of a clock that stands still while there is no broker."""
    return at - sum(min(at, end) - start for start, end in outages if start < at)
