"""Plain queries: one key of a read model, asked for with nothing but the key, and answered ahead of aiohttp.

A request is plain if it has no body, asks for a key that needs no escape, and has no header that changes what is to be
answered, or how. It is answered at once if this instance owns the key's partition. If not, and a client asks, the same
coroutine answers it as for aiohttp's handler, most often with what a peer has answered. Everything else is left to
aiohttp and the middlewares, which would answer a plain query with the same bytes. Belongs to the event loop.
"""

from __future__ import annotations

import string
import time
from dataclasses import dataclass, replace
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import hdrs
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11

from balance_service.errors import InvalidInputError
from balance_service.http.access.clients import Scope
from balance_service.http.answer import Problem, unexpected
from balance_service.http.model_queries import PATH
from balance_service.http.parameters import KEY, KeyQuery
from balance_service.http.peers.proxy import FORWARDED_HEADER
from balance_service.http.peers.trust import PROOF_HEADER
from balance_service.http.server.limits import headers_fit
from balance_service.model.keys import MAX_KEY_BYTES, TEXT, KeyType
from balance_service.model.routes import Collection, Routes

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator

    from aiohttp.http import RawRequestMessage

    from balance_service.http.access.authorization import Access
    from balance_service.http.answer import Answer
    from balance_service.http.model_queries import ModelQueries
    from balance_service.http.peers.trust import PeerTrust
    from balance_service.http.queries import Queries
    from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp
    from balance_service.http.server.limits import UnderWay
    from balance_service.model.read_model import ReadModel

_NEEDED = frozenset({Scope.READ})
# Source: RFC 3986, section 2.3. A query that is passed on has them as they are, too.
_UNRESERVED = string.ascii_letters + string.digits + "-._~"


class HasModels(Protocol):
    """Holds what answers for each read model, once that can be asked."""

    models: ModelQueries | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneKey:
    """How targets ask for one key of a read model."""

    model: str
    noun: str
    path: str
    key_type: KeyType = TEXT
    parameter: str = ""
    """What names the key; empty: it is the last part of the path."""
    tells_key: bool = False
    """Whether the answer has the key beside the value."""
    asks_peers: bool = True
    """Whether peers are asked by the same target, and answer alike."""

    @property
    def before_key(self) -> str:
        """The target up to the last `=`, or else `/`."""
        return f"{self.path}?{self.parameter}" if self.parameter else self.path

    def key_of(self, text: str) -> bytes | None:
        """The key that a target ends with; None if that may be none, or has to be looked at more closely."""
        # Dots alone may lead elsewhere in a path.
        if not 0 < len(text) <= MAX_KEY_BYTES or text.strip(_UNRESERVED) or not (self.parameter or text.strip(".")):
            return None
        if not self.key_type.is_number:
            return text.encode()
        try:
            return self.key_type.parse(text)
        except InvalidInputError:
            return None

    def query(self, text: str, key: bytes) -> KeyQuery:
        """The same as aiohttp's handler has it."""
        return KeyQuery(
            key=key,
            path=self.path if self.parameter else f"{self.path}/{text}",
            parameters={self.parameter: text} if self.parameter else {},
            noun=self.noun,
            told_as=text if self.tells_key else None,
        )


class PlainQueries:
    """Answers plain queries, as they go over the wire."""

    def __init__(
        self,
        handlers: HasModels,
        trust: PeerTrust,
        under_way: UnderWay,
        access: Access,
        models: Iterable[ReadModel],
    ) -> None:
        """Args:
        under_way: bounds the queries that wait for a peer.
        access: the checks that clients have to pass.
        models: of which it answers, where they are hosted.
        """
        self._asked = {asked.before_key: asked for asked in asked_of(models)}
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
        """The answer to a plain query, or what will have it with the help of peers; None if aiohttp is to answer."""
        before, _, text = request.path.rpartition("=" if "=" in request.path else "/")
        asked, models = self._asked.get(before), self._handlers.models
        if asked is None or models is None or not _is_plain(request):
            return None
        key, answers = asked.key_of(text), models.hosted.get(asked.model)
        if key is None or answers is None:
            return None
        queries, told_as = answers.queries, text if asked.tells_key else None
        mark = request.headers.get(FORWARDED_HEADER)
        if mark is not None and not asked.asks_peers:
            return None
        try:
            proven = None if mark is None else self._trust.judge(mark, f"{hdrs.METH_GET} {request.path}")
            client = self._client_of(request, connection) if proven is None else ""
            if client is None:
                return None
            answer = queries.at_once(key, asked.noun, told_as)
            if answer is None and (mark is not None or not asked.asks_peers):
                return None
            # Only now: aiohttp uses the mark, or charges the client, where it answers.
            if proven is None:
                self._access.charge(client)
            else:
                self._trust.use(proven)
        except Problem:
            return None
        if answer is None:
            return self._answer(queries, asked.query(text, key))
        return self._raw(answer, None if mark is None else self._trust.proof_of(answer, mark))

    def _client_of(self, request: RawRequestMessage, connection: AheadOfAiohttp) -> str | None:
        """The client that sends a query; None if it may not be admitted, which aiohttp's handlers will find out."""
        client, is_authenticated, refusal = self._access.judge(
            request, connection.whereabouts, _NEEDED, by_memory_alone=True
        )
        if refusal is not None or not self._access.has_room(client):
            return None
        if is_authenticated:
            connection.belongs_to(client)
        return client

    async def _answer(self, queries: Queries, query: KeyQuery) -> bytes:
        try:
            answer = await self._under_way.run(lambda: queries.answer(query))
        except Problem as problem:
            answer = problem.answer()
        except Exception:
            answer = unexpected(query.path).answer()
        return self._raw(answer)

    def _raw(self, answer: Answer, proof: str | None = None) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._date_and_server = f"Date: {formatdate(now, usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n".encode()
        more = self._date_and_server
        return answer.raw(more if proof is None else more + f"{PROOF_HEADER}: {proof}\r\n".encode())


def _is_plain(request: RawRequestMessage) -> bool:
    """Whether a request without a body asks for nothing besides.

    The parser has judged what the headers say of the connection, of a body and of another protocol.
    """
    return (
        request.method == hdrs.METH_GET
        and request.version == HttpVersion11
        and not request.should_close
        and not request.upgrade
        and hdrs.EXPECT not in request.headers
        and hdrs.CONTENT_ENCODING not in request.headers
        and headers_fit(request.raw_headers)
    )


def asked_of(models: Iterable[ReadModel]) -> Iterator[OneKey]:
    """How keys of read models are asked for, in all forms."""
    for model in models:
        if not model.has_states():
            continue
        of_model = OneKey(
            model=model.name, noun=KEY.name, path=f"{PATH}/{model.name}/keys", key_type=model.key_type, tells_key=True
        )
        yield of_model
        match model.queries:
            case Routes(path, parameter, noun):
                yield replace(of_model, noun=noun, path=path, parameter=parameter, tells_key=False)
            # A text might be a route of its own, such as `count`.
            case Collection(path, _, noun) if model.key_type.is_number:
                yield replace(of_model, noun=noun, path=path, tells_key=False, asks_peers=False)
