"""Places: how many connections an HTTP server keeps, and which one it closes to make room for another.

A connection takes a place when it is accepted, before its TLS handshake, and gives it up once the client has
acknowledged all that was sent, or has been reset.

    ├────────────── 15/16: ordinary places ──────────────┤─ 1/16: reserved ─┤
                                          ▲              ▲
          three quarters: a client with a quarter        full: the connection that has been
          of them gets another only in place of          idle longest is closed; where none is
          its own connection that is idle longest        idle, the new one takes a reserved place,
                                                         which serves probes and proven peers alone

A client is a token's holder once a request on the connection has shown a token, and the client's address before.
Everything runs on the event loop's thread.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from typing import TYPE_CHECKING

from balance_service.http.access.clients import whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_RESERVED = 16
_CROWDED = 3 / 4
_SHARE = 4


class Place:
    """The place of one accepted connection."""

    __slots__ = ("client", "cut", "idle_since", "is_reserved")

    def __init__(self, client: str, now: float, *, is_reserved: bool) -> None:
        self.client = client
        """Whose share of the places it counts for."""
        self.idle_since: float | None = now
        """When its last answer ended, or when it was accepted; None while a request is answered."""
        self.is_reserved = is_reserved
        """Whether it serves probes and proven peers alone."""
        self.cut: Callable[[], None] = lambda: None
        """Closes the connection at once."""


class Places:
    """All places of one server."""

    def __init__(self, most: int, trusted_proxies: Iterable[str], now: Callable[[], float]) -> None:
        """Args:
        most: how many there are, at least 1.
        trusted_proxies: addresses and networks of clients that have no share.
        now: seconds, of a clock that never goes back.
        """
        self._trusted = [ipaddress.ip_network(entry) for entry in trusted_proxies]
        self.now = now
        self._ordinary = _Group()
        self._reserved = _Group()
        self._by_client: dict[str, _Group] = {}
        self.bound(most)

    def bound(self, most: int) -> None:
        """Change how many there are. Of connections beyond that, those that are idle are closed, longest idle first."""
        self._most_reserved = most // _RESERVED
        self._most_ordinary = max(1, most - self._most_reserved)
        self._share = max(1, self._most_ordinary // _SHARE)
        while len(self._ordinary.places) > self._most_ordinary and self._make_room(self._ordinary):
            continue

    def __len__(self) -> int:
        """How many are taken."""
        return len(self._ordinary.places) + len(self._reserved.places)

    def take(self, address: str) -> Place | None:
        """A place for a connection from an IP address; None if it has to be refused."""
        client, is_reserved = whereabouts(address), False
        if self._exceeds_share(client) and not self._is_trusted(address):
            if not self._make_room(self._by_client[client]):
                return None
        elif len(self._ordinary.places) >= self._most_ordinary and not self._make_room(self._ordinary):
            is_reserved = True
            if len(self._reserved.places) >= self._most_reserved and not self._make_room(self._reserved):
                return None
        place = Place(client, self.now(), is_reserved=is_reserved)
        self._group(place).places.add(place)
        self._join(place)
        return place

    def attribute(self, place: Place, client: str) -> None:
        """Count a place for the holder of the token that a request on its connection has shown."""
        if place.client == client or place not in self._group(place).places:
            return
        # A token has a share of its own, behind a trusted proxy too.
        if self._exceeds_share(client):
            self._make_room(self._by_client[client])
        self._leave(place)
        place.client = client
        self._join(place)

    def release(self, place: Place) -> None:
        """Give a place up; one that was given up already may be again."""
        group = self._group(place)
        if place in group.places:
            group.places.discard(place)
            self._leave(place)

    def _exceeds_share(self, client: str) -> bool:
        group = self._by_client.get(client)
        is_crowded = len(self) >= self._most_ordinary * _CROWDED
        return is_crowded and group is not None and len(group.places) >= self._share

    def _make_room(self, group: _Group) -> bool:
        """Close the connection of a group that has been idle longest; whether there is one."""
        place = group.longest_idle()
        if place is None:
            return False
        self.release(place)
        place.cut()
        return True

    def _group(self, place: Place) -> _Group:
        return self._reserved if place.is_reserved else self._ordinary

    def _join(self, place: Place) -> None:
        self._by_client.setdefault(place.client, _Group()).places.add(place)

    def _leave(self, place: Place) -> None:
        group = self._by_client[place.client]
        group.places.discard(place)
        if not group.places:
            del self._by_client[place.client]

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
    """Some places, and which of them is idle longest.

    A request costs nothing here: candidates are sorted when one is wanted, and each is looked at again before it is
    taken. So many are found for one sorting.
    """

    __slots__ = ("_candidates", "places")

    def __init__(self) -> None:
        self.places: set[Place] = set()
        self._candidates: deque[tuple[float, Place]] = deque()

    def longest_idle(self) -> Place | None:
        place = self._next()
        if place is None:
            idle = [(place.idle_since, place) for place in self.places if place.idle_since is not None]
            self._candidates.extend(sorted(idle, key=lambda candidate: candidate[0]))
            place = self._next()
        return place

    def _next(self) -> Place | None:
        while self._candidates:
            since, place = self._candidates.popleft()
            if place in self.places and place.idle_since == since:
                return place
        return None
