"""A journal of faults printed as they happen, and the table at the end of a run."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import psutil

from tests.chaos.checks import KINDS, by_kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.chaos.checks import Succession, Violation
    from tests.chaos.clients import Answer
    from tests.chaos.plan import Plan


def unstolen_time() -> float:
    """Returns the monotonic time minus the time that a hypervisor gave to other machines."""
    return time.monotonic() - getattr(psutil.cpu_times(), "steal", 0.0) / (psutil.cpu_count() or 1)


class Entry(NamedTuple):
    """A fault; `at` is monotonic time."""

    at: float
    fault: str
    member: str
    partitions: frozenset[int]
    """The partitions that the instance owned, as far as the readers knew."""
    stood_by: frozenset[int] = frozenset()
    """The partitions with a tailing standby on another instance."""


class Start(NamedTuple):
    """The start of an instance at a monotonic time, and the seconds until it was ready."""

    at: float
    member: str
    seconds: float


class Journal:
    """Thread-safe. Prints each line at once."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.entries: list[Entry] = []
        self.starts: list[Start] = []
        self.outages: list[tuple[float, float]] = []
        """Start and end of each broker outage."""
        self.counts: Counter[str] = Counter()
        self._unexpected: list[str] = []

    def say(self, text: str) -> None:
        """Prints a line of progress."""
        with self._lock:
            print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)

    def fault(
        self,
        fault: str,
        member: str = "",
        partitions: set[int] | None = None,
        detail: str = "",
        at: float | None = None,
        stood_by: Iterable[int] = (),
    ) -> None:
        """Records a fault, now or at another time."""
        entry = Entry(at or time.monotonic(), fault, member, frozenset(partitions or ()), frozenset(stood_by))
        with self._lock:
            self.entries.append(entry)
            self.counts[fault] += 1
        owned = f", owner of {sorted(entry.partitions)}" if entry.partitions else ""
        self.say(" ".join(filter(None, (fault, member + owned, detail))))

    def started(self, member: str, at: float) -> None:
        """Records that an instance started at a given time is ready now."""
        with self._lock:
            self.starts.append(Start(at, member, time.monotonic() - at))

    def record_unexpected(self, text: str) -> None:
        """Records an event that no fault explains, such as the end of a process."""
        with self._lock:
            self._unexpected.append(text)
        self.say(f"UNEXPECTED: {text}")

    def take_unexpected(self) -> list[str]:
        """Returns and clears the unexpected events."""
        with self._lock:
            taken, self._unexpected = self._unexpected, []
        return taken


_SHOWN = 12
_SHOWN_REFUSALS = 6
_NUMBERS = re.compile(r"[0-9.:]*[0-9]")


class Report:
    """Collects the results of all rounds. Used by one thread."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self._plan = plan
        self._journal = journal
        self.violations: list[Violation] = []
        self.reads: Counter[tuple[int, str]] = Counter()
        self._refusals: Counter[str] = Counter()
        self.silences = 0
        self.records: dict[str, int] = {}
        self.progress: list[float] = []
        self.commands: Counter[int] = Counter()
        self.requests: Counter[str] = Counter()
        """An operator's requests, by verb and status."""
        self.generations: Counter[str] = Counter()
        """Steps of the generations."""
        self._new_owner: dict[str, list[float]] = defaultdict(list)
        self._flagged: list[float] = []

    def add_violations(self, found: Iterable[Violation]) -> None:
        """Keeps violations and prints the first few."""
        for violation in found:
            if len(self.violations) < _SHOWN:
                self._journal.say(f"VIOLATION ({violation.kind}): {violation.detail}")
            self.violations.append(violation)

    def add_answers(self, answers: Sequence[Answer]) -> None:
        """Counts answers by status and role."""
        for answer in answers:
            self.reads[answer.status, answer.role] += 1
            if not answer.speaks:
                self._refusals[_NUMBERS.sub("…", answer.detail.partition('"detail":')[2])] += 1

    def add_successions(self, found: Iterable[Succession]) -> None:
        """Keeps the times until a new owner or a standby answered."""
        for one in found:
            if one.owned is not None:
                self._new_owner[one.entry.fault].append(one.owned)
            if one.flagged is not None and one.entry.fault == "kill":
                self._flagged.append(one.flagged)

    def table(self) -> str:
        """Returns the table of faults, records, reads and violations."""
        kinds = by_kind(self.violations)
        wanted = self._plan.counts
        done = self._journal.counts
        rows = [("seed", f"CHAOS_SEED={self._plan.seed}")]
        rows += [
            (fault, f"{done[fault]} of {wanted.get(fault, 0)}")
            for fault in sorted({*done, *filter(wanted.get, wanted)})
        ]
        rows += [(name, str(count)) for name, count in self.records.items()]
        rows += [("reads", str(sum(self.reads.values())))]
        rows += [(f"  {status} {role or '-'}", str(n)) for (status, role), n in sorted(self.reads.items())]
        rows += [("  no answer", str(self.silences))]
        rows += [(f"  {n} refused", why) for why, n in self._refusals.most_common(_SHOWN_REFUSALS)]
        rows += [(f"addFunds {status or 'no answer'}", str(n)) for status, n in sorted(self.commands.items())]
        rows += [(f"request: {request}", str(n)) for request, n in sorted(self.requests.items())]
        rows += [(f"generations: {action}", str(n)) for action, n in sorted(self.generations.items())]
        rows += [("progress after healing", _seconds(self.progress))]
        rows += [(f"new owner after {fault}", _seconds(times)) for fault, times in sorted(self._new_owner.items())]
        rows += [("answer to maxLag after kill", _seconds(self._flagged))]
        rows += [("ready after a start", _seconds([start.seconds for start in self._journal.starts]))]
        rows += [(f"VIOLATIONS {kind}", str(kinds[kind])) for kind in KINDS]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _seconds(times: Sequence[float]) -> str:
    if not times:
        return "-"
    return f"median {statistics.median(times):.1f} s, longest {max(times):.1f} s, of {len(times)}"
