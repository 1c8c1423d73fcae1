"""Commands within sentences and tables are accepted by the product, as those of code blocks are."""

from __future__ import annotations

import re

import pytest

from tests.docs.code_blocks import check_shell
from tests.docs.pages import DOCUMENTS, PAGES, ROOT

_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
# With arguments: a name alone may stand for the command in a sentence.
_COMMAND = re.compile(r"(?<!`)`((?:curl|balance-service(?: [a-z-]+)+) [^`…][^`]*)`(?!`)")
_HOSTS = re.compile(r"\b(INSTANCE|PEER)\b")
_NUMBERS = re.compile(r"\b[A-Z]\b")


def commands_of(text: str) -> list[str]:
    """The commands outside of code blocks, where `INSTANCE` and `PEER` are hosts and a single capital is a number."""
    found = _COMMAND.findall(_BLOCK.sub("", text))
    return [_NUMBERS.sub("1", _HOSTS.sub("127.0.0.1:5051", command)).replace("\n", " ") for command in found]


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if document not in PAGES])
def test_commands_in_sentences_are_accepted(document: str) -> None:
    for command in commands_of((ROOT / document).read_text(encoding="utf-8")):
        try:
            check_shell(command)
        except ValueError as error:
            pytest.fail(f"{document}: {error}")


def test_the_runbook_has_commands() -> None:
    assert len(commands_of((ROOT / "docs/runbook.md").read_text(encoding="utf-8"))) > 20


@pytest.mark.parametrize(
    "wrong",
    ["`curl http://INSTANCE/health/redy`", "`balance-service dead-letters list --state parked`"],
)
def test_a_wrong_command_in_a_sentence_is_found(wrong: str) -> None:
    (command,) = commands_of(f"See {wrong}.")
    with pytest.raises(ValueError, match=r"no route|No such option"):
        check_shell(command)
