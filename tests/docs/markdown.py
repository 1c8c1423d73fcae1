"""Tables of Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table, which ends with an empty line."""
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def bullets(items: Sequence[str]) -> str:
    """Returns a list, which ends with an empty line; empty without items."""
    return "".join(f"- {item}\n" for item in items) + "\n" * bool(items)


def section(title: str, *parts: str) -> str:
    return f"## {title}\n\n{''.join(parts)}"


def joined(parts: Iterable[str]) -> str:
    """Returns a page of sections, which ends with one line break."""
    return "".join(parts).rstrip("\n") + "\n"
