"""Decides when a `transform` fails at so many records that its task must halt.

A deployment that fails at most events must not turn a topic into dead letters.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from balance_service.errors import TaskHaltedError
from balance_service.model.transform import TRANSFORM_FAILED, TRANSFORM_TOO_LARGE

if TYPE_CHECKING:
    from balance_service.engine.batch import TaskBatch

_OF_RECORDS = 1_000
# The rest of what Spark says may quote the event, and probes return the reason of a halt without authentication.
_ERROR_CLASS = re.compile(r"\[[A-Z0-9_.]+\]")


@dataclass(slots=True)
class TransformFailures:
    """The last batches of each partition of a stage: where they begin, and how many records fail of how many."""

    stage: str = ""
    is_on: bool = True
    """Whether a task halts; not if the model says `DEAD_LETTER`, for data that is bad and code that is right."""
    passes_on: bool = False
    """Whether the stage re-keys the rows, so that a corrected transform needs another name."""
    _batches: dict[int, deque[tuple[int, int, int]]] = field(init=False, default_factory=dict)

    def require_few(self, batch: TaskBatch, partition: int) -> None:
        """Notes a batch that is about to be committed.

        Raises:
            TaskHaltedError: with it, more than half of at least 1,000 successive records fail.
        """
        letters = batch.updates.dead_letters
        failed = [letter for letter in letters if letter.cause in (TRANSFORM_FAILED, TRANSFORM_TOO_LARGE)]
        noted = self._batches.setdefault(partition, deque())
        if not self.is_on or batch.retried or not (failed or noted):
            return
        # A batch whose commit failed comes again.
        while noted and noted[-1][0] >= batch.start:
            noted.pop()
        count = batch.updates.applied + sum(batch.updates.ignored.values()) + len(letters)
        noted.append((batch.start, count, len(failed)))
        while sum(one for _, one, _ in noted) - noted[0][1] >= _OF_RECORDS:
            noted.popleft()
        if not any(one for _, _, one in noted):
            noted.clear()
        records, failures = (sum(numbers) for numbers in ([n for _, n, _ in noted], [n for _, _, n in noted]))
        if failed and records >= _OF_RECORDS and 2 * failures > records:
            last = failed[-1]
            said = _ERROR_CLASS.match(last.detail)
            remedy = (
                "give the corrected model another `name`" if self.passes_on else "correct it, and restart the instance"
            )
            raise TaskHaltedError(
                f"the `transform` of {self.stage} fails at {failures:,} of {records:,} successive records, at last at "
                f"offset {last.offset}{f' with {said[0]}' if said else ''}; {remedy}",
                last.key,
            )
