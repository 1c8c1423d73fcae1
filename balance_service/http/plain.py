"""Plain queries: a customer's balance, asked for in the way nearly everybody asks, and answered without aiohttp.

A request is plain if its bytes are one whole request without a body, with headers from a list of those that change
nothing, for a customer whose id needs no escape. It is answered at once if this instance owns the customer's partition.
If not, and a client asks, the same coroutine answers it as for aiohttp's handler, most often with what a peer has
answered. Everything else is left to aiohttp and the middlewares, which would answer a plain query with the same bytes.
Belongs to the event loop.
"""

from __future__ import annotations

import http
import re
import time
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp.http import SERVER_SOFTWARE

from balance_service.http.problems import Problem, unexpected
from balance_service.http.queries import PATH, BalanceAnswer

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from balance_service.http.limits import UnderWay
    from balance_service.http.peers import PeerTrust
    from balance_service.http.queries import Queries

# Far below all limits of requests.
_MAX_BYTES = 2 << 10
# Neither these headers nor their values mean anything to aiohttp or to us. Nothing is matched in two ways, so that a
# request that is not whole is told as fast as one that is.
_ORDINARY = (
    rb"(?:(?i:User-Agent|Accept|Accept-Language|Accept-Encoding|Cache-Control|Pragma|Referer|traceparent|tracestate"
    rb"|X-Request-ID|X-Forwarded-For|X-Forwarded-Proto|X-Real-IP): [!-~](?:[ -~]*[!-~])?\r\n"
    rb"|(?i:Connection: keep-alive)\r\n){0,20}+"
)
_WHOLE = re.compile(
    rb"GET (?P<target>/[!-~]*) HTTP/1\.1\r\n(?i:Host): [A-Za-z0-9.:\[\]_-]+\r\n"
    + _ORDINARY
    + rb"(?:Balance-Forwarded: (?P<mark>[!-~]+)\r\n)?+"
    + _ORDINARY
    + rb"\r\n"
)
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in http.HTTPStatus}
_TARGET = re.compile(re.escape(PATH.encode()) + rb"\?customerId=(?P<customer_id>[A-Za-z0-9._~-]{1,256})")


@dataclass(frozen=True, slots=True)
class WholeRequest:
    """A request of which not a byte is to come. `mark` is that of a query passed on."""

    target: bytes
    mark: bytes | None


class HasQueries(Protocol):
    """Whoever has the queries, once they can be answered."""

    queries: Queries | None


class PlainQueries:
    """Answers plain queries, as they go over the wire."""

    def __init__(self, handlers: HasQueries, trust: PeerTrust, under_way: UnderWay) -> None:
        """Args:
        under_way: bounds the queries that wait for a peer.
        """
        self._handlers = handlers
        self._trust = trust
        self._under_way = under_way
        self._second = 0
        self._end_of_head = b""

    def at_once(self, request: WholeRequest) -> bytes | None:
        """The answer; None if the request is not plain, or this instance cannot answer it alone and at once."""
        queries = self._handlers.queries
        match = _TARGET.fullmatch(request.target)
        if queries is None or match is None:
            return None
        if request.mark is not None and not self._is_proven(request.mark, request.target):
            return None
        answer = queries.at_once(match["customer_id"])
        return None if answer is None else self._raw(answer)

    def later(self, request: WholeRequest) -> Coroutine[Any, Any, bytes] | None:
        """What answers a client's plain query, with the help of peers; None if it is none."""
        queries = self._handlers.queries
        match = _TARGET.fullmatch(request.target)
        if queries is None or match is None or request.mark is not None:
            return None
        return self._answer(queries, match["customer_id"])

    async def _answer(self, queries: Queries, key: bytes) -> bytes:
        try:
            answer = await self._under_way.run(lambda: queries.answer(key))
        except Problem as problem:
            answer = BalanceAnswer.of(problem)
        except Exception:
            answer = BalanceAnswer.of(unexpected(PATH))
        return self._raw(answer)

    def _is_proven(self, mark: bytes, target: bytes) -> bool:
        try:
            self._trust.check(mark.decode(), target.decode())
        except Problem:
            return False
        return True

    def _raw(self, answer: BalanceAnswer) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._end_of_head = f"Date: {formatdate(now, usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n".encode()
        fields = "".join([f"{name}: {value}\r\n" for name, value in answer.headers.items()])
        head = (
            f"{_STATUS_LINES[answer.status]}{fields}Content-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\n"
        )
        return b"".join((head.encode(), self._end_of_head, answer.body))


def whole_request(data: bytes) -> WholeRequest | None:
    """The request that some bytes are, if they are one, whole, without a body, and with no header of any effect."""
    match = _WHOLE.fullmatch(data) if len(data) <= _MAX_BYTES else None
    # Given twice, it is an error to aiohttp.
    if match is None or data.lower().count(b"\nuser-agent:") > 1:
        return None
    return WholeRequest(match["target"], match["mark"])
