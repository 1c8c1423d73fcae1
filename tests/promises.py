"""The promises of docs/guarantees.md and the tests that show them: `python -m tests.promises` fills in the tests.

A test names the promises that it shows: `@pytest.mark.shows("exactly-once")`. Each row of the document's tables has a
promise of that name; its last cell lists the files of the tests, without `test_` and `.py`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import TypeGuard

DOCUMENT = Path(__file__).parents[1] / "docs/guarantees.md"
_TESTS = Path(__file__).parent
_MARKER = "pytest.mark.shows"
_ROW = re.compile(r"^(\| `([^`]+)` \|[^|]*\|[^|]*\|).*\|$", re.MULTILINE)


def promised(text: str) -> list[str]:
    """The names of the promises of the document, in their order."""
    return [name for _, name in _ROW.findall(text)]


def shown(folder: Path = _TESTS) -> dict[str, set[str]]:
    """The tests that show each promise, as `FILE::FUNCTION`; reads the tests' source and imports nothing."""
    tests = defaultdict[str, set[str]](set)
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if _MARKER not in text or path == Path(__file__):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        markers = [node for node in nodes if _is_marker(node)]
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for marker in filter(_is_marker, node.decorator_list):
                    markers.remove(marker)
                    for promise in map(ast.literal_eval, marker.args):
                        tests[promise].add(f"{path.relative_to(folder)}::{node.name}")
        if markers or not path.name.startswith("test_"):
            raise ValueError(f"{path} has a marker `shows` that is no decorator of a test")
    return dict(tests)


def completed(text: str, tests: dict[str, set[str]]) -> str:
    """The document with the tests of each promise in its row."""

    def row(match: re.Match[str]) -> str:
        files = sorted({Path(test.partition("::")[0]).stem.removeprefix("test_") for test in tests.get(match[2], ())})
        return f"{match[1]} {', '.join(files)} |"

    return _ROW.sub(row, text)


def _is_marker(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == _MARKER


if __name__ == "__main__":
    DOCUMENT.write_text(completed(DOCUMENT.read_text(encoding="utf-8"), shown()), encoding="utf-8")
