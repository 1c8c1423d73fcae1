"""Access control: requests from browsers, authentication, scopes, and rate limits.

A route declares scopes; a request needs one of them. A request that matches no route, and is answered 404 or 405,
needs a token with any scope. `Access.judge` checks requests on both paths to an answer: ahead of aiohttp
(`server/plain.py`) and in the application (`guarded`). Everything here belongs to the event loop.
"""

from __future__ import annotations

import ipaddress
import math
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import hdrs, web

from balance_service.http.access.authentication import (
    Authenticator,
    insufficient_scope,
    load_jwts,
    load_tokens,
    unauthenticated,
)
from balance_service.http.access.clients import Scope, anonymous_name
from balance_service.http.answer import Problem
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp
from balance_service.http.server.reloading import Reloaded
from balance_service.settings.network import address_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from aiohttp.typedefs import Middleware
    from multidict import CIMultiDictProxy

    from balance_service.http.route import RouteTable
    from balance_service.settings import Settings

CLIENT = web.RequestKey("client", str)
"""The name of an authenticated client."""
ON_BEHALF_OF = web.RequestKey("on_behalf_of", str)
"""The client whose query a proven peer forwards, as `PeerTrust.client_of` names it."""
RECHECK: web.RequestKey[Callable[[], Problem | None]] = web.RequestKey("recheck")
"""Returns the refusal that the same request would meet now; None while its client is admitted."""

KNOWS: web.AppKey[Callable[[CIMultiDictProxy[str]], bool]] = web.AppKey("knows")
"""Whether a client with these headers may read why an instance is not ready, which names peers, topics and errors."""

_SITE_HEADER = "Sec-Fetch-Site"
_OWN_SITES = frozenset({"same-origin", "none"})
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:\[\]]+)(?::[0-9]*)?")  # RFC 3986, section 3.2.2, in lower case
_MAX_HOSTS = 1_000
_JSON = "application/json"

# About 10 MB. Beyond it, the client that has been idle longest is dropped: its bucket is the likeliest to be full.
_MAX_CLIENTS = 50_000
# Less than any interval: sums of intervals are not exact.
_TOLERANCE_SECONDS = 1e-7


class RateLimit:
    """A token bucket for each client. Not thread-safe.

    A bucket is stored as the time when it will be full again (the generic cell rate algorithm, ITU-T I.371). Each
    request moves that time forward by one interval. A request that finds the bucket empty is refused.
    """

    def __init__(
        self,
        per_second: float,
        burst: int,
        now: Callable[[], float] = time.monotonic,
        max_clients: int = _MAX_CLIENTS,
    ) -> None:
        """Args:
        burst: the capacity of a bucket, in requests.
        max_clients: bounds the memory.
        """
        self._per_second = per_second
        self._interval = 1.0 / per_second
        self._depth = (burst - 1) * self._interval + _TOLERANCE_SECONDS
        self._now = now
        self._max_clients = max_clients
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, client: str) -> None:
        """Counts a request.

        Raises:
            Problem: 429, with Retry-After, if the client's bucket is empty.
        """
        full_at, early = self._bucket(client)
        if early > 0:
            raise Problem(
                429,
                f"a client may make {self._per_second:g} requests a second; this request was not processed",
                retry_after=max(1, math.ceil(early)),
            )
        self._full_at[client] = full_at + self._interval
        self._full_at.move_to_end(client)
        if len(self._full_at) > self._max_clients:
            self._full_at.popitem(last=False)

    def has_room(self, client: str) -> bool:
        """Whether `take` would succeed now."""
        return self._bucket(client)[1] <= 0

    def _bucket(self, client: str) -> tuple[float, float]:
        """Returns when the bucket is full again, and by how many seconds a request is too early."""
        now = self._now()
        full_at = max(self._full_at.get(client, now), now)
        return full_at, full_at - now - self._depth


class Browsers:
    """Refuses requests that a web page of another site makes a browser send.

    A page can send requests to any instance that its browser reaches. Sec-Fetch-Site (W3C Fetch Metadata) and Origin
    (RFC 6454) reveal a page of another origin. Host reveals DNS rebinding, where a page resolves its own name to the
    instance. Clients other than browsers can forge these headers: only tokens keep them out.
    """

    def __init__(self, hosts: Iterable[str] | None = None, origins: Iterable[str] = ()) -> None:
        """Args:
        hosts: names and `*.domains` that Host may contain, in addition to IP addresses and `localhost`; None accepts
            any host.
        origins: origins whose pages may send requests, in lower case.
        """
        names = None if hosts is None else [host.removesuffix(".").lower() for host in hosts]
        self._names = None if names is None else frozenset({"localhost", *names})
        self._domains = tuple(name.removeprefix("*") for name in names or () if name.startswith("*."))
        self._origins = frozenset(origins)
        # Clients send the same few hosts in every request.
        self._is_known = lru_cache(maxsize=_MAX_HOSTS)(self._look_up)

    def refusal(self, headers: CIMultiDictProxy[str]) -> Problem | None:
        """Returns 403 or 421; None if the request may pass."""
        host = headers.get(hdrs.HOST)
        # HTTP/1.0 permits a request without Host, and no browser sends one; aiohttp's parser refuses it in HTTP/1.1.
        if self._names is not None and host is not None and not self._is_known(host):
            return Problem(
                421, "this instance is not known by the host in the header Host; add that host to BALANCE_ALLOWED_HOSTS"
            )
        if self.allowed_origin(headers) is not None:
            return None
        site, origin = headers.get(_SITE_HEADER), headers.get(hdrs.ORIGIN)
        is_own = origin is None or (host is not None and origin.lower().partition("://")[2] == host.lower())
        if is_own if site is None else site in _OWN_SITES:
            return None
        if origin is None:
            return Problem(403, "pages of other sites may not send requests here")
        return Problem(
            403, "pages of other origins may not send requests here; list those that may in BALANCE_ALLOWED_ORIGINS"
        )

    def allowed_origin(self, headers: CIMultiDictProxy[str]) -> str | None:
        """Returns the origin of the page that sends a request, unchanged, if it is one of the listed ones."""
        origin = headers.get(hdrs.ORIGIN) if self._origins else None
        return origin if origin is not None and origin.lower() in self._origins else None

    def _look_up(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match["name"].removesuffix(".")
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in (self._names or ()) or name.endswith(self._domains)
        return True


class AccessDecision(NamedTuple):
    """The client of a request, and the answer if the request is refused."""

    client: str
    """The name of an authenticated client; otherwise, the client's address."""
    is_authenticated: bool
    refusal: Problem | None


@dataclass(frozen=True, slots=True)
class Access:
    """The checks that each request of a client must pass; by default none."""

    authenticator: Authenticator | None = None
    rate_limit: RateLimit | None = None
    browsers: Browsers | None = None

    def allowed_origin(self, headers: CIMultiDictProxy[str]) -> str | None:
        """As `Browsers.allowed_origin`."""
        return None if self.browsers is None else self.browsers.allowed_origin(headers)

    def judge(
        self,
        headers: CIMultiDictProxy[str],
        anonymous: str,
        needed: frozenset[Scope],
        *,
        verifies_jwts: bool = True,
    ) -> AccessDecision:
        """Checks a request without side effects that a client could notice.

        Args:
            anonymous: the name of the client if it has no token.
            needed: the token must grant one of these scopes.
            verifies_jwts: whether to verify a JWT that is not cached, which is slow; otherwise it is refused.
        """
        refusal = None if self.browsers is None else self.browsers.refusal(headers)
        if refusal is not None or self.authenticator is None:
            return AccessDecision(anonymous, False, refusal)
        if verifies_jwts:
            try:
                client = self.authenticator.client_of(headers)
            except Problem as problem:
                return AccessDecision(anonymous, False, problem)
        else:
            remembered = self.authenticator.remembered(headers)
            if remembered is None:
                return AccessDecision(anonymous, False, unauthenticated())
            client = remembered
        is_allowed = not needed.isdisjoint(client.scopes)
        return AccessDecision(client.name, True, None if is_allowed else insufficient_scope(needed))

    def knows(self, headers: CIMultiDictProxy[str]) -> bool:
        """Whether the client has an accepted token, or needs none."""
        try:
            return self.authenticator is None or bool(self.authenticator.client_of(headers))
        except Problem:
            return False

    def charge(self, client: str) -> None:
        """Counts a request. Raises Problem: 429 if the client exceeds the rate limit."""
        if self.rate_limit is not None:
            self.rate_limit.take(client)

    def has_room(self, client: str) -> bool:
        """Whether `charge` would succeed now."""
        return self.rate_limit is None or self.rate_limit.has_room(client)


def access_of(settings: Settings) -> Access:
    """Builds the checks that the settings ask for.

    Raises:
        ConfigurationError: a file cannot be used. The message names the setting.
    """
    rate_limit = None if settings.rate_limit is None else RateLimit(settings.rate_limit, settings.burst)
    tokens = jwts = None
    if settings.tokens_file is not None:
        tokens = Reloaded([settings.tokens_file], partial(load_tokens, settings.tokens_file))
    if settings.jwks_file is not None:
        issuer, audience = settings.jwt_issuer or "", settings.jwt_audience or ""
        jwts = Reloaded([settings.jwks_file], partial(load_jwts, settings.jwks_file, issuer, audience))
    authenticator = None if tokens is None and jwts is None else Authenticator(tokens, jwts)
    # A page that rebinds DNS has no token, so Host matters only where none is needed.
    own_host = address_of(settings.application_server).host
    hosts = (own_host, *settings.allowed_hosts) if settings.admits_anonymous else None
    return Access(authenticator, rate_limit, Browsers(hosts, settings.allowed_origins))


def guarded(access: Access, routes: RouteTable, *, peers_are_proven: bool) -> Middleware:
    """The middleware that admits clients. It must run inside the one that checks the marks of peers.

    Args:
        peers_are_proven: admit a query that a peer forwards, because that peer has checked the token. Only valid if
            marks carry proofs: otherwise any client could write one.
    """

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        route = routes.of(request)
        is_marked = FORWARDED_HEADER in request.headers
        if route is None:
            _admit(access, request, frozenset(Scope))
        # Probes are open under any host: they reveal no data, and an unlisted host must not fail a health check.
        elif not route.is_open and not (peers_are_proven and route.is_forwarded and is_marked):
            _admit(access, request, route.scopes)
            # Peers send no body, and a page of another site needs a preflight to send the mark.
            if access.browsers is not None and route.body is not None and not is_marked:
                _require_json(request)
        return await handler(request)

    return guard


def _admit(access: Access, request: web.Request, needed: frozenset[Scope]) -> None:
    """Raises Problem: 400, 401, 403, 421, 429."""
    decision = access.judge(request.headers, anonymous_name(request.remote), needed)
    # The rate limit also applies to clients without an accepted token, by their addresses.
    access.charge(decision.client)
    # The function holds no request: that would make a cycle, which waits for a collection.
    headers, client = request.headers, decision.client
    request[RECHECK] = lambda: access.judge(headers, client, needed).refusal
    if decision.is_authenticated:
        request[CLIENT] = decision.client
        if isinstance(request.protocol, AheadOfAiohttp):
            request.protocol.belongs_to(decision.client)
    if decision.refusal is not None:
        raise decision.refusal


def _require_json(request: web.Request) -> None:
    """A page of another site can send a body of any other type without a preflight.

    Source: Fetch, "CORS-safelisted request-header".
    """
    content_type = request.headers.get(hdrs.CONTENT_TYPE, "")
    if content_type.partition(";")[0].strip().lower() != _JSON:
        raise Problem(415, f"the body must be JSON; send the header Content-Type: {_JSON}")
