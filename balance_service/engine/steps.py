"""Adds events to states and makes the output of each, in columns, for a running sum that emits every step.

The event-by-event way of `fold.py` defines the result. Whatever is not certain to be the same here is left to it, key
by key: sums beyond 64 bits, keys that are not plain text, states under another schema, outputs that do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from balance_service.avro.number_columns import decimals
from balance_service.errors import FatalError
from balance_service.model.made_records import Total

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from balance_service.engine.outputs import BatchEmission
    from balance_service.engine.records import Output
    from balance_service.engine.store import StateStore
    from balance_service.kafka.partitioner import Partitioning
    from balance_service.model.addition import Addition


@dataclass(frozen=True, slots=True)
class Stepped:
    """What steps result in: the states after them, row for row, their outputs, and the rows that are left.

    `deleted` are the keys whose state is gone.
    """

    keys: pa.Array
    frames: pa.Array
    created: int
    outputs: Sequence[Output]
    rest: pa.Table
    deleted: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Steps:
    """The sum of one column by key, and an output for each event with the sum after it.

    `parts` are those of the output's record: the same bytes for all events, a column of the rows, or the sum.
    """

    addition: Addition
    column: str
    header: bytes
    parts: Sequence[bytes | str | Total]

    def of(
        self,
        rows: pa.Table,
        store: StateStore,
        blocked: Mapping[bytes, int],
        partitioning: Partitioning,
        partition: int,
        emission: BatchEmission | None,
    ) -> Iterator[Stepped]:
        """Yields results, each of some keys with all of their events.

        Args:
            rows: at least one event each, in offset order: `offset`, `timestamp`, `key`, the summed column, and those
                of `parts`.
            blocked: the keys with events that must wait.
            partitioning, partition: where keys without a state must belong.
            emission: of the outputs.
        """
        if emission is None:
            raise FatalError("each step is to make an output, and there is none")
        keys, of_rows = numbered(rows["key"].combine_chunks())
        listed = keys.to_pylist()
        frames = store.get_many(listed)
        before, widths = self.addition.numbers(frames)
        amounts, fits = self.addition.summands(rows[self.column].combine_chunks(), rows.num_rows)
        totals, after = _running(of_rows, amounts, before)
        values = self._values(rows, totals)
        fits &= values.is_valid().to_numpy(zero_copy_only=False)
        fits &= emission.builder.fit(rows["key"].combine_chunks(), values)
        for part in self.parts:
            if isinstance(part, Total):
                fits &= np.abs(totals) < part.limit
        apply = widths >= 0
        apply[of_rows[~fits]] = False
        if blocked:
            apply &= [key not in blocked for key in listed]
        new = np.flatnonzero(apply & (widths == 0))
        begun = self.addition.begin(
            keys.take(new),
            self.addition.amounts(after[new]),
            lambda some: partitioning.of_rows(some) == partition,
        )
        known = {row: frame for row, frame in zip(new.tolist(), begun, strict=True) if frame is not None}
        apply[new] = [row in known for row in new.tolist()]
        numbers = decimals(after).to_pylist()
        changed = [
            known.get(row) or frames[row][: -width - 1] + numbers[row]  # type: ignore[index]
            for row, width in zip(np.flatnonzero(apply).tolist(), widths[apply].tolist(), strict=True)
        ]
        is_applied = apply[of_rows]
        sent = pa.array(is_applied & emission.are_sent(rows["offset"].to_numpy()))
        yield Stepped(
            keys=keys.filter(pa.array(apply)),
            frames=pa.array(changed, pa.binary()),
            created=len(known),
            outputs=emission.builder.build_all(
                rows.select(["offset", "timestamp", "key"]).filter(sent), values.filter(sent)
            ),
            rest=rows.filter(pa.array(~is_applied)),
        )

    def _values(self, rows: pa.Table, totals: NDArray[np.int64]) -> pa.Array:
        """Returns the framed outputs; null where a part of one is."""
        parts: list[pa.Array | pa.Scalar] = [pa.scalar(self.header, pa.binary())]
        for part in self.parts:
            match part:
                case bytes():
                    parts.append(pa.scalar(part, pa.binary()))
                case str():
                    parts.append(rows[part].combine_chunks())
                case Total(prefix=prefix):
                    parts.append(decimals(totals, prefix))
        return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))


def numbered(keys: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """Returns each key once, sorted, and the number of each row's key."""
    encoded = keys.dictionary_encode()
    # Neighbouring keys cost the store less than any other order.
    order = pc.sort_indices(encoded.dictionary)
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order.to_numpy()] = np.arange(len(order))
    return encoded.dictionary.take(order), ranks[encoded.indices.to_numpy()]


def _running(
    of_rows: NDArray[np.int64], amounts: NDArray[np.int64], before: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the sum after each row, and after the last row of each key.

    Args:
        of_rows: the number of each row's key. Each key has a row.
        before: the sum before, by key.
    """
    by_key = np.argsort(of_rows, kind="stable")
    sums = amounts[by_key].cumsum()
    counts = np.bincount(of_rows, minlength=len(before))
    lasts = counts.cumsum() - 1
    # What other keys have added until the first row of each.
    others = np.concatenate([[0], sums[lasts[:-1]]])
    totals = np.empty_like(amounts)
    totals[by_key] = sums + (before - others)[of_rows[by_key]]
    return totals, before + sums[lasts] - others
