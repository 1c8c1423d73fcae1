"""Ports of the local servers, which listen on the loopback address alone."""

from __future__ import annotations

import random
import socket

from balance_service.errors import ConfigurationError

HOST = "127.0.0.1"

# Below the ephemeral ports of Linux and macOS: while a server is down for a moment, no outgoing
# connection is given its port, and no client that keeps trying can end up connected to itself.
_PORTS = range(20_000, 30_000)

# Given out by this process; a server may not have begun to listen on its own yet.
_taken: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, and that this process is given only once."""
    for port in random.sample(_PORTS, 200):
        if port not in _taken and is_free(port):
            _taken.add(port)
            return port
    raise ConfigurationError(f"no free port was found between {_PORTS.start} and {_PORTS.stop}")


def require_free(port: int, server: str, flag: str) -> None:
    """Check that `server` can listen on `port`, which a person chooses with `flag`.

    Raises:
        ConfigurationError: another program listens there, or the port may not be used.
    """
    if not is_free(port):
        raise ConfigurationError(
            f"port {port}, on which the {server} should listen, is in use or not allowed: "
            f"stop the program that uses it, or choose another port with {flag} (0 picks a free one)"
        )
    _taken.add(port)


def is_free(port: int) -> bool:
    """Whether a server could listen on `port`."""
    # macOS would let one bind beside a server that listens on the wildcard address.
    if accepts_connections(port):
        return False
    with socket.socket() as server:
        # As Java does: connections of a former server that linger do not keep the port.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((HOST, port))
        except OSError:
            return False
    return True


def accepts_connections(port: int) -> bool:
    """Whether a server listens on `port` now."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0
