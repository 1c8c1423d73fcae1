"""Compares readers' answers with the recount, and derives owners from them.

Every check yields violations, by kind:

    wrong         an amount, or a 404, that differs from the recount at the position in the response headers
    wrong owner   an owner's answer although an earlier one had a higher epoch, or another owner the same epoch
    stale         an owner's answer below the position of an earlier owner's answer
    unflagged     a standby's answer to a query for owners only, or an answer without its origin
    bound         an answer beyond `maxLag`, known to the instance or not, or below `minPosition`
    backwards     a position that decreased on one server in one role and epoch
    status        a response that no such query should get
    lost          an accepted command that is missing in the source, or has another Idempotency-Key

The audit and the run add other kinds: lost or doubled money, differing digests of copies, a partition that stands
still, missing answers without a cause, and an instance that ended or logged an unexpected error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from tests.chaos.commands import Promise
    from tests.chaos.readers import Answer
    from tests.chaos.recount import Recount

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
)
WATERMARK_SECONDS = 4.0
"""The maximum age of an instance's watermark, plus a second."""
_ROLES = ("active", "standby")


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
        if answer.role not in _ROLES or not answer.server or answer.epoch < 1:
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
        return answer.asked, answer.server, answer.role, answer.epoch, answer.partition

    for answer, before in _with_best_before(answers, who, attrgetter("position")):
        if answer.position < before.position:
            yield Violation("backwards", f"{answer} after {before}")


def _stale(answers: Iterable[Answer]) -> Iterator[Violation]:
    owners = (answer for answer in answers if answer.role == "active")
    for answer, before in _with_best_before(owners, attrgetter("partition"), attrgetter("position")):
        if answer.position < before.position:
            yield Violation("stale", f"{answer} after {before}")


def _wrong_owners(answers: Iterable[Answer]) -> Iterator[Violation]:
    for answer, before in _with_best_before(answers, attrgetter("partition"), attrgetter("epoch")):
        if answer.role == "active" and answer.epoch < before.epoch:
            yield Violation("wrong owner", f"{answer} after {before}")


def _two_owners(answers: Iterable[Answer]) -> Iterator[Violation]:
    owners: dict[tuple[int, int], Answer] = {}
    for answer in answers:
        if answer.role == "active":
            first = owners.setdefault((answer.partition, answer.epoch), answer)
            if answer.server != first.server:
                yield Violation("wrong owner", f"{answer} under the same epoch as {first}")


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
