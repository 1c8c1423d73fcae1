"""The schema of a writer, and how schemas that refer to each other become one text."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from balance_service.avro.logical_types import with_times
from balance_service.avro.number_reader import long_at
from balance_service.avro.schemas import full_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from balance_service.avro.schemas import Schema

_NAMED = ("record", "error", "enum", "fixed")
_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")

SCHEMA_INCOMPATIBLE = "schema-incompatible"
SCHEMA_TYPE_UNSUPPORTED = "schema-type-unsupported"
# Python's JSON library and the functions below reach about 500, less than the registry and Avro for Java.
_MOST_LEVELS = 300
_SCANNED_CHARACTERS = 64 << 10
# A string, and the string after its colon if there is one, or a bracket. Each part matches in linear time.
_STRING = r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)'
_TOKEN = re.compile(rf"(?P<string>{_STRING})(?:\s*+:\s*+(?P<value>{_STRING}))?+|(?P<bracket>[\[\]{{}}])", re.DOTALL)
_PROTOBUF_COMMENT = re.compile(r"//[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/|\Z)")
_PROTOBUF_MESSAGE = re.compile(r"\bmessage\s++(\w++)\s*+\{")
_FORMATS = {"JSON": "JSON Schema", "PROTOBUF": "Protobuf"}


class UnusableSchemaError(Exception):
    """A registered schema cannot be read; the message continues "schema 7 …"."""


@dataclass(frozen=True)
class WriterSchema:
    text: str
    """As JSON, with the definitions of all types that it names, and `with_times`; empty if there is a problem."""
    records: tuple[str, ...]
    """Full names of the records that a value can be: of a record one, of a union several, of anything else none. With a
    problem, the names that can be told; those of JSON Schema and Protobuf have no namespace."""
    problem: str = ""
    """Why no value under the schema can be read, as in "schema 7 is not JSON"; empty if there is no problem."""
    cause: str = ""
    """The cause of the dead letters of such values."""

    @classmethod
    def from_schema(cls, schema: Any) -> WriterSchema:
        members = schema if isinstance(schema, list) else [schema]
        return cls(json.dumps(with_times(schema)), tuple(name for name in map(_record_name, members) if name))

    @classmethod
    def from_avro(cls, text: str, referenced: Sequence[str] = ()) -> WriterSchema:
        """Args:
        referenced: the texts of the schemas that it refers to, and of those that they refer to.
        """
        try:
            return cls.from_schema(parsed_schema(text, referenced))
        except UnusableSchemaError as error:
            return cls.unusable(str(error), records_told(text))

    @classmethod
    def from_other_format(cls, schema_type: str, text: str) -> WriterSchema:
        """Args:
        schema_type: as the registry names it: `JSON`, `PROTOBUF`, or another.
        """
        names: Iterable[str] = ()
        match schema_type:
            case "JSON":
                names = _titles(text)
            case "PROTOBUF":
                names = _PROTOBUF_MESSAGE.findall(_PROTOBUF_COMMENT.sub(" ", text))
        problem = f"is {_FORMATS.get(schema_type, schema_type)}, and only Avro is read"
        return cls.unusable(problem, names, SCHEMA_TYPE_UNSUPPORTED)

    @classmethod
    def unusable(cls, problem: str, records: Iterable[str] = (), cause: str = SCHEMA_INCOMPATIBLE) -> WriterSchema:
        return cls("", tuple(map(_encodable, records)), _encodable(problem), cause)

    def record_of(self, body: bytes) -> str:
        """The full name of the record that a body holds; empty if it is none, or if a union has no such member."""
        if self._members is None:
            return self.records[0] if self.records else ""
        try:
            member, _ = long_at(body, 0)
        except IndexError:
            return ""
        return self._members[member] if 0 <= member < len(self._members) else ""

    @cached_property
    def _members(self) -> list[str] | None:
        schema = json.loads(self.text) if self.records and self.text else None
        return [_record_name(member) for member in schema] if isinstance(schema, list) else None


def parsed_schema(text: str, referenced: Sequence[str] = ()) -> Any:
    """An Avro schema with the definitions of the types that it takes from others.

    Args:
        referenced: the texts of those others.

    Raises:
        UnusableSchemaError: it cannot be read.
    """
    with _reading():
        schema, *others = map(json.loads, (text, *referenced))
        _check_levels(schema, *others)
    return with_definitions(schema, named_in(others)) if others else schema


def named_in(schemas: Iterable[Any]) -> Definitions:
    """Returns the named types of some schemas. Raises UnusableSchemaError if one cannot be read."""
    with _reading():
        return Definitions(schemas)


def with_definitions(schema: Any, others: Definitions) -> Any:
    """Returns as `self_contained`. Raises UnusableSchemaError if the schema cannot be read then."""
    with _reading():
        schema = others.completing(schema)
        _check_levels(schema)
    return schema


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise UnusableSchemaError(f"is not JSON: {error}") from None
    # Decoders find others that are not valid Avro.
    except (TypeError, LookupError, AttributeError) as error:
        raise UnusableSchemaError(f"is not valid Avro: {error!r}") from None


def _check_levels(*schemas: Any) -> None:
    level: list[Any] = [*schemas]
    for _ in range(_MOST_LEVELS + 1):
        parts = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [part for of_one in parts for part in of_one]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> UnusableSchemaError:
    return UnusableSchemaError(f"is nested more than {_MOST_LEVELS} levels deep")


def _record_name(kind: Any) -> str:
    return _encodable(full_name(kind)) if isinstance(kind, dict) and kind.get("type") == "record" else ""


def _encodable(text: str) -> str:
    """A text without halves of characters, which JSON can have and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def records_told(text: str) -> list[str]:
    """The names of the records of an Avro schema that is not parsed, as far as its beginning tells them."""
    text = text[:_SCANNED_CHARACTERS].lstrip()
    own_level, level = (2 if text.startswith("[") else 1), 0
    found: list[dict[str, str]] = []
    for token in _TOKEN.finditer(text):
        if bracket := token["bracket"]:
            level += 1 if bracket in "[{" else -1
            if level == own_level and bracket == "{":
                found.append({})
        elif level == own_level and token["value"] and found:
            found[-1].setdefault(token["string"][1:-1], token["value"][1:-1])
    return [name for name in map(_record_name, found) if name]


def _titles(text: str) -> list[str]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return []
    title = schema.get("title") if isinstance(schema, dict) else None
    return [title] if isinstance(title, str) and title else []


def definitions_of(schema: Any) -> dict[str, Schema]:
    """The records that a value under a parsed schema can be, by full name, as the schema defines them."""
    members = schema if isinstance(schema, list) else [schema]
    return {name: member for member in members if (name := _record_name(member)) and "name" in member}


def self_contained(schema: Any, referenced: Iterable[Any]) -> Any:
    """A schema with the definitions of the types that it takes from others, each where it is first named.

    The first definition of a name counts. A name that nothing defines remains.

    Source: Avro 1.12 specification, "Names"; as Avro for Java, a name that its namespace lacks is looked up in none.
    """
    return Definitions(referenced).completing(schema)


class Definitions:
    """The named types of some schemas. Completes other schemas with them."""

    def __init__(self, schemas: Iterable[Any]) -> None:
        self._others: dict[str, tuple[Schema, str]] = {}
        for schema in schemas:
            for name, found in _defined_in(schema, ""):
                self._others.setdefault(name, found)
        self._written: set[str] = set()

    def completing(self, schema: Any) -> Any:
        """Returns as `self_contained`. The time does not depend on the types that the schema does not take."""
        self._written = set()
        return self._written_into(schema, "")

    def _written_into(self, kind: Any, namespace: str) -> Any:
        match kind:
            case str():
                return self._named(kind, namespace)
            case list():
                return [self._written_into(member, namespace) for member in kind]
            case {"type": str(plain), "name": str()} if plain in _NAMED:
                return self._defined(kind, namespace)
            case {"type": "array", "items": items}:
                return {**kind, "items": self._written_into(items, namespace)}
            case {"type": "map", "values": values}:
                return {**kind, "values": self._written_into(values, namespace)}
            case {"type": str(name)} if name not in _PRIMITIVES:
                return self._named(name, namespace)
            case {"type": dict() | list() as inner}:
                return {**kind, "type": self._written_into(inner, namespace)}
            case _:
                return kind

    def _named(self, name: str, namespace: str) -> Any:
        if name in _PRIMITIVES:
            return name
        for full in (full_name({"name": name, "namespace": namespace}), name):
            if full in self._written:
                return full
            if full in self._others:
                return self._defined(*self._others[full])
        return name

    def _defined(self, kind: Schema, namespace: str) -> Any:
        full = full_name({"namespace": namespace, **kind})
        if full in self._written:
            return full
        self._written.add(full)
        namespace, _, name = full.rpartition(".")
        defined = {**kind, "name": name, "namespace": namespace}
        if "fields" in kind:
            defined["fields"] = [
                {**field, "type": self._written_into(field["type"], namespace)} for field in kind["fields"]
            ]
        return defined


def _defined_in(kind: Any, namespace: str) -> Iterator[tuple[str, tuple[Schema, str]]]:
    """The named types that a schema defines at any depth: full name, and definition with the namespace around it."""
    match kind:
        case list():
            for member in kind:
                yield from _defined_in(member, namespace)
        case {"type": str(plain), "name": str()} if plain in _NAMED:
            full = full_name({"namespace": namespace, **kind})
            yield full, (kind, namespace)
            for field in kind.get("fields", ()):
                yield from _defined_in(field["type"], full.rpartition(".")[0])
        case {"type": "array", "items": inner} | {"type": "map", "values": inner}:
            yield from _defined_in(inner, namespace)
        case {"type": dict() | list() as inner}:
            yield from _defined_in(inner, namespace)
