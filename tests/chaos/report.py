"""The table at the end of a run, with recovery times."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from tests.chaos.checks import KINDS, by_kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.chaos.availability import Succession
    from tests.chaos.checks import Violation
    from tests.chaos.journal import Journal
    from tests.chaos.plan import Plan
    from tests.chaos.readers import Answer

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
