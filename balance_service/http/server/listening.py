"""The listening side of an HTTP server: it accepts connections, and holds each until its last byte is acknowledged.

asyncio's own server would accept without a bound, count nothing before the TLS handshake, and log a traceback for each
connection that it has no file descriptor for. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import termios
from typing import TYPE_CHECKING

import structlog

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Callable

    from balance_service.http.server.places import Place, Places

log = structlog.get_logger(__name__)

_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 16
_HANDSHAKE_SECONDS = 5.0
_TLS_END_SECONDS = 1.0
# The kernel takes twice as much for each direction. Without a bound it grows to several MiB.
_BUFFER_BYTES = 64 << 10
# How long a client may leave unacknowledged what it was sent, before the connection is closed or after.
UNACKNOWLEDGED_SECONDS = 10.0
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_SECONDS = 1.0
_TELL_AGAIN_SECONDS = 60.0
_RESET = struct.pack("ii", 1, 0)


def bind(host: str, port: int, setting: str = "BALANCE_HTTP_PORT") -> socket.socket:
    """A listening socket.

    Args:
        setting: where the port is from; the host comes from the setting of the same prefix.

    Raises:
        ConfigurationError: the port is in use, or the address is not ours.
    """
    of_host = setting.replace("_PORT", "_HOST")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit these.
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listener.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_SECONDS * 1000))
        listener.bind(address)
    except UnicodeError:
        raise ConfigurationError(
            f"{of_host} {host} is no address and no host's name; name an address of this machine"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is in use; stop what listens there or set {setting}"
            ) from None
        raise ConfigurationError(
            f"{of_host} {host} cannot be listened on: {error.strerror}; name an address of this machine"
        ) from None
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


class AcceptedSocket(socket.socket):
    """The socket of an accepted connection. Closed with bytes unacknowledged, it stays open, and counted, for a while.

    A socket that is only closed would leave its unsent bytes to the kernel for minutes, uncounted.
    """

    __slots__ = ("_is_reset", "_listener", "is_handed_over", "place")

    def __init__(self, accepted: socket.socket, place: Place, listener: Listener) -> None:
        """Take an accepted socket over."""
        super().__init__(fileno=accepted.detach())
        self.setblocking(False)
        self.place = place
        self.is_handed_over = False
        """Whether a transport of asyncio closes it."""
        self._listener = listener
        self._is_reset = False

    @property
    def unacknowledged(self) -> int:
        """Bytes that were sent, or wait to be, and that the client has not acknowledged."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
        except OSError:
            return 0

    def reset(self) -> None:
        """Have `close` throw away what is not acknowledged."""
        self._is_reset = True
        if self.fileno() >= 0:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def close(self) -> None:
        """Close it as soon as the client has acknowledged everything, within `UNACKNOWLEDGED_SECONDS`."""
        if not self._is_reset and self.fileno() >= 0 and self.unacknowledged and self._listener.drain(self):
            return
        super().close()
        self._listener.places.release(self.place)


class Listener:
    """Accepts the connections of one socket, within its places."""

    def __init__(
        self,
        bound: socket.socket,
        places: Places,
        connection: Callable[[AcceptedSocket], asyncio.Protocol],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Args:
        connection: makes the protocol of an accepted connection; it replaces `Place.cut`.
        """
        self.places = places
        self._bound = bound
        self._connection = connection
        self._loop = loop
        self._tls: ssl.SSLContext | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._draining: dict[AcceptedSocket, float] = {}
        self._resuming: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")
        self._is_closed = False

    def listen(self, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections from now on, under TLS if it is given. Connections accepted before do not change."""
        self._tls = tls
        self._loop.add_reader(self._bound, self._accept)

    def close(self) -> None:
        """Accept no more connections; end handshakes, and what clients have not acknowledged."""
        self._is_closed = True
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._bound)
        self._bound.close()
        for opening in self._opening:
            opening.cancel()
        for draining in list(self._draining):
            self._end(draining)

    def drain(self, closing: AcceptedSocket) -> bool:
        """Keep a socket until its bytes are acknowledged; whether it can be."""
        if self._is_closed or closing in self._draining:
            return False
        try:
            closing.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        self._draining[closing] = self._loop.time()
        return True

    def sweep(self, now: float) -> None:
        """Close the sockets whose bytes are acknowledged, and reset those whose time is up."""
        for draining, since in list(self._draining.items()):
            if not draining.unacknowledged or now - since > UNACKNOWLEDGED_SECONDS:
                self._end(draining)

    def _end(self, draining: AcceptedSocket) -> None:
        del self._draining[draining]
        if draining.unacknowledged:
            draining.reset()
        draining.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                self._pause(error)
                return
            place = self.places.take(str(address[0]))
            if place is None:
                accepted.close()
                continue
            self._begin(AcceptedSocket(accepted, place, self))

    def _begin(self, accepted: AcceptedSocket) -> None:
        opening = self._loop.create_task(self._open(accepted))
        self._opening.add(opening)

        def cut() -> None:
            accepted.reset()
            opening.cancel()

        def opened(_: asyncio.Task[None]) -> None:
            self._opening.discard(opening)
            # A task that is cancelled before its first step has opened nothing.
            if not accepted.is_handed_over:
                accepted.close()

        accepted.place.cut = cut
        opening.add_done_callback(opened)

    async def _open(self, accepted: AcceptedSocket) -> None:
        """Make the connection of an accepted socket; its TLS handshake takes a while."""
        tls = self._tls
        accepted.is_handed_over = True
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._connection(accepted),
                accepted,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else _HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=None if tls is None else _TLS_END_SECONDS,
            )
        except OSError as error:
            log.debug("a connection could not be opened", reason=str(error))

    def _pause(self, error: OSError) -> None:
        """Leave connections in the backlog for a second: the descriptors that are left are the engine's."""
        self._loop.remove_reader(self._bound)
        self._resuming = self._loop.call_later(_PAUSE_SECONDS, self._loop.add_reader, self._bound, self._accept)
        now = self._loop.time()
        if now - self._told_at > _TELL_AGAIN_SECONDS:
            self._told_at = now
            log.error(
                "no connections are accepted for a second at a time: raise the limit of open files", reason=str(error)
            )
