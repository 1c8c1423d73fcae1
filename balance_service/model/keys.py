"""Keys of events and states: their encoding, and their validation.

Text is encoded as UTF-8. A number, an int or a long, takes 8 bytes, big-endian, with its sign bit inverted, so that the
bytes sort in numeric order.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

from balance_service.avro.schemas import simple_name, without_null
from balance_service.errors import InvalidInputError

MAX_KEY_BYTES = 256
# In a notation that both Python and JSON Schema accept.
CONTROL_CHARACTERS = r"\u0000-\u001f\u007f-\u009f"
_CONTROL_CHARACTER = re.compile(f"[{CONTROL_CHARACTERS}]")


def checked_key(key: str, name: str) -> str:
    """Returns the key if it is valid.

    Args:
        name: the key's name in the error message.

    Raises:
        InvalidInputError: the key is invalid; the message says why.
    """
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidInputError(f"{name} is not UTF-8") from None
    if not 1 <= size <= MAX_KEY_BYTES:
        raise InvalidInputError(f"{name} must have 1 to {MAX_KEY_BYTES} bytes of UTF-8")
    if _CONTROL_CHARACTER.search(key):
        raise InvalidInputError(f"{name} must not contain control characters")
    return key


_NUMBER = struct.Struct(">Q")
SIGN_BIT = 1 << 63
_NUMERAL = re.compile(r"0|-?[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class KeyType:
    """The encoding of one column's values as keys."""

    column: str
    is_number: bool

    @staticmethod
    def from_column(column: str, kind: Any) -> KeyType | None:
        """Returns the key type of a column of an Avro type; None if the type cannot be a key."""
        name = simple_name(without_null(kind)[0])
        return KeyType(column, name != "string") if name in ("string", "int", "long") else None

    def encode(self, value: str | int) -> bytes:
        return _NUMBER.pack(value + SIGN_BIT) if isinstance(value, int) else value.encode()

    def decode(self, key: bytes) -> str | int:
        """Returns the value of a key. Raises InvalidInputError if the key is not valid."""
        if not self.is_number:
            try:
                return checked_key(key.decode(), self.column)
            except UnicodeDecodeError:
                raise InvalidInputError(f"{self.column} is not UTF-8") from None
        if len(key) != _NUMBER.size:
            raise InvalidInputError(f"{self.column} is a number, which takes {_NUMBER.size} bytes, not {len(key)}")
        (unsigned,) = _NUMBER.unpack(key)
        return int(unsigned) - SIGN_BIT

    def text(self, key: bytes) -> str:
        """Returns a state's key as queries name it."""
        return str(self.decode(key)) if self.is_number else key.decode()

    def of_text(self, text: str) -> bytes:
        """Returns the key for a text that `parse` accepted before."""
        return self.encode(int(text) if self.is_number else text)

    def parse(self, text: str) -> bytes:
        """Returns the key for a text in a query. Raises InvalidInputError if the text is not valid."""
        if not self.is_number:
            return checked_key(text, self.column).encode()
        if not _NUMERAL.fullmatch(text) or not -SIGN_BIT <= (number := int(text)) < SIGN_BIT:
            raise InvalidInputError(f"{self.column} must be a number of at most 64 bits, such as 42")
        return self.encode(number)


_AFTER_ALL_KEYS = b"\xff"


def key_range(key_type: KeyType, start: str | None, end: str | None, prefix: str | None) -> tuple[bytes, bytes]:
    """The bytes of the first key of a range, both of whose ends belong to it, and those after its last key.

    `KeyType.parse` has accepted `start` and `end`.
    """
    common = (prefix or "").encode()
    starts = [common] + ([] if start is None else [key_type.of_text(start)])
    stops = [common + _AFTER_ALL_KEYS] + ([] if end is None else [key_type.of_text(end) + b"\0"])
    return max(starts), min(stops)


TEXT = KeyType("key", is_number=False)
"""Leaves keys unchanged."""


def key_problems(key: str | None, by: str | None) -> dict[str, str]:
    """Returns what is wrong with the key of an event, by the cause of its dead letter.

    Args:
        key: the column that is the key of the states; None for a model without states.
        by: the column whose value becomes the key of the records that a stage passes on; None for a last stage.
    """
    problems = {"key-reserved": "the key begins with 0xFF"}
    if by is not None:
        problems["field-null"] = f"{by} is null"
        problems[f"{'-'.join(words_of(by))}-malformed"] = f"{by} is not UTF-8, or has more than {MAX_KEY_BYTES:,} bytes"
    elif key is not None:
        problems[f"key-is-not-{'-'.join(words_of(key))}"] = f"the record's key is not the {key} of its event"
    return problems


def words_of(column: str) -> list[str]:
    """Splits a column's name into words, for causes: `customerId` is customer and id."""
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", column).lower().split("_")
