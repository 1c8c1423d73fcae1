"""Plain queries: a customer's balance, asked for with nothing but the customer, and answered ahead of aiohttp.

A request is plain if it has no body, asks for a customer whose id needs no escape, and has no header that changes what
is to be answered, or how. It is answered at once if this instance owns the customer's partition. If not, and a client
asks, the same coroutine answers it as for aiohttp's handler, most often with what a peer has answered. Everything else
is left to aiohttp and the middlewares, which would answer a plain query with the same bytes. Belongs to the event loop.
"""

from __future__ import annotations

import string
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import hdrs
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11

from balance_service.http.peers.proxy import FORWARDED_HEADER
from balance_service.http.peers.trust import PROOF_HEADER
from balance_service.http.queries import PATH
from balance_service.http.server.limits import headers_fit
from balance_service.http.server.problems import Problem, unexpected
from balance_service.read_models.keys import MAX_KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from aiohttp.http import RawRequestMessage

    from balance_service.http.answer import Answer
    from balance_service.http.peers.trust import PeerTrust
    from balance_service.http.queries import Queries
    from balance_service.http.server.limits import UnderWay

_UP_TO_CUSTOMER = f"{PATH}?customerId="
# Source: RFC 3986, section 2.3. A query that is passed on has them as they are, too.
_UNRESERVED = string.ascii_letters + string.digits + "-._~"


class HasQueries(Protocol):
    """Holds the queries of the balance, once they can be answered."""

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
        self._date_and_server = b""

    def answer(self, request: RawRequestMessage) -> bytes | Coroutine[Any, Any, bytes] | None:
        """The answer to a plain query, or what will have it with the help of peers; None if aiohttp is to answer."""
        queries, key = self._handlers.queries, customer_of(request)
        if queries is None or key is None:
            return None
        mark = request.headers.get(FORWARDED_HEADER)
        if mark is not None:
            return self._answer_to_peer(queries, key, mark, request.path)
        answer = queries.at_once(key)
        return self._answer(queries, key) if answer is None else self._raw(answer)

    def _answer_to_peer(self, queries: Queries, key: bytes, mark: str, target: str) -> bytes | None:
        try:
            judged = self._trust.judge(mark, f"{hdrs.METH_GET} {target}")
            answer = queries.at_once(key)
            if answer is None:
                return None
            # Only now: aiohttp's handlers use it otherwise.
            self._trust.use(judged)
        except Problem:
            return None
        return self._raw(answer, self._trust.proof_of(answer, mark))

    async def _answer(self, queries: Queries, key: bytes) -> bytes:
        try:
            answer = await self._under_way.run(lambda: queries.answer(key))
        except Problem as problem:
            answer = problem.answer()
        except Exception:
            answer = unexpected(PATH).answer()
        return self._raw(answer)

    def _raw(self, answer: Answer, proof: str | None = None) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._date_and_server = f"Date: {formatdate(now, usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n".encode()
        more = self._date_and_server
        return answer.raw(more if proof is None else more + f"{PROOF_HEADER}: {proof}\r\n".encode())


def customer_of(request: RawRequestMessage) -> bytes | None:
    """The key of the customer that a request without a body names, if it is a plain query.

    The parser has judged what the headers say of the connection, of a body and of another protocol.
    """
    if not request.path.startswith(_UP_TO_CUSTOMER):
        return None
    customer_id = request.path[len(_UP_TO_CUSTOMER) :]
    is_plain = (
        request.method == hdrs.METH_GET
        and request.version == HttpVersion11
        and not request.should_close
        and not request.upgrade
        and hdrs.EXPECT not in request.headers
        and headers_fit(request.raw_headers)
        and 0 < len(customer_id) <= MAX_KEY_BYTES
        and not customer_id.strip(_UNRESERVED)
    )
    return customer_id.encode() if is_plain else None
