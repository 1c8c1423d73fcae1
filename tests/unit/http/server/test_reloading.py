"""Reloaded files: the last usable content stays in force while a file is missing or malformed."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from balance_service.errors import ConfigurationError
from balance_service.http.access.authentication import load_tokens
from balance_service.http.server.reloading import Reloaded

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = json.dumps({"tokens": [{"name": "a", "sha256": "0" * 64, "scopes": ["balance:read"]}]})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "tokens.json"
    made.write_text(TOKENS)
    return made


def test_the_content_of_a_deleted_file_stays_in_force_and_is_stale_until_the_file_is_back(file: Path) -> None:
    reloaded, aside = Reloaded([file], lambda: load_tokens(file)), file.with_suffix(".aside")
    before = reloaded.value
    file.rename(aside)

    assert not reloaded.refresh()
    assert (reloaded.value, reloaded.is_stale) == (before, True)

    # With its previous time, inode and size.
    aside.rename(file)
    assert not reloaded.refresh()
    assert not reloaded.is_stale


@pytest.mark.shows("reload")
@pytest.mark.parametrize("content", ["", "{", "[]", '{"tokens": {}}', '{"tokens": [7]}', TOKENS[:-1]])
def test_the_content_before_a_malformed_change_stays_in_force(file: Path, content: str) -> None:
    reloaded = Reloaded([file], lambda: load_tokens(file))
    before = reloaded.value
    file.write_text(content)

    assert not reloaded.refresh()
    assert (reloaded.value, reloaded.is_stale) == (before, True)

    file.write_text(TOKENS + "\n")
    assert reloaded.refresh()
    assert not reloaded.is_stale


def test_an_empty_list_of_tokens_revokes_all_tokens(file: Path) -> None:
    reloaded = Reloaded([file], lambda: load_tokens(file))
    file.write_text('{"tokens": []}')

    assert reloaded.refresh()
    assert (reloaded.value, reloaded.is_stale) == ({}, False)


def test_a_file_is_reloaded_only_if_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_text("1")
    source = Reloaded([file], lambda: int(file.read_text()))

    assert (source.refresh(), source.value) == (False, 1)
    file.write_text("22")
    assert (source.refresh(), source.value) == (True, 22)
    assert (source.refresh(), source.value) == (False, 22)


def test_a_replaced_symbolic_link_is_a_change(tmp_path: Path) -> None:
    one, two, link = tmp_path / "one", tmp_path / "two", tmp_path / "link"
    for file, text in ((one, "1"), (two, "2")):
        file.write_text(text)
        os.utime(file, (1, 1))
    link.symlink_to(one)
    source = Reloaded([link], lambda: link.read_text())

    (tmp_path / "new").symlink_to(two)
    (tmp_path / "new").replace(link)

    assert (source.refresh(), source.value) == (True, "2")


def test_the_value_stays_in_force_while_its_file_is_malformed_or_missing(tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_text("1")

    def load() -> int:
        try:
            return int(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError("no number") from error

    source = Reloaded([file], load)
    for spoil in (lambda: file.write_text("x"), file.unlink):
        spoil()
        assert (source.refresh(), source.value) == (False, 1)

    file.write_text("333")
    assert (source.refresh(), source.value) == (True, 333)
