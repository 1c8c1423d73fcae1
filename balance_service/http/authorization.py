"""What stands before the routes where it is wanted: who asks, whether they may, and how often.

Which scope a route needs is told by the route that a request was matched to, not by its path, so that no way of writing
a path gets around it. A route that is not listed needs the scope for operations.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from balance_service.http import commands, queries
from balance_service.http.clients import (
    Client,
    InvalidTokenError,
    Scope,
    insufficient_scope,
    invalid_request,
    invalid_token,
    unauthenticated,
)
from balance_service.http.jwts import load_jwts
from balance_service.http.proxy import FORWARDED_HEADER
from balance_service.http.rate_limit import RateLimit
from balance_service.http.reloaded import Reloaded
from balance_service.http.tokens import load_tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware

    from balance_service.http.jwts import Jwts
    from balance_service.http.tokens import Tokens
    from balance_service.http_settings import HttpSecuritySettings

_ANY = frozenset(Scope)
SCOPES: dict[str, frozenset[Scope]] = {
    queries.PATH: frozenset({Scope.READ}),
    commands.PATH: frozenset({Scope.ADD}),
    "/metrics": frozenset({Scope.OPERATIONS}),
    "/api/status": frozenset({Scope.OPERATIONS}),
    # How to ask is for whoever may ask for anything.
    "/openapi.json": _ANY,
}
"""By route, the scopes of which a client needs one."""
OPEN = frozenset({"/health/live", "/health/ready"})
"""Routes for orchestrators, which have no tokens, and must have an answer whatever else is going on."""

_BEARER = re.compile(r"(?i:bearer) +([A-Za-z0-9._~+/-]+=*)")  # RFC 6750, section 2.1
_IPV6_SITE_BITS = 64


class Authenticator:
    """Tells clients by their tokens. Belongs to the event loop."""

    def __init__(self, tokens: Tokens | None, jwts: Jwts | None) -> None:
        self._tokens = tokens
        self._jwts = jwts

    def client_of(self, request: web.Request) -> Client:
        """Who asks.

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


def guarded(access: Access, *, peers_are_proven: bool) -> Middleware:
    """The middleware that lets only those in who may. Belongs within the one that checks the marks of peers.

    Args:
        peers_are_proven: a query that a peer passes on is let in, for that peer has asked for the token. Only where
            marks are proofs: otherwise anybody could write one.
    """

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = None if resource is None else resource.canonical
        is_passed_on = peers_are_proven and route == queries.PATH and FORWARDED_HEADER in request.headers
        if route not in OPEN and not is_passed_on:
            _admit(access, request, _ANY if route is None else SCOPES.get(route, frozenset({Scope.OPERATIONS})))
        return await handler(request)

    return guard


def _admit(access: Access, request: web.Request, needed: frozenset[Scope]) -> None:
    """Raises Problem: 400, 401, 403, 429."""
    client = None
    try:
        if access.authenticator is not None:
            client = access.authenticator.value.client_of(request)
    finally:
        # Those without a token that is accepted are counted too, by where they are.
        if access.rate_limit is not None:
            access.rate_limit.take(_whereabouts(request) if client is None else client.name)
    if client is not None and needed.isdisjoint(client.scopes):
        raise insufficient_scope(needed)


def _whereabouts(request: web.Request) -> str:
    """The address a client asks from; of IPv6 the network, within which one site has as many as it likes."""
    try:
        address = ipaddress.ip_address(request.remote or "")
    except ValueError:
        return f"address:{request.remote}"
    if isinstance(address, ipaddress.IPv4Address):
        return f"address:{address}"
    # On a socket of both families, IPv4 comes as IPv6.
    if address.ipv4_mapped is not None:
        return f"address:{address.ipv4_mapped}"
    return f"address:{ipaddress.ip_network((int(address), _IPV6_SITE_BITS), strict=False)}"


def _authenticator(settings: HttpSecuritySettings) -> Authenticator:
    tokens = None if settings.tokens_file is None else load_tokens(settings.tokens_file)
    jwts = None
    if settings.jwks_file is not None:
        jwts = load_jwts(settings.jwks_file, settings.jwt_issuer or "", settings.jwt_audience or "")
    return Authenticator(tokens, jwts)
