"""Named types of Avro schemas: Avro defines one where it is first used, and names it from then on.

The types of a read model have every definition in full at each use, so that a type can be read without its schema;
`contracted` writes them as Avro again.

Source: Avro 1.12 specification, "Names"; as Avro for Java, a name that its namespace lacks is looked up in none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.avro.schemas import full_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.avro.schemas import Schema

_NAMED = ("record", "error", "enum", "fixed")
_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
# Records that use the next one twice double with each level.
_MOST_TYPES = 10_000


def expanded(schema: Any) -> Any:
    """Returns a schema with each named type in full at each use. Within its own definition, a type remains a name.

    Raises:
        ValueError: two definitions have one name, or the result has more than 10,000 types.
    """
    return _Expansion(schema).of(schema, "", frozenset())


def contracted(schema: Any) -> Any:
    """Returns the Avro of a schema or a part of one: a type is defined at its first use, and a name at the others.

    Leaves a schema unchanged that defines each type once.
    """
    return _Contraction().of(schema, "")


class _Expansion:
    def __init__(self, schema: Any) -> None:
        self._defined: dict[str, tuple[Schema, str]] = {}
        """By full name: the definition, and the namespace around it."""
        self._left = _MOST_TYPES
        self._note(schema, "")

    def of(self, kind: Any, namespace: str, within: frozenset[str]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has more than {_MOST_TYPES} types, with each named type counted at each use")
        match kind:
            case str():
                return self._named(kind, namespace, within)
            case {"type": str(name)} if name not in _NAMED and name not in (*_PRIMITIVES, "array", "map"):
                return self._named(name, namespace, within)
            case {"type": dict() | list() as inner} if "logicalType" not in kind:
                return self.of(inner, namespace, within)
        inside = full_name({"namespace": namespace, **kind}) if _is_definition(kind) else ""
        return _with_parts(kind, namespace, lambda part, at: self.of(part, at, within | {inside}))

    def _named(self, name: str, namespace: str, within: frozenset[str]) -> Any:
        if name in _PRIMITIVES:
            return name
        for full in (full_name({"name": name, "namespace": namespace}), name):
            if full in within:
                return full
            if full in self._defined:
                kind, around = self._defined[full]
                own = full_name({"namespace": around, **kind}).rpartition(".")[0]
                # Its namespace may have been that around it.
                moved = kind if around == namespace or "." in kind["name"] else {**kind, "namespace": own}
                return self.of(moved, namespace, within)
        return name

    def _note(self, kind: Any, namespace: str) -> Any:
        if _is_definition(kind):
            full = full_name({"namespace": namespace, **kind})
            if self._defined.setdefault(full, (kind, namespace))[0] != kind:
                raise ValueError(f"it defines {full} in two ways")
        return _with_parts(kind, namespace, self._note)


class _Contraction:
    def __init__(self) -> None:
        self._defined: set[str] = set()

    def of(self, kind: Any, namespace: str) -> Any:
        if _is_definition(kind):
            full = full_name({"namespace": namespace, **kind})
            if full in self._defined:
                own, _, name = full.rpartition(".")
                return name if own == namespace else full
            self._defined.add(full)
        return _with_parts(kind, namespace, self.of)


def _is_definition(kind: Any) -> bool:
    return isinstance(kind, dict) and kind.get("type") in _NAMED and isinstance(kind.get("name"), str)


def _with_parts(kind: Any, namespace: str, change: Callable[[Any, str], Any]) -> Any:
    """Returns a type with a change to the types directly within it.

    Args:
        namespace: around the type.
        change: (type, namespace around it) → type.
    """
    match kind:
        case list():
            return [change(member, namespace) for member in kind]
        case {"fields": fields} if _is_definition(kind):
            inside = full_name({"namespace": namespace, **kind}).rpartition(".")[0]
            return {**kind, "fields": [{**field, "type": change(field["type"], inside)} for field in fields]}
        case {"type": "array", "items": items}:
            return {**kind, "items": change(items, namespace)}
        case {"type": "map", "values": values}:
            return {**kind, "values": change(values, namespace)}
        case {"type": dict() | list() as inner}:
            return {**kind, "type": change(inner, namespace)}
        case _:
            return kind
