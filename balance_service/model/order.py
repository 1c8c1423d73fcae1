"""Whether the order of a key's events matters where one of them could not be applied at once."""

from __future__ import annotations

from enum import Enum


class Order(Enum):
    """What becomes of later events of a key whose earlier one is a dead letter that may still be applied."""

    ANY = "any"
    PER_KEY = "per-key"


ANY = Order.ANY
"""They are applied; the dead letter is too, whenever it can be. For folds that come to the same in any order."""
PER_KEY = Order.PER_KEY
"""They wait as dead letters behind it, and are applied after it, in the order in which they came."""
