"""The user's own Kafka properties, by librdkafka's names: a JSON object, a properties file, or both."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

HIDDEN = "********"
_SECRET_WORDS = (
    "password",
    "secret",
    "token",
    "credential",
    "jaas",
    "passphrase",
    "private",
    ".key",
    "key.pem",
    "oauthbearer.config",
)
# Where something lies is no secret, though the name has one of those words in it.
_NO_SECRETS = {"sasl.oauthbearer.token.endpoint.url", "ssl.key.location", "ssl.keystore.location"}
_SEPARATOR = re.compile(r"(?P<name>(?:\\.|[^\\=:\s])+)(?:\s*[=:]\s*|\s+)(?P<value>.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}


class PropertyError(ConfigurationError):
    """A Kafka property is wrong; the message names it and says what to do."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.name = name


def parse_json(text: str) -> dict[str, str]:
    """Properties from a JSON object. Raises ValueError, never with a value in it."""
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ValueError("not JSON; give an object of property names and values") from error
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object; give an object of property names and values")
    for name, v in parsed.items():
        if not isinstance(v, (str, int, float)):  # a bool is an int
            raise ValueError(f"property '{name}' is neither a string nor a number nor a boolean")
    return {name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in parsed.items()}


def read_file(path: Path) -> dict[str, str]:
    r"""Properties from a file in Java's format: `name=value`, `#` or `!` for comments, `\` to escape and to continue.

    Raises:
        ValueError: says which line is wrong, never what is in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8") from error
    properties: dict[str, str] = {}
    for number, line in _logical_lines(text):
        match = _SEPARATOR.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} of {path} is not name=value")
        name = _unescaped(match["name"])
        if name in properties:
            raise ValueError(f"{path} has {name} twice; keep one")
        properties[name] = _unescaped(match["value"])
    return properties


def printable(properties: Mapping[str, str]) -> str:
    """The properties as JSON, secrets hidden."""
    return json.dumps({name: HIDDEN if _is_secret(name) else value for name, value in properties.items()})


def _is_secret(name: str) -> bool:
    return name not in _NO_SECRETS and any(word in name.lower() for word in _SECRET_WORDS)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that say something, with the number of the first of each; continued ones joined."""
    begun, parts = 0, ""
    # Not at other separators of Unicode, which a password may hold.
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        stripped = line.lstrip(" \t\f")
        if not parts and (not stripped or stripped[0] in "#!"):
            continue
        begun = begun if parts else number
        continues = (len(stripped) - len(stripped.rstrip("\\"))) % 2 == 1
        parts += stripped[:-1] if continues else stripped
        if not continues:
            yield begun, parts
            parts = ""
    if parts:
        yield begun, parts


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPED.get(code, code)

    return _ESCAPE.sub(character, text)
