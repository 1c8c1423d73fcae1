"""The documents, and those that are generated. As a program, writes them: `make docs`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.docs import cli, folds, http, metrics, settings, topics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).parents[2]
DOCUMENTS: Sequence[str] = sorted(
    str(file.relative_to(ROOT)) for file in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md"))
)
"""The paths of all documents, generated ones too."""
PAGES: Mapping[str, Callable[[], str]] = {
    "docs/reference/cli.md": cli.page,
    "docs/reference/folds.md": folds.page,
    "docs/reference/http.md": http.page,
    "docs/reference/metrics.md": metrics.page,
    "docs/reference/settings.md": settings.page,
    "docs/reference/topics.md": topics.page,
}


def write() -> None:
    for path, page in PAGES.items():
        file, text = ROOT / path, page()
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    write()
