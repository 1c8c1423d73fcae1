"""Addresses of instances: a host and a port, as peers and settings write them."""

from __future__ import annotations

import re
from typing import NamedTuple

_MAX_PORT = 65_535
# A host holds nothing that a URL gives a meaning to: no user, no path, no escape. IPv6 addresses are in brackets. It is
# ASCII, for it is told in a header, and a peer takes no other there. Between its dots are 1 to 63 characters, for no
# resolver can be asked for others.
_NAME = r"(?=[^:]{1,253}:)[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
_ADDRESS = re.compile(rf"(?P<host>{_NAME}|\[[0-9A-Fa-f:.]{{2,45}}\]):(?P<port>[0-9]{{1,5}})", re.ASCII)


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
