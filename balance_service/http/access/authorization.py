"""Access control before the routes, where it is configured: authentication, scopes, rate limits.

Which scope a request needs is told by the route that it was matched to. What matches none, and is answered 404 or 405,
needs a token with any scope.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

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
from balance_service.http.peers.proxy import FORWARDED_HEADER
from balance_service.http.server.reloading import Reloaded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware

    from balance_service.http.access.jwts import Jwts
    from balance_service.http.access.tokens import Tokens
    from balance_service.http.api.route import Routes
    from balance_service.settings.http_security import HttpSecuritySettings

_BEARER = re.compile(r"(?i:bearer) +([A-Za-z0-9._~+/-]+=*)")  # RFC 6750, section 2.1
CLIENT = web.RequestKey("client", str)
"""Who asks, as far as that is known: a client's name, or where it asks from."""


class Authenticator:
    """Tells clients by their tokens. Belongs to the event loop."""

    def __init__(self, tokens: Tokens | None, jwts: Jwts | None) -> None:
        self._tokens = tokens
        self._jwts = jwts

    def client_of(self, request: web.Request) -> Client:
        """The client that sends a request.

        Raises:
            Problem: 401, there is no token, or none that is accepted; 400, there are several.
        """
        given = request.headers.getall("Authorization", [])
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
        client = None if self._tokens is None else self._tokens.client_of(token)
        if client is not None:
            return client
        if self._jwts is None or token.count(".") != 2:  # three parts
            raise invalid_token("the token is not known here")
        try:
            return self._jwts.client_of(token)
        except InvalidTokenError as error:
            raise invalid_token(str(error)) from None


@dataclass(frozen=True, slots=True)
class Access:
    """What is asked of clients; nothing, unless it is set."""

    authenticator: Reloaded[Authenticator] | None = None
    rate_limit: RateLimit | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is."""
        return self.authenticator is None and self.rate_limit is None


def access_of(settings: HttpSecuritySettings) -> Access:
    """Access as the settings want it.

    Raises:
        ConfigurationError: a file cannot be used; names the setting.
    """
    rate_limit = None if settings.rate_limit is None else RateLimit(settings.rate_limit, settings.burst)
    files = [file for file in (settings.tokens_file, settings.jwks_file) if file is not None]
    return Access(Reloaded(files, lambda: _authenticator(settings)) if files else None, rate_limit)


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
        if route is None:
            _admit(access, request, frozenset(Scope))
        elif not route.is_open:
            is_proven = peers_are_proven and route.is_forwarded and FORWARDED_HEADER in request.headers
            if not is_proven:
                request[CLIENT] = _admit(access, request, route.scopes)
        return await handler(request)

    return guard


def _admit(access: Access, request: web.Request, needed: frozenset[Scope]) -> str:
    """The name of the client. Raises Problem: 400, 401, 403, 429."""
    client = None
    try:
        if access.authenticator is not None:
            client = access.authenticator.value.client_of(request)
    finally:
        # Clients without an accepted token count too, by their address.
        if access.rate_limit is not None:
            access.rate_limit.take(whereabouts(request.remote) if client is None else client.name)
    if client is not None and needed.isdisjoint(client.scopes):
        raise insufficient_scope(needed)
    return whereabouts(request.remote) if client is None else client.name


def _authenticator(settings: HttpSecuritySettings) -> Authenticator:
    tokens = None if settings.tokens_file is None else load_tokens(settings.tokens_file)
    jwts = None
    if settings.jwks_file is not None:
        jwts = load_jwts(settings.jwks_file, settings.jwt_issuer or "", settings.jwt_audience or "")
    return Authenticator(tokens, jwts)
