"""What a task of a batch job does with one share of a partition's keys, in a Python worker: it folds their records.

It is the fold of the service: batch after batch in offset order, into a store on the worker's disk, whose records are
written as files in the end.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa

from balance_service.bulk.folder import RECORDS, stream_time_of
from balance_service.bulk.manifest import RecordFile
from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.commit import fold
from balance_service.engine.dead_letter import OWN_CODE_FAILED, Status
from balance_service.engine.idempotency import IdempotencyKeys
from balance_service.engine.records import POSITION_KEY, DeadLetter, Position
from balance_service.engine.store import StateStore
from balance_service.engine.transform_failures import TransformFailures
from balance_service.errors import BalanceServiceError, FatalError
from balance_service.observability.logs import quiet_logging
from balance_service.process.failpoints import part_size
from balance_service.spark.batch_plan import telling
from balance_service.spark.batch_split import in_batches, rows_in, with_time_before
from balance_service.spark.combine import PartitionRows, end_of
from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from balance_service.bulk.folder import Split
    from balance_service.engine.batch import KeyedUpdate
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.dead_letters import LetterChanges
    from balance_service.spark.batch_plan import Plan

FOLDED = "share int, done string"
"""The columns of what is folded: a share, and a `FoldedShare` as JSON."""
_FOLDED = pa.schema({"share": pa.int32(), "done": pa.string()})
# Most of what a batch costs is for each key. Events that are folded one by one are Python objects, which take many
# times as much memory as columns.
_ROWS, _ROWS_SINGLY = 65_536, 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedShare(Struct):
    """The result of one share.

    Attributes:
        rows: how many records it folded.
        keys, letters: as in `engine.records.Position`.
        replayed: the offsets of dead letters that were applied before, and now again in their turn.
        own_code_failed: the first offsets at which the read model's own code has failed, in order.
        splits, stream_time_ms: how many splits of its partition it has found, and the greatest time in them.
    """

    rows: int
    keys: int
    letters: Mapping[str, int]
    replayed: tuple[int, ...]
    own_code_failed: tuple[int, ...]
    splits: int
    stream_time_ms: int
    files: tuple[RecordFile, ...]


def folded(plan: Plan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the result of a share.

    Args:
        batches: what `dealt` yields, of one share, by the first offset; and one without any rows before all others.
    """
    quiet_logging()
    try:
        plan.require_same_code()
        rows = chain.from_iterable(zip(*(batch[name] for name in batch.schema.names), strict=True) for batch in batches)
        first = next(rows, None)
        if first is None:
            return
        number = first[0].as_py()
        parts = ((of.as_py(), at.as_py(), content.as_buffer()) for of, at, content in rows)
        with tempfile.TemporaryDirectory(prefix="balance-share-") as path:
            share = _Share(plan, number, Path(path))
            done = json.dumps(share.folded(parts).record())
        yield pa.RecordBatch.from_pylist([{"share": number, "done": done}], _FOLDED)
    except BalanceServiceError as error:
        raise telling(error) from error


class _Share:
    def __init__(self, plan: Plan, number: int, path: Path) -> None:
        self._plan = plan
        self._number = number
        self._partition, self._share = divmod(number, plan.shares)
        self._processor = processor = plan.processor()
        # `dealt` has looked at all of the partition's records.
        letters = replace(processor.letters, failures=TransformFailures(is_on=False))
        self._processor = replace(processor, letters=letters)
        self._store = StateStore(path / "store", processor.position_codec)
        self._rows = 0
        self._replayed: list[int] = []
        self._failed: list[int] = []

    @cached_property
    def _splits(self) -> Sequence[Split]:
        return self._plan.folder.splits(self._partition)

    def folded(self, parts: Iterable[tuple[int, int, Any]]) -> FoldedShare:
        plan, store, partition = self._plan, self._store, self._partition
        try:
            self._begin()
            is_singly = plan.read_model.combine is None and self._processor.steps is None
            for rows in in_batches(self._in_order(parts), part_size(_ROWS_SINGLY if is_singly else _ROWS)):
                self._rows += rows.num_rows
                self._fold(rows)
            stream_time_ms = stream_time_of(self._splits)
            self._expire(stream_time_ms)
            name = f"{self._share:05}-{uuid4().hex}"
            files = plan.folder.write(partition, name, map(_table, store.pages()))
            position = self._position
            return FoldedShare(
                rows=self._rows,
                keys=position.keys,
                letters=position.letters,
                replayed=tuple(self._replayed),
                own_code_failed=tuple(self._failed),
                splits=len(self._splits),
                stream_time_ms=stream_time_ms,
                files=tuple(files),
            )
        finally:
            store.close()

    def _in_order(self, parts: Iterable[tuple[int, int, Any]]) -> Iterator[pa.Table]:
        """Yields the rows of each part, with the stream time of earlier splits counted in."""
        splits, last = self._splits, -1
        firsts = [split.first for split in splits]
        before = [*accumulate((split.stream_time_ms for split in splits), max, initial=-1)]
        for number, first, content in parts:
            of = bisect_right(firsts, first) - 1
            if number != self._number or first <= last or of < 0 or first > splits[of].last:
                raise FatalError(f"share {self._number} has rows of share {number}, from offset {first} on")
            rows = with_time_before(rows_in(content), before[of])
            last = rows["offset"][-1].as_py()
            yield rows

    @property
    def _position(self) -> Position:
        found = self._store.position
        if found is None:
            raise FatalError("the store of a share has no position")
        return found

    def _begin(self) -> None:
        """Writes the position, the dead letters that are taken over, and those of records at which Spark fails."""
        plan, partition = self._plan, self._partition
        start = Position(
            plan.begins[partition],
            0,
            plan.source_topic_id,
            source=f"{plan.stage.source}:{partition}",
            partitioner=plan.partitioner,
            owner=plan.stage.mark,
        )
        self._write((), start)
        letters = plan.letters.get(partition, {})
        kept = {at: one for at, one in letters.items() if one.status is not Status.APPLIED}
        ours = [one for one in kept.values() if self._is_ours(one.key)]
        self._take_over(ours)
        # Most have a letter already, of the generation that serves.
        found = sorted(plan.failing.get(partition, {}).items())
        failing = [one for at, one in found if at not in kept and self._is_ours(one.key)]
        if failing:
            self._apply(PartitionUpdates(start.offset, dead_letters=failing))

    def _is_ours(self, record_key: bytes | None) -> bool:
        return self._plan.share_of(record_key) == self._share

    def _take_over(self, letters: Sequence[Letter]) -> None:
        if not letters:
            return
        changes: LetterChanges = self._processor.letters.carry_over(letters)
        counts = Counter(self._position.letters) + Counter(changes.counted)
        self._write(changes.records, replace(self._position, letters=dict(counts)))

    def _fold(self, rows: pa.Table) -> None:
        if applied := self._plan.applied(self._partition):
            again = sorted(applied.keys() & rows["offset"].to_pylist())
            self._replayed += again
            self._take_over([applied[at] for at in again])
        of = PartitionRows(rows)
        updates = of.folded_by(self._plan.read_model)
        self._apply(replace(updates, end=end_of(rows), singles=self._singles(of)))

    def _singles(self, rows: PartitionRows) -> Callable[[Sequence[bytes]], Sequence[KeyedUpdate]]:
        sent = self._plan.read_model.key_type.sent

        def singles(keys: Sequence[bytes]) -> Sequence[KeyedUpdate]:
            found = rows.updates_of(keys)
            pairs = zip(found["offset"].to_pylist(), found["key"].to_pylist(), strict=True)
            # Its time and its value are in no record of changelog or store. `single_updates` has those that count.
            records = {at: DeadLetter(at, -1, sent(key), None, "") for at, key in pairs}
            once = {one.offset: one.record for one in rows.single_updates(found) if one.record is not None}
            return rows.single_updates(found, records | once)

        return singles

    def _apply(self, updates: PartitionUpdates) -> None:
        left_out = self._plan.left_out(self._partition)
        batch = TaskBatch(self._position.offset, updates, left_out=left_out, is_silent=True)
        found = fold(batch, self._partition, self._processor, self._store)
        if found is None:
            raise FatalError("a batch without retries was not folded")
        self._failed += [one.offset for one in found.failed if one.cause == OWN_CODE_FAILED]
        self._write(found.records(), found.position)

    def _expire(self, stream_time_ms: int) -> None:
        """Removes the markers that have expired at the partition's end."""
        processor = self._processor
        while True:
            keys = IdempotencyKeys.of(
                (),
                self._store,
                processor.marker_codec,
                processor.idempotency_window_ms,
                processor.read_model.repeated,
                stream_time_ms,
            )
            if not (records := keys.records(self._store)):
                return
            self._write(records, self._position)

    def _write(self, records: Iterable[tuple[bytes, bytes | None]], position: Position) -> None:
        frame = self._processor.position_codec.encode(position.record())
        self._store.write(chain(records, [(POSITION_KEY, frame)]), 0)


def _table(page: Sequence[tuple[bytes, bytes]]) -> pa.Table:
    keys, values = zip(*page, strict=True) if page else ((), ())
    return pa.table([pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=RECORDS)
