"""The guide to read models: its files are the project's, and its code runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/read-models.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("language", "file"), [("json", "schemas/Activity.avsc"), ("python", "balance_service/read_models/activity.py")]
)
def test_the_example_is_the_file_whole(language: str, file: str) -> None:
    assert blocks(language)[0] == (ROOT / file).read_text(encoding="utf-8")


def test_all_of_its_code_runs_from_the_top() -> None:
    _, *code = blocks("python")
    assert len(code) > 4

    namespace = {"__name__": "guide"}
    for block in code:
        exec(textwrap.dedent(block), namespace)
