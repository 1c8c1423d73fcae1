"""A client, its scopes, and the problems that refuse it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from balance_service.http.answer import Problem

REALM = "balance-service"
_IPV6_SITE_BITS = 64
_BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN = 400, 401, 403


class Scope(StrEnum):
    """What a token may allow."""

    READ = "balance:read"
    ADD = "balance:add"
    OPERATIONS = "balance:operations"
    """To look at the service."""
    OPERATE = "balance:operate"
    """To see dead letters, which are events as they are, and to decide about them."""


@dataclass(frozen=True, slots=True)
class Client:
    """The holder of a token. `name` is unique among all clients, whatever kind their tokens are of."""

    name: str
    scopes: frozenset[Scope]


class InvalidTokenError(Exception):
    """A token that is not accepted; the message says why, without anything of the token's own."""


@lru_cache(maxsize=10_000)
def whereabouts(address: str | None) -> str:
    """A client without a token, by the IP address it asks from; by the /64 network of IPv6, which is one site's."""
    try:
        ip = ipaddress.ip_address(address or "")
    except ValueError:
        return f"address:{address}"
    if isinstance(ip, ipaddress.IPv4Address):
        return f"address:{ip}"
    # A socket of both families has IPv4 addresses as IPv6.
    if ip.ipv4_mapped is not None:
        return f"address:{ip.ipv4_mapped}"
    return f"address:{ipaddress.ip_network((int(ip), _IPV6_SITE_BITS), strict=False)}"


def scopes_of(names: object) -> frozenset[Scope]:
    """The scopes among some names; those that mean nothing here are left out."""
    if not isinstance(names, (list, tuple)):
        return frozenset()
    return frozenset(scope for scope in Scope if scope.value in names)


def unauthenticated() -> Problem:
    """401 for a request without a token. Source: RFC 6750, section 3.1: no error code then."""
    return Problem(
        _UNAUTHORIZED,
        "this needs a bearer token; send one in the header Authorization",
        headers={"WWW-Authenticate": f'Bearer realm="{REALM}"'},
    )


def invalid_token(reason: str) -> Problem:
    """401 for a token that is not accepted."""
    return Problem(_UNAUTHORIZED, reason, headers=_challenge("invalid_token", reason))


def invalid_request(reason: str) -> Problem:
    """400 for what cannot be understood as one token."""
    return Problem(_BAD_REQUEST, reason, headers=_challenge("invalid_request", reason))


def insufficient_scope(needed: frozenset[Scope]) -> Problem:
    """403 for a client that may do other things, not this."""
    names = " ".join(sorted(needed))
    reason = f"this token does not allow that; it needs the scope {' or '.join(sorted(needed))}"
    headers = _challenge("insufficient_scope", reason, f', scope="{names}"')
    return Problem(_FORBIDDEN, reason, headers=headers)


def _challenge(error: str, reason: str, more: str = "") -> dict[str, str]:
    return {"WWW-Authenticate": f'Bearer realm="{REALM}", error="{error}", error_description="{reason}"{more}'}
