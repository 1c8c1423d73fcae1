"""Adds amounts to many framed states at once, in columns. The fold `RunningSum` defines the result.

A state with two fields, a string (the key) and a decimal, has the frame

    header, see `avro.frames` | length of the string, 1 or 2 bytes | string | length of the number, 1 byte | number

The number is two's complement, big-endian, in `(bit length + 8) // 8` bytes (Avro specification, "Binary encoding" and
"Decimal"). If the key is the record's own, the state has no string, and the number follows the id. If the sum takes as
many bytes as the number in the state, only the number is overwritten. A key of plain text without a state gets a new
frame with the amount, and so does a number or bytes. All other states are left to the fold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from balance_service.avro.number_columns import MOST, NUMBER_BYTES, big_endian, put, unscaled, widths_of
from balance_service.model.record_keys import OURS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

# Behind a header. A frame without a key may be shorter than the eight bytes that are read from its end: what is before
# it does not count.
_LEAST_BODY, _LEAST_WITHOUT_KEY = 4, 2
# In printable ASCII characters: the length of the string then takes one byte.
_LONGEST_PLAIN_KEY = 63


class Addition:
    """Adds an update column to the state field of the same name."""

    def __init__(self, column: str, scale: int, header: bytes, *, has_key: bool = True) -> None:
        """Args:
        scale: digits of the field after the decimal point.
        header: of the frames under the current schema of the states.
        has_key: whether the states have their key, which is text.
        """
        self._column = column
        self._has_key = has_key
        self._type = pa.decimal128(38, scale)
        self._header = header

    def next_states(
        self,
        keys: pa.Array,
        updates: pa.RecordBatch,
        frames: Sequence[bytes | None],
        belong: Callable[[NDArray[np.uint8]], NDArray[np.bool_]],
    ) -> list[bytes | None]:
        """Returns the next states, framed; None in the place of a state that the fold must compute or refuse.

        Args:
            keys: binary, without nulls.
            updates: one combined row for each key.
            frames: the current states; None where a key has none.
            belong: see `begin`.
        """
        amounts = updates[self._column]
        after = self.add(frames, amounts)
        new = pa.array([row for row, frame in enumerate(frames) if frame is None], pa.int64())
        for row, frame in zip(new.to_pylist(), self.begin(keys.take(new), amounts.take(new), belong), strict=True):
            after[row] = frame
        return after

    def add(self, frames: Sequence[bytes | None], amounts: pa.Array) -> list[bytes | None]:
        """Returns the next states, framed; None in the place of a state that the fold must compute.

        Args:
            frames: the current states; None where a key has none.
            amounts: one decimal for each state; null if no event had a value.
        """
        if amounts.type != self._type:
            return [None] * len(frames)
        low, fits = unscaled(amounts)
        data, starts, ends = _joined(frames)
        rows, widths, numbers = self._read(data, np.flatnonzero(fits), starts, ends)
        totals = numbers + low[rows]
        same = (widths_of(totals) == widths) & (numbers > -MOST) & (numbers < MOST)
        rows, widths, totals = rows[same], widths[same], totals[same]
        after = _with_numbers(data, ends[rows], widths, totals)
        added: list[bytes | None] = [None] * len(frames)
        for row, start, end in zip(rows.tolist(), starts[rows].tolist(), ends[rows].tolist(), strict=True):
            added[row] = after[start:end]
        return added

    def numbers(self, frames: Sequence[bytes | None]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the unscaled numbers of states, and their width in bytes.

        The width is 0 if there is no state, and -1 if `add` would leave the state to the fold.
        """
        numbers = np.zeros(len(frames), dtype=np.int64)
        widths = np.fromiter((0 if frame is None else -1 for frame in frames), dtype=np.int64, count=len(frames))
        data, starts, ends = _joined(frames)
        rows, found, of_rows = self._read(data, np.arange(len(frames)), starts, ends)
        small = (of_rows > -MOST) & (of_rows < MOST)
        numbers[rows[small]], widths[rows[small]] = of_rows[small], found[small]
        return numbers, widths

    def summands(self, amounts: pa.Array, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the unscaled amounts, 0 for null; and a mask of those of which `count` can be added in 64 bits."""
        if amounts.type != self._type:
            return np.zeros(len(amounts), dtype=np.int64), np.zeros(len(amounts), dtype=bool)
        low, fits = unscaled(amounts)
        is_null = amounts.is_null().to_numpy(zero_copy_only=False)
        most = MOST // max(count, 1)
        fits = is_null | (fits & (low > -most) & (low < most))
        return np.where(fits & ~is_null, low, 0), fits

    def amounts(self, numbers: NDArray[np.int64]) -> pa.Array:
        """Returns unscaled numbers as decimals."""
        words = np.stack([numbers, numbers >> 63], axis=1).astype("<i8")
        return pa.Array.from_buffers(self._type, len(numbers), [None, pa.py_buffer(words.tobytes())])

    def begin(
        self, keys: pa.Array, amounts: pa.Array, belong: Callable[[NDArray[np.uint8]], NDArray[np.bool_]]
    ) -> list[bytes | None]:
        """Returns the first states of keys that have none, framed; None where the fold must compute or refuse it.

        Args:
            keys: binary, without nulls.
            amounts: one decimal for each key; null if no event had a value.
            belong: keys of equal length, one row of bytes each → mask of the keys that this partition may hold.
        """
        begun: list[bytes | None] = [None] * len(keys)
        if amounts.type != self._type or not len(keys):
            return begun
        numbers, fits = unscaled(amounts)
        widths = widths_of(numbers)
        data = np.frombuffer(keys.buffers()[2] or b"", dtype=np.uint8)
        bounds = np.frombuffer(keys.buffers()[1], dtype=np.int32)[keys.offset : keys.offset + len(keys) + 1]
        starts, lengths = bounds[:-1].astype(np.int64), np.diff(bounds)
        fits &= (lengths >= 1) & (lengths <= _LONGEST_PLAIN_KEY)
        forms = np.where(fits, lengths.astype(np.int64) * (NUMBER_BYTES + 1) + widths, 0)
        for form in np.unique(forms[fits]).tolist():
            length, width = divmod(form, NUMBER_BYTES + 1)
            rows = np.flatnonzero(forms == form)
            text = data[starts[rows][:, np.newaxis] + np.arange(length)]
            is_plain = ((text >= ord(" ")) & (text <= ord("~"))).all(axis=1)
            if not self._has_key:
                # Numbers and bytes were checked when they got the form of our stores, which begins with a zero.
                is_plain |= text[:, 0] == OURS[0]
            plain = np.flatnonzero(is_plain)
            plain = plain[belong(text[plain])]
            rows, text = rows[plain], text[plain]
            frames = self._first_frames(text, numbers[rows], width)
            written, size = frames.tobytes(), frames.shape[1]
            for at, row in enumerate(rows.tolist()):
                begun[row] = written[at * size : (at + 1) * size]
        return begun

    def _first_frames(self, text: NDArray[np.uint8], numbers: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
        """Returns one frame per row, for strings of equal length and numbers of equal width."""
        count, length = text.shape
        head = bytes([*self._header, 2 * length]) if self._has_key else bytes(self._header)
        frames = np.empty((count, len(head) + length * self._has_key + 1 + width), dtype=np.uint8)
        frames[:, : len(head)] = np.frombuffer(head, dtype=np.uint8)
        if self._has_key:
            frames[:, len(head) : -width - 1] = text
        frames[:, -width - 1] = 2 * width
        frames[:, -width:] = big_endian(numbers)[:, NUMBER_BYTES - width :]
        return frames

    def _read(
        self, data: NDArray[np.uint8], rows: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the rows of `_numbers`, the widths and the numbers."""
        least = len(self._header) + (_LEAST_BODY if self._has_key else _LEAST_WITHOUT_KEY)
        rows = rows[ends[rows] - starts[rows] >= least]
        rows, widths = self._numbers(data, rows, starts[rows], ends[rows])
        numbers = _last_bytes(data, ends[rows])
        spare = 8 * (NUMBER_BYTES - widths)
        return rows, widths, (numbers << spare) >> spare

    def _numbers(
        self, data: NDArray[np.uint8], rows: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the rows whose frames have the documented form and a number of 1 to 8 bytes, with its width."""
        known = np.ones(len(rows), dtype=bool)
        for place, byte in enumerate(self._header):
            known &= data[starts + place] == byte
        at = starts + len(self._header)
        if not self._has_key:
            return self._widths(data, rows, known, at, ends)
        # Avro lengths are zigzag varints: twice the length, seven bits per byte, least significant first.
        first, second = data[at].astype(np.int64), data[at + 1].astype(np.int64)
        is_short = first < 0x80
        length = np.where(is_short, first, (first & 0x7F) | (second << 7)) >> 1
        of_number = at + np.where(is_short, 1, 2) + length
        known &= (is_short | (second < 0x80)) & (of_number < ends)
        return self._widths(data, rows, known, of_number, ends)

    @staticmethod
    def _widths(
        data: NDArray[np.uint8],
        rows: NDArray[np.int64],
        known: NDArray[np.bool_],
        of_number: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the known rows whose number, at `of_number`, ends the frame, with its width."""
        widths = ends - of_number - 1
        known &= (widths >= 1) & (widths <= NUMBER_BYTES)
        known[known] &= data[of_number[known]] == 2 * widths[known]
        return rows[known], widths[known]


def _joined(frames: Sequence[bytes | None]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Returns all frames as one array, with the start and the end of each."""
    known = [frame or b"" for frame in frames]
    sizes = np.fromiter(map(len, known), dtype=np.int64, count=len(known))
    ends = sizes.cumsum()
    return np.frombuffer(b"".join(known), dtype=np.uint8), ends - sizes, ends


def _last_bytes(data: NDArray[np.uint8], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the 8 bytes before each end as big-endian numbers."""
    at = ends[:, np.newaxis] + np.arange(-NUMBER_BYTES, 0)
    numbers: NDArray[np.int64] = data[at].view(">i8").ravel().astype(np.int64)
    return numbers


def _with_numbers(
    data: NDArray[np.uint8], ends: NDArray[np.int64], widths: NDArray[np.int64], numbers: NDArray[np.int64]
) -> bytes:
    """Returns the data with the bytes before each end replaced by the numbers."""
    changed = data.copy()
    put(changed, ends, widths, numbers)
    return changed.tobytes()
