"""The query and the command of balances, as a client sends them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.support.api import ADD_FUNDS, GET_BALANCE

if TYPE_CHECKING:
    import httpx


def body_of(customer_id: str, amount: str) -> bytes:
    """A command; `amount` is JSON as it stands."""
    return f'{{"customerId": {json.dumps(customer_id)}, "amount": {amount}}}'.encode()


def post(http: httpx.Client, body: bytes) -> httpx.Response:
    return http.post(ADD_FUNDS, content=body, headers={"Content-Type": "application/json"})


def add(http: httpx.Client, customer_id: str, amount: str) -> str:
    """Add funds, and return the position at which they are visible."""
    answer = post(http, body_of(customer_id, amount))
    assert answer.status_code == 202, answer.text
    return answer.headers["Balance-Position"]


def read(http: httpx.Client, customer_id: str, position: str | None) -> httpx.Response:
    parameters = {"customerId": customer_id} | ({} if position is None else {"minPosition": position})
    return http.get(GET_BALANCE, params=parameters)


def assert_problem(answer: httpx.Response, status: int, detail: str = "") -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"].split(";")[0] == "application/problem+json"
    problem = answer.json()
    assert problem.keys() == {"type", "title", "status", "detail"}
    assert problem["status"] == status
    assert problem["title"]
    assert detail in problem["detail"]
