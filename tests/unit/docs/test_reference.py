"""The reference pages are generated, and current."""

from __future__ import annotations

import re

import click
import pytest

from balance_service.cli.main import cli
from balance_service.model.standard_fold import StandardFold
from balance_service.settings import Settings
from balance_service.settings.settings import variable_of
from tests.docs.pages import DOCUMENTS, PAGES, ROOT
from tests.support.shipped import ROUTES

# Variables of docker-compose.yml.
_OF_COMPOSE = {"BALANCE_HOST_ADDRESS", "BALANCE_HOST_PORTS", "BALANCE_IMAGE", "BALANCE_MEMORY"}
# No setting of a user.
_OF_TESTS = {"BALANCE_FAILPOINTS"}
_MOST_BYTES = 54_500


def page(name: str) -> str:
    return PAGES[f"docs/reference/{name}.md"]()


@pytest.mark.parametrize("path", sorted(PAGES))
def test_a_page_is_current(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path](), "run `make docs`, and commit the result"


def test_no_page_of_the_reference_is_written_by_hand() -> None:
    assert {str(file.relative_to(ROOT)) for file in (ROOT / "docs/reference").iterdir()} <= PAGES.keys()


def test_every_setting_has_a_row_with_its_meaning() -> None:
    rows = {row.split(" | ")[0]: row for row in page("settings").splitlines() if row.startswith("| `BALANCE_")}

    assert rows.keys() == {f"| `{variable_of(name)}`" for name in Settings.model_fields}
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    "row",
    [
        "| `BALANCE_SESSION_TIMEOUT_MS` | integer from 3000 to 300000 | `10000` |",
        "| `BALANCE_READ_TIMEOUT` | number above 0 to 300 | `5.0` |",
        "| `BALANCE_CREATE_TOPICS` | `true`, `false` | `true` |",
        "| `BALANCE_PEER_SECRET` | secret of at least 16 characters | none |",
        "| `BALANCE_PEER_ALLOW_LIST` | list | none |",
        "| `BALANCE_KAFKA_CONFIG` | JSON object | `{}` |",
        "| `BALANCE_TLS_CERTIFICATE` | path | none |",
    ],
)
def test_a_row_of_a_setting_has_the_values_and_the_default(row: str) -> None:
    assert row in page("settings")


@pytest.mark.parametrize("path", DOCUMENTS)
def test_documents_name_only_existing_settings(path: str) -> None:
    named = set(re.findall(r"BALANCE_[A-Z_]+[A-Z]", (ROOT / path).read_text(encoding="utf-8")))

    assert named - {variable_of(name) for name in Settings.model_fields} <= _OF_COMPOSE | _OF_TESTS


def test_every_command_has_a_section_with_its_options() -> None:
    sections = re.split(r"^## ", page("cli"), flags=re.MULTILINE)

    def check(group: click.Group, path: str) -> None:
        for name in group.list_commands(click.Context(group)):
            command = group.get_command(click.Context(group), name)
            assert command is not None
            if isinstance(command, click.Group):
                check(command, f"{path}{name} ")
                if not command.invoke_without_command:
                    continue
            section, *_ = (one for one in sections if re.match(rf"`{path}{name}[ `]", one))
            for option in command.params:
                assert not isinstance(option, click.Option) or f"`{option.opts[0]}" in section, option

    check(cli, "")


def test_every_route_has_a_row() -> None:
    rows = set(re.findall(r"^\| `(\w+ [^`?]+)", page("http"), re.MULTILINE))

    assert rows == {f"{route.method} {route.path}" for route in ROUTES}


def test_every_standard_fold_has_a_row() -> None:
    def kinds(of: type[StandardFold]) -> set[str]:
        return {
            name
            for kind in of.__subclasses__()
            if kind.__module__.startswith("balance_service.")
            for name in (kind.__name__, *kinds(kind))
        }

    assert set(re.findall(r"^\| `(\w+)\(", page("folds"), re.MULTILINE)) == kinds(StandardFold)


@pytest.mark.parametrize(
    "row",
    [
        "| `APPLICATION-STAGE-changelog` | `cleanup.policy=compact`, `min.compaction.lag.ms=3600000`,",
        "| `SOURCE-dead-letters` | *forever* |",
        "| dead letters | `dead-letter-cause` |",
    ],
)
def test_a_row_of_a_topic_has_its_configuration(row: str) -> None:
    assert row in page("topics")


def test_alerts_are_named_with_their_metrics() -> None:
    (row,) = (row for row in page("metrics").splitlines() if row.startswith("| `balance_ready` |"))

    assert row == "| `balance_ready` |  | 1 while /health/ready returns 200. | BalanceNotReady |"


def test_the_reference_is_short() -> None:
    assert sum(len(make().encode()) for make in PAGES.values()) <= _MOST_BYTES
