"""Which marks of peers were used, so that none is used twice.

Each asker counts its marks. They arrive out of order, over many connections, so that a window over each asker's count
says which of the latest have been here; what is older than the window is refused.
Source: RFC 6479, "IPsec Anti-Replay Algorithm without Bit Shifting".
"""

from __future__ import annotations

_BYTES = 1 << 14
WINDOW = 8 * (_BYTES - 1)
"""So many marks may overtake one: six seconds' worth at 20,000 a second."""
MOST_ASKERS = 1_000
"""Runs of instances, within ten minutes. Only those that know the secret count."""
# Far longer than a mark is good for, should a clock be set back meanwhile.
_FORGET_SECONDS = 600.0


class _Window:
    """The latest marks of one asker: a bit for each, in a ring of bytes."""

    __slots__ = ("_highest", "_seen", "used_at")

    def __init__(self) -> None:
        self._highest = 0
        self._seen = bytearray(_BYTES)
        self.used_at = 0.0

    def take(self, number: int) -> bool:
        byte, highest = number >> 3, self._highest >> 3
        if byte <= highest - _BYTES:
            return False
        if byte > highest:
            # What the ring has there is of marks that are now too old.
            if byte - highest >= _BYTES:
                self._seen = bytearray(_BYTES)
            else:
                for fresh in range(highest + 1, byte + 1):
                    self._seen[fresh % _BYTES] = 0
        at, bit = byte % _BYTES, 1 << (number & 7)
        if self._seen[at] & bit:
            return False
        self._seen[at] |= bit
        self._highest = max(self._highest, number)
        return True


class UsedMarks:
    """The marks that one instance has accepted; at most 16 MiB. Belongs to the event loop."""

    def __init__(self) -> None:
        self._askers: dict[str, _Window] = {}

    def take(self, run: str, number: int, now: float) -> bool:
        """Use a mark, which must be of now: whether it was not used before.

        Args:
            run: which run of which instance has made the mark.
            number: how many marks that run had made.
        """
        window = self._askers.get(run)
        if window is None:
            self._askers = {r: w for r, w in self._askers.items() if now - w.used_at < _FORGET_SECONDS}
            if len(self._askers) >= MOST_ASKERS:
                return False
            window = self._askers[run] = _Window()
        window.used_at = max(window.used_at, now)
        return window.take(number)
