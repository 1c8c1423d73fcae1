"""Each promise of docs/guarantees.md is shown by tests, and the document names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.promises import DOCUMENT, completed, promised, shown

if TYPE_CHECKING:
    from pathlib import Path

TEXT = DOCUMENT.read_text(encoding="utf-8")
SHOWN = shown()


def test_each_promise_is_named_once_and_shown_by_a_test() -> None:
    names = promised(TEXT)

    assert len(names) == TEXT.count("\n| `") == len(set(names))
    assert [name for name in names if name not in SHOWN] == []


def test_each_marker_names_a_promise_of_the_document() -> None:
    unknown = {promise: tests for promise, tests in SHOWN.items() if promise not in promised(TEXT)}

    assert unknown == {}


def test_the_document_names_the_present_tests() -> None:
    assert completed(TEXT, SHOWN) == TEXT, "run `make docs`"


def test_a_marker_is_found_on_any_test_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "unit").mkdir()
    file = tmp_path / "unit/test_a.py"
    file.write_text(
        "class TestA:\n"
        "    @pytest.mark.shows('one', 'two')\n"
        "    @pytest.mark.timeout(3)\n"
        "    async def test_b(self) -> None: ...\n"
        "@pytest.mark.shows('two')\n"
        "def test_c() -> None: ...\n"
    )

    tests = shown(tmp_path)

    b, c = "unit/test_a.py::test_b", "unit/test_a.py::test_c"
    assert tests == {"one": {b}, "two": {b, c}}
    table = "| `one` | First. | | |\n| `two` | Second. | 3 s | old |\n| `three` | Third. | | old |"
    assert (
        completed(table, tests) == "| `one` | First. | | a |\n| `two` | Second. | 3 s | a |\n| `three` | Third. | |  |"
    )
    file.write_text("@pytest.mark.shows('one')\ndef helper() -> None: ...\n")
    with pytest.raises(ValueError, match="no decorator of a test"):
        shown(tmp_path)
