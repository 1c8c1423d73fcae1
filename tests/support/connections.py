"""One HTTP connection kept alive, cheap enough for hundreds of requests a second beside a whole cluster."""

from __future__ import annotations

import http.client
import json
from decimal import Context, Decimal
from typing import NamedTuple
from urllib.parse import quote, urlencode

QUERY_PATH = "/api/customers.getBalance"
COMMAND_PATH = "/api/balance.addFunds"
_EXACT = Context(prec=80)


class Reply(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """Reconnects by itself; used by one thread. Raises OSError or HTTPException where there is no answer."""

    def __init__(self, host: str, port: int, timeout_seconds: float) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)

    def open(self) -> None:
        """Connect already."""
        self._connection.connect()

    def ask(self, target: str) -> Reply:
        """GET."""
        self.send(target)
        return self.receive()

    def post(self, target: str, body: object, headers: dict[str, str]) -> Reply:
        """POST of a JSON body."""
        try:
            self._connection.request("POST", target, json.dumps(body), {"Content-Type": "application/json", **headers})
        except BaseException:
            self.close()
            raise
        return self.receive()

    def send(self, target: str) -> None:
        """The request alone, so that somebody who is stopped finds it when he wakes."""
        try:
            self._connection.request("GET", target)
        except BaseException:
            self.close()
            raise

    def receive(self) -> Reply:
        """The answer to what was sent."""
        try:
            with self._connection.getresponse() as answer:
                return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close; the next request opens another."""
        self._connection.close()


def query(customer: str, max_lag: int | None = None, min_position: str | None = None) -> str:
    """The target of a balance query."""
    bounds = {"maxLag": max_lag, "minPosition": min_position}
    parameters = {"customerId": customer} | {k: v for k, v in bounds.items() if v is not None}
    return f"{QUERY_PATH}?{urlencode(parameters, quote_via=quote)}"


def cents_of(body: bytes) -> int:
    """The amount of a 200, to the digit; fails unless it has two decimals at most."""
    amount = json.loads(body, parse_float=Decimal, parse_int=Decimal)["amount"]
    cents = _EXACT.multiply(amount, Decimal(100))
    assert cents == int(cents), body
    return int(cents)
