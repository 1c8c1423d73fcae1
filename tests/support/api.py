"""Paths of the HTTP API, and a keep-alive connection that is cheap enough for hundreds of requests a second."""

from __future__ import annotations

import http.client
import json
from decimal import Context, Decimal
from typing import NamedTuple
from urllib.parse import quote, urlencode

GET_BALANCE = "/api/customers.getBalance"
ADD_FUNDS = "/api/balance.addFunds"


_EXACT = Context(prec=80)


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """Reconnects automatically. Not thread-safe. Raises OSError or HTTPException if there is no response."""

    def __init__(self, host: str, port: int, timeout_seconds: float) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)

    def open(self) -> None:
        self._connection.connect()

    def ask(self, target: str) -> Reply:
        self.send(target)
        return self.receive()

    def post(self, target: str, body: object, headers: dict[str, str]) -> Reply:
        try:
            self._connection.request("POST", target, json.dumps(body), {"Content-Type": "application/json", **headers})
        except BaseException:
            self.close()
            raise
        return self.receive()

    def send(self, target: str) -> None:
        """Sends a GET without waiting for its response: a stopped process finds it when it continues."""
        try:
            self._connection.request("GET", target)
        except BaseException:
            self.close()
            raise

    def receive(self) -> Reply:
        try:
            with self._connection.getresponse() as answer:
                return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection; the next request opens a new one."""
        self._connection.close()


def query(customer: str, max_lag: int | None = None, min_position: str | None = None) -> str:
    bounds = {"maxLag": max_lag, "minPosition": min_position}
    parameters = {"customerId": customer} | {k: v for k, v in bounds.items() if v is not None}
    return f"{GET_BALANCE}?{urlencode(parameters, quote_via=quote)}"


def cents_of(body: bytes) -> int:
    """Returns the exact amount in a 200 response, in cents. Fails if it has more than two decimals."""
    amount = json.loads(body, parse_float=Decimal, parse_int=Decimal)["amount"]
    cents = _EXACT.multiply(amount, Decimal(100))
    assert cents == int(cents), body
    return int(cents)
