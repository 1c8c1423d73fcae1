"""Files that ship with the project but are not Python: schemas and the jar list."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def resource(relative: str) -> Path:
    """Path of a shipped file, e.g. `schemas/FundsAdded.avsc`.

    In a wheel these lie inside the package, in a checkout beside it.
    """
    packaged = _PACKAGE / "_resources" / relative
    return packaged if packaged.exists() else _PACKAGE.parent / relative
