"""The version of this package, and its data files."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

_PACKAGE = Path(__file__).parents[1]


def resource(relative: str) -> Path:
    """Path of a shipped file, such as `schemas/FundsAdded.avsc`: inside an installed package, or in the checkout."""
    packaged = _PACKAGE / "_resources" / relative
    return packaged if packaged.exists() else _PACKAGE.parent / relative
