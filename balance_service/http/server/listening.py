"""Accepts the connections of an HTTP server, within a number of slots.

A connection takes a slot when it is accepted, before its TLS handshake. It releases the slot once the client has
acknowledged everything that was sent, or the connection is reset.

    ├────────────── 15/16: ordinary slots ───────────────┤─ 1/16: reserved ─┤
                                          ▲              ▲
          three quarters: a client with a quarter        full: the connection that has been
          of them gets another slot only in place of     idle longest is closed; if none is idle,
          its own connection that is idle longest        the new one takes a reserved slot, which
                                                         serves only probes and proven peers

A client is identified by its address, and by its token after the first request with one. asyncio's own server would
accept without a bound, count nothing before the TLS handshake, and log a traceback for each connection when no file
descriptor is left. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import ssl
import struct
import termios
from collections import deque
from typing import TYPE_CHECKING

import structlog

from balance_service.errors import ConfigurationError
from balance_service.http.access.clients import anonymous_name

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

log = structlog.get_logger(__name__)

_RESERVED = 16
_CROWDED = 3 / 4
_SHARE = 4

_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 16
_HANDSHAKE_SECONDS = 5.0
# The kernel doubles it for each direction. Without a bound, buffers grow to several MiB.
_BUFFER_BYTES = 64 << 10
UNACKNOWLEDGED_SECONDS = 10.0
"""How long a client may leave data unacknowledged, on an open connection or after it is closed."""
# Over TLS, asyncio sends the end of an answer after the connection is closed, and discards what is left then.
_TLS_SHUTDOWN_SECONDS = UNACKNOWLEDGED_SECONDS
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_SECONDS = 1.0
_LOG_AGAIN_SECONDS = 60.0
_RESET = struct.pack("ii", 1, 0)
_NO_CERTIFICATE = "PEER_DID_NOT_RETURN_A_CERTIFICATE"


def bind(host: str, port: int, setting: str = "BALANCE_HTTP_PORT") -> socket.socket:
    """Returns a listening socket.

    Args:
        setting: for error messages: the setting of the port. The setting of the host has the same prefix.

    Raises:
        ConfigurationError: the port is in use, or the address is not of this machine.
    """
    host_setting = setting.replace("_PORT", "_HOST")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit these options.
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listener.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_SECONDS * 1000))
        listener.bind(address)
    except UnicodeError:
        raise ConfigurationError(
            f"{host_setting} {host} is neither an address nor a host name; name an address of this machine"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is in use; stop the process that listens there, or set {setting}"
            ) from None
        raise ConfigurationError(
            f"{host_setting} {host} cannot be used: {error.strerror}; name an address of this machine"
        ) from None
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


class Slot:
    """The slot of one accepted connection."""

    __slots__ = ("client", "close_now", "idle_since", "is_reserved")

    def __init__(self, client: str, now: float, *, is_reserved: bool) -> None:
        self.client = client
        """The client whose share includes this slot."""
        self.idle_since: float | None = now
        """When the latest answer ended, or the connection was accepted; None during a request."""
        self.is_reserved = is_reserved
        """Whether it serves only probes and proven peers."""
        self.close_now: Callable[[], None] = lambda: None
        """Closes the connection at once."""


class Slots:
    """All slots of one server."""

    def __init__(self, capacity: int, trusted_proxies: Iterable[str], now: Callable[[], float]) -> None:
        """Args:
        capacity: at least 1.
        trusted_proxies: addresses and networks that no share bounds.
        now: seconds, of a monotonic clock.
        """
        self._trusted = [ipaddress.ip_network(entry) for entry in trusted_proxies]
        self.now = now
        self._ordinary = _Group()
        self._reserved = _Group()
        self._by_client: dict[str, _Group] = {}
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Sets the number of slots. Beyond it, closes connections that are idle, longest idle first."""
        self._most_reserved = capacity // _RESERVED
        self._most_ordinary = max(1, capacity - self._most_reserved)
        self._share = max(1, self._most_ordinary // _SHARE)
        while len(self._ordinary.slots) > self._most_ordinary and self._evict(self._ordinary):
            continue

    def __len__(self) -> int:
        return len(self._ordinary.slots) + len(self._reserved.slots)

    def take(self, address: str) -> Slot | None:
        """Takes a slot for a connection from an IP address; None if the connection must be refused."""
        client, is_reserved = anonymous_name(address), False
        if self._exceeds_share(client) and not self._is_trusted(address):
            if not self._evict(self._by_client[client]):
                return None
        elif len(self._ordinary.slots) >= self._most_ordinary and not self._evict(self._ordinary):
            is_reserved = True
            if len(self._reserved.slots) >= self._most_reserved and not self._evict(self._reserved):
                return None
        slot = Slot(client, self.now(), is_reserved=is_reserved)
        self._group(slot).slots.add(slot)
        self._join(slot)
        return slot

    def attribute(self, slot: Slot, client: str) -> None:
        """Moves a slot to the share of an authenticated client."""
        if slot.client == client or slot not in self._group(slot).slots:
            return
        # A token has a share of its own, even behind a trusted proxy.
        if self._exceeds_share(client):
            self._evict(self._by_client[client])
        self._leave(slot)
        slot.client = client
        self._join(slot)

    def release(self, slot: Slot) -> None:
        """Idempotent."""
        group = self._group(slot)
        if slot in group.slots:
            group.slots.discard(slot)
            self._leave(slot)

    def _exceeds_share(self, client: str) -> bool:
        group = self._by_client.get(client)
        is_crowded = len(self) >= self._most_ordinary * _CROWDED
        return is_crowded and group is not None and len(group.slots) >= self._share

    def _evict(self, group: _Group) -> bool:
        """Closes the connection that has been idle longest; returns False if none is idle."""
        slot = group.longest_idle()
        if slot is None:
            return False
        self.release(slot)
        slot.close_now()
        return True

    def _group(self, slot: Slot) -> _Group:
        return self._reserved if slot.is_reserved else self._ordinary

    def _join(self, slot: Slot) -> None:
        self._by_client.setdefault(slot.client, _Group()).slots.add(slot)

    def _leave(self, slot: Slot) -> None:
        group = self._by_client[slot.client]
        group.slots.discard(slot)
        if not group.slots:
            del self._by_client[slot.client]

    def _is_trusted(self, address: str) -> bool:
        if not self._trusted:
            return False
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        ip = getattr(ip, "ipv4_mapped", None) or ip
        return any(ip in network for network in self._trusted)


class _Group:
    """Some slots, with a search for the one that is idle longest.

    A request costs nothing here. The search sorts the idle slots once and checks each candidate again before it
    returns it, so that one sort serves many searches.
    """

    __slots__ = ("_candidates", "slots")

    def __init__(self) -> None:
        self.slots: set[Slot] = set()
        self._candidates: deque[tuple[float, Slot]] = deque()

    def longest_idle(self) -> Slot | None:
        slot = self._next()
        if slot is None:
            idle = [(slot.idle_since, slot) for slot in self.slots if slot.idle_since is not None]
            self._candidates.extend(sorted(idle, key=lambda candidate: candidate[0]))
            slot = self._next()
        return slot

    def _next(self) -> Slot | None:
        while self._candidates:
            since, slot = self._candidates.popleft()
            if slot in self.slots and slot.idle_since == since:
                return slot
        return None


class AcceptedSocket(socket.socket):
    """The socket of an accepted connection. `close` delays until the client has acknowledged all data.

    Otherwise the kernel would hold unsent data for minutes, without a slot.
    """

    __slots__ = ("_is_reset", "_listener", "is_handed_over", "slot")

    def __init__(self, accepted: socket.socket, slot: Slot, listener: Listener) -> None:
        super().__init__(fileno=accepted.detach())
        self.setblocking(False)
        self.slot = slot
        self.is_handed_over = False
        """Whether an asyncio transport closes it."""
        self._listener = listener
        self._is_reset = False

    @property
    def unacknowledged(self) -> int:
        """Bytes in the kernel's send queue: not sent yet, or not acknowledged."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
        except OSError:
            return 0

    def reset(self) -> None:
        """Makes `close` discard unacknowledged data."""
        self._is_reset = True
        if self.fileno() >= 0:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def close(self) -> None:
        """Closes it once the client has acknowledged everything, at most `UNACKNOWLEDGED_SECONDS` later."""
        if not self._is_reset and self.fileno() >= 0 and self.unacknowledged and self._listener.drain(self):
            return
        super().close()
        self._listener.slots.release(self.slot)


class Listener:
    """Accepts the connections of one listening socket."""

    def __init__(
        self,
        bound: socket.socket,
        slots: Slots,
        connection: Callable[[AcceptedSocket], asyncio.Protocol],
        loop: asyncio.AbstractEventLoop,
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        """Args:
        connection: makes the protocol of an accepted connection; it replaces `Slot.close_now`.
        pause_seconds: how long no connection is accepted when the process has no file descriptor left.
        """
        self.slots = slots
        self._bound = bound
        self._connection = connection
        self._loop = loop
        self._pause_seconds = pause_seconds
        self._tls: ssl.SSLContext | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._draining: dict[AcceptedSocket, float] = {}
        self._resuming: asyncio.TimerHandle | None = None
        self._logged_at: dict[str, float] = {}
        self._is_closed = False

    def listen(self, tls: ssl.SSLContext | None = None) -> None:
        """Accepts connections from now on, with TLS if given. Does not affect connections accepted before."""
        self._tls = tls
        self._loop.add_reader(self._bound, self._accept)

    def close(self) -> None:
        """Accepts no more connections; aborts handshakes and resets sockets with unacknowledged data."""
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
        """Keeps a socket until its data is acknowledged; returns False if it cannot be kept."""
        if self._is_closed or closing in self._draining:
            return False
        try:
            closing.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        self._draining[closing] = self._loop.time()
        return True

    def sweep(self, now: float) -> None:
        """Closes the draining sockets whose data is acknowledged, and resets those that exceed the time limit."""
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
            slot = self.slots.take(str(address[0]))
            if slot is None:
                accepted.close()
                continue
            self._begin(AcceptedSocket(accepted, slot, self))

    def _begin(self, accepted: AcceptedSocket) -> None:
        opening = self._loop.create_task(self._open(accepted))
        self._opening.add(opening)

        def close_now() -> None:
            accepted.reset()
            opening.cancel()

        def opened(_: asyncio.Task[None]) -> None:
            self._opening.discard(opening)
            # A task that is cancelled before its first step has not handed the socket over.
            if not accepted.is_handed_over:
                accepted.close()

        accepted.slot.close_now = close_now
        opening.add_done_callback(opened)

    async def _open(self, accepted: AcceptedSocket) -> None:
        """Makes the connection of an accepted socket, after its TLS handshake."""
        tls = self._tls
        accepted.is_handed_over = True
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._connection(accepted),
                accepted,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else _HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=None if tls is None else _TLS_SHUTDOWN_SECONDS,
            )
        except OSError as error:
            log.debug("a connection could not be opened", reason=str(error))
            if isinstance(error, ssl.SSLCertVerificationError) or getattr(error, "reason", "") == _NO_CERTIFICATE:
                # asyncio closes the connection without telling the client.
                self._log_again(
                    log.warning,
                    "a client's certificate is missing, expired, not for clients, or of no CA in BALANCE_TLS_CLIENT_CA",
                    client=accepted.slot.client,
                    reason=str(error),
                )

    def _pause(self, error: OSError) -> None:
        """Leaves connections in the backlog for a second: the engine needs the remaining file descriptors."""
        self._loop.remove_reader(self._bound)
        self._resuming = self._loop.call_later(self._pause_seconds, self._loop.add_reader, self._bound, self._accept)
        self._log_again(
            log.error,
            "no connections are accepted for a second at a time: raise the limit of open files",
            reason=str(error),
        )

    def _log_again(self, write: Callable[..., object], event: str, **about: str) -> None:
        """Logs an event at most once a minute."""
        now = self._loop.time()
        if now - self._logged_at.get(event, float("-inf")) > _LOG_AGAIN_SECONDS:
            self._logged_at[event] = now
            write(event, **about)
