"""Checks of the headers that tell which page has a browser send a request, and to which host.

A web page can have a browser send requests to any instance that the browser reaches. A page of another origin is
recognised by the headers Sec-Fetch-Site (W3C Fetch Metadata) and Origin (RFC 6454). A page that lets its own name point
to an instance (DNS rebinding) passes for one of the instance's origin, and is recognised by the header Host. Other
clients can write into these headers what they want: tokens keep those out.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from aiohttp import hdrs

from balance_service.http.answer import Problem
from balance_service.settings.address import address_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multidict import CIMultiDictProxy

    from balance_service.settings import Settings

SITE_HEADER = "Sec-Fetch-Site"
_OWN_SITES = frozenset({"same-origin", "none"})
_JSON = "application/json"
_LOCALHOST = "localhost"
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:\[\]]+)(?::[0-9]*)?")  # RFC 3986, section 3.2.2, in lower case
_FORBIDDEN, _UNSUPPORTED, _MISDIRECTED = 403, 415, 421
_MOST_HOSTS = 1_000


class Asked(Protocol):
    """A request, from aiohttp's parser or in its handlers."""

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """Its headers."""


class Browsers:
    """Refuses requests that a page of another site has a browser send. Belongs to the event loop."""

    def __init__(self, hosts: Iterable[str] | None = None, origins: Iterable[str] = ()) -> None:
        """Args:
        hosts: names and `*.domains` that the header Host may name, in addition to IP addresses and `localhost`; None
            accepts any host.
        origins: origins whose pages may send requests, in lower case.
        """
        names = None if hosts is None else [host.removesuffix(".").lower() for host in hosts]
        self._names = None if names is None else frozenset({_LOCALHOST, *names})
        self._domains = tuple(name.removeprefix("*") for name in names or () if name.startswith("*."))
        self._origins = frozenset(origins)
        # Clients name few hosts, and name them in every request.
        self._is_known = lru_cache(maxsize=_MOST_HOSTS)(self._find_out)

    def refusal(self, asked: Asked) -> Problem | None:
        """403 or 421 for a request that is refused; None for one that is not."""
        headers = asked.headers
        host = headers.get(hdrs.HOST)
        # HTTP/1.0 allows a request without Host, and no browser sends one; aiohttp's parser refuses others.
        if self._names is not None and host is not None and not self._is_known(host):
            return Problem(
                _MISDIRECTED,
                "this instance is not known by the host that the header Host names; list that in BALANCE_ALLOWED_HOSTS",
            )
        site = headers.get(SITE_HEADER)
        if site is not None:
            is_own = site in _OWN_SITES
            return None if is_own else Problem(_FORBIDDEN, "pages of other sites may not send requests here")
        origin = headers.get(hdrs.ORIGIN)
        if origin is not None and not self._is_own(origin.lower(), host):
            return Problem(
                _FORBIDDEN,
                "pages of other origins may not send requests here; list those that may in BALANCE_ALLOWED_ORIGINS",
            )
        return None

    def _is_own(self, origin: str, host: str | None) -> bool:
        is_same = host is not None and origin.partition("://")[2] == host.lower()
        return is_same or origin in self._origins

    def _find_out(self, host: str) -> bool:
        """Whether clients may address an instance by a host, with any port."""
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match["name"].removesuffix(".")
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in (self._names or ()) or name.endswith(self._domains)
        return True


def browsers_of(settings: Settings) -> Browsers:
    """The checks that the settings ask for: of Host only while anybody may ask."""
    is_open = settings.admits_anonymous
    hosts = (address_of(settings.application_server).host, *settings.allowed_hosts) if is_open else None
    return Browsers(hosts, settings.allowed_origins)


def not_json(asked: Asked) -> Problem | None:
    """415 for a request whose body is not said to be JSON. A page of another site could send any other type unasked.

    Source: Fetch, "CORS-safelisted request-header".
    """
    given = asked.headers.get(hdrs.CONTENT_TYPE, "")
    if given.partition(";")[0].strip().lower() == _JSON:
        return None
    return Problem(_UNSUPPORTED, f"the body must be JSON; send the header Content-Type: {_JSON}")
