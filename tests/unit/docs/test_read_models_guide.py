"""The guide to read models: its files are those of `balance-service init`, and its code runs in that project."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from click.testing import CliRunner

import balance_service
from balance_service.cli.init import write_project
from balance_service.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

GUIDE = (Path(__file__).parents[3] / "docs/read-models.md").read_text(encoding="utf-8")
OF_THE_PROJECT = ("shop/orders.py", "tests/test_orders.py")
ITS_OWN_SCHEMAS = ("shop/schemas/Visits.avsc", "shop/schemas/Shipped.avsc", "shop/schemas/Notice.avsc")


class Block(NamedTuple):
    """A code block of the guide; `file` is the path at the end of the line above it, or empty."""

    file: str
    language: str
    text: str


BLOCKS = [
    Block(*found)
    for found in re.findall(r"(?:`([\w./]+)`:\n\n)?^```(\w*)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
]
FILE_TEXTS = {block.file: block.text for block in BLOCKS if block.file}
CODE = [block.text for block in BLOCKS if block.language == "python" and not block.file]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project that the guide creates, with the schemas of the guide, as the working directory."""
    write_project(tmp_path / "shop")
    for file in ITS_OWN_SCHEMAS:
        (tmp_path / "shop" / file).write_text(FILE_TEXTS[file], encoding="utf-8")
    monkeypatch.chdir(tmp_path / "shop")
    monkeypatch.syspath_prepend(tmp_path / "shop")
    yield tmp_path / "shop"
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def run(project: Path, code: str) -> None:
    """Import the code of the guide as a module of the project."""
    (project / "shop" / "guide.py").write_text(code, encoding="utf-8")
    importlib.import_module("shop.guide")


def test_every_file_of_the_guide_is_known() -> None:
    assert {*FILE_TEXTS} == {*OF_THE_PROJECT, *ITS_OWN_SCHEMAS}


@pytest.mark.parametrize("file", OF_THE_PROJECT)
def test_the_guide_shows_complete_files_of_the_project(project: Path, file: str) -> None:
    assert FILE_TEXTS[file] == (project / file).read_text(encoding="utf-8")


def test_the_guide_names_every_file_of_the_project(tmp_path: Path) -> None:
    files = write_project(tmp_path / "shop")

    assert [file for file in files if f"`{file.relative_to(tmp_path / 'shop')}`" not in GUIDE] == []


@pytest.mark.usefixtures("project")
def test_the_guide_shows_the_output_of_try() -> None:
    done = CliRunner().invoke(cli, ["try", "shop.orders:Orders", "--events", "samples/orders.jsonl"])

    assert done.exit_code == 0, done.output
    shown = next(block.text for block in BLOCKS if block.text.startswith("orders: 4 keys"))
    assert [line.rstrip() for line in done.output.splitlines()] == shown.splitlines()


def test_all_code_of_the_guide_runs_in_order(project: Path) -> None:
    assert len(CODE) > 9

    run(project, "\n\n".join(CODE))


@pytest.mark.parametrize(
    ("value", "wrong"),
    [('.then({"amount": Decimal("8.50")})', '.then({"amount": Decimal("8.51")})'), ('"OrderPlaced.placedAt"', '"O.x"')],
)
def test_wrong_code_is_found(project: Path, value: str, wrong: str) -> None:
    code = "\n\n".join(CODE)
    assert value in code

    with pytest.raises((AssertionError, balance_service.ConfigurationError)):
        run(project, code.replace(value, wrong))


def test_the_guide_uses_all_public_names_and_no_others() -> None:
    imported = re.findall(
        r"^from (balance_service[\w.]*) import", "\n".join(block.text for block in BLOCKS), re.MULTILINE
    )

    assert {*imported} == {"balance_service", "balance_service.testing"}
    assert [name for name in balance_service.__all__ if not re.search(rf"\b{name}\b", GUIDE) and name[0] != "_"] == []


def test_the_schemas_of_the_guide_are_named_like_their_files() -> None:
    for file in ITS_OWN_SCHEMAS:
        assert json.loads(FILE_TEXTS[file])["name"] == Path(file).stem
