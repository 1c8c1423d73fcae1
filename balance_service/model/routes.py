"""Where a read model is asked, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Routes:
    """The path at which a read model answers for one key, beside `/api/models`; `key` is the parameter that names it.

    `noun` is what the key is called in answers.
    """

    path: str
    key: str
    noun: str = "key"


@dataclass(frozen=True, slots=True)
class Collection:
    """The path below which a read model answers as a collection: all of it, one key, a range of keys, how many.

    `key` is the parameter that names a key, `noun` what it is called in answers.
    """

    path: str
    key: str
    noun: str
