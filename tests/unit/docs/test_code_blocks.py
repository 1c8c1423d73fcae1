"""Each code block of the documents is checked, or run by a test.

| language | check |
| --- | --- |
| `sh` | commands of `balance-service` are parsed, targets of `make` exist, local URLs of `curl` are routes |
| `json`, `yaml`, `properties` | parsed |
| others, and output without a language | a test that names the document runs it, or compares it with the product |
| drawings, without a language | none |
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.docs.code_blocks import CHECKS, CodeBlock, blocks_of, check_shell
from tests.docs.pages import DOCUMENTS, PAGES

BLOCKS = [block for document in DOCUMENTS if document not in PAGES for block in blocks_of(document)]
TESTS = Path(__file__).parents[2]


@cache
def _naming(document: str) -> list[str]:
    return [
        str(file)
        for folder in ("e2e", "integration", "unit/docs")
        for file in (TESTS / folder).glob("test_*.py")
        if f'"{document}"' in (text := file.read_text(encoding="utf-8")) or f'"{Path(document).name}"' in text
    ]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_code_block_is_checked(block: CodeBlock) -> None:
    if check := CHECKS.get(block.language):
        try:
            check(block.text)
        except (ValueError, yaml.YAMLError) as error:
            pytest.fail(f"{block}: {error}")
    elif not block.is_drawing:
        assert _naming(block.document), (
            f"{block}: no test in tests/ names the document, so nothing checks the block. Write a test that runs it, "
            f"or give the block a language that is checked: {', '.join(CHECKS)}"
        )


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("balance-service lokal", "No such command 'lokal'"),
        ("balance-service local --kafka-port", "requires an argument"),
        ("A=1 .venv/bin/balance-service topics copy orders # FROM TO", "Missing argument 'TO'"),
        ("cd shop && make rum", "no target 'rum'"),
        ("curl -i 'http://127.0.0.1:5051/api/customers.getBalance?customer=alice'", "no route answers GET"),
        ("curl -X POST http://localhost:5051/metrics", "no route answers POST /metrics"),
        ("#!/bin/sh\nif [ -n 1 ]; then\n", "[Ss]yntax error"),
        ("echo 1 |\n  balanse-service produce orders < a.txt", "'balanse-service' is not known"),
    ],
)
def test_wrong_commands_are_found(command: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        check_shell(command)


@pytest.mark.parametrize(
    "command",
    [
        "export BALANCE_MODELS=activity  # it's one\nbalance-service rebuild activity",
        'TOKEN=$(openssl rand -hex 32); echo "$TOKEN"',
        "curl 'http://127.0.0.1:5052/api/models/balance/entries?limit=2' https://example.com/none",
        "balance-service produce orders --key-separator '|' < samples/orders.jsonl &",
    ],
)
def test_correct_commands_pass(command: str) -> None:
    check_shell(command)
