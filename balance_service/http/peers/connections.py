"""Connections to peers, kept for the queries to come: one query at a time on each, and none after a surprise.

    CONNECTING ──► IDLE ──ask──► ASKED     A connection goes back to IDLE with a whole answer and nothing more. All
                    ▲ │            │ │     else (an error, a time-out, a query given up, bytes that nobody asked for)
                    │ │   answer   │ │     ends it, for what would come next could be the answer to another query.
                    └─┼────────────┘ │
                      ▼              ▼
                    CLOSED ◄─────────┘

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import aiohappyeyeballs

from balance_service.http.peers.answers import AnswerReader, UnexpectedAnswerError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Sequence

    from aiohappyeyeballs import AddrInfoType
    from yarl import URL

    from balance_service.http.peers.answers import Received

_MAX_CONNECTIONS_PER_PEER = 64
# Well below the time after which a peer closes an idle connection, so that no query meets a closing one.
_IDLE_SECONDS = 15.0
_SWEEP_SECONDS = 5.0
_LOOK_UP_AGAIN_SECONDS = 10.0
# Source: RFC 8305, Happy Eyeballs, section 5.
_NEXT_ADDRESS_SECONDS = 0.25


class ClosedError(ConnectionError):
    """The connection was closed. `is_unanswered`: before the first byte of an answer."""

    def __init__(self, *, is_unanswered: bool) -> None:
        super().__init__("the connection was closed")
        self.is_unanswered = is_unanswered


class PeerConnection(asyncio.Protocol):
    """One connection to a peer."""

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
        """It is IDLE."""
        self._transport = transport  # type: ignore[assignment]  # a connection's transports are asyncio.Transport
        self.is_open = True

    async def ask(self, request: bytes) -> Received:
        """Send a query and wait for its answer. The caller enforces the deadline by cancelling.

        Raises:
            ClosedError: the connection was closed.
            UnexpectedAnswerError: it sent something other than an answer.
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
        """Read on; what nobody asked for ends the connection."""
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
        """The peer says no more: asyncio closes the connection after this."""
        self.is_open = False

    def connection_lost(self, exc: Exception | None) -> None:
        """It is CLOSED."""
        self.is_open = False
        asked = self._asked
        if asked is not None and not asked.done():
            is_unanswered = not self._reader.is_within
            # A reset connection was closed too, before what was sent arrived.
            is_closing = exc is None or isinstance(exc, ConnectionError)
            asked.set_exception(ClosedError(is_unanswered=is_unanswered) if is_closing else exc)  # type: ignore[arg-type]
        self._on_lost(self)

    def abort(self) -> None:
        """Close it at once; nothing that still comes is read."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


class _Peer:
    """One address: its idle connections, the one that was used last at the end, and how many queries it has."""

    def __init__(self) -> None:
        self.idle: list[PeerConnection] = []
        self.slots = asyncio.Semaphore(_MAX_CONNECTIONS_PER_PEER)
        # One partition that stands still would else take the places of all queries to this peer.
        self.slots_to_wait_in = asyncio.Semaphore(_MAX_CONNECTIONS_PER_PEER)
        self.queries = 0
        self._looking_up = asyncio.Lock()
        self._looked_up_at = float("-inf")
        self._addresses: Sequence[AddrInfoType] = ()

    def take_idle(self, tls: ssl.SSLContext | None) -> PeerConnection | None:
        """An idle connection under this context, which is not idle then; those under others are closed."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_open and connection.tls is tls:
                return connection
            connection.abort()
        return None

    async def addresses(self, host: str, port: int, loop: asyncio.AbstractEventLoop) -> Sequence[AddrInfoType]:
        """The addresses of a host's name; queries that ask at the same time share one lookup."""
        async with self._looking_up:
            if loop.time() - self._looked_up_at > _LOOK_UP_AGAIN_SECONDS:
                self._addresses = await loop.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
                )
                self._looked_up_at = loop.time()
            return self._addresses

    def look_up_again(self) -> None:
        """They may be of no use: the name may stand for others by now."""
        self._looked_up_at = float("-inf")


class PeerConnections:
    """All connections to peers; a query that finds all in use waits for one.

    To each peer there are 64 at most, and 64 more on which queries wait for a position there.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, _Peer] = {}
        self._open: set[PeerConnection] = set()
        self._sweeping = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        self.is_closed = False

    async def ask(
        self, url: URL, request: bytes, tls: ssl.SSLContext | None, *, changes: bool = False, waits: bool = False
    ) -> Received:
        """Send a query to the peer that a URL names, and wait for its answer; cancel it to give it up.

        A peer may close a connection just when it is to be used again. A query of which nothing is answered then is
        asked once more, on a new connection. One that `changes` something may have been answered all the same: it is
        asked on a new connection, and once.

        Args:
            waits: whether the peer is to wait before it answers; such queries have places of their own.

        Raises:
            UnexpectedAnswerError: what came is not an answer of an instance.
            OSError: the peer cannot be reached.
        """
        peer = self._peers.get(url.authority)
        if peer is None:
            peer = self._peers[url.authority] = _Peer()
        peer.queries += 1
        try:
            async with peer.slots_to_wait_in if waits else peer.slots:
                connection = None if changes else peer.take_idle(tls)
                if connection is not None:
                    try:
                        return await self._ask(peer, connection, request)
                    except ClosedError as error:
                        if not error.is_unanswered:
                            raise
                    # Most likely it has closed them all.
                    _close(peer.idle)
                try:
                    return await self._ask(peer, await self._connect(peer, url, tls), request)
                except BaseException:
                    peer.look_up_again()
                    raise
        finally:
            peer.queries -= 1

    async def close(self) -> None:
        """Close all connections."""
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
            # Its transport first, if it has one by now: the loop must not watch a number that is another's.
            connection.abort()
            connected.close()
            raise
        if self.is_closed or not connection.is_open:
            connection.abort()
            raise ClosedError(is_unanswered=True)
        self._open.add(connection)
        return connection

    def _sweep(self) -> None:
        """Close what has been idle for long, and forget peers of which nothing is left."""
        self._sweeping = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        since = self._loop.time() - _IDLE_SECONDS
        for address, peer in list(self._peers.items()):
            old = [c for c in peer.idle if c.idle_since < since or not c.is_open]
            peer.idle = [c for c in peer.idle if c not in old]
            _close(old)
            if not peer.idle and not peer.queries:
                del self._peers[address]


def _close(connections: Iterable[PeerConnection]) -> None:
    for connection in connections:
        connection.abort()
