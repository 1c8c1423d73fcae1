"""One connection for each pair of instances, over which one follows partitions that the other owns.

The asker opens parts by number, and asks for each next batch; the owner sends a batch when there is one. It asks
nothing of a part whose reader is slow, so that this part delays no other.

    asker → owner   {"open":7,"model":"balance","partition":1,"since":40,"changelog":"…","key":"c1"},
                    {"next":7}, {"close":7}
    owner → asker   {"part":7,"kind":"changes","entries":["{…}"],"position":42,"epoch":3,"changelog":"…"},
                    {"part":7,"kind":"ended"}

Everything here belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from aiohttp import web

from balance_service.errors import InvalidInputError, RetriableError
from balance_service.http.answer import Problem, unavailable
from balance_service.http.peers.proxy import HEARTBEAT_SECONDS, PeerMessages
from balance_service.http.peers.trust import FORWARDED_HEADER, UnprovenError, digest_of
from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp
from balance_service.http.shares import Asker, asker_of
from balance_service.http.streams.feed import Point
from balance_service.http.streams.part import Batch, Kind, PartEndedError, Selection
from balance_service.process.runtime import Attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balance_service.http.peers.proxy import Proxy
    from balance_service.http.peers.trust import Peer, PeerTrust
    from balance_service.http.shares import Shares
    from balance_service.http.streams.part import LocalPart

    OpenLocal = Callable[[str, int, Selection, Point | None, Asker], LocalPart]
    """Model, partition, selection, point and asker → a part of this instance. Raises PartEndedError."""

log = structlog.get_logger(__name__)

PATH = "/api/changes"
_CANNOT_FOLLOW, _FOLLOWS = "a peer's changes cannot be followed", "a peer's changes are followed again"
_ENDED = "ended"
_CLIENT = "client"
_MAX_REQUEST_BYTES = 8 << 10
_MAX_PARTS = 100_000
# Without the secret, any process that opens a connection may be a client.
_MAX_UNPROVEN_PARTS = 1_000
_MAX_UNPROVEN_CONNECTIONS = 4
"""Of one address, or of one instance to another."""
_UNUSED_SECONDS = 15.0
_CLOSE_SECONDS = 1.0
# The last two come from JSON that has Infinity for a number, or is nested too deeply.
_MALFORMED = (LookupError, TypeError, ValueError, OverflowError, RecursionError)


class RemotePart:
    """A part of a stream from a peer's store."""

    def __init__(self, link: _Link, number: int, address: str) -> None:
        self.address = address
        self._link = link
        self._number = number
        self._is_asked = True
        self._arrived: asyncio.Queue[Batch | None] = asyncio.Queue()

    async def take(self) -> Batch:
        """Waits for the next batch. Raises PartEndedError."""
        if not self._is_asked and self._arrived.empty():
            self._is_asked = True
            self._link.send({"next": self._number})
        batch = await self._arrived.get()
        if batch is None:
            raise PartEndedError
        return batch

    def arrived(self, batch: Batch) -> None:
        """Called with each batch. Raises ValueError: it was not asked for."""
        if not self._is_asked:
            raise ValueError("a batch arrived that was not asked for")
        self._is_asked = False
        self._arrived.put_nowait(batch)

    def end(self) -> None:
        self._arrived.put_nowait(None)

    def close(self) -> None:
        self._link.close_part(self._number)


class Links:
    """The connections of this instance to the peers whose partitions it follows."""

    def __init__(self, proxy: Proxy, address: str) -> None:
        self._proxy = proxy
        self._address = address
        self._links: dict[Peer, list[_Link]] = {}
        self._attempts: dict[str, Attempts] = {}
        """Of following, by address: streams ask again ten times a second while a peer is away."""
        self._most_parts = _MAX_PARTS if proxy.proves_itself else _MAX_UNPROVEN_PARTS
        self._most_links = 1 if proxy.proves_itself else _MAX_UNPROVEN_CONNECTIONS

    def open(
        self, peer: Peer, model: str, partition: int, selection: Selection, since: Point | None, asker: Asker
    ) -> RemotePart:
        """Opens a part on behalf of an asker; connects to the peer if need be. The part ends if that fails.

        Raises:
            PartEndedError: the peer serves no more parts of this instance.
        """
        links = self._links.setdefault(peer, [])
        link = next((link for link in links if not link.has_ended and len(link) < self._most_parts), None)
        if link is None:
            if len(links) >= self._most_links:
                raise PartEndedError
            attempts = self._attempts.setdefault(peer.address, Attempts(log, _CANNOT_FOLLOW, _FOLLOWS))
            link = _Link(peer, self._proxy, self._address, attempts, self._ended)
            links.append(link)
        return link.open(model, partition, selection, since, asker)

    def _ended(self, link: _Link) -> None:
        links = self._links[link.peer]
        links.remove(link)
        if not links:
            del self._links[link.peer]


class _Link:
    """The connection to one peer."""

    def __init__(
        self, peer: Peer, proxy: Proxy, address: str, attempts: Attempts, on_end: Callable[[_Link], None]
    ) -> None:
        self.peer = peer
        self.has_ended = False
        self._proxy = proxy
        self._address = address
        self._attempts = attempts
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._parts: dict[int, RemotePart] = {}
        self._outgoing: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._unused: asyncio.TimerHandle | None = None
        self._running = self._loop.create_task(self._run())

    def __len__(self) -> int:
        """The number of parts."""
        return len(self._parts)

    def open(self, model: str, partition: int, selection: Selection, since: Point | None, asker: Asker) -> RemotePart:
        number = next(self._numbers)
        part = self._parts[number] = RemotePart(self, number, self.peer.address)
        if self._unused is not None:
            self._unused.cancel()
            self._unused = None
        position, changelog = since or (None, "")
        about = {"open": number, "model": model, "partition": partition, "since": position, "changelog": changelog}
        self.send({**about, _CLIENT: digest_of(asker.name), **selection.parameters()})
        return part

    def send(self, message: Mapping[str, Any]) -> None:
        self._outgoing.put_nowait(message)

    def close_part(self, number: int) -> None:
        if self._parts.pop(number, None) is not None:
            self.send({"close": number})
        if not self._parts and self._unused is None:
            self._unused = self._loop.call_later(_UNUSED_SECONDS, self._running.cancel)

    async def _run(self) -> None:
        messages: PeerMessages | None = None
        try:
            messages = await self._proxy.connect(self.peer, PATH, self._address)
            sending = self._loop.create_task(self._send_all(messages))
            try:
                async for message in messages.received():
                    self._attempts.succeeded()
                    self._take(message)
            finally:
                sending.cancel()
        except RetriableError as error:
            self._attempts.failed(error, peer=self.peer.address)
        except (UnprovenError, *_MALFORMED) as error:
            why = f"a message is not proven, or not of this version: {error}"
            self._attempts.failed(why, peer=self.peer.address)
        finally:
            self.has_ended = True
            self._on_end(self)
            for part in self._parts.values():
                part.end()
            if messages is not None:
                with suppress(ConnectionError):
                    await messages.close()

    async def _send_all(self, messages: PeerMessages) -> None:
        with suppress(ConnectionError):
            while True:
                await messages.send(await self._outgoing.get())

    def _take(self, message: Mapping[str, Any]) -> None:
        """Raises one of `_MALFORMED`."""
        part = self._parts.get(message["part"])
        if part is None:
            # It was closed while the batch was on its way.
            return
        if message["kind"] == _ENDED:
            part.end()
            return
        entries = [str(entry) for entry in message["entries"]]
        if any("\n" in entry or "\r" in entry for entry in entries):
            raise ValueError("an entry has several lines")
        # An instance before an upgrade names no changelog. A client then goes on with a snapshot.
        changelog = str(message.get("changelog", ""))
        part.arrived(Batch(Kind(message["kind"]), entries, int(message["position"]), int(message["epoch"]), changelog))


class PeerStreams:
    """Serves the connections of peers that follow partitions of this instance."""

    def __init__(self, open_local: OpenLocal, trust: PeerTrust, shares: Shares) -> None:
        """Args:
        shares: the places of streams. A connection takes one unless it is proven to be a peer's.
        """
        self._open_local = open_local
        self._trust = trust
        self._shares = shares
        self._unproven: Counter[str] = Counter()
        self._sockets: set[web.WebSocketResponse] = set()
        self._is_closed = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Serves one connection until it closes.

        Raises:
            Problem: 403, the request is not a peer's; 503, without a secret, its address has too many connections.
        """
        if self._is_closed:
            raise unavailable("this instance is stopping")
        mark = request.headers.get(FORWARDED_HEADER)
        if mark is None:
            raise Problem(403, "only instances open connections here; clients follow changes at /api/models")
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=_MAX_REQUEST_BYTES, compress=False)
        if not socket.can_prepare(request).ok:
            raise Problem(400, "this path takes WebSocket connections of instances only")
        if self._trust.demands_proof:
            return await self._serve(request, socket, mark, _MAX_PARTS)
        client = asker_of(request).name
        if self._unproven[client] >= _MAX_UNPROVEN_CONNECTIONS or not self._shares.take(client):
            raise unavailable(
                f"without BALANCE_PEER_SECRET, one address may have {_MAX_UNPROVEN_CONNECTIONS} connections here, and "
                "they count as streams; give all instances the same secret"
            )
        self._unproven[client] += 1
        try:
            return await self._serve(request, socket, mark, _MAX_UNPROVEN_PARTS)
        finally:
            self._shares.release(client)
            self._unproven[client] -= 1
            if not self._unproven[client]:
                del self._unproven[client]

    async def _serve(
        self, request: web.Request, socket: web.WebSocketResponse, mark: str, most_parts: int
    ) -> web.StreamResponse:
        incoming, outgoing = self._trust.chains(mark)
        connection = request.protocol
        # Otherwise a connection that always has something to send would look like one without a reader.
        drained = connection.drained if isinstance(connection, AheadOfAiohttp) else None
        messages = PeerMessages(socket, outgoing, incoming, drained)
        served = _Served(
            messages, self._open_local, asker_of(request), most_parts, names_clients=self._trust.demands_proof
        )
        try:
            await socket.prepare(request)
        except ConnectionError:
            return socket
        self._sockets.add(socket)
        try:
            # The peer may close the connection, or die, while a message is sent to it.
            with suppress(ConnectionError):
                await served.run()
        except (UnprovenError, InvalidInputError, *_MALFORMED) as error:
            log.warning("a peer's connection for changes is closed", reason=str(error) or "a message is not proven")
        finally:
            self._sockets.discard(socket)
            await _close(socket)
        return socket

    async def close(self) -> None:
        """Closes all connections, and opens no more."""
        self._is_closed = True
        await asyncio.gather(*[_close(socket) for socket in self._sockets])


async def _close(socket: web.WebSocketResponse) -> None:
    """Closes a connection. A peer that is suspended does not take part in it."""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await socket.close()


class _ServedPart(NamedTuple):
    is_asked: asyncio.Event
    serving: asyncio.Task[None]


class _Served:
    """The parts that one peer follows."""

    def __init__(
        self, messages: PeerMessages, open_local: OpenLocal, asker: Asker, most_parts: int, *, names_clients: bool
    ) -> None:
        """Args:
        names_clients: whether the peer is believed on whose behalf it opens parts.
        """
        self._messages = messages
        self._open_local = open_local
        self._asker = asker
        self._most_parts = most_parts
        self._names_clients = names_clients
        self._parts: dict[int, _ServedPart] = {}

    async def run(self) -> None:
        try:
            async for message in self._messages.received():
                await self._take(message)
        finally:
            for served in list(self._parts.values()):
                served.serving.cancel()

    async def _take(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"open": int(number)}:
                await self._open(number, message)
            case {"next": int(number)}:
                if number in self._parts:
                    self._parts[number].is_asked.set()
            case {"close": int(number)}:
                if number in self._parts:
                    self._parts.pop(number).serving.cancel()
            case _:
                raise ValueError("a message asks for nothing that this version knows")

    async def _open(self, number: int, message: Mapping[str, Any]) -> None:
        if number in self._parts or len(self._parts) >= self._most_parts:
            raise ValueError(f"part {number} cannot be opened")
        since = message["since"]
        try:
            part = self._open_local(
                str(message["model"]),
                int(message["partition"]),
                Selection.of(message),
                None if since is None else Point(int(since), str(message.get("changelog", ""))),
                self._asker_of(message),
            )
        except (PartEndedError, InvalidInputError):
            # An instance that does not know the type of the keys may pass on a key of another type.
            await self._messages.send({"part": number, "kind": _ENDED})
            return
        is_asked = asyncio.Event()
        is_asked.set()
        serving = asyncio.get_running_loop().create_task(self._serve(number, part, is_asked))
        opened = self._parts[number] = _ServedPart(is_asked, serving)

        def served(_: asyncio.Task[None]) -> None:
            # A task that is cancelled before its first step frees nothing itself.
            part.close()
            # The peer may have closed the part, and opened another one by its number.
            if self._parts.get(number) is opened:
                del self._parts[number]

        serving.add_done_callback(served)

    def _asker_of(self, message: Mapping[str, Any]) -> Asker:
        # A peer of an earlier version names no client: all of its clients have one share.
        client = message.get(_CLIENT) if self._names_clients else None
        return self._asker if client is None else Asker(str(client), is_peer=True)

    async def _serve(self, number: int, part: LocalPart, is_asked: asyncio.Event) -> None:
        with suppress(ConnectionError):
            try:
                while True:
                    await is_asked.wait()
                    is_asked.clear()
                    await self._messages.send({"part": number, **(await part.take())._asdict()})
            except PartEndedError:
                pass
            except Exception:  # a model's own view may raise anything
                log.exception("a partition cannot be followed")
            await self._messages.send({"part": number, "kind": _ENDED})
