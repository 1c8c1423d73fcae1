"""Forwards queries to peers, one hop, over pooled connections.

A peer's address comes from a topic, so it is not trusted: hosts must be on the allow-list if there is one, paths are
fixed, parameters are re-encoded, redirects are not followed, and answers are bounded and stripped of unknown headers
(see `connections`). The mark of a forwarded query keeps the peer from forwarding it again; a proof authenticates its
answer (see `trust`).
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import aiohttp
from opentelemetry.trace import SpanKind
from yarl import URL

from balance_service.errors import RetriableError
from balance_service.http.answer import compact_json
from balance_service.http.peers.connections import ClosedError, PeerConnections, UnexpectedAnswerError
from balance_service.http.peers.trust import CLIENT_HEADER, FORWARDED_HEADER, PeerTrust
from balance_service.http.server.limits import MAX_URL_BYTES
from balance_service.observability.tracing import UNTRACED, W3C, open_span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from aiohttp import web
    from opentelemetry.trace import Tracer

    from balance_service.http.answer import Answer
    from balance_service.http.peers.trust import Peer, ProofChain
    from balance_service.http.server.reloading import Reloaded
    from balance_service.http.server.tls import Tls

_UNAUTHORIZED, _FORBIDDEN, _TOO_MANY = 401, 403, 429
_CONNECT_SECONDS = 3.0
HEARTBEAT_SECONDS = 4.0
"""A peer that answers no ping for this time has died, or is suspended."""
MAX_MESSAGE_BYTES = 16 << 20
_CRLF = "\r\n"
_LINE = re.compile(r"[!-~]+: [^\x00-\x1f\x7f]+")


class Proxy:
    """Sends queries to peers. Not thread-safe."""

    def __init__(
        self, trust: PeerTrust | None = None, tls: Reloaded[Tls] | None = None, tracer: Tracer = UNTRACED
    ) -> None:
        """Args:
        trust: by default, any peer may be asked and no proof is made or required.
        tls: connects to peers by HTTPS; without it, by HTTP.
        """
        self._trust = PeerTrust() if trust is None else trust
        self._tls = tls
        self._tracer = tracer
        self._connections = PeerConnections()
        self._session: aiohttp.ClientSession | None = None

    async def get(
        self,
        peer: Peer,
        path: str,
        parameters: Mapping[str, str],
        from_address: str,
        timeout_seconds: float,
        *,
        client: str = "",
        method: str = "GET",
        waits: bool = False,
    ) -> Answer:
        """Returns a peer's answer.

        Args:
            client: the one whose query it is, and whose shares are used here and there; empty for this instance's own.
            method: other methods than GET are sent once; no method has a body.
            waits: the peer waits until it has reached a position before it answers.

        Raises:
            RetriableError: the peer is not allowed, does not accept this instance's proof, does not prove its answer,
                or did not answer in time or in the expected form.
        """
        target = _target(path, parameters)
        if self._tracer is UNTRACED:
            return await self._get(peer, target, from_address, timeout_seconds, client, method, waits=waits)
        # Without the path, which may contain a key; the peer's own span contains the route.
        attributes = {"http.request.method": method, "server.address": peer.address}
        with open_span(self._tracer, method, SpanKind.CLIENT, attributes) as span:
            answer = await self._get(peer, target, from_address, timeout_seconds, client, method, waits=waits)
            span.set_attribute("http.response.status_code", answer.status)
            return answer

    async def _get(
        self,
        peer: Peer,
        target: str,
        from_address: str,
        timeout_seconds: float,
        client: str,
        method: str,
        *,
        waits: bool,
    ) -> Answer:
        address = peer.address
        self._require_allowed(address)
        try:
            url = _url(address)
            mark = self._trust.mark(from_address, peer, f"{method} {target}")
            headers = {FORWARDED_HEADER: mark}
            if client and (proof_of_client := self._trust.client_proof(client, mark)) is not None:
                headers[CLIENT_HEADER] = proof_of_client
            W3C.inject(headers)
            request = _request(method, url, target, headers)
            # Read for each query: after a renewal of the certificate, new connections use the new context.
            tls = None if self._tls is None else self._tls.value.client
            async with asyncio.timeout(timeout_seconds):
                changes = method != "GET"
                answer, proof = await self._connections.ask(url, request, tls, client, changes=changes, waits=waits)
        except UnexpectedAnswerError as error:
            raise RetriableError(f"the peer at {address} {error}") from error
        except ssl.SSLError as error:
            raise RetriableError(
                f"the peer at {address} cannot be reached by TLS: {error}; its certificate must name that host and be "
                "signed by a CA in BALANCE_TLS_CA"
            ) from error
        except TimeoutError as error:
            raise RetriableError(f"the peer at {address} cannot be reached: it did not answer in time") from error
        except (OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            if self._tls is not None and isinstance(error, ClosedError) and error.is_unanswered:
                # In TLS 1.3, the peer checks this instance's certificate after the handshake has ended here.
                reason += "; it may refuse this instance's certificate: see its log, and BALANCE_TLS_CLIENT_CA there"
            raise RetriableError(f"the peer at {address} cannot be reached: {reason}") from error
        if answer.status == _FORBIDDEN:
            raise RetriableError(
                f"the peer at {address} does not accept the proof that this instance is its peer; give all instances "
                "the same BALANCE_PEER_SECRET, an address of their own, and clocks that agree"
            )
        if answer.status in (_UNAUTHORIZED, _TOO_MANY):
            # The peer treats this instance as a client. The client that is served here has passed these checks already.
            raise RetriableError(f"the peer at {address} answered {answer.status} with {answer.content_type}")
        if not self._trust.is_proven(answer, mark, proof):
            raise RetriableError(
                f"the peer at {address} does not prove that its answer is a peer's; give all instances the same "
                "BALANCE_PEER_SECRET"
            )
        return answer

    @property
    def proves_itself(self) -> bool:
        """Whether peers know that this instance is one."""
        return self._trust.demands_proof

    async def connect(self, peer: Peer, path: str, from_address: str) -> PeerMessages:
        """Opens a connection for messages in both directions.

        Raises:
            RetriableError: the peer is not allowed, cannot be reached, or does not open one.
        """
        address = peer.address
        self._require_allowed(address)
        mark = self._trust.mark(from_address, peer, f"GET {path}")
        tls = None if self._tls is None else self._tls.value.client
        if self._session is None:
            # Each connection serves all streams from one peer.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                socket = await self._session.ws_connect(
                    URL(f"{'http' if tls is None else 'https'}://{address}{path}", encoded=True),
                    headers={FORWARDED_HEADER: mark},
                    ssl=True if tls is None else tls,
                    heartbeat=HEARTBEAT_SECONDS,
                    max_msg_size=MAX_MESSAGE_BYTES,
                )
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise RetriableError(f"the peer at {address} opens no connection for streams: {reason}") from error
        return PeerMessages(socket, *self._trust.chains(mark))

    async def close(self) -> None:
        await self._connections.close()
        if self._session is not None:
            await self._session.close()

    def _require_allowed(self, address: str) -> None:
        if not self._trust.allows(address):
            raise RetriableError(
                f"the owner's address, {address[:300]!r}, is not on the list in BALANCE_PEER_ALLOW_LIST"
            )
        if self._connections.is_closed:
            raise RetriableError("this instance is stopping")


class PeerMessages:
    """Proven messages over a WebSocket (RFC 6455) between two instances. Used by one task on each direction."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse,
        outgoing: ProofChain,
        incoming: ProofChain,
        drained: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Args:
        drained: waits after each message until the peer has read most of what was sent.
        """
        self._socket = socket
        self._drained = drained
        self._outgoing = outgoing
        self._incoming = incoming
        self._sending = asyncio.Lock()

    async def send(self, message: Mapping[str, Any]) -> None:
        """Raises ConnectionError: the connection is closed."""
        async with self._sending:
            await self._socket.send_str(self._outgoing.sent(compact_json(message)))
            if self._drained is not None:
                await self._drained()

    async def received(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yields the peer's messages until the connection closes.

        Raises:
            UnprovenError: a message is not the peer's.
            ValueError: a message is not a JSON object.
        """
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise ValueError("a message is not text")
            content = json.loads(self._incoming.received(message.data))
            if not isinstance(content, dict):
                raise ValueError("a message is not a JSON object")
            yield content

    async def close(self) -> None:
        await self._socket.close()


def split_to_fit(
    name: str, numbers: Sequence[int], path: str, parameters: Mapping[str, str]
) -> Iterator[tuple[Sequence[int], Mapping[str, str]]]:
    """Splits numbers into lists that fit into a URL; yields each list with the parameters of its request.

    Args:
        name: of the parameter that lists the numbers.
        parameters: all others.
    """
    room = MAX_URL_BYTES - len(_target(path, {**parameters, name: ""}))
    most = max(1, room // (len(str(max(numbers))) + len(",")))
    for start in range(0, len(numbers), most):
        some = numbers[start : start + most]
        yield some, {**parameters, name: ",".join(map(str, some))}


def _target(path: str, parameters: Mapping[str, str]) -> str:
    # A comma is allowed in a query unescaped, and lists contain many. Source: RFC 3986, section 3.4.
    return f"{path}?{urlencode(parameters, quote_via=quote, safe=',')}" if parameters else path


@lru_cache(maxsize=100)
def _url(address: str) -> URL:
    return URL(f"http://{address}")


def _request(method: str, url: URL, target: str, headers: Mapping[str, str]) -> bytes:
    """A query as sent.

    Raises:
        ValueError: a header is not a single line.
    """
    lines = [f"Host: {url.raw_authority}", *[f"{name}: {value}" for name, value in headers.items()]]
    if not all(_LINE.fullmatch(line) for line in lines):
        raise ValueError("a header of the query is not a single line")
    return f"{method} {target} HTTP/1.1\r\n{_CRLF.join(lines)}\r\n\r\n".encode()
