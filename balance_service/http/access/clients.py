"""Clients, their names, and the scopes that their tokens grant."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

_IPV6_SITE_BITS = 64


class Scope(StrEnum):
    """Permissions that a token can grant."""

    READ = "balance:read"
    ADD = "balance:add"
    OPERATIONS = "balance:operations"
    """Read metrics and status."""
    OPERATE = "balance:operate"
    """Read dead letters, which contain whole events, and decide about them."""


@dataclass(frozen=True, slots=True)
class Client:
    """The holder of a token. `name` is unique across all kinds of tokens."""

    name: str
    scopes: frozenset[Scope]


@lru_cache(maxsize=10_000)
def anonymous_name(address: str | None) -> str:
    """Returns the name of a client without a token: its IPv4 address, or the /64 network of its IPv6 address.

    A /64 network usually belongs to one site.
    """
    try:
        ip = ipaddress.ip_address(address or "")
    except ValueError:
        return f"address:{address}"
    if isinstance(ip, ipaddress.IPv4Address):
        return f"address:{ip}"
    # A dual-stack socket reports IPv4 addresses in IPv6 form.
    if ip.ipv4_mapped is not None:
        return f"address:{ip.ipv4_mapped}"
    return f"address:{ipaddress.ip_network((int(ip), _IPV6_SITE_BITS), strict=False)}"


def scopes_of(names: object) -> frozenset[Scope]:
    """Returns the known scopes among `names`; ignores unknown ones."""
    if not isinstance(names, (list, tuple)):
        return frozenset()
    return frozenset(scope for scope in Scope if scope.value in names)
