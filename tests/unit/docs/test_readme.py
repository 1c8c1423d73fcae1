"""The README names every command, and every route that clients call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from balance_service.cli.main import cli
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterator

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")


def commands(group: click.Group, path: str = "") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}"


def test_every_command_is_in_the_table() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", README, re.MULTILINE)

    assert [name for name in commands(cli) if not any(row == name or row.startswith(f"{name} ") for row in rows)] == []


def test_every_route_is_in_the_table() -> None:
    # Upper-case words are parameters; a row may name several routes and the method once.
    told = set()
    for row in re.findall(r"^\| (`(?:GET|POST) .*?) \|", README, re.MULTILINE):
        method = ""
        for text in re.findall(r"`((?:GET |POST )?/[^`?]*)", row):
            method, path = text.split() if " " in text else (method, text)
            told.add((method, re.sub(r"/[A-Z]+\b", "/{}", path)))

    assert told == {(route.method, re.sub(r"\{\w+\}", "{}", route.path)) for route in ROUTES}
