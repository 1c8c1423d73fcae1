"""What becomes of dead letters: which are due, and what one commit makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from balance_service.engine.letters.letter import Status

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from balance_service.engine.letters.letter import Letter
    from balance_service.engine.records import DeadLetter, Record


@dataclass(frozen=True, slots=True)
class Due:
    """Letters whose time has come, in the order of their records: to be tried again, or to be forgotten."""

    again: Sequence[Letter] = ()
    forgotten: Sequence[Letter] = ()


@dataclass(slots=True)
class Changes:
    """What a commit makes of letters: `records` for the changelog and the store, `counts` for the position."""

    counts: Counter[str]
    records: list[Record] = field(default_factory=list)
    fresh: list[DeadLetter] = field(default_factory=list)
    """Records that could not be applied and had no letter before."""
    after: dict[int, Letter] = field(default_factory=dict)
    """The letters as they are now, by offset."""
    freed: set[bytes] = field(default_factory=set)
    """Keys that a letter held and holds no more."""

    @property
    def counted(self) -> dict[str, int]:
        """How many letters there are, by cause and status."""
        return {name: count for name, count in self.counts.items() if count}

    @property
    def applied(self) -> int:
        """How many letters are closed because their records are applied."""
        return sum(letter.status is Status.APPLIED for letter in self.after.values())
