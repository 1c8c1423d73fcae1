"""Addresses and networks in settings, and proxies of the environment."""

from __future__ import annotations

import ipaddress
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.request import getproxies

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_MAX_PORT = 65_535
# A host has no characters with a meaning in a URL: no user, path or escape. IPv6 addresses are in brackets. A host is
# ASCII, because peers send it in a header. Labels have 1 to 63 characters, the bounds of DNS.
_NAME = r"(?=[^:]{1,253}:)[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
_ADDRESS = re.compile(rf"(?P<host>{_NAME}|\[[0-9A-Fa-f:.]{{2,45}}\]):(?P<port>[0-9]{{1,5}})", re.ASCII)
DEFAULT_PORT = 5051
OWN_HOST_NAME = "{hostname}"
"""Placeholder of this machine's host name in a setting."""
# Files of Docker and Podman. Kubernetes sets the variable in every container.
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_KUBERNETES_VARIABLE = "KUBERNETES_SERVICE_HOST"


class Address(NamedTuple):
    """The host, without brackets, and port of an instance."""

    host: str
    port: int


def address_of(text: str) -> Address:
    """Parses `host:port`. Raises ValueError if no client could connect to it."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) <= _MAX_PORT:
        raise ValueError("is not host:port; give an address in ASCII that peers can reach")
    return Address(match["host"].strip("[]"), int(match["port"]))


def default_server(given: Mapping[str, Any]) -> str:
    """The default address of an instance, by its other settings.

    On one machine, instances differ by their ports. Containers of one definition share all settings, but each has its
    own host name, where peers reach it unless it listens on loopback only.
    """
    host = OWN_HOST_NAME if _in_container() and not _is_loopback(given.get("http_host", "localhost")) else "localhost"
    return f"{host}:{given.get('http_port') or DEFAULT_PORT}"


def is_network(text: str) -> bool:
    """Whether the text is an IP address or network."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def checked_list(entries: tuple[str, ...], is_valid: Callable[[str], object], wanted: str) -> tuple[str, ...]:
    """Returns the entries of a setting. Raises ValueError for an invalid one, which is `wanted`."""
    for entry in entries:
        if not is_valid(entry):
            raise ValueError(f"has {entry!r}, which is {wanted}")
    return entries


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _in_container() -> bool:
    return _KUBERNETES_VARIABLE in os.environ or any(Path(mark).exists() for mark in _CONTAINER_FILES)


@contextmanager
def environment_proxies() -> Iterator[None]:
    """Wraps the creation of an HTTP client that uses the environment's proxies.

    Raises:
        ConfigurationError: the client refuses a proxy; names its variable, not its value, which may hold a password.
    """
    import httpx

    try:
        yield
    except (ValueError, ImportError, httpx.InvalidURL):
        proxies = getproxies()
        for scheme in ("all", "https", "http"):
            if scheme in proxies and not _is_usable(proxies[scheme]):
                raise ConfigurationError(
                    f"{scheme.upper()}_PROXY names a proxy that cannot be used; set one with http://, or unset it"
                ) from None
        raise


def _is_usable(proxy: str) -> bool:
    import httpx

    try:
        httpx.HTTPTransport(verify=False, trust_env=False, proxy=proxy if "://" in proxy else f"http://{proxy}").close()
    except (ValueError, ImportError, httpx.InvalidURL):
        return False
    return True
