"""Keys of events and states: their encoding, and their validation.

The key of one column: text is encoded as UTF-8. A number, an int or a long, takes 8 bytes, big-endian, with its sign
bit inverted, so that the bytes sort in numeric order.

A composite key is its columns one after the other: numbers as above, text with its NULs escaped and a terminator. So no
two keys have the same bytes, the bytes sort as the columns do, and the keys with the same first columns are one range.
"""

from __future__ import annotations

import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode

from balance_service.avro.schemas import simple_name, without_null
from balance_service.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_KEY_BYTES = 256
# In a notation that both Python and JSON Schema accept.
CONTROL_CHARACTERS = r"\u0000-\u001f\u007f-\u009f"
_CONTROL_CHARACTER = re.compile(f"[{CONTROL_CHARACTERS}]")
# Greater than the key of any state.
_AFTER_ALL_KEYS = b"\xff"


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
NUMERAL = re.compile(r"0|-?[1-9][0-9]{0,18}")
NUMBERS = f"^(?:{NUMERAL.pattern})$"
A_NUMBER, A_TEXT = "1", "c1"
"""Examples of keys."""
# UTF-8, so that Spark can write them as text. A text ends before any text that it begins.
ESCAPED_NUL, END_OF_TEXT = "\0\2", "\0\1"
_ESCAPED, _END = ESCAPED_NUL.encode(), END_OF_TEXT.encode()


class KeyType(ABC):
    """The encoding of the values of one column, or of several, as keys."""

    __slots__ = ()
    is_number = False
    """Whether each key is one number."""

    @property
    @abstractmethod
    def parts(self) -> tuple[ColumnKey, ...]:
        """The columns, in the order of the key."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple([part.column for part in self.parts])

    @property
    def is_text(self) -> bool:
        """Whether each key is its text, in UTF-8."""
        return not self.is_number and not self.is_composite

    @property
    def is_composite(self) -> bool:
        return len(self.parts) > 1

    @property
    def declared(self) -> str | tuple[str, ...]:
        """The key as a read model declares it."""
        return self.columns if self.is_composite else self.columns[0]

    def stored(self, record_key: bytes) -> bytes:
        """Returns the key of a state, given that of the records that it is made of: the same but for `RecordKey`."""
        return record_key

    def sent(self, key: bytes) -> bytes:
        """Returns the key of the records that a state is made of, given the state's: the inverse of `stored`."""
        return key

    @abstractmethod
    def of(self, record: Mapping[str, Any]) -> bytes:
        """Returns the key of a record, none of whose key columns is null."""

    @abstractmethod
    def fields(self, key: bytes) -> dict[str, str | int]:
        """Returns the columns of a key. Raises InvalidInputError if the key is not valid."""

    @abstractmethod
    def text(self, key: bytes) -> str:
        """Returns a state's key as queries name it; a composite key as its query: `card=c1&day=20`."""

    @abstractmethod
    def of_text(self, text: str) -> bytes:
        """Returns the key for a text that `parse` accepted before."""

    @abstractmethod
    def parse(self, text: str) -> bytes:
        """Returns the key for a text in a query. Raises InvalidInputError if the text is not valid."""

    @abstractmethod
    def texts(self, text: str) -> dict[str, str]:
        """Returns the text of each column, given that of the key. Raises InvalidInputError if it is none."""

    @abstractmethod
    def shown(self, text: str) -> str | dict[str, str | int]:
        """Returns a key, given its text, as answers show it: as text, or the columns of a composite key."""

    @abstractmethod
    def text_of_shown(self, shown: Any) -> str:
        """Returns the text of a key, given what an answer shows. Raises TypeError if it is none."""

    @abstractmethod
    def range(
        self,
        start: str | None = None,
        end: str | None = None,
        prefix: str | None = None,
        within: Mapping[str, str] | None = None,
    ) -> tuple[bytes, bytes]:
        """Returns the bytes of the first key of a range, and those after its last key.

        Args:
            start, end: the first and the last value of the key, or of the column after those of `within`.
            prefix: of that value, which must be text.
            within: first columns of a composite key, with their values as text.

        Raises:
            InvalidInputError: an argument is not valid for keys of this type.
        """


@dataclass(frozen=True, slots=True)
class ColumnKey(KeyType):
    """The encoding of one column's values as keys."""

    column: str
    is_number: bool

    @property
    def pattern(self) -> str:
        """What texts of keys match, as a regular expression of Python and of JSON Schema; empty for any text."""
        return NUMBERS if self.is_number else ""

    @property
    def example(self) -> str:
        return A_NUMBER if self.is_number else A_TEXT

    @staticmethod
    def from_column(column: str, kind: Any) -> ColumnKey | None:
        """Returns the key type of a column of an Avro type; None if the type cannot be a key."""
        name = simple_name(without_null(kind)[0])
        return ColumnKey(column, name != "string") if name in ("string", "int", "long") else None

    @property
    def parts(self) -> tuple[ColumnKey, ...]:
        return (self,)

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

    def of(self, record: Mapping[str, Any]) -> bytes:
        value = record[self.column]
        # A table's key is text, even of a number.
        return self.encode(value if self.is_number else str(value))

    def fields(self, key: bytes) -> dict[str, str | int]:
        return {self.column: self.decode(key)}

    def text(self, key: bytes) -> str:
        return str(self.decode(key)) if self.is_number else key.decode()

    def of_text(self, text: str) -> bytes:
        return self.encode(int(text) if self.is_number else text)

    def parse(self, text: str) -> bytes:
        return self.encode(self.value(text))

    def value(self, text: str) -> str | int:
        """Returns the value for a text in a query. Raises InvalidInputError if the text is not valid."""
        if not self.is_number:
            return checked_key(text, self.column)
        if not NUMERAL.fullmatch(text) or not -SIGN_BIT <= (number := int(text)) < SIGN_BIT:
            raise InvalidInputError(f"{self.column} must be a number of at most 64 bits, such as 42")
        return number

    def texts(self, text: str) -> dict[str, str]:
        return {self.column: text}

    def shown(self, text: str) -> str:
        return text

    def text_of_shown(self, shown: Any) -> str:
        if not isinstance(shown, str):
            raise TypeError("a key is not text")
        return shown

    def range(
        self,
        start: str | None = None,
        end: str | None = None,
        prefix: str | None = None,
        within: Mapping[str, str] | None = None,
    ) -> tuple[bytes, bytes]:
        if within:
            raise InvalidInputError(f"the key is {self.column} alone: use from, to")
        if prefix is not None and self.is_number:
            raise InvalidInputError(
                "prefix requires text keys, and the keys of this read model are numbers: use from, to"
            )
        common = (prefix or "").encode()
        starts = [common] + ([] if start is None else [self.parse(start)])
        stops = [common + _AFTER_ALL_KEYS] + ([] if end is None else [self.parse(end) + b"\0"])
        return max(starts), min(stops)


@dataclass(frozen=True, slots=True)
class CompositeKey(KeyType):
    """The encoding of the values of several columns as one key."""

    parts: tuple[ColumnKey, ...]

    def of(self, record: Mapping[str, Any]) -> bytes:
        return b"".join([_encoded(record[part.column]) for part in self.parts])

    def fields(self, key: bytes) -> dict[str, str | int]:
        found: dict[str, str | int] = {}
        rest = self._checked(key)
        for part in self.parts:
            if part.is_number:
                value, rest = rest[: _NUMBER.size], rest[_NUMBER.size :]
            else:
                value, rest = _text_and_rest(rest, part.column)
            found[part.column] = part.decode(value)
        if rest:
            raise InvalidInputError(f"the key has {len(rest)} bytes after {self.columns[-1]}")
        return found

    def text(self, key: bytes) -> str:
        return urlencode(self.fields(key), quote_via=quote, safe="")

    def of_text(self, text: str) -> bytes:
        return self.parse(text)

    def parse(self, text: str) -> bytes:
        return self._of_texts(self.texts(text))

    def texts(self, text: str) -> dict[str, str]:
        try:
            pairs = parse_qsl(
                text, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=len(self.parts)
            )
        except (ValueError, UnicodeError):
            pairs = []
        if len(dict(pairs)) != len(pairs) or dict(pairs).keys() != {*self.columns}:
            form = "&".join([f"{column}=…" for column in self.columns])
            raise InvalidInputError(f"the key must be of the form {form}")
        return {column: dict(pairs)[column] for column in self.columns}

    def _of_texts(self, texts: Mapping[str, str]) -> bytes:
        return self._checked(self.of({part.column: part.value(texts[part.column]) for part in self.parts}))

    def shown(self, text: str) -> dict[str, str | int]:
        texts = self.texts(text)
        return {part.column: part.value(texts[part.column]) for part in self.parts}

    def text_of_shown(self, shown: Any) -> str:
        if not isinstance(shown, Mapping) or shown.keys() != {*self.columns}:
            raise TypeError(f"a key is not an object of {', '.join(self.columns)}")
        try:
            return self.text(self._of_texts({column: str(value) for column, value in shown.items()}))
        except InvalidInputError as error:
            raise TypeError(str(error)) from None

    def range(
        self,
        start: str | None = None,
        end: str | None = None,
        prefix: str | None = None,
        within: Mapping[str, str] | None = None,
    ) -> tuple[bytes, bytes]:
        within = within or {}
        count = len(within)
        if unknown := within.keys() - {*self.columns}:
            raise InvalidInputError(f"the key has no {min(unknown)}: its columns are {', '.join(self.columns)}")
        if within.keys() != {*self.columns[:count]}:
            absent = next(column for column in self.columns if column not in within)
            raise InvalidInputError(f"{absent} is missing: a range is one of the first columns of the key")
        common = b"".join([_encoded(part.value(within[part.column])) for part in self.parts[:count]])
        starts, stops = [common], [after(common)]
        if (start, end, prefix) != (None, None, None):
            if count == len(self.parts):
                raise InvalidInputError(
                    "from, to and prefix are of the column after those that are given, and all are given"
                )
            ranged = self.parts[count]
            if prefix is not None and ranged.is_number:
                raise InvalidInputError(f"prefix requires text, and {ranged.column} is a number: use from, to")
            if prefix is not None:
                begun = common + prefix.encode().replace(b"\0", _ESCAPED)
                starts, stops = [*starts, begun], [*stops, begun + _AFTER_ALL_KEYS]
            if start is not None:
                starts.append(common + _encoded(ranged.value(start)))
            if end is not None:
                stops.append(after(common + _encoded(ranged.value(end))))
        return max(starts), min(stops)

    def _checked(self, key: bytes) -> bytes:
        if len(key) > MAX_KEY_BYTES:
            raise InvalidInputError(f"{' and '.join(self.columns)} together must have at most {MAX_KEY_BYTES} bytes")
        if key.startswith(_AFTER_ALL_KEYS):
            raise InvalidInputError(f"{self.columns[0]} is too great: the key would begin with 0xFF")
        return key


def _encoded(value: str | int) -> bytes:
    """Returns a column's part of a composite key."""
    if isinstance(value, int):
        return _NUMBER.pack(value + SIGN_BIT)
    return value.encode().replace(b"\0", _ESCAPED) + _END


def _text_and_rest(key: bytes, column: str) -> tuple[bytes, bytes]:
    """Splits what begins with a text. Raises InvalidInputError if it does not."""
    at = key.find(b"\0")
    while key[at : at + 2] == _ESCAPED:
        at = key.find(b"\0", at + 2)
    if at < 0 or key[at : at + 2] != _END:
        raise InvalidInputError(f"{column} has no end")
    return key[:at].replace(_ESCAPED, b"\0"), key[at + 2 :]


def after(common: bytes) -> bytes:
    """Returns the first bytes that sort after all that begin so."""
    begun = common.rstrip(b"\xff")
    return begun[:-1] + bytes([begun[-1] + 1]) if begun else _AFTER_ALL_KEYS


TEXT = ColumnKey("key", is_number=False)
"""Leaves keys unchanged."""


def key_type_of(parts: Sequence[ColumnKey]) -> KeyType:
    return parts[0] if len(parts) == 1 else CompositeKey(tuple(parts))


def key_problems(key: Sequence[str], by: Sequence[str] | None) -> dict[str, str]:
    """Returns what is wrong with the key of an event, by the cause of its dead letter.

    Args:
        key: the columns that are the key of the states; empty for a model without states.
        by: the columns whose values become the key of the records that a stage passes on; None for a last stage.
    """
    problems = {"key-reserved": "the key begins with 0xFF"}
    if by is not None:
        one, is_one = " or ".join(by), len(by) == 1
        size = f"has more than {MAX_KEY_BYTES:,} bytes" if is_one else f"they have more than {MAX_KEY_BYTES:,} bytes"
        problems["field-null"] = f"{one} is null"
        problems[f"{cause_of(by)}-malformed"] = f"{one} is not UTF-8, or {size}"
    elif key:
        problems[f"key-is-not-{cause_of(key)}"] = f"the record's key is not the {' and '.join(key)} of its event"
    return problems


def cause_of(columns: Sequence[str]) -> str:
    """Returns the part of a cause that names columns: `customerId` is `customer-id`."""
    return "-".join([word for column in columns for word in words_of(column)])


def words_of(column: str) -> list[str]:
    """Splits a column's name into words, for causes: `customerId` is customer and id."""
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", column).lower().split("_")
