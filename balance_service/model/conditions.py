"""Which events count, as values: each is a column on Spark (`events.updates`), and a function of a row here."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.avro.types import simple_name, without_null

if TYPE_CHECKING:
    from collections.abc import Mapping

UPPER, LOWER = string.ascii_uppercase, string.ascii_lowercase
"""The letters whose case may be ignored. Beyond ASCII, what is the same letter depends on who is asked."""
_LOWERED = str.maketrans(UPPER, LOWER)
_TYPES = {str: ("string", "enum"), bool: ("boolean",), int: ("int", "long")}


@dataclass(frozen=True, slots=True)
class Same:
    """Holds for an event whose column has this value; not for one whose column is null."""

    column: str
    value: str | int | bool
    ignoring_case: bool

    def holds(self, event: Mapping[str, Any]) -> bool:
        """Whether it holds for an event's fields."""
        found = event[self.column]
        return found is not None and self.lowered(found) == self.lowered(self.value)

    def lowered(self, value: Any) -> Any:
        """A value as it is compared."""
        return value.translate(_LOWERED) if self.ignoring_case else value

    def misfit(self, kind: Any) -> str:
        """Why it cannot be asked of a column of an Avro type; empty if it can."""
        name, kinds = simple_name(without_null(kind)[0]), _TYPES[type(self.value)]
        return "" if name in kinds else f"'{self.column}' is of type {name}, and {self.value!r} is one of {kinds}"


def same(column: str, value: str | int | bool, *, ignoring_case: bool = False) -> Same:
    """The condition that a column has a value.

    Args:
        ignoring_case: of ASCII letters; for text.
    """
    if ignoring_case and not isinstance(value, str):
        raise TypeError(f"the case of {value!r} cannot be ignored: it is no text")
    return Same(column, value, ignoring_case)
