"""The formats that others rely on are as they are committed, so that a change of one is seen."""

from __future__ import annotations

import re

import pytest

from tests.docs import formats
from tests.docs.formats import LISTINGS, kept, listing
from tests.support.former import FORMER_RELEASE


@pytest.mark.parametrize("name", LISTINGS)
def test_a_format_is_as_it_is_committed(name: str) -> None:
    before, now = kept(name), listing(name)

    removed = [f"- {line}" for line in before if line not in now]
    added = [f"+ {line}" for line in now if line not in before]
    assert not removed + added, (
        "\n".join([f"the {name} of others change:", *removed, *added])
        + "\na removed line breaks those who rely on it, and a rolling upgrade if it is of topics or records; if the "
        "change is meant, run `python -m tests.docs.formats` and tell it in CHANGELOG.md"
    )


def test_a_changed_field_of_a_record_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listing("records")
    changed = [line.replace("epoch: long", "epoch: int") for line in before]
    monkeypatch.setattr(formats, "LISTINGS", {"records": lambda: iter(changed)})

    assert listing("records") != before
    assert [line for line in listing("records") if line not in before]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("settings", r"BALANCE_SESSION_TIMEOUT_MS: integer from 3000 to 300000, default `10000`"),
        ("metrics", r"balance_lag: gauge read_model partition role"),
        ("http", r"GET /api/customers\.getBalance query customerId required: .*"),
        ("http", r"GET /api/customers\.getBalance 200 header Balance-Position: .*"),
        ("topics", r"`APPLICATION-STAGE-changelog` `cleanup\.policy=compact`.*"),
        ("records", r"record parts\.code\.balance\.\w+\.Position \d\d epoch: long.*"),
        ("records", r"reserved key records\.POSITION_KEY: b'\\xffposition'"),
    ],
)
def test_a_listing_has_what_others_rely_on(name: str, line: str) -> None:
    assert any(re.fullmatch(line, one) for one in listing(name)), listing(name)[:50]


def test_the_release_before_is_a_whole_commit() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", FORMER_RELEASE)
