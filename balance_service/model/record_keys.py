"""The records' own keys as the keys of states: the forms that Kafka's serializers write, and the form of our stores.

A key has two encodings. The producer's is the one that places it: its hash is its partition. Ours is the one that
stores have: it sorts as the values do, and its first byte is never 0xFF, which begins reserved keys, and Java's
negative numbers. Text and UUIDs have the same in both. Of numbers and bytes, ours begins with a zero, and the sign bit
of a number is inverted. Each can be made of the other, so no two keys have the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from balance_service.errors import InvalidInputError
from balance_service.model.keys import A_NUMBER, A_TEXT, MAX_KEY_BYTES, NUMBERS, NUMERAL, ColumnKey, after, checked_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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


class _RecordKey(str):
    """Not a column: `key = RECORD_KEY` is the key of Kafka's record."""

    __slots__ = ()


RECORD_KEY: Final = _RecordKey("key")
"""The key of Kafka's record as the key of the states; answers and clients call it `key`."""


_UUID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BYTES = re.compile("(?:[0-9a-f]{2})+")
_HEX_DIGIT = "[0-9a-fA-F]"
_A_UUID, _SOME_BYTES = "123e4567-e89b-12d3-a456-426614174000", "00ff"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a `KeyFormat` is. The functions raise ValueError or InvalidInputError for what has another form.

    `stored` takes a producer's bytes, and returns ours; `sent` is its inverse. `decode` takes ours, and returns the
    value; `encode` is its inverse. `value` takes the text of a query. `said` and `asked` name a producer's key and that
    text for people; `pattern` and `example` are of that text, as those of `ColumnKey`.
    """

    said: str
    asked: str = ""
    pattern: str = ""
    example: str
    is_number: bool = False
    stored: Callable[[bytes], bytes] = bytes
    sent: Callable[[bytes], bytes] = bytes
    decode: Callable[[bytes], str | int]
    encode: Callable[[Any], bytes] = str.encode
    value: Callable[[str], str | int]


def _text(text: str) -> str:
    return checked_key(text, RECORD_KEY)


def _canonical(text: str) -> str:
    return _matching(_UUID, text)


def _matching(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(text)
    return text


def _number(said: str, width: int) -> _Form:
    bits = 8 * width

    def stored(sent: bytes) -> bytes:
        if len(sent) != width:
            raise ValueError(sent)
        return OURS + _flipped(sent)

    def value(text: str) -> int:
        if not NUMERAL.fullmatch(text) or not -(1 << bits - 1) <= (number := int(text)) < 1 << bits - 1:
            raise ValueError(text)
        return number

    return _Form(
        said=f"{said}, which takes {width} bytes",
        asked=f"a number of at most {bits} bits, such as 42",
        pattern=NUMBERS,
        example=A_NUMBER,
        is_number=True,
        stored=stored,
        sent=lambda key: _flipped(key[1:]),
        decode=lambda key: int.from_bytes(_flipped(key[1:]), "big", signed=True),
        encode=lambda number: OURS + _flipped(number.to_bytes(width, "big", signed=True)),
        value=value,
    )


def _stored_bytes(sent: bytes) -> bytes:
    if not 1 <= len(sent) <= MOST_BYTES:
        raise ValueError(sent)
    return OURS + sent


def _hex(text: str) -> str:
    if len(text) > 2 * MOST_BYTES:
        raise ValueError(text)
    return _matching(_BYTES, text.lower())


_FORMS: Mapping[KeyFormat, _Form] = {
    # Checked with the first state, as other keys are.
    "string": _Form(
        said=f"text of 1 to {MAX_KEY_BYTES} bytes of UTF-8 without control characters",
        example=A_TEXT,
        decode=lambda key: _text(key.decode()),
        value=_text,
    ),
    "int": _number("an int", 4),
    "long": _number("a long", 8),
    "uuid": _Form(
        said="a UUID as text in lower case, such as Kafka's UUIDSerializer writes",
        asked=f"a UUID, such as {_A_UUID}",
        pattern=f"^{_HEX_DIGIT}{{8}}(?:-{_HEX_DIGIT}{{4}}){{3}}-{_HEX_DIGIT}{{12}}$",
        example=_A_UUID,
        decode=lambda key: _canonical(key.decode()),
        value=lambda text: _canonical(text.lower()),
    ),
    "bytes": _Form(
        said=f"1 to {MOST_BYTES} bytes",
        asked=f"1 to {MOST_BYTES} bytes in hexadecimal digits, such as {_SOME_BYTES}",
        pattern=f"^(?:{_HEX_DIGIT}{{2}}){{1,{MOST_BYTES}}}$",
        example=_SOME_BYTES,
        stored=_stored_bytes,
        sent=lambda key: key[1:],
        decode=lambda key: key[1:].hex(),
        encode=lambda digits: OURS + bytes.fromhex(digits),
        value=_hex,
    ),
}


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
        return RecordKey(str(RECORD_KEY), _FORMS[key_format].is_number, key_format)

    @property
    def is_text(self) -> bool:
        return self.key_format == "string"

    @property
    def pattern(self) -> str:
        return _FORMS[self.key_format].pattern

    @property
    def example(self) -> str:
        return _FORMS[self.key_format].example

    def stored(self, record_key: bytes) -> bytes:
        """Raises InvalidInputError: the record's key has another form."""
        try:
            return _FORMS[self.key_format].stored(record_key)
        except ValueError:
            raise InvalidInputError(self.problem) from None

    def sent(self, key: bytes) -> bytes:
        return _FORMS[self.key_format].sent(key)

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
        form = _FORMS[self.key_format].said
        said = f"the record's key is not {form}: name the `key_format` of the topic's producers"
        if self.key_format != "long":
            return said
        return f'{said}; an output of this service has such keys with `Emit(…, key_format="long")`'

    def encode(self, value: str | int) -> bytes:
        return _FORMS[self.key_format].encode(value)

    def decode(self, key: bytes) -> str | int:
        try:
            return _FORMS[self.key_format].decode(key)
        except (ValueError, InvalidInputError):
            raise InvalidInputError(self.problem) from None

    def value(self, text: str) -> str | int:
        form = _FORMS[self.key_format]
        try:
            return form.value(text)
        except ValueError:
            raise InvalidInputError(f"{self.column} must be {form.asked}") from None

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
            raise InvalidInputError(f"prefix must be bytes in hexadecimal digits, such as {_SOME_BYTES}")
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
