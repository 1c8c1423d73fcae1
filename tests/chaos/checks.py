"""Compares readers' answers with the recount, and derives owners from them.

Every check yields violations, by kind:

    wrong         an amount, or a 404, that differs from the recount at the position in the response headers
    wrong owner   an owner's answer although an earlier one had a higher epoch, or another owner the same epoch
    stale         an owner's answer below the position of an earlier owner's answer of the same generation
    unflagged     a standby's answer to a query for owners only, or an answer without its origin
    bound         an answer beyond `maxLag`, known to the instance or not, or below `minPosition`
    backwards     a position that decreased on one server in one role, epoch and generation
    status        a response that no such query should get
    lost          an accepted command that is missing in the source, or has another Idempotency-Key
    silent        queries refused without a fault, or no new owner of a partition in time
    stuck         an owner that answers without events that were committed long before
    generation    an answer of a generation that never served, a difference between two generations, or what a dropped
                  one leaves

The time limits follow from `docs/guarantees.md` for one processor per instance and one for each broker. With fewer,
they grow by the time that a cold JVM lacks. The audit and the run add other kinds: lost or doubled money, differing
digests of copies, a partition that stands still, and an instance that ended or logged an unexpected error.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos.cluster import INSTANCES, SESSION_TIMEOUT_SECONDS
from tests.chaos.plan import BROKERS
from tests.support.waiting import SHARED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

    from tests.chaos.clients import Answer, Promise
    from tests.chaos.recount import Recount
    from tests.chaos.report import Entry, Start

KINDS = (
    "lost",
    "doubled",
    "wrong",
    "wrong owner",
    "stale",
    "unflagged",
    "bound",
    "backwards",
    "status",
    "digest",
    "stuck",
    "silent",
    "crash",
    "listener",
    "generation",
)
WATERMARK_SECONDS = 4.0
"""The maximum age of an instance's watermark, plus a second."""
_NUMBER = re.compile(r"\d+")
_BEHIND = re.compile(r"\d records behind, and maxLag is")
_SHOWN = 4
_ROLES = ("active", "standby", "halted")


class Violation(NamedTuple):
    """A broken promise."""

    kind: str
    detail: str


class Ends:
    """End offsets of the source as acknowledged to producers: (time, partition, end), in order of time."""

    def __init__(self, acks: Iterable[tuple[float, int, int]]) -> None:
        self._known: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for at, partition, end in acks:
            known = self._known[partition]
            known.append((at, max(end, known[-1][1] if known else 0)))

    def at(self, partition: int, time: float) -> int:
        """Returns the end offset of a partition at a time; 0 if none was known."""
        known = self._known[partition]
        count = bisect_right(known, (time, 0))
        return known[count - 1][1] if count else 0


def check_answers(answers: Sequence[Answer], recount: Recount) -> list[Violation]:
    """Runs all checks that need no time of acknowledgement."""
    speaking = [answer for answer in answers if answer.speaks]
    return [
        *_wrong(speaking, recount),
        *_unflagged(speaking),
        *_out_of_bounds(speaking),
        *_unexpected(answers),
        *_backwards(speaking),
        *_stale(speaking),
        *_wrong_owners(speaking),
        *_two_owners(speaking),
    ]


def is_behind(answer: Answer) -> bool:
    """Whether a query is refused because every copy is further behind than its `maxLag`."""
    return not answer.speaks and _BEHIND.search(answer.detail) is not None


def check_told(told: Sequence[Answer], recount: Recount) -> list[Violation]:
    """Checks the events of listeners of keys, each at its position; they come at any time after their commits."""
    return [*_wrong(told, recount), *_unflagged(told)]


def check_staleness(answers: Iterable[Answer], acks: Sequence[tuple[float, int, int]]) -> Iterator[Violation]:
    """Checks `maxLag` against the ends that producers knew some seconds before the query.

    Args:
        acks: (time, partition, end), in order of time.
    """
    ends = Ends(acks)
    for answer in answers:
        if not answer.speaks or answer.max_lag is None:
            continue
        end = ends.at(answer.partition, answer.sent - WATERMARK_SECONDS)
        if end - answer.position > answer.max_lag:
            detail = f"the source ended at {end} {WATERMARK_SECONDS:.0f} s before"
            yield Violation("bound", f"{detail}, and maxLag was {answer.max_lag}: {answer}")


def check_served(answers: Iterable[Answer], served: Collection[int]) -> Iterator[Violation]:
    """Checks that no generation answers that has never served, because queries name none."""
    strange = {answer.generation: answer for answer in answers if answer.speaks and answer.generation not in served}
    for answer in strange.values():
        yield Violation("generation", f"only {sorted(served)} have served: {answer}")


def check_promises(promises: Iterable[Promise], recount: Recount) -> Iterator[Violation]:
    """Checks that every accepted event is in the source, at the promised position and unchanged."""
    for promise in promises:
        found = recount.events.get((promise.partition, promise.position - 1))
        token = None if promise.token is None else promise.token.encode()
        if found != (promise.customer.encode(), promise.cents, token):
            yield Violation("lost", f"{promise} was accepted; the source has {found}")


def by_kind(violations: Iterable[Violation]) -> Counter[str]:
    return Counter(violation.kind for violation in violations)


def _wrong(answers: Iterable[Answer], recount: Recount) -> Iterator[Violation]:
    for answer in answers:
        key = answer.customer.encode()
        history = recount.histories.get(key)
        expected = None if history is None else history.below(answer.position)
        if answer.cents != expected:
            yield Violation("wrong", f"the recount has {expected} there: {answer}")
        elif history is not None and answer.partition != recount.home(key):
            yield Violation("wrong", f"not the customer's partition: {answer}")


def _unflagged(answers: Iterable[Answer]) -> Iterator[Violation]:
    for answer in answers:
        if answer.role not in _ROLES or not answer.server or answer.epoch < 1 or answer.generation < 1:
            yield Violation("unflagged", f"lacks its origin: {answer}")
        elif answer.role == "standby" and answer.max_lag is None and answer.min_position is None:
            yield Violation("unflagged", f"only the owner may answer that: {answer}")


def _out_of_bounds(answers: Iterable[Answer]) -> Iterator[Violation]:
    for answer in answers:
        if answer.max_lag is not None and (answer.lag is None or answer.lag > answer.max_lag):
            yield Violation("bound", f"maxLag was {answer.max_lag}: {answer}")
        if answer.min_position is not None and answer.position < answer.min_position:
            yield Violation("bound", f"minPosition was {answer.min_position}: {answer}")


def _unexpected(answers: Iterable[Answer]) -> Iterator[Violation]:
    for answer in answers:
        if not answer.speaks and not (answer.status == 503 and answer.retry_after):
            yield Violation("status", f"{answer}")


def _backwards(answers: Iterable[Answer]) -> Iterator[Violation]:
    def who(answer: Answer) -> Hashable:
        return answer.asked, answer.server, answer.role, answer.epoch, *_task(answer)

    for answer, before in _with_best_before(answers, who, attrgetter("position")):
        if answer.position < before.position:
            yield Violation("backwards", f"{answer} after {before}")


def _stale(answers: Iterable[Answer]) -> Iterator[Violation]:
    owners = (answer for answer in answers if answer.role == "active")
    for answer, before in _with_best_before(owners, _task, attrgetter("position")):
        if answer.position < before.position:
            yield Violation("stale", f"{answer} after {before}")


def _wrong_owners(answers: Iterable[Answer]) -> Iterator[Violation]:
    for answer, before in _with_best_before(answers, _task, attrgetter("epoch")):
        if answer.role == "active" and answer.epoch < before.epoch:
            yield Violation("wrong owner", f"{answer} after {before}")


def _two_owners(answers: Iterable[Answer]) -> Iterator[Violation]:
    owners: dict[tuple[int, int, int], Answer] = {}
    for answer in answers:
        if answer.role == "active":
            first = owners.setdefault((*_task(answer), answer.epoch), answer)
            if answer.server != first.server:
                yield Violation("wrong owner", f"{answer} under the same epoch as {first}")


def _task(answer: Answer) -> tuple[int, int]:
    """Each generation of a partition has its own position and epochs."""
    return answer.generation, answer.partition


def _with_best_before(
    answers: Iterable[Answer], group: Callable[[Answer], Hashable], rank: Callable[[Answer], int]
) -> Iterator[tuple[Answer, Answer]]:
    """Yields each answer with the highest-ranking answer of its group that was received before its query was sent."""
    groups: dict[Hashable, list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[group(answer)].append(answer)
    for members in groups.values():
        received = iter(sorted(members, key=attrgetter("received")))
        upcoming, best = next(received, None), None
        for answer in sorted(members, key=attrgetter("sent")):
            while upcoming is not None and upcoming.received < answer.sent:
                best = upcoming if best is None or rank(upcoming) > rank(best) else best
                upcoming = next(received, None)
            if best is not None:
                yield answer, best


SHARE = max(1.0, (INSTANCES + BROKERS) / (os.cpu_count() or 1)) * SHARED
"""Factor of the bounds on this machine."""
PROGRESS_SECONDS = (SESSION_TIMEOUT_SECONDS + 10) * SHARE
"""Covers the session timeout, the opening of the task by another instance, and its restore."""
_OWNED_SECONDS = (SESSION_TIMEOUT_SECONDS + 5) * SHARE
_REMOVED_SECONDS = 5 * SHARE
_FLAGGED_SECONDS = 3 * SHARE
_READY_SECONDS = 30 * SHARE
STRIKE_SECONDS = 3 * (_READY_SECONDS + PROGRESS_SECONDS)
"""Covers start, assignment, and folding up to a fail point, on a machine with other work."""
# Up to three faults in a row may strike the owner of a partition. After the third, no instance may be up until the
# first of them has started again.
_STANDSTILL_SECONDS = 3 * PROGRESS_SECONDS + _READY_SECONDS
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
    """Seconds until a query that accepts standbys was answered, or was told how many records a copy is behind."""
    is_alone: bool
    """Whether no other fault came in between."""
    observed: float
    """Seconds for which readers asked after the fault."""
    refused: Sequence[Answer]
    """The refusals of queries that accept standbys, until one was answered."""


def successions(answers: Iterable[Answer], entries: Sequence[Entry]) -> Iterator[Succession]:
    """Yields a succession for each fault and partition of its instance."""
    by_partition: dict[int, list[Answer]] = defaultdict(list)
    homes: dict[str, int] = {}
    refusals: list[Answer] = []
    asked_until = 0.0
    for answer in sorted(answers, key=lambda a: a.received):
        asked_until = answer.received
        if answer.speaks:
            by_partition[answer.partition].append(answer)
            homes[answer.customer] = answer.partition
        elif answer.max_lag is not None:
            refusals.append(answer)
    for entry in entries:
        for partition in entry.partitions:
            of_it = by_partition[partition]
            after = [a for a in of_it if entry.at < a.sent and a.received < entry.at + _WATCHED_SECONDS]
            before: dict[int, int] = {}
            for a in of_it:
                if a.received <= entry.at:
                    before[a.generation] = max(a.epoch, before.get(a.generation, 0))
            owned = next(
                (a.received for a in after if a.role == "active" and a.epoch > before.get(a.generation, 0)), None
            )
            refused = [a for a in refusals if homes.get(a.customer) == partition and entry.at < a.sent]
            told = [a.received for a in after if a.max_lag is not None]
            # Events have come since the owner stood still: all copies may be further behind than any query accepts.
            told += [a.received for a in refused if is_behind(a)]
            flagged = min(told, default=None)
            refused = [a for a in refused if a.sent < (flagged or math.inf)]
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
                refused,
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
                yield Violation("silent", f"{detail}, and {bound:.0f} s are promised{_told(one.refused)}")


def _told(refused: Sequence[Answer]) -> str:
    """Returns the reasons of refusals, the most frequent first, and the last one unchanged."""
    if not refused:
        return ""
    reasons = Counter(f"{a.status} {_NUMBER.sub('#', a.detail)}" for a in refused).most_common(_SHOWN)
    return f"; {'; '.join(f'{reason} ({count} times)' for reason, count in reasons)}; the last: {refused[-1].detail}"


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
