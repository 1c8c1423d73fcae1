"""Addresses of instances: a host and a port, as peers and settings write them."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_PORT = 65_535
# A host holds nothing that a URL gives a meaning to: no user, no path, no escape. IPv6 addresses are in brackets. It is
# ASCII, for it is told in a header, and a peer takes no other there. Between its dots are 1 to 63 characters, for no
# resolver can be asked for others.
_NAME = r"(?=[^:]{1,253}:)[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
_ADDRESS = re.compile(rf"(?P<host>{_NAME}|\[[0-9A-Fa-f:.]{{2,45}}\]):(?P<port>[0-9]{{1,5}})", re.ASCII)
DEFAULT_PORT = 5051
OWN_HOST_NAME = "{hostname}"
"""In an address of the settings, stands for this machine's own name."""
# Docker's and Podman's; Kubernetes sets the variable in every container.
_OF_CONTAINERS = ("/.dockerenv", "/run/.containerenv")
_OF_KUBERNETES = "KUBERNETES_SERVICE_HOST"


class Address(NamedTuple):
    """Where an instance is reached; `host` is without brackets."""

    host: str
    port: int


def address_of(text: str) -> Address:
    """The address in a plain `host:port`. Raises ValueError if the text is not one that can be connected to."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) <= _MAX_PORT:
        raise ValueError("is not host:port; give an address in ASCII that peers can reach")
    return Address(match["host"].strip("[]"), int(match["port"]))


def default_server(given: Mapping[str, Any]) -> str:
    """The address that an instance has where none is set, by its other settings.

    On one machine, instances differ by their ports. Containers of one definition share every setting, but each has a
    host name of its own. Peers reach it there unless it listens on loopback alone.
    """
    host = OWN_HOST_NAME if _in_container() and not _is_loopback(given.get("http_host", "localhost")) else "localhost"
    return f"{host}:{given.get('http_port') or DEFAULT_PORT}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _in_container() -> bool:
    return _OF_KUBERNETES in os.environ or any(Path(mark).exists() for mark in _OF_CONTAINERS)
