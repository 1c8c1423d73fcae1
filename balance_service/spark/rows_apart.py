"""The rows of one partition where its queries fail: its records are read without Spark, and decoded in parts.

A record that cannot be decoded becomes a row with a cause, so that its dead letter is committed in its turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from balance_service.engine.dead_letter import DECODER_FAILED
from balance_service.errors import BalanceServiceError, RetriableError
from balance_service.spark.combine import NOTE
from balance_service.spark.row_query import QueryEndedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from balance_service.engine.records import DeadLetter
    from balance_service.engine.task import Task
    from balance_service.spark.redrive import Redrive
    from balance_service.spark.trials import Trials

# A query reads ahead of the position: so far behind it may lie what it fails at.
_MOST_ROWS = 65_536
# Often, several bad records follow one another.
_MOST_AFTER = 1_024


class RowsApartEndedError(BalanceServiceError):
    """The records at which queries failed have been read: the next query may read on."""


class RowsApart:
    """Gives rows as `TaskRows` does. The task's thread calls."""

    def __init__(
        self,
        redrive: Redrive,
        trials: Trials,
        task: Task,
        left_out: Collection[int],
        is_interrupted: Callable[[], bool],
    ) -> None:
        """Args:
        left_out: the offsets whose rows are not used.
        """
        self._redrive = redrive
        self._trials = trials
        self._task = task
        self._left_out = frozenset(left_out)
        self._is_interrupted = is_interrupted
        self.position = task.position
        """The offset that they begin at."""
        self._end = 0
        self._left = _MOST_ROWS

    def change_over(self, _position: int) -> bool:
        """No query replaces them."""
        return False

    def pull(self, _timeout_seconds: float) -> pa.RecordBatch | None:
        """Returns the rows of some records, once those before are committed; None until then.

        Raises:
            RowsApartEndedError: enough rows, or all that there are, have been read.
            QueryEndedError: the broker or the registry does not answer, or Spark fails at any record.
            QueryInterruptedError: interrupted.
            FatalError: Spark's JVM has ended, or Spark has failed at any record three times in a row.
        """
        position = self._task.position
        if position < self._end:
            return None
        try:
            read = self._redrive.read(self._task.task_id.partition, position) if self._left > 0 else []
        except RetriableError as error:
            raise QueryEndedError(str(error)) from error
        if not read:
            # Queries of an empty partition fail too, if Spark does.
            self._trials.check()
            self._trials.forget()
            raise RowsApartEndedError("read apart")
        rows = self._rows(read)
        self._left -= rows.num_rows
        self._end = rows["offset"][-1].as_py() + 1
        (batch,) = rows.combine_chunks().to_batches()
        return batch

    def _rows(self, read: Sequence[tuple[Mapping[str, Any] | None, DeadLetter]]) -> pa.Table:
        """Returns one row for each of the first records; those that are left out have nothing but their offset."""
        letters = {letter.offset: letter for _, letter in read}
        records = [one for one, letter in read if one is not None and letter.offset not in self._left_out]
        rows, end = None, read[-1][1].offset + 1
        if records:
            trial = self._trials.decoded(records, self._is_interrupted)
            rows, last = trial.rows, trial.records[-1]["offset"]
            end = last + 1 if len(trial.records) < len(records) else end
            if rows is None:
                letters[last] = replace(letters[last], cause=DECODER_FAILED, detail=trial.detail)
        decoded = set() if rows is None else set(rows["offset"].to_pylist())
        others = [letter for letter in letters.values() if letter.offset < end and letter.offset not in decoded]
        if any(letter.cause for letter in others):
            self._left = min(self._left, _MOST_AFTER)
        if rows is not None and not others:
            return rows
        schema = self._redrive.rows_schema() if rows is None else rows.schema
        tables = [pa.Table.from_pylist([*map(_row, others)], schema), *([] if rows is None else [rows])]
        return pa.concat_tables(tables).sort_by("offset")


def _row(letter: DeadLetter) -> dict[str, Any]:
    note = {
        "cause": letter.cause,
        "detail": letter.detail,
        "timestamp": letter.timestamp_ms,
        "record_key": letter.key,
        "value": letter.value,
    }
    return {"offset": letter.offset, NOTE: [note] if letter.cause else None}
