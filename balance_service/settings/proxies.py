"""Proxies that the environment names: one that HTTP clients cannot use is told by its variable."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.request import getproxies

import httpx

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEEDED = ("all", "https", "http")


@contextmanager
def heeding_proxies() -> Iterator[None]:
    """For making an HTTP client that heeds the environment.

    Raises:
        ConfigurationError: a proxy cannot be used; names its variable.
    """
    try:
        yield
    except (ValueError, ImportError, httpx.InvalidURL):
        given = getproxies()
        unusable = [scheme for scheme in _HEEDED if scheme in given and not _can_be_used(given[scheme])]
        if not unusable:
            raise
        # Without its value, in which a password may be.
        raise ConfigurationError(
            f"{unusable[0].upper()}_PROXY names a proxy that cannot be used here; give one with http://, or unset it"
        ) from None


def _can_be_used(url: str) -> bool:
    try:
        httpx.HTTPTransport(verify=False, trust_env=False, proxy=url if "://" in url else f"http://{url}").close()
    except (ValueError, ImportError, httpx.InvalidURL):
        return False
    return True
