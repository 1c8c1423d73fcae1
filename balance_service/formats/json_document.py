"""Parses JSON documents of untrusted producers: exactly, or not at all.

Python's own parser takes the last of two values of one name, half of a surrogate pair, NaN, and any depth.

Source: RFC 8259.
"""

from __future__ import annotations

import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

MALFORMED = "json-malformed"
"""The cause of what is no document, or one that is refused as a whole. `java/Json.java` refuses the same."""
_MOST_BYTES = 16 << 20
_MOST_LEVELS = 64
_MOST_CHARACTERS = 1_000
_FRAME_BYTES = 5
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}


class MalformedJsonError(ValueError):
    """The bytes are no document, or one that is refused; the message says where and why."""


class Number:
    """A number, as it is written."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def without_frame(value: bytes) -> bytes:
    """Returns the document of a value: Confluent's serializers put the id of a schema before it."""
    return value[_FRAME_BYTES:] if len(value) > _FRAME_BYTES and value[0] == 0 else value


def parsed(value: bytes) -> Any:
    """Returns a document as a dict, a list, a `str`, a `Number`, a `bool` or None. Raises MalformedJsonError."""
    document = without_frame(value)
    if len(document) > _MOST_BYTES:
        raise MalformedJsonError("it has more than 16 MiB")
    try:
        text = document.decode()
    except UnicodeDecodeError:
        raise MalformedJsonError("it is not UTF-8") from None
    found, at = _Parser(text).value(_after_space(text, 0), 0, "")
    if (end := _after_space(text, at)) != len(text):
        _refuse(end)
    return found


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _refuse(at: int) -> NoReturn:
    raise MalformedJsonError(f"it is not JSON: character {at + 1} is not expected")


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._may_have_halves = "\\ud" in text.lower()

    def value(self, at: int, level: int, path: str) -> tuple[Any, int]:
        """Returns the value that begins at a character, and where it ends.

        Args:
            level: how many values this one is nested in.
        """
        text = self._text
        first = text[at : at + 1]
        if first == '"':
            return self._string(at, path)
        if first in ("{", "["):
            if level == _MOST_LEVELS:
                raise MalformedJsonError(f"its values are nested more than {_MOST_LEVELS} levels deep")
            return self._object(at, level, path) if first == "{" else self._array(at, level, path)
        if first in _WORDS:
            word, meant = _WORDS[first]
            if text.startswith(word, at):
                return meant, at + len(word)
        number = _NUMBER.match(text, at)
        if number is None:
            _refuse(at)
        if len(number[0]) > _MOST_CHARACTERS:
            raise MalformedJsonError(f"{path or 'it'} is a number of more than 1,000 characters")
        return Number(number[0]), number.end()

    def _object(self, at: int, level: int, path: str) -> tuple[dict[str, Any], int]:
        text, found = self._text, dict[str, Any]()
        at = _after_space(text, at + 1)
        if text.startswith("}", at):
            return found, at + 1
        while True:
            if not text.startswith('"', at):
                _refuse(at)
            name, at = self._read(at)
            inside = f"{path}.{name}" if path else name
            if name in found:
                raise MalformedJsonError(f"{inside} is there twice")
            self._check(name, "a name")
            at = _after_space(text, at)
            if not text.startswith(":", at):
                _refuse(at)
            found[name], at = self.value(_after_space(text, at + 1), level + 1, inside)
            at = _after_space(text, at)
            if text.startswith("}", at):
                return found, at + 1
            if not text.startswith(",", at):
                _refuse(at)
            at = _after_space(text, at + 1)

    def _array(self, at: int, level: int, path: str) -> tuple[list[Any], int]:
        text, found, inside = self._text, list[Any](), f"{path}[]"
        at = _after_space(text, at + 1)
        if text.startswith("]", at):
            return found, at + 1
        while True:
            item, at = self.value(at, level + 1, inside)
            found.append(item)
            at = _after_space(text, at)
            if text.startswith("]", at):
                return found, at + 1
            if not text.startswith(",", at):
                _refuse(at)
            at = _after_space(text, at + 1)

    def _string(self, at: int, path: str) -> tuple[str, int]:
        found, at = self._read(at)
        self._check(found, path or "it")
        return found, at

    def _read(self, at: int) -> tuple[str, int]:
        try:
            found, end = scanstring(self._text, at + 1, True)
        except ValueError as error:
            raise MalformedJsonError(f"it is not JSON: {error}") from None
        return found, end

    def _check(self, found: str, path: str) -> None:
        if self._may_have_halves and _SURROGATE.search(found):
            raise MalformedJsonError(f"{path} has half of a surrogate pair")
