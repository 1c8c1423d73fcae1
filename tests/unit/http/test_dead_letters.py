"""The body of a decision about dead letters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from balance_service.engine.decisions import MAX_REASON_CHARACTERS
from balance_service.errors import InvalidInputError
from balance_service.http.dead_letters import DecisionBody


@pytest.mark.parametrize("reason", ["x", "a test event", "schön, 好", "x" * MAX_REASON_CHARACTERS])
def test_a_decision_keeps_its_reason_unchanged(reason: str) -> None:
    body = DecisionBody.of_json(json.dumps({"ids": ["balance/1:42", "balance/1:42"], "reason": reason}).encode())

    assert ([str(one) for one in body.letter_ids], body.reason) == (["balance/1:42"], reason)


@pytest.mark.parametrize(
    "reason", [None, "", " ", " x", "x\n", "\0", "\ud800", "x\udfff", 1, ["x"], "x" * (MAX_REASON_CHARACTERS + 1)]
)
def test_a_decision_without_a_readable_reason_is_refused(reason: Any) -> None:
    with pytest.raises(
        InvalidInputError, match="reason must be a text of 1 to 200 characters that does not begin with"
    ):
        DecisionBody.of_json(json.dumps({"ids": ["balance/1:42"], "reason": reason}).encode())


def test_a_decision_with_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="the body has 'model', which is not known here"):
        DecisionBody.of_json(b'{"ids": ["balance/1:42"], "reason": "x", "model": "balance"}')


@pytest.mark.parametrize("ids", [None, [], "balance/1:42", [1], ["balance/1:42"] * 501])
def test_a_decision_needs_a_list_of_1_to_500_ids(ids: Any) -> None:
    with pytest.raises(InvalidInputError, match="ids must be a list of 1 to 500 ids of dead letters; send"):
        DecisionBody.of_json(json.dumps({"ids": ids, "reason": "x"}).encode())


def test_a_decision_names_a_malformed_id() -> None:
    with pytest.raises(InvalidInputError, match="'balance/x'"):
        DecisionBody.of_json(b'{"ids": ["balance/x"], "reason": "x"}')


@pytest.mark.parametrize("missing", ["ids", "reason"])
def test_a_decision_names_what_is_missing(missing: str) -> None:
    body = {"ids": ["balance/1:42"], "reason": "x"}
    del body[missing]

    with pytest.raises(InvalidInputError, match=f"^{missing} is missing$"):
        DecisionBody.of_json(json.dumps(body).encode())
