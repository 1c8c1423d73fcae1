"""The pages on read models: they show the files of `balance-service init`, and their code runs in that project."""

from __future__ import annotations

import importlib
import re
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

import balance_service
from balance_service.cli.main import cli
from balance_service.model.loading import load_models
from balance_service.testing import Driver, event
from tests.support.documents import ROOT, blocks, files_of

if TYPE_CHECKING:
    from pathlib import Path

TUTORIAL = "docs/tutorials/read-model.md"
GUIDE = "docs/how-to/read-models.md"
OPERATE = "docs/how-to/operate.md"
CODE = [block.text for block in blocks(GUIDE) if block.language == "python"]


def run(project: Path, code: str) -> None:
    """Import the code of the guide as a module of the project."""
    (project / "shop" / "guide.py").write_text(code, encoding="utf-8")
    importlib.import_module("shop.guide")


def test_every_file_that_a_page_shows_is_known() -> None:
    assert {*files_of(TUTORIAL)} == {"shop/events.py", "shop/orders.py"}
    assert {*files_of(GUIDE)} == {"shop/habits.py"}
    assert {*files_of("README.md")} == {"shop/spending.py"}


def test_the_tutorial_shows_code_of_the_project(project: Path) -> None:
    shown = [block.text for block in blocks(TUTORIAL) if block.language == "python"]
    names = ("shop/events.py", "shop/orders.py", "tests/test_orders.py")
    events, model, tests = ((project / name).read_text(encoding="utf-8") for name in names)

    assert shown[:-1] == [events, model]
    assert f"\n\n\n{shown[-1]}\n\n" in tests


@pytest.mark.parametrize("document", ["README.md", TUTORIAL, GUIDE, "docs/tutorials/joins.md"])
def test_a_document_shows_the_output_of_try(project: Path, document: str) -> None:
    for file, text in files_of(document).items():
        (project / file).write_text(text, encoding="utf-8")
    found = blocks(document)
    number = next(number for number, block in enumerate(found) if block.text.startswith("balance-service try"))

    done = CliRunner().invoke(cli, found[number].text.split()[1:])

    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.output.splitlines()] == found[number + 1].text.splitlines()


def test_all_code_of_the_guide_runs_in_order(project: Path) -> None:
    assert len(CODE) >= 7

    run(project, "\n\n".join(CODE))


def test_the_new_version_of_a_model_is_hosted_next_to_the_former_one(project: Path) -> None:
    (code,) = [block.text for block in blocks(OPERATE) if block.language == "python"]
    (models,) = re.findall("with both classes: `BALANCE_MODELS=(.*?)`", (ROOT / OPERATE).read_text(encoding="utf-8"))
    (project / "shop" / "orders_v2.py").write_text(code, encoding="utf-8")

    former, new = load_models(models.split(","), {})

    assert [(one.name, one.version) for one in (former, new)] == [("orders", 1), ("orders", 2)]
    placed = [event("OrderPlaced", {"customerId": "ada", "amount": Decimal(amount)}) for amount in ("9.99", "10.00")]
    for model, orders in ((former, 2), (new, 1)):
        with Driver(model()) as driver:
            driver.given(*placed)
            assert driver.view("ada")["orders"] == orders


@pytest.mark.parametrize(
    ("value", "wrong"),
    [('.then({"amount": Decimal("8.50")})', '.then({"amount": Decimal("8.51")})'), ('"OrderPlaced.orderId"', '"O.x"')],
)
def test_wrong_code_is_found(project: Path, value: str, wrong: str) -> None:
    code = "\n\n".join(CODE)
    assert value in code

    with pytest.raises((AssertionError, balance_service.ConfigurationError)):
        run(project, code.replace(value, wrong))


def test_the_pages_use_all_public_names_and_no_others() -> None:
    texts = [
        (ROOT / page).read_text(encoding="utf-8") for page in (GUIDE, TUTORIAL, "docs/how-to/json.md", "README.md")
    ]
    text = "\n".join(texts)
    imported = re.findall(r"^from (balance_service[\w.]*) import", text, re.MULTILINE)

    assert {*imported} == {"balance_service", "balance_service.testing"}
    assert [name for name in balance_service.__all__ if not re.search(rf"\b{name}\b", text) and name[0] != "_"] == []


def test_no_page_shows_a_schema_that_is_written_by_hand() -> None:
    pages = (
        GUIDE,
        TUTORIAL,
        "README.md",
        *(str(path.relative_to(ROOT)) for path in (ROOT / "docs/tutorials").glob("*")),
    )

    assert [file for page in pages for file in files_of(page) if file.endswith(".avsc")] == []
