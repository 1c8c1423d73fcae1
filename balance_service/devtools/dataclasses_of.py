"""Dataclasses of the records in Avro schemas, as the text of a Python module that type checkers accept."""

from __future__ import annotations

import keyword
import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from balance_service.avro.logical_types import with_times
from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import full_name, is_fixed_uuid, simple_name, without_null

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from balance_service.avro.schemas import Schema

_NAME = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*")
# Others have a meaning for an Enum.
_SYMBOL = re.compile(r"(?!(?:mro|name|value)\Z)[A-Za-z][A-Za-z0-9_]*")
_PLAIN = {
    "string": "str",
    "string uuid": "str",
    "fixed uuid": "str",
    "int": "int",
    "long": "int",
    "float": "float",
    "double": "float",
    "boolean": "bool",
    "bytes": "bytes",
    "int date": "date",
    "long timestamp-millis": "datetime",
    "long timestamp-micros": "datetime",
    "long timestamp-nanos": "datetime",
}
# Of another logical type, or of one on another type, Avro's libraries read the plain type.
_LOGICAL = re.compile(
    "int (date|time-millis)|long (time-micros|(local-)?timestamp-(millis|micros|nanos))|string uuid|bytes decimal|"
    "fixed (uuid|decimal|duration)"
)
_MODULES = {
    **dict.fromkeys(("str", "int", "float", "bool", "bytes", "list", "dict"), "builtins"),
    "dataclass": "dataclasses",
    "field": "dataclasses",
    "date": "datetime",
    "datetime": "datetime",
    "Decimal": "decimal",
    "Enum": "enum",
    "Annotated": "typing",
    "scale": "balance_service",
}
_MOST_DIGITS = 38
_LONG_LIMIT = 2**63


class DataclassText(NamedTuple):
    text: str
    left_out: list[str]
    """The parts that no dataclass can have, each as a sentence. The text has them as comments."""


def dataclasses_of(schemas: Iterable[Schema]) -> DataclassText:
    """Returns a module with a dataclass for each record, and for the records and enums in it."""
    return _Writer(schemas).written()


class _LeftOutError(Exception):
    """There is no type for it."""


class _Field(NamedTuple):
    line: str
    has_default: bool
    left_out: str


class _Writer:
    def __init__(self, schemas: Iterable[Schema]) -> None:
        self._schemas: list[Schema] = []
        # In the body of a class, a field hides what has its name.
        self._hidden: set[str] = set()
        self._used = {("dataclass", "dataclass")}
        """The names that the text uses, each with what it is there."""
        self._defined: dict[str, Any] = {}
        """The schemas of records and enums by name."""
        self._texts: list[str] = []
        self._left_out: list[str] = []
        for schema in schemas:
            try:
                qualified = _qualified(expanded(with_times(schema)), "")
                self._hidden |= {*_field_names(qualified)}
                self._schemas.append(qualified)
            except Exception as error:  # Files, and some registries, may have what is no schema of Avro.
                self._leave_out(schema, error)
        self._suffix = "_"
        while any(name.endswith(self._suffix) for name in self._hidden):
            self._suffix += "_"

    def written(self) -> DataclassText:
        for schema in self._schemas:
            try:
                self._record(schema, is_read=True)
            except Exception as error:  # As above.
                self._leave_out(schema, error)
        head = ['"""Records of Kafka topics, written by `balance-service schemas types`."""', "", *self._imports()]
        text = "\n\n\n".join(["\n".join(head).rstrip(), *self._texts])
        return DataclassText(text + "\n", self._left_out)

    def _leave_out(self, schema: Any, error: Exception) -> None:
        why = error if isinstance(error, _LeftOutError) else f"cannot be read as a schema: {error!r}"
        self._left_out.append(_line(f"{full_name(schema)!r} {why}"))
        self._texts.append(f"# {self._left_out[-1]}")

    def _imports(self) -> Iterator[str]:
        used: dict[str, list[str]] = {}
        for name, called in sorted(self._used):
            module = _MODULES.get(name)
            if module is not None and (called != name or module != "builtins"):
                used.setdefault(module, []).append(name if called == name else f"{name} as {called}")
        for module in sorted(used, key=lambda module: (module == "balance_service", module)):
            # The package is no part of the standard library.
            if module == "balance_service":
                yield ""
            yield f"from {module} import {', '.join(sorted(used[module], key=str.lower))}"

    def _named(self, name: str) -> str:
        """Returns the name of a type for use in the body of a class."""
        called = name + self._suffix if name in self._hidden else name
        self._used.add((name, called))
        return called

    def _record(self, schema: Schema, *, is_read: bool = False) -> str:
        """Returns the name of a record's class.

        Args:
            is_read: whether events are of the record, which are found by its full name.
        """
        name = self._defining(schema, is_read=is_read)
        if name in self._defined:
            return self._named(name)
        fields = [self._field(name, field) for field in schema.get("fields", ())]
        left_out = [field.left_out for field in fields if field.left_out]
        if not any(field.line for field in fields):
            raise _LeftOutError("; ".join(["has no field with a type of Python", *left_out]))
        found = [field.has_default for field in fields if field.line]
        lines = ["@dataclass(kw_only=True)" if found != sorted(found) else "@dataclass", f"class {name}:"]
        if doc := _doc(schema):
            lines += [f'    """{doc}"""', ""]
        if schema["namespace"]:
            lines += [f"    __namespace__ = {_text(schema['namespace'])}", ""]
        for field in fields:
            lines += filter(None, (field.left_out and f"    # {field.left_out}", field.line))
        self._left_out += left_out
        self._define(name, schema, lines)
        return self._named(name)

    def _field(self, record: str, field: Schema) -> _Field:
        name, of = str(field["name"]), f"{record}.{field['name']}"
        try:
            if not _NAME.fullmatch(name) or keyword.iskeyword(name):
                raise _LeftOutError("has a name that no field of a dataclass can have")
            if field.get("aliases"):
                raise _LeftOutError("has aliases, which no field of a dataclass can have")
            kind = self._kind(field["type"])
        except _LeftOutError as error:
            return _Field("", has_default=False, left_out=_line(f"{of!r} {error}"))
        default = self._default(field["type"], field["default"]) if "default" in field else None
        line = f"    {name}: {kind}" + (f" = {default}" if default else "")
        if doc := _doc(field):
            line += f'\n    """{doc}"""'
        is_lost = "default" in field and default is None
        return _Field(line, bool(default), _line(f"{of!r} has a default that is left out") if is_lost else "")

    def _kind(self, kind: Any) -> str:
        inner, is_nullable = without_null(kind)
        found = self._non_null(inner)
        return f"{found} | None" if is_nullable else found

    def _non_null(self, kind: Any) -> str:
        match _type_of(kind):
            case "bytes decimal" | "fixed decimal" if _is_decimal(precision := kind.get("precision"), kind):
                digits = f"{kind.get('scale', 0)}" + ("" if precision == _MOST_DIGITS else f", precision={precision}")
                return f"{self._named('Annotated')}[{self._named('Decimal')}, {self._named('scale')}({digits})]"
            case "array":
                return f"{self._named('list')}[{self._kind(kind['items'])}]"
            case "map":
                return f"{self._named('dict')}[{self._named('str')}, {self._kind(kind['values'])}]"
            case "enum":
                return self._enum(kind)
            case "record":
                return self._record(kind)
            case name if name in _PLAIN:
                return self._named(_PLAIN[name])
            case _ if isinstance(kind, str):
                raise _LeftOutError("contains a record within itself")
        raise _LeftOutError(f"is of the type {simple_name(kind)!r}, which no field of a dataclass has")

    def _enum(self, schema: Schema) -> str:
        name, symbols = self._defining(schema), schema["symbols"]
        if name not in self._defined:
            if "default" in schema:
                raise _LeftOutError("has a default for unknown symbols, which no Enum has")
            if not symbols or len({*symbols}) < len(symbols):
                raise _LeftOutError("has no symbols, or one of them twice")
            for symbol in symbols:
                if not _SYMBOL.fullmatch(symbol) or keyword.iskeyword(symbol):
                    raise _LeftOutError(f"has the symbol {symbol!r}, which no member of an Enum can be called")
            self._used.add(("Enum", "Enum"))
            self._define(name, schema, [f"class {name}(Enum):", *(f'    {one} = "{one}"' for one in symbols)])
        return self._named(name)

    def _defining(self, schema: Schema, *, is_read: bool = False) -> str:
        """Returns the name of the class for a record or an enum."""
        name, namespace = str(schema["name"]), schema["namespace"]
        # With `_` at the end, a class could have the other name of one that a field hides.
        if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name in _MODULES or name.endswith("_"):
            raise _LeftOutError(f"is called {name!r}, a name that its class cannot have")
        if schema.get("aliases"):
            raise _LeftOutError(f"is {full_name(schema)!r}, which has aliases, and no class can have them")
        if is_read and namespace and not all(map(_NAME.fullmatch, namespace.split("."))):
            raise _LeftOutError(f"is in the namespace {namespace!r}, which no dataclass can name")
        known = self._defined.get(name, schema)
        # Within a record, a type may have another namespace than where it is read.
        if _shape(known) != _shape(schema) or (is_read and known["namespace"] != namespace):
            raise _LeftOutError(
                f"is {full_name(schema)!r}, and another record or enum, {full_name(known)!r}, has that name"
            )
        return name

    def _define(self, name: str, schema: Schema, lines: list[str]) -> None:
        other = ["", "", f"{name}{self._suffix} = {name}"] if name in self._hidden else []
        self._texts.append("\n".join([*lines, *other]))
        self._defined[name] = schema

    def _default(self, kind: Any, value: Any) -> str | None:
        """Returns a default as Python writes it; None if that is not simple."""
        inner, is_nullable = without_null(kind)
        match _type_of(inner), value:
            case _, None:
                return "None" if is_nullable else None
            case "boolean", bool():
                return repr(value)
            case (("string" | "string uuid"), str()):
                return _text(value)
            case (("int" | "long"), int()) if -_LONG_LIMIT <= value < _LONG_LIMIT:
                return repr(int(value))
            case (("float" | "double"), (int() | float())) if math.isfinite(value):
                return repr(float(value))
            case "enum", str() if value in inner["symbols"]:
                return f"{self._named(inner['name'])}.{value}"
            case ("array", []) | ("map", {}) if not value:
                made = self._named("list" if isinstance(value, list) else "dict")
                return f"{self._named('field')}(default_factory={made})"
            case (("bytes decimal" | "fixed decimal"), str()) if all(character <= "\xff" for character in value):
                number = int.from_bytes(value.encode("latin-1"), "big", signed=True)
                digits = tuple(map(int, str(abs(number))))
                if len(digits) <= inner["precision"]:
                    exact = Decimal((number < 0, digits, -inner.get("scale", 0)))
                    return f'{self._named("Decimal")}("{exact:f}")'
        return None


def _type_of(kind: Any) -> str:
    """Returns `string`, `array`, `int date`, …: a type, and its logical type if it has one; `union` for several."""
    if not isinstance(kind, dict):
        return "union" if isinstance(kind, list) else str(kind)
    plain, both = str(kind["type"]), f"{kind['type']} {kind.get('logicalType')}"
    return both if _LOGICAL.fullmatch(both) and (both != "fixed uuid" or is_fixed_uuid(kind)) else plain


def _is_decimal(precision: Any, kind: Schema) -> bool:
    digits = kind.get("scale", 0)
    # A bool is an int.
    return type(digits) is type(precision) is int and 0 <= digits <= precision and 1 <= precision <= _MOST_DIGITS


def _qualified(kind: Any, namespace: str) -> Any:
    """Returns a type whose named types each have a simple name, and their namespace, which may be that around them."""
    match kind:
        case list():
            return [_qualified(member, namespace) for member in kind]
        case {"type": list() as inner}:
            return _qualified(inner, namespace)
        case {"type": dict() as inner}:
            return _qualified({**kind, **inner}, namespace)
        case {"type": "array", "items": inner}:
            return {**kind, "items": _qualified(inner, namespace)}
        case {"type": "map", "values": inner}:
            return {**kind, "values": _qualified(inner, namespace)}
        case {"name": str()}:
            space, _, name = full_name({"namespace": namespace, **kind}).rpartition(".")
            fields = [{**field, "type": _qualified(field["type"], space)} for field in kind.get("fields", ())]
            return {**kind, "name": name, "namespace": space, **({"fields": fields} if fields else {})}
        case _:
            return kind


def _field_names(kind: Any) -> Iterator[str]:
    """Yields the names of all fields within a type."""
    match kind:
        case list():
            for member in kind:
                yield from _field_names(member)
        case {"fields": fields}:
            for field in fields:
                yield str(field["name"])
                yield from _field_names(field["type"])
        case {"type": "array", "items": inner} | {"type": "map", "values": inner}:
            yield from _field_names(inner)


def _shape(kind: Any) -> Any:
    """Returns what a class has of a type: neither documentation nor namespace."""
    if isinstance(kind, list):
        return [_shape(member) for member in kind]
    if not isinstance(kind, dict):
        return kind
    return {name: _shape(part) for name, part in kind.items() if name not in ("doc", "namespace")}


def _line(text: str) -> str:
    """Returns a text in one line, which cannot leave a comment."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _doc(of: Schema) -> str:
    """Returns a documentation as the text of a docstring, in one line."""
    return _line(str(of.get("doc") or "")).replace("\\", "\\\\").replace('"', '\\"')


def _text(text: str) -> str:
    return f'"{text}"' if re.fullmatch(r"[ !#-\[\]-~]*", text) else repr(text)
