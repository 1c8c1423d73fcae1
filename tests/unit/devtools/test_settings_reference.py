"""`docs/settings.md` is generated from the fields of the settings, and is current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from balance_service.devtools.settings_reference import reference
from balance_service.settings import Settings
from balance_service.settings.settings import variable_of

ROOT = Path(__file__).resolve().parents[3]
# Variables of docker-compose.yml.
_OF_COMPOSE = {"BALANCE_HOST_ADDRESS", "BALANCE_HOST_PORTS", "BALANCE_IMAGE", "BALANCE_MEMORY"}


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == reference(), "run `make settings-docs`"


def test_every_setting_has_a_row_with_its_meaning() -> None:
    rows = {row.split(" | ")[0]: row for row in reference().splitlines() if row.startswith("| `BALANCE_")}

    assert rows.keys() == {f"| `{variable_of(name)}`" for name in Settings.model_fields}
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    "row",
    [
        "| `BALANCE_SESSION_TIMEOUT_MS` | integer from 3000 to 300000 | `10000` |",
        "| `BALANCE_READ_TIMEOUT` | number above 0 to 300 | `5.0` |",
        "| `BALANCE_CREATE_TOPICS` | `true` or `false` | `true` |",
        "| `BALANCE_PEER_SECRET` | secret of at least 16 characters | none |",
        "| `BALANCE_PEER_ALLOW_LIST` | list | none |",
        "| `BALANCE_KAFKA_CONFIG` | JSON object | `{}` |",
        "| `BALANCE_TLS_CERTIFICATE` | path | none |",
    ],
)
def test_a_row_has_the_values_and_the_default(row: str) -> None:
    assert row in reference()


@pytest.mark.parametrize("page", ["README.md", "docs/http-security.md", "docs/security.md", "docs/deploy.md"])
def test_other_pages_name_only_existing_settings(page: str) -> None:
    named = set(re.findall(r"BALANCE_[A-Z_]+[A-Z]", (ROOT / page).read_text()))

    assert named - {variable_of(name) for name in Settings.model_fields} <= _OF_COMPOSE
