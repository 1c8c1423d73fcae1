"""Access control before the routes: what browsers may send, authentication, scopes, rate limits.

Which scope a request needs is told by the route that it was matched to. What matches none, and is answered 404 or 405,
needs a token with any scope. `Access.judge` judges requests on both ways to an answer: ahead of aiohttp (`plain`) and
through it (`guarded`). It belongs to the event loop.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import hdrs, web

from balance_service.http.access.browsers import browsers_of, not_json
from balance_service.http.access.clients import (
    Client,
    InvalidTokenError,
    Scope,
    insufficient_scope,
    invalid_request,
    invalid_token,
    unauthenticated,
    whereabouts,
)
from balance_service.http.access.jwts import load_jwts
from balance_service.http.access.rate_limit import RateLimit
from balance_service.http.access.tokens import load_tokens
from balance_service.http.answer import Problem
from balance_service.http.peers.proxy import FORWARDED_HEADER
from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp
from balance_service.http.server.reloading import Reloaded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from aiohttp.typedefs import Middleware
    from multidict import CIMultiDictProxy

    from balance_service.http.access.browsers import Asked, Browsers
    from balance_service.http.access.jwts import Jwts
    from balance_service.http.access.tokens import Tokens
    from balance_service.http.api.route import Routes
    from balance_service.settings import Settings

_BEARER = re.compile(r"(?i:bearer) +([A-Za-z0-9._~+/-]+=*)")  # RFC 6750, section 2.1
AUTHENTICATOR_FILES = ("tokens", "jwks")
CLIENT = web.RequestKey("client", str)
"""The name of the client, where its token was accepted."""


class Authenticator:
    """Tells clients by their tokens."""

    def __init__(self, tokens: Reloaded[Tokens] | None = None, jwts: Reloaded[Jwts] | None = None) -> None:
        self._tokens = tokens
        self._jwts = jwts

    @property
    def files(self) -> Mapping[str, Reloaded[Any]]:
        """The files that it goes by, by what they hold."""
        files: tuple[Reloaded[Any] | None, ...] = (self._tokens, self._jwts)
        return {name: file for name, file in zip(AUTHENTICATOR_FILES, files, strict=True) if file is not None}

    def remembered(self, headers: CIMultiDictProxy[str]) -> Client | None:
        """The client of a token in the file, or of a JWT that was verified before; otherwise None: ask `client_of`."""
        given = headers.getall(hdrs.AUTHORIZATION, ())
        match = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
        return None if match is None else self._remembered(match[1])

    def client_of(self, headers: CIMultiDictProxy[str]) -> Client:
        """The client that sends a request with these headers.

        Raises:
            Problem: 401, there is no token, or none that is accepted; 400, there are several.
        """
        given = headers.getall(hdrs.AUTHORIZATION, ())
        if not given:
            raise unauthenticated()
        if len(given) > 1:
            raise invalid_request("the header Authorization is given more than once")
        if given[0][:7].lower() != "bearer ":
            raise unauthenticated()
        match = _BEARER.fullmatch(given[0])
        if match is None:
            raise invalid_token("the header Authorization holds no bearer token")
        token = match[1]
        client = self._remembered(token)
        if client is not None:
            return client
        if self._jwts is None or token.count(".") != 2:  # three parts
            raise invalid_token("the token is not known here")
        try:
            return self._jwts.value.client_of(token)
        except InvalidTokenError as error:
            raise invalid_token(str(error)) from None

    def _remembered(self, token: str) -> Client | None:
        digest = hashlib.sha256(token.encode()).digest()
        client = None if self._tokens is None else self._tokens.value.get(digest)
        if client is None and self._jwts is not None:
            return self._jwts.value.remembered(digest)
        return client


class Verdict(NamedTuple):
    """Who sends a request, and what it is answered if it is not admitted."""

    client: str
    """The name of a client, or the whereabouts of one without an accepted token."""
    is_authenticated: bool
    refusal: Problem | None


@dataclass(frozen=True, slots=True)
class Access:
    """The checks that clients have to pass; by default none."""

    authenticator: Authenticator | None = None
    rate_limit: RateLimit | None = None
    browsers: Browsers | None = None

    def judge(self, asked: Asked, stranger: str, needed: frozenset[Scope], *, by_memory_alone: bool = False) -> Verdict:
        """Judge a request; changes nothing that a client could notice.

        Args:
            stranger: whereabouts of the client.
            needed: one of these scopes must be granted.
            by_memory_alone: refuse a JWT that was not verified before, which takes long.
        """
        refusal = None if self.browsers is None else self.browsers.refusal(asked)
        if refusal is not None or self.authenticator is None:
            return Verdict(stranger, False, refusal)
        if by_memory_alone:
            client = self.authenticator.remembered(asked.headers)
            if client is None:
                return Verdict(stranger, False, unauthenticated())
        else:
            try:
                client = self.authenticator.client_of(asked.headers)
            except Problem as problem:
                return Verdict(stranger, False, problem)
        is_allowed = not needed.isdisjoint(client.scopes)
        return Verdict(client.name, True, None if is_allowed else insufficient_scope(needed))

    def charge(self, client: str) -> None:
        """Count a request of a client. Raises Problem: 429, it makes too many."""
        if self.rate_limit is not None:
            self.rate_limit.take(client)

    def has_room(self, client: str) -> bool:
        """Whether `charge` would count a request of the client now."""
        return self.rate_limit is None or self.rate_limit.has_room(client)


def access_of(settings: Settings) -> Access:
    """Access as the settings want it.

    Raises:
        ConfigurationError: a file cannot be used; names the setting.
    """
    rate_limit = None if settings.rate_limit is None else RateLimit(settings.rate_limit, settings.burst)
    tokens = jwts = None
    if settings.tokens_file is not None:
        tokens = Reloaded([settings.tokens_file], partial(load_tokens, settings.tokens_file))
    if settings.jwks_file is not None:
        issuer, audience = settings.jwt_issuer or "", settings.jwt_audience or ""
        jwts = Reloaded([settings.jwks_file], partial(load_jwts, settings.jwks_file, issuer, audience))
    is_open = tokens is None and jwts is None
    return Access(None if is_open else Authenticator(tokens, jwts), rate_limit, browsers_of(settings))


def guarded(access: Access, routes: Routes, *, peers_are_proven: bool) -> Middleware:
    """The middleware that admits clients. Belongs within the one that checks the marks of peers.

    Args:
        peers_are_proven: admit a query that a peer forwards, because that peer has checked the token. Only where
            marks are proofs: otherwise any client could write one.
    """

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        route = routes.of(request)
        is_marked = FORWARDED_HEADER in request.headers
        if route is None:
            _admit(access, request, frozenset(Scope))
        # Probes are answered under any host: they tell no data, and a name must not take an instance out of service.
        elif not route.is_open and not (peers_are_proven and route.is_forwarded and is_marked):
            _admit(access, request, route.scopes)
            # Peers send no body; and no page of another site can send the mark unasked.
            if access.browsers is not None and route.body is not None and not is_marked:
                refusal = not_json(request)
                if refusal is not None:
                    raise refusal
        return await handler(request)

    return guard


def _admit(access: Access, request: web.Request, needed: frozenset[Scope]) -> None:
    """Raises Problem: 400, 401, 403, 421, 429."""
    verdict = access.judge(request, whereabouts(request.remote), needed)
    # Clients without an accepted token count too, by their address.
    access.charge(verdict.client)
    if verdict.is_authenticated:
        request[CLIENT] = verdict.client
        if isinstance(request.protocol, AheadOfAiohttp):
            request.protocol.belongs_to(verdict.client)
    if verdict.refusal is not None:
        raise verdict.refusal
