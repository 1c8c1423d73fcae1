"""Pooled connections to peers, and a strict reader of what peers answer.

A connection is reused for one query after another. If the end of an answer were ambiguous, the next query would receive
another query's answer. The reader therefore accepts only the form that instances send: a single
Content-Length, and not a byte after it. It refuses everything that leaves a choice (chunks, an end by closing, interim
answers, folded lines, repeated lengths).

    CONNECTING ──► IDLE ──ask──► ASKED     A connection returns to IDLE after exactly one complete answer. Everything
                    ▲ │            │ │     else (an error, a time-out, a cancelled query, unexpected bytes) closes it,
                    │ │   answer   │ │     because the next bytes could belong to another query.
                    └─┼────────────┘ │
                      ▼              ▼
                    CLOSED ◄─────────┘

Everything here belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import aiohappyeyeballs

from balance_service.http.answer import PROBLEM_JSON, Answer
from balance_service.http.peers.trust import PASSED_ON
from balance_service.http.shares import Shares

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from aiohappyeyeballs import AddrInfoType
    from yarl import URL

# Headers can hold a value for each of a thousand partitions; a page of entries has up to one MiB.
MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = (1 << 20) + (64 << 10)
# An instance answers its peers with no other status or content type.
_STATUSES = frozenset({200, 400, 401, 403, 404, 421, 429, 500, 503})
_CONTENT_TYPES = frozenset({"application/json", PROBLEM_JSON})
_PASSED_ON = {name.lower(): name for name in PASSED_ON}
_FRAMING = frozenset({"connection", "content-encoding", "content-length", "content-type", "transfer-encoding"})
_KNOWN = _FRAMING | _PASSED_ON.keys()

_BEGIN = b"HTTP/1.1 "
_END_OF_HEAD = b"\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.1 (?P<status>[1-9][0-9]{2}) [ -~]*")
_FIELD = re.compile(rb"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(?P<value>[\t -~\x80-\xff]*)")
_PROOF = re.compile(rb"\r\n(?i:Balance-Proof):[ \t]*(?P<proof>[0-9a-f]{64})[ \t]*(?=\r\n|\Z)")
_LENGTH = re.compile(r"[0-9]{1,9}")
_PASSED_ON_VALUE = re.compile(r"[!-~](?:[ -~]{0,15998}[!-~])?")

_MAX_CONNECTIONS_PER_PEER = 64
# Well below the idle time-out of a peer's server, so that no query meets a closing connection.
_IDLE_SECONDS = 15.0
_SWEEP_SECONDS = 5.0
_LOOK_UP_AGAIN_SECONDS = 10.0
# Source: RFC 8305, Happy Eyeballs, section 5.
_NEXT_ADDRESS_SECONDS = 0.25


class UnexpectedAnswerError(Exception):
    """The bytes received are not an instance's answer; the message continues "the peer at … "."""


class ClosedError(ConnectionError):
    """The connection was closed. `is_unanswered`: before the first byte of an answer."""

    def __init__(self, *, is_unanswered: bool) -> None:
        super().__init__("the connection was closed")
        self.is_unanswered = is_unanswered


class Received(NamedTuple):
    """An answer and its proof, which is empty if the peer sent none."""

    answer: Answer
    proof: str


@dataclass(frozen=True, slots=True)
class _Head:
    status: int
    length: int
    content_type: str
    headers: Mapping[str, str]
    is_last: bool


class AnswerReader:
    """Reads answers one after another, and keeps of each only what may be passed on."""

    def __init__(self) -> None:
        self.is_last = False
        """Whether the peer closes the connection after the latest answer."""
        self._received = b""
        self._head: _Head | None = None
        self._proof = ""
        self._body: list[bytes] = []
        self._length = 0

    @property
    def is_within(self) -> bool:
        """Whether an answer has been received in part."""
        return bool(self._received) or self._head is not None

    def feed(self, data: bytes) -> Received | None:
        """Takes some bytes; returns the answer if they complete it.

        Raises:
            UnexpectedAnswerError: they are not an instance's answer, or continue beyond it.
        """
        head = self._head
        if head is None:
            received = self._received = self._received + data if self._received else data
            end = received.find(_END_OF_HEAD, 0, MAX_HEAD_BYTES)
            if end < 0:
                _check_begin(received)
                return None
            without_proof, self._proof = _cut(received[:end])
            head = self._head = _head(without_proof)
            data = received[end + len(_END_OF_HEAD) :]
            self._received, self._body, self._length = b"", [], 0
        # Joined once: a page of 1 MiB arrives in many pieces.
        self._body.append(data)
        self._length += len(data)
        if self._length < head.length:
            return None
        if self._length > head.length:
            raise UnexpectedAnswerError("answered with more bytes than it announced")
        self._head, self.is_last = None, head.is_last
        body = b"".join(self._body)
        return Received(Answer(head.status, body, head.content_type, head.headers), self._proof)


def _check_begin(received: bytes) -> None:
    if received[: len(_BEGIN)] != _BEGIN[: len(received)]:
        raise UnexpectedAnswerError("answered with something other than HTTP/1.1")
    if len(received) >= MAX_HEAD_BYTES:
        raise UnexpectedAnswerError(f"answered with a head of more than {MAX_HEAD_BYTES} bytes")


def _cut(head: bytes) -> tuple[bytes, str]:
    """Splits a head into the part without its proof, and the proof, which differs every time."""
    found = _PROOF.search(head)
    return (head, "") if found is None else (head[: found.start()] + head[found.end() :], found["proof"].decode())


# Between two commits, a peer's answers have the same head for a second.
@lru_cache(maxsize=256)
def _head(head: bytes) -> _Head:
    first, *lines = head.split(b"\r\n")
    status_line = _STATUS_LINE.fullmatch(first)
    if status_line is None:
        raise UnexpectedAnswerError("answered with something other than HTTP/1.1")
    status, fields = int(status_line["status"]), _fields(lines)
    content_type = fields.get("content-type", "none").partition(";")[0].strip().lower()
    if status not in _STATUSES or content_type not in _CONTENT_TYPES or "content-encoding" in fields:
        raise UnexpectedAnswerError(f"answered {status} with {content_type[:100]}")
    length = fields.get("content-length", "")
    if "transfer-encoding" in fields or not _LENGTH.fullmatch(length):
        raise UnexpectedAnswerError("answered without the number of bytes")
    if int(length) > MAX_BODY_BYTES:
        raise UnexpectedAnswerError(f"answered with more than {MAX_BODY_BYTES} bytes")
    headers = {name: fields[lower] for lower, name in _PASSED_ON.items() if lower in fields}
    if not all(_PASSED_ON_VALUE.fullmatch(value) for value in headers.values()):
        raise UnexpectedAnswerError("answered with headers that are not an instance's")
    is_last = fields.get("connection", "keep-alive").lower() != "keep-alive"
    return _Head(status, int(length), content_type, headers, is_last)


def _fields(lines: list[bytes]) -> dict[str, str]:
    """The known fields, by their names in lower case."""
    fields: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise UnexpectedAnswerError("answered with headers that are not HTTP's")
        name = field["name"].decode().lower()
        if name in _KNOWN:
            if name in fields:
                raise UnexpectedAnswerError(f"answered with two headers {name}")
            fields[name] = field["value"].decode("latin-1").rstrip(" \t")
    return fields


class PeerConnection(asyncio.Protocol):
    """One connection to a peer, with at most one query at a time."""

    def __init__(
        self,
        tls: ssl.SSLContext | None,
        on_lost: Callable[[PeerConnection], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.tls = tls
        self.idle_since = 0.0
        self.is_open = False
        self._on_lost = on_lost
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader()
        self._asked: asyncio.Future[Received] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a connection's transports are asyncio.Transport
        self.is_open = True

    async def ask(self, request: bytes) -> Received:
        """Sends a query and waits for its answer. The caller enforces the deadline by cancelling.

        Raises:
            ClosedError: the connection was closed.
            UnexpectedAnswerError: the peer sent something other than an answer.
            OSError: the connection broke.
        """
        transport = self._transport
        if transport is None or not self.is_open or self._asked is not None:
            raise ClosedError(is_unanswered=True)
        asked: asyncio.Future[Received] = self._loop.create_future()
        self._asked = asked
        try:
            transport.write(request)
            return await asked
        except BaseException:
            self.abort()
            raise
        finally:
            self._asked = None

    def data_received(self, data: bytes) -> None:
        asked = self._asked
        if asked is None or asked.done():
            self.abort()
            return
        try:
            answer = self._reader.feed(data)
        except UnexpectedAnswerError as error:
            self.abort()
            asked.set_exception(error)
            return
        if answer is not None:
            if self._reader.is_last:
                self.abort()
            asked.set_result(answer)

    def eof_received(self) -> None:
        """Returns None, so that asyncio closes the connection."""
        self.is_open = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        asked = self._asked
        if asked is not None and not asked.done():
            is_unanswered = not self._reader.is_within
            # A reset is a close too: the peer closed before the query arrived.
            is_closing = exc is None or isinstance(exc, ConnectionError)
            asked.set_exception(ClosedError(is_unanswered=is_unanswered) if is_closing else exc)  # type: ignore[arg-type]
        self._on_lost(self)

    def abort(self) -> None:
        """Closes the connection at once and reads nothing more."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


class _Peer:
    """The connections to one address. `idle` ends with the one used last."""

    def __init__(self) -> None:
        self.idle: list[PeerConnection] = []
        self.slots = Shares("queries to this peer", _MAX_CONNECTIONS_PER_PEER)
        # Otherwise the queries that wait for one stalled partition would use the slots of all queries to this peer.
        self.slots_to_wait_in = Shares("queries to this peer that wait", _MAX_CONNECTIONS_PER_PEER)
        self.queries = 0
        self._looking_up = asyncio.Lock()
        self._looked_up_at = float("-inf")
        self._addresses: Sequence[AddrInfoType] = ()

    def take_idle(self, tls: ssl.SSLContext | None) -> PeerConnection | None:
        """Removes and returns an idle connection under this TLS context; closes those under other contexts."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_open and connection.tls is tls:
                return connection
            connection.abort()
        return None

    async def addresses(self, host: str, port: int, loop: asyncio.AbstractEventLoop) -> Sequence[AddrInfoType]:
        """Resolves a host name; concurrent queries share one lookup."""
        async with self._looking_up:
            if loop.time() - self._looked_up_at > _LOOK_UP_AGAIN_SECONDS:
                self._addresses = await loop.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
                )
                self._looked_up_at = loop.time()
            return self._addresses

    def look_up_again(self) -> None:
        """Discards the addresses: the name may resolve to others by now."""
        self._looked_up_at = float("-inf")


class PeerConnections:
    """The connection pool: to each peer up to 64 connections, and 64 more for queries that wait for a position.

    The clients share them. A query that finds its client's share in use waits in line.
    """

    def __init__(self, idle_seconds: float = _IDLE_SECONDS, sweep_seconds: float = _SWEEP_SECONDS) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_seconds = idle_seconds
        self._sweep_seconds = sweep_seconds
        self._peers: dict[str, _Peer] = {}
        self._open: set[PeerConnection] = set()
        self._sweeping = self._loop.call_later(self._sweep_seconds, self._sweep)
        self.is_closed = False

    async def ask(
        self,
        url: URL,
        request: bytes,
        tls: ssl.SSLContext | None,
        client: str = "",
        *,
        changes: bool = False,
        waits: bool = False,
    ) -> Received:
        """Sends a query to the peer at `url` and waits for its answer; cancelling abandons the query.

        A peer may close an idle connection just as a query is sent on it. If the peer has answered nothing, the query
        is sent once more, on a new connection.

        Args:
            client: the one whose query it is.
            changes: the request is not idempotent, so it is sent once, on a new connection.
            waits: the peer waits before it answers; such queries have slots of their own.

        Raises:
            UnexpectedAnswerError: the bytes received are not an instance's answer.
            OSError: the peer cannot be reached.
        """
        peer = self._peers.get(url.authority)
        if peer is None:
            peer = self._peers[url.authority] = _Peer()
        peer.queries += 1
        slots = peer.slots_to_wait_in if waits else peer.slots
        try:
            if not slots.take(client):
                await slots.wait(client)
            try:
                connection = None if changes else peer.take_idle(tls)
                if connection is not None:
                    try:
                        return await self._ask(peer, connection, request)
                    except ClosedError as error:
                        if not error.is_unanswered:
                            raise
                    # The peer has most likely closed the other idle connections too.
                    _close(peer.idle)
                try:
                    return await self._ask(peer, await self._connect(peer, url, tls), request)
                except BaseException:
                    peer.look_up_again()
                    raise
            finally:
                slots.release(client)
        finally:
            peer.queries -= 1

    async def close(self) -> None:
        self.is_closed = True
        self._sweeping.cancel()
        while self._open:
            _close(list(self._open))
            await asyncio.sleep(0)

    async def _ask(self, peer: _Peer, connection: PeerConnection, request: bytes) -> Received:
        answer = await connection.ask(request)
        if connection.is_open:
            connection.idle_since = self._loop.time()
            peer.idle.append(connection)
        return answer

    async def _connect(self, peer: _Peer, url: URL, tls: ssl.SSLContext | None) -> PeerConnection:
        if self.is_closed:
            raise ClosedError(is_unanswered=True)
        host, port = url.raw_host or "", url.port or 0
        addresses = await peer.addresses(host, port, self._loop)
        connected = await aiohappyeyeballs.start_connection(
            addresses, loop=self._loop, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS
        )
        connection = PeerConnection(tls, self._open.discard, self._loop)
        try:
            await self._loop.create_connection(
                lambda: connection,
                sock=connected,
                ssl=tls,
                server_hostname=None if tls is None else host.rstrip("."),
            )
        except BaseException:
            # Abort the transport first: otherwise the loop could watch a file descriptor that the kernel has reused.
            connection.abort()
            connected.close()
            raise
        if self.is_closed or not connection.is_open:
            connection.abort()
            raise ClosedError(is_unanswered=True)
        self._open.add(connection)
        return connection

    def _sweep(self) -> None:
        """Closes connections that have been idle too long, and drops peers without connections."""
        self._sweeping = self._loop.call_later(self._sweep_seconds, self._sweep)
        since = self._loop.time() - self._idle_seconds
        for address, peer in list(self._peers.items()):
            old = [c for c in peer.idle if c.idle_since < since or not c.is_open]
            peer.idle = [c for c in peer.idle if c not in old]
            _close(old)
            if not peer.idle and not peer.queries:
                del self._peers[address]


def _close(connections: Iterable[PeerConnection]) -> None:
    for connection in connections:
        connection.abort()
