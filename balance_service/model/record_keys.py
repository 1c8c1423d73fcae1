"""The records' own keys as the keys of states: the forms that Kafka's serializers write, and the form of our stores.

A key has two encodings. The producer's is the one that places it: its hash is its partition. Ours is the one that
stores have: it sorts as the values do, and its first byte is never 0xFF, which begins reserved keys, and Java's
negative numbers. Text and UUIDs have the same in both. Of numbers and bytes, ours begins with a zero, and the sign bit
of a number is inverted. Each can be made of the other, so no two keys have the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from balance_service.errors import InvalidInputError
from balance_service.model.keys import MAX_KEY_BYTES, NUMERAL, ColumnKey, after, checked_key

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

KeyFormat = Literal["string", "int", "long", "uuid", "bytes"]
"""The serializer of a topic's keys: Kafka's StringSerializer, IntegerSerializer and so on.

UUIDs are text, as Kafka's UUIDSerializer writes them: 16 bytes are `bytes`.
"""
KEY_FORMATS: tuple[KeyFormat, ...] = get_args(KeyFormat)
NO_KEYS = {
    "avro": "has a schema id, so the same key has other bytes under another schema",
    "json": "may have its fields in any order, and spaces",
}
"""Formats whose bytes a query cannot make again, so that they cannot key states, and why."""
KEY_FORMAT_HEADER = "key-format"
"""Names the form of an output's key, where that is not the one of our stores."""
MOST_BYTES = MAX_KEY_BYTES // 2
"""The length of a key of bytes: in hexadecimal digits, it is as long as a text may be."""
OURS = b"\0"
"""How the keys of states begin that are numbers or bytes."""
_WIDTHS: Mapping[KeyFormat, int] = {"int": 4, "long": 8}
UUID_PATTERN = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_UUID = re.compile(UUID_PATTERN)
_BYTES = re.compile("(?:[0-9a-f]{2})+")
_FORMS: Mapping[KeyFormat, str] = {
    "string": f"text of 1 to {MAX_KEY_BYTES} bytes of UTF-8 without control characters",
    "int": "an int, which takes 4 bytes",
    "long": "a long, which takes 8 bytes",
    "uuid": "a UUID as text in lower case, such as Kafka's UUIDSerializer writes",
    "bytes": f"1 to {MOST_BYTES} bytes",
}


class _RecordKey(str):
    """Not a column: `key = RECORD_KEY` is the key of Kafka's record."""

    __slots__ = ()


RECORD_KEY: Final = _RecordKey("key")
"""The key of Kafka's record as the key of the states; answers and clients call it `key`."""


def is_record_key(declared: object) -> bool:
    return isinstance(declared, _RecordKey)


@dataclass(frozen=True, slots=True)
class RecordKey(ColumnKey):
    """The record's own key, in the form that its producers' serializer writes.

    Its values are text and numbers; bytes are text of hexadecimal digits.
    """

    key_format: KeyFormat = "string"

    @staticmethod
    def of_format(key_format: KeyFormat) -> RecordKey:
        return RecordKey(str(RECORD_KEY), key_format in _WIDTHS, key_format)

    @property
    def is_text(self) -> bool:
        return self.key_format == "string"

    def stored(self, record_key: bytes) -> bytes:
        """Raises InvalidInputError: the record's key has another form."""
        if (width := _WIDTHS.get(self.key_format)) is not None:
            if len(record_key) != width:
                raise InvalidInputError(self.problem)
            return OURS + _flipped(record_key)
        if self.key_format != "bytes":
            # Checked with the first state, as other keys are.
            return record_key
        if not 1 <= len(record_key) <= MOST_BYTES:
            raise InvalidInputError(self.problem)
        return OURS + record_key

    def sent(self, key: bytes) -> bytes:
        if self.is_number:
            return _flipped(key[1:])
        return key[1:] if self.key_format == "bytes" else key

    def record_key(self, value: str | int | UUID | bytes) -> bytes:
        """Returns the key that a producer writes for a value. Raises InvalidInputError if it is not valid."""
        return self.sent(self.parse(key_text(value)))

    @property
    def cause(self) -> str:
        """The cause of a record whose key has another form."""
        return f"{self.column}-malformed"

    @property
    def problems(self) -> dict[str, str]:
        """As `keys.key_problems`."""
        return {"key-null": "the record has no key, and the read model's key is that", self.cause: self.problem}

    @property
    def problem(self) -> str:
        """What is wrong with a record's key that has another form, and what to do."""
        said = f"the record's key is not {_FORMS[self.key_format]}: name the `key_format` of the topic's producers"
        if self.key_format != "long":
            return said
        return f'{said}; an output of this service has such keys with `Emit(…, key_format="long")`'

    def encode(self, value: str | int) -> bytes:
        match value:
            case int():
                return OURS + _flipped(value.to_bytes(_WIDTHS[self.key_format], "big", signed=True))
            case _ if self.key_format == "bytes":
                return OURS + bytes.fromhex(value)
        return value.encode()

    def decode(self, key: bytes) -> str | int:
        if self.is_number:
            return int.from_bytes(_flipped(key[1:]), "big", signed=True)
        if self.key_format == "bytes":
            return key[1:].hex()
        try:
            return checked_key(key.decode(), self.column) if self.key_format == "string" else _canonical(key.decode())
        except (UnicodeDecodeError, InvalidInputError):
            raise InvalidInputError(self.problem) from None

    def value(self, text: str) -> str | int:
        match self.key_format:
            case "string":
                return checked_key(text, self.column)
            case "uuid":
                if _UUID.fullmatch(text.lower()):
                    return text.lower()
                raise InvalidInputError(f"{self.column} must be a UUID, such as 123e4567-e89b-12d3-a456-426614174000")
            case "bytes":
                if len(text) <= 2 * MOST_BYTES and _BYTES.fullmatch(text.lower()):
                    return text.lower()
                raise InvalidInputError(
                    f"{self.column} must be 1 to {MOST_BYTES} bytes in hexadecimal digits, such as 00ff"
                )
        bits = 8 * _WIDTHS[self.key_format]
        if not NUMERAL.fullmatch(text) or not -(1 << bits - 1) <= (number := int(text)) < 1 << bits - 1:
            raise InvalidInputError(f"{self.column} must be a number of at most {bits} bits, such as 42")
        return number

    def text(self, key: bytes) -> str:
        return str(self.decode(key))

    def of_text(self, text: str) -> bytes:
        return self.parse(text)

    def shown(self, text: str) -> str:
        return str(self.value(text))

    def range(
        self,
        start: str | None = None,
        end: str | None = None,
        prefix: str | None = None,
        within: Mapping[str, str] | None = None,
    ) -> tuple[bytes, bytes]:
        if prefix is None or self.is_text or self.is_number:
            return ColumnKey.range(self, start, end, prefix, within)
        first, stop = ColumnKey.range(self, start, end, None, within)
        prefix = prefix.lower()
        if self.key_format == "bytes" and not _BYTES.fullmatch(prefix):
            raise InvalidInputError("prefix must be bytes in hexadecimal digits, such as 00ff")
        begun = self.encode(prefix)
        return max(first, begun), min(stop, after(begun))


def key_text(value: str | int | UUID | bytes) -> str:
    """Returns the text of a key, given as a value of Python."""
    return value.hex() if isinstance(value, bytes) else str(value)


def java_long(key: bytes) -> bytes:
    """Returns a number, encoded as a re-key does, as Java's LongSerializer writes it."""
    return _flipped(key)


def _flipped(number: bytes) -> bytes:
    """Returns a number with its sign bit inverted."""
    return bytes([number[0] ^ 0x80]) + number[1:]


def _canonical(text: str) -> str:
    if not _UUID.fullmatch(text):
        raise InvalidInputError(f"{text!r} is not a UUID")
    return text
