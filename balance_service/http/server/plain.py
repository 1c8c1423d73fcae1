"""Answers the most frequent queries ahead of aiohttp: for one key of a read model, with nothing but the key.

A request is plain if it has no body, no parameter but a key that needs no escaping, and no header that changes the
answer. If this instance owns the key's partition, the answer is sent at once. Otherwise `Queries.answer` answers a
client's query, as it does for aiohttp's handler; most often it asks the owner. All other requests are left to aiohttp
and the middlewares, which would answer a plain query with the same bytes. Everything here belongs to the event loop.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from aiohttp import hdrs
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11

from balance_service.http.answer import Problem, unexpected
from balance_service.http.key_target import KEY_SCOPES, key_targets
from balance_service.http.model_queries import ModelQueries
from balance_service.http.peers.trust import FORWARDED_HEADER, PROOF_HEADER
from balance_service.http.route import accepts_events
from balance_service.http.server.limits import headers_fit

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from aiohttp.http import RawRequestMessage

    from balance_service.http.access.authorization import Access
    from balance_service.http.answer import Answer
    from balance_service.http.key_target import KeyQuery
    from balance_service.http.peers.trust import PeerTrust
    from balance_service.http.queries import Queries
    from balance_service.http.route import Handlers
    from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp
    from balance_service.http.server.limits import UnderWay
    from balance_service.model.read_model import ReadModel


class PlainQueries:
    """Answers plain queries with the bytes to send. `answer` is an `AnswerAhead`."""

    def __init__(
        self,
        handlers: Handlers,
        trust: PeerTrust,
        under_way: UnderWay,
        access: Access,
        models: Iterable[ReadModel],
    ) -> None:
        """Args:
        under_way: bounds the queries that wait for a peer.
        models: whose keys it answers, if they are hosted.
        """
        self._targets = {target.before_key: target for target in key_targets(models)}
        self._handlers = handlers
        self._trust = trust
        self._access = access
        self._under_way = under_way
        self._second = 0
        self._date_and_server = b""

    def answer(
        self,
        request: RawRequestMessage,
        connection: AheadOfAiohttp,
    ) -> bytes | Coroutine[Any, Any, bytes] | None:
        before, _, text = request.path.rpartition("=" if "=" in request.path else "/")
        target, models = self._targets.get(before), self._handlers.find(ModelQueries)
        if target is None or models is None or not _is_plain(request):
            return None
        # Most clients repeat their headers, and what is decided below depends on nothing else.
        is_repeated = request.raw_headers == connection.admitted_headers
        if not is_repeated and not self._have_plain_answers(request):
            return None
        key, answers = target.key_of(text), models.serving_answers(target.model)
        if key is None or answers is None:
            return None
        queries, echoed_key = answers.queries, text if target.echoes_key else None
        mark = None if is_repeated else request.headers.get(FORWARDED_HEADER)
        if mark is not None and not target.is_forwarded:
            return None
        try:
            proven = None if mark is None else self._trust.verified(mark, f"{hdrs.METH_GET} {request.path}")
            client = self._client_of(request, connection, is_repeated=is_repeated) if proven is None else ""
            if client is None:
                return None
            # A token has to be judged again: it expires, and the file that names it may change.
            if mark is None and self._access.authenticator is None:
                connection.admitted_headers = request.raw_headers
            answer = queries.at_once(key, target.noun, echoed_key)
            if answer is None and mark is not None:
                return None
            # Not earlier: a request left to aiohttp uses up its mark, or charges its client, there.
            if proven is None:
                self._access.charge(client)
            else:
                self._trust.use(proven)
        except Problem:
            return None
        if answer is None:
            return self._answer(queries, target.query(text), request.path, client)
        return self._raw(answer, None if mark is None else self._trust.proof_of(answer, mark))

    def _have_plain_answers(self, request: RawRequestMessage) -> bool:
        """Whether no header changes the answer. The parser has interpreted those about the connection and a body."""
        headers = request.headers
        return (
            hdrs.EXPECT not in headers
            and hdrs.CONTENT_ENCODING not in headers
            and not accepts_events(headers)
            and headers_fit(request.raw_headers)
            and self._access.allowed_origin(headers) is None
        )

    def _client_of(self, request: RawRequestMessage, connection: AheadOfAiohttp, *, is_repeated: bool) -> str | None:
        """Returns the client's name; None if it may not be admitted, for which aiohttp's handlers give the reason.

        Args:
            is_repeated: whether the client was admitted with the same headers before, and needs no token.
        """
        client = connection.anonymous_client
        if not is_repeated:
            client, is_authenticated, refusal = self._access.judge(
                request.headers, client, KEY_SCOPES, verifies_jwts=False
            )
            if refusal is not None:
                return None
            if is_authenticated:
                connection.belongs_to(client)
        return client if self._access.has_room(client) else None

    async def _answer(self, queries: Queries, query: KeyQuery, path: str, client: str) -> bytes:
        try:
            answer = await self._under_way.run(client, lambda: queries.answer(lambda: query, client))
        except Problem as problem:
            answer = problem.answer()
        except Exception:
            answer = unexpected(path.partition("?")[0]).answer()
        return self._raw(answer)

    def _raw(self, answer: Answer, proof: str | None = None) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._date_and_server = f"Date: {formatdate(now, usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n".encode()
        more = self._date_and_server
        return answer.raw(more if proof is None else more + f"{PROOF_HEADER}: {proof}\r\n".encode())


def _is_plain(request: RawRequestMessage) -> bool:
    """Whether a request without a body reads, on a connection that stays open for the same protocol."""
    return (
        request.method == hdrs.METH_GET
        and request.version == HttpVersion11
        and not request.should_close
        and not request.upgrade
    )
