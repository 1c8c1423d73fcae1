"""Numbers in columns, in Avro's encodings.

Source: Avro 1.12 specification, "Binary Encoding", "Decimal".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUMBER_BYTES = 8
MOST = 1 << 62
"""Unscaled decimals below it are added here: the sum of two fits into 64 bits."""
_POWERS = np.array([1 << (8 * width - 1) for width in range(1, NUMBER_BYTES)], dtype=np.int64)
_SEVENS = np.array([1 << (7 * width) for width in range(1, 10)], dtype=np.uint64)


def varints(numbers: NDArray[np.int64]) -> pa.Array:
    """Returns numbers as Avro's ints and longs, which also precede texts as their lengths."""
    bits = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    widths = 1 + np.searchsorted(_SEVENS, bits, side="right")
    ends = widths.cumsum()
    data = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    for place in range(int(widths.max(initial=0))):
        reaches = np.flatnonzero(widths > place)
        septets = (bits[reaches] >> np.uint64(7 * place)).astype(np.uint8) & 0x7F
        data[ends[reaches] - widths[reaches] + place] = septets | ((widths[reaches] > place + 1) << 7)
    return _cut(data, ends)


def decimals(numbers: NDArray[np.int64], prefix: bytes = b"") -> pa.Array:
    """Returns unscaled numbers as Avro's decimals in bytes, each behind a prefix."""
    widths = widths_of(numbers)
    head = len(prefix) + 1
    ends = (widths + head).cumsum()
    data = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    starts = ends - widths - head
    for at, byte in enumerate(prefix):
        data[starts + at] = byte
    data[ends - widths - 1] = 2 * widths
    put(data, ends, widths, numbers)
    return _cut(data, ends)


def unscaled(amounts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the unscaled values of decimals of 128 bits, and a mask of those that are below `MOST`."""
    words = np.frombuffer(amounts.buffers()[1], dtype="<i8").reshape(-1, 2)
    words = words[amounts.offset : amounts.offset + len(amounts)]
    low, high = words[:, 0], words[:, 1]
    fits = (high == low >> 63) & (low > -MOST) & (low < MOST)
    # The value in the place of a null is undefined.
    return low, fits & amounts.is_valid().to_numpy(zero_copy_only=False) if amounts.null_count else fits


def widths_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the number of bytes that each number takes as a decimal."""
    # Avro's writer uses the bit length of the magnitude: -128 takes two bytes although one would hold it.
    return 1 + np.searchsorted(_POWERS, np.abs(numbers), side="right")


def big_endian(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    return numbers.astype(">i8").view(np.uint8).reshape(-1, NUMBER_BYTES)


def put(
    data: NDArray[np.uint8], ends: NDArray[np.int64], widths: NDArray[np.int64], numbers: NDArray[np.int64]
) -> None:
    """Writes each number into the bytes before its end."""
    columns = big_endian(numbers)
    for back in range(1, NUMBER_BYTES + 1):
        reaches = widths >= back
        data[ends[reaches] - back] = columns[reaches, NUMBER_BYTES - back]


def _cut(data: NDArray[np.uint8], ends: NDArray[np.int64]) -> pa.Array:
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
