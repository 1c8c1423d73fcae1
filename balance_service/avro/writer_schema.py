"""The schema of a writer, and how schemas that refer to each other become one text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from balance_service.avro.logical_types import with_times
from balance_service.avro.number_reader import long_at
from balance_service.avro.schemas import full_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from balance_service.avro.schemas import Schema

_NAMED = ("record", "error", "enum", "fixed")
_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")


@dataclass(frozen=True)
class WriterSchema:
    text: str
    """As JSON, with the definitions of all types that it names, and `with_times`; as registered if it is not Avro."""
    records: tuple[str, ...]
    """Full names of the records that a value can be: of a record one, of a union several, of anything else none."""

    @classmethod
    def of(cls, schema: Any) -> WriterSchema:
        members = schema if isinstance(schema, list) else [schema]
        return cls(json.dumps(with_times(schema)), tuple(name for name in map(_record_name, members) if name))

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
        schema = json.loads(self.text) if self.records else None
        return [_record_name(member) for member in schema] if isinstance(schema, list) else None


def _record_name(kind: Any) -> str:
    return full_name(kind) if isinstance(kind, dict) and kind.get("type") == "record" else ""


def self_contained(schema: Any, referenced: Iterable[Any]) -> Any:
    """A schema with the definitions of the types that it takes from others, each where it is first named.

    The first definition of a name counts. A name that nothing defines remains.

    Source: Avro 1.12 specification, "Names"; as Avro for Java, a name that its namespace lacks is looked up in none.
    """
    return _Definitions(referenced).written_into(schema, "")


class _Definitions:
    def __init__(self, schemas: Iterable[Any]) -> None:
        self._others: dict[str, tuple[Schema, str]] = {}
        for schema in schemas:
            for name, found in _defined_in(schema, ""):
                self._others.setdefault(name, found)
        self._written: set[str] = set()

    def written_into(self, kind: Any, namespace: str) -> Any:
        match kind:
            case str():
                return self._named(kind, namespace)
            case list():
                return [self.written_into(member, namespace) for member in kind]
            case {"type": str(plain), "name": str()} if plain in _NAMED:
                return self._defined(kind, namespace)
            case {"type": "array", "items": items}:
                return {**kind, "items": self.written_into(items, namespace)}
            case {"type": "map", "values": values}:
                return {**kind, "values": self.written_into(values, namespace)}
            case {"type": str(name)} if name not in _PRIMITIVES:
                return self._named(name, namespace)
            case {"type": dict() | list() as inner}:
                return {**kind, "type": self.written_into(inner, namespace)}
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
                {**field, "type": self.written_into(field["type"], namespace)} for field in kind["fields"]
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
