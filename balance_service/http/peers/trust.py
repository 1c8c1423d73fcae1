"""Which peers are trusted: those that this instance may ask, and how a peer that asks it proves that it is one.

A query that one instance passes on to another carries a mark. With a shared secret the mark has a proof: an HMAC
(RFC 2104) over the asking address, the time and the question. A proof is good for one question and a short time, since
marks cross the network in the clear.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import time
from typing import TYPE_CHECKING

from balance_service.http.server.problems import Problem
from balance_service.settings.address import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARK_SECONDS = 30
_CONTEXT = "balance-service forwarded query 1"
_PROVEN = re.compile(r"(?P<address>[^;\s]{1,300});t=(?P<t>[0-9]{1,12});hmac=(?P<proof>[0-9a-f]{64})")
_FORBIDDEN = 403

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Literal = ipaddress.IPv4Address | ipaddress.IPv6Address


class PeerTrust:
    """Judges addresses and marks of peers. Without a secret every mark passes; with an empty list, every host."""

    def __init__(
        self, secret: str | None = None, allow_list: Iterable[str] = (), now: Callable[[], float] = time.time
    ) -> None:
        """Args:
        allow_list: host names, `*.domain` for every name below it, IP addresses, networks.
        now: seconds since 1970.
        """
        self._secret = None if secret is None else secret.encode()
        self._now = now
        self._names: set[str] = set()
        self._domains: list[str] = []
        self._networks: list[_Network] = []
        self._allows_all = True
        for entry in allow_list:
            self._allows_all = False
            self._allow(entry)

    @property
    def demands_proof(self) -> bool:
        """Whether a mark that passed is a peer's; otherwise anybody can have written it."""
        return self._secret is not None

    def mark(self, from_address: str, path_and_query: str) -> str:
        """The mark of a query passed on.

        Args:
            path_and_query: exactly as it goes over the wire.
        """
        if self._secret is None:
            return from_address
        t = str(int(self._now()))
        return f"{from_address};t={t};hmac={self._proof(self._secret, from_address, t, path_and_query)}"

    def check(self, mark: str, path_and_query: str) -> None:
        """Refuse a mark that does not come from a peer.

        Args:
            path_and_query: exactly as it came over the wire.

        Raises:
            Problem: 403, the mark has no proof, or not one for this query, or one of another time.
        """
        if self._secret is None:
            return
        match = _PROVEN.fullmatch(mark)
        if match is None:
            raise Problem(
                _FORBIDDEN, "a forwarded query needs a proof; give all instances the same BALANCE_PEER_SECRET"
            )
        expected = self._proof(self._secret, match["address"], match["t"], path_and_query)
        if not hmac.compare_digest(expected, match["proof"]):
            raise Problem(
                _FORBIDDEN, "the forwarded query's proof is wrong; give all instances the same BALANCE_PEER_SECRET"
            )
        if abs(self._now() - int(match["t"])) > MARK_SECONDS:
            raise Problem(
                _FORBIDDEN,
                f"the forwarded query's proof by BALANCE_PEER_SECRET is not of now; "
                f"the clocks of all instances must agree within {MARK_SECONDS} s",
            )

    def allows(self, address: str) -> bool:
        """Whether an address may be asked: a plain host:port whose host is on the list.

        A network allows IP addresses only, for what a name resolves to is not known before it is asked.
        """
        try:
            host = _plain(address_of(address).host)
        except ValueError:
            return False
        if self._allows_all:
            return True
        literal = _literal(host)
        if literal is not None:
            return any(literal in network for network in self._networks)
        return host in self._names or any(host.endswith(domain) for domain in self._domains)

    def _allow(self, entry: str) -> None:
        try:
            self._networks.append(ipaddress.ip_network(entry.strip("[]")))
        except ValueError:
            if entry.startswith("*."):
                self._domains.append(_plain(entry[1:]))
            else:
                self._names.add(_plain(entry))

    @staticmethod
    def _proof(secret: bytes, address: str, t: str, path_and_query: str) -> str:
        # No part but the last can hold a line's end, so no two lists of parts make one message.
        message = "\n".join((_CONTEXT, address, t, path_and_query)).encode("utf-8", "surrogatepass")
        return hmac.new(secret, message, hashlib.sha256).hexdigest()


def _plain(host: str) -> str:
    """A host in the one form in which hosts are compared."""
    return host.strip("[]").removesuffix(".").lower()


def _literal(host: str) -> _Literal | None:
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(literal, "ipv4_mapped", None) or literal
