"""Bearer tokens that are listed in a file, by their SHA-256: a reader of the file cannot use them.

    {"tokens": [{"name": "billing", "sha256": "<64 hex digits>", "scopes": ["balance:read", "balance:add"]}]}

A plain hash is enough: tokens are long random values, which cannot be guessed one by one as passwords are. For the same
reason a token may be looked up by its digest. How long a look-up takes could at most say how much of a known digest a
guess has hit, and a guess whose digest begins with given bytes cannot be made but by trying, nor does a digest say
anything of the token that it is of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from balance_service.errors import ConfigurationError
from balance_service.http.access.clients import Client, Scope, scopes_of
from balance_service.http.server.reloading import read

if TYPE_CHECKING:
    from pathlib import Path

SETTING = "BALANCE_TOKENS_FILE"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[!-~]{1,100}")
_FORM = '{"tokens": [{"name": …, "sha256": …, "scopes": […]}, …]}'


Tokens = Mapping[bytes, Client]
"""The tokens of one file: SHA-256 of a token → its client."""


def load_tokens(file: Path) -> Tokens:
    """The tokens of a file; an empty list is valid and admits no client.

    Raises:
        ConfigurationError: it cannot be read, or is not of the form above; tells no hash.
    """
    text = read(file, SETTING)
    try:
        entries = json.loads(text)["tokens"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigurationError(f"{SETTING}: {file} is not of the form {_FORM}") from None
    if not isinstance(entries, list):
        raise ConfigurationError(f"{SETTING}: {file} is not of the form {_FORM}")
    clients = [_client(entry, f"{SETTING}: {file}: token {number}") for number, entry in enumerate(entries, 1)]
    for what, values in (("name", [c.name for _, c in clients]), ("sha256", [digest for digest, _ in clients])):
        if len(set(values)) < len(values):
            raise ConfigurationError(f"{SETTING}: {file} has a {what} more than once; each token needs its own")
    return dict(clients)


def _client(entry: Any, where: str) -> tuple[bytes, Client]:
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where} is not an object; the file must be of the form {_FORM}")
    name, digest, scopes = entry.get("name"), entry.get("sha256"), entry.get("scopes")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(f"{where} needs a name of 1 to 100 visible ASCII characters")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ConfigurationError(f"{where} ({name}) needs a sha256 of 64 lower-case hexadecimal digits")
    known = scopes_of(scopes)
    if not isinstance(scopes, list) or not known or len(known) != len(scopes):
        raise ConfigurationError(f"{where} ({name}) needs scopes, each once, of {', '.join(Scope)}")
    return bytes.fromhex(digest), Client(f"token:{name}", known)
