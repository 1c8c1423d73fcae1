"""The chapters on the shipped systems show the flowcharts of their declarations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from balance_service.cli.main import cli
from balance_service.devtools.local.samples import SAMPLES
from balance_service.read_models import SHIPPED

SYSTEMS = (Path(__file__).parents[3] / "docs" / "systems.md").read_text(encoding="utf-8")
# These models are in the README.
MODELS = sorted((SAMPLES.keys() & SHIPPED.keys()) - {"balance", "activity"})


def pictures() -> dict[str, str]:
    """Model → its flowchart in the document."""
    return dict(re.findall(r"^<!-- flow (\S+) -->\n(.*?)^<!-- end of flow -->", SYSTEMS, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("model", MODELS)
def test_a_chapter_shows_the_flowchart_of_its_model(model: str) -> None:
    drawn = CliRunner().invoke(cli, ["flow", model])

    assert drawn.exit_code == 0
    # If it differs, paste the output of `balance-service flow MODEL`.
    assert pictures().get(model) == f"```mermaid\n{drawn.output.rstrip()}\n```\n"


def test_the_links_to_declarations_and_schemas_are_valid() -> None:
    for model in MODELS:
        (chapter,) = re.findall(rf"^## `{model}`$(.*?)(?=^## |\Z)", SYSTEMS, re.DOTALL | re.MULTILINE)
        links = re.findall(r"\]\(\.\./([^)]+)\)", chapter)
        assert f"balance_service/read_models/{model}.py" in links
        assert [link for link in links if not (Path(__file__).parents[3] / link).is_file()] == []
