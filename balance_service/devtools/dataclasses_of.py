"""Dataclasses of the records in Avro schemas, as the text of a Python module that type checkers accept."""

from __future__ import annotations

import keyword
import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from balance_service.avro.logical_types import with_times
from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import full_name, simple_name, without_null

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from balance_service.avro.schemas import Schema

_NAME = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*")
# Others have a meaning for an Enum.
_SYMBOL = re.compile(r"(?!(?:mro|name|value)\Z)[A-Za-z][A-Za-z0-9_]*")
_PLAIN = {
    "string": "str",
    "uuid": "str",
    "int": "int",
    "long": "int",
    "float": "float",
    "double": "float",
    "boolean": "bool",
    "bytes": "bytes",
    "date": "date",
    "timestamp-millis": "datetime",
    "timestamp-micros": "datetime",
    "timestamp-nanos": "datetime",
}
_MODULES = {
    "dataclass": "dataclasses",
    "field": "dataclasses",
    "date": "datetime",
    "datetime": "datetime",
    "Decimal": "decimal",
    "Enum": "enum",
    "Annotated": "typing",
    "scale": "balance_service",
}
_TAKEN = frozenset({*_PLAIN.values(), *_MODULES, "list", "dict"})
_MOST_DIGITS = 38
# Logical types that Avro's libraries know; a value of another one is of its plain type.
_KNOWN_LOGICAL = re.compile("(local-)?(time|timestamp)-.*|duration|decimal|date|uuid")


class DataclassText(NamedTuple):
    text: str
    left_out: list[str]
    """What no dataclass can have, each as a sentence. The text has them as comments."""


def dataclasses_of(schemas: Iterable[Schema]) -> DataclassText:
    """Returns a module with a dataclass for each record, and for the records and enums in it."""
    return _Writer([_qualified(expanded(with_times(schema)), "") for schema in schemas]).written()


class _LeftOutError(Exception):
    """There is no type for it."""


class _Field(NamedTuple):
    line: str
    has_default: bool
    comment: str


class _Writer:
    def __init__(self, schemas: list[Schema]) -> None:
        self._schemas = schemas
        # In the body of a class, a field hides what has its name.
        self._hidden = {name for schema in schemas for name in _field_names(schema)}
        self._used: set[str] = {"dataclass"}
        self._defined: dict[str, Any] = {}
        """The schemas of records and enums by name."""
        self._texts: list[str] = []
        self._left_out: list[str] = []

    def written(self) -> DataclassText:
        for schema in self._schemas:
            try:
                self._record(schema)
            except _LeftOutError as error:
                self._texts.append(self._comment(f"{full_name(schema)!r} {error}", ""))
        head = ['"""Records of Kafka topics, written by `balance-service schemas types`."""', "", *self._imports()]
        text = "\n\n\n".join(["\n".join(head).rstrip(), *self._texts])
        return DataclassText(text + "\n", self._left_out)

    def _imports(self) -> Iterator[str]:
        used: dict[str, list[str]] = {}
        for name in sorted(self._used & _MODULES.keys()):
            used.setdefault(_MODULES[name], []).append(name)
        for module in sorted(used, key=lambda module: (module == "balance_service", module)):
            # The package is no part of the standard library.
            if module == "balance_service":
                yield ""
            yield f"from {module} import {', '.join(sorted(used[module], key=str.lower))}"
        aliases = [f"_{name} = {name}" for name in sorted(self._used & self._hidden & _TAKEN)]
        yield from ["", "# A field has the name.", *aliases] if aliases else []

    def _named(self, name: str) -> str:
        """Returns the name of a type for use in the body of a class."""
        self._used.add(name)
        return f"_{name}" if name in self._hidden else name

    def _comment(self, sentence: str, indent: str) -> str:
        self._left_out.append(sentence)
        return f"{indent}# {sentence}"

    def _record(self, schema: Schema) -> str:
        name = self._defining(schema)
        if name in self._defined:
            return self._named(name)
        self._defined[name] = schema
        first = len(self._left_out)
        try:
            fields = [self._field(name, field) for field in schema["fields"]]
            if not any(field.line for field in fields):
                raise _LeftOutError("has no field with a type of Python")
        except _LeftOutError:
            del self._defined[name], self._left_out[first:]
            raise
        found = [field.has_default for field in fields if field.line]
        lines = ["@dataclass(kw_only=True)" if found != sorted(found) else "@dataclass", f"class {name}:"]
        if doc := _doc(schema):
            lines += [f'    """{doc}"""', ""]
        if schema["namespace"]:
            lines += [f"    __namespace__ = {_text(schema['namespace'])}", ""]
        for field in fields:
            lines += filter(None, (field.comment, field.line))
        self._texts.append("\n".join(lines) + self._alias(name))
        return self._named(name)

    def _field(self, record: str, field: Schema) -> _Field:
        name, of = str(field["name"]), f"{record}.{field['name']}"
        try:
            if not _NAME.fullmatch(name) or keyword.iskeyword(name):
                raise _LeftOutError("has a name that no field of a dataclass can have")
            kind = self._kind(field["type"])
        except _LeftOutError as error:
            return _Field("", has_default=False, comment=self._comment(f"{of!r} {error}", "    "))
        line, default, comment = f"    {name}: {kind}", None, ""
        if "default" in field:
            default = self._default(field["type"], field["default"])
            comment = "" if default else self._comment(f"{of!r} has a default that is left out", "    ")
        doc = _doc(field)
        return _Field(
            line + (f" = {default}" if default else "") + (f'\n    """{doc}"""' if doc else ""), bool(default), comment
        )

    def _kind(self, kind: Any) -> str:
        inner, is_nullable = without_null(kind)
        found = self._non_null(inner)
        return f"{found} | None" if is_nullable else found

    def _non_null(self, kind: Any) -> str:
        match simple_name(kind):
            case "decimal" if kind.get("precision", _MOST_DIGITS + 1) <= _MOST_DIGITS:
                digits = str(kind.get("scale", 0))
                digits += "" if kind["precision"] == _MOST_DIGITS else f", precision={kind['precision']}"
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
            case name if isinstance(kind, dict) and "logicalType" in kind and not _KNOWN_LOGICAL.fullmatch(name):
                return self._non_null(kind["type"])
            case _ if isinstance(kind, str) and kind.rpartition(".")[2] in self._defined:
                raise _LeftOutError("contains a record within itself")
        raise _LeftOutError(f"is of the type {simple_name(kind)!r}, which no field of a dataclass has")

    def _enum(self, schema: Schema) -> str:
        name = self._defining(schema)
        if name not in self._defined:
            for symbol in schema["symbols"]:
                if not _SYMBOL.fullmatch(symbol) or keyword.iskeyword(symbol):
                    raise _LeftOutError(f"has the symbol {symbol!r}, which no member of an Enum can be called")
            self._used.add("Enum")
            members = [f'    {symbol} = "{symbol}"' for symbol in schema["symbols"]]
            self._texts.append("\n".join([f"class {name}(Enum):", *members]) + self._alias(name))
            self._defined[name] = schema
        return self._named(name)

    def _defining(self, schema: Schema) -> str:
        """Returns the name of the class for a record or an enum."""
        name = str(schema["name"])
        if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name in _TAKEN:
            raise _LeftOutError(f"is called {name!r}, a name that its class cannot have")
        if self._defined.get(name, schema) != schema:
            other = full_name(self._defined[name])
            raise _LeftOutError(f"is {full_name(schema)}, and another record or enum, {other}, has that name")
        return name

    def _alias(self, name: str) -> str:
        return f"\n\n\n_{name} = {name}" if name in self._hidden else ""

    def _default(self, kind: Any, value: Any) -> str | None:
        """Returns a default as Python writes it; None if that is not simple."""
        if value is None:
            return "None"
        inner, _ = without_null(kind)
        match simple_name(inner), value:
            case "boolean", bool():
                return repr(value)
            case "string", str():
                return _text(value)
            case (("int" | "long"), int()):
                return repr(int(value))
            case (("float" | "double"), (int() | float())) if math.isfinite(value):
                return repr(float(value))
            case "enum", str() if value in inner["symbols"]:
                return f"{self._named(inner['name'])}.{value}"
            case ("array", []) | ("map", {}) if not value:
                made = self._named("list" if isinstance(value, list) else "dict")
                return f"{self._named('field')}(default_factory={made})"
            case "decimal", str():
                number = int.from_bytes(value.encode("latin-1"), "big", signed=True)
                exact = Decimal((number < 0, tuple(map(int, str(abs(number)))), -inner.get("scale", 0)))
                return f'{self._named("Decimal")}("{exact:f}")'
        return None


def _qualified(kind: Any, namespace: str) -> Any:
    """Returns a type whose named types each have a simple name, and their namespace, which may be that around them."""
    match kind:
        case list():
            return [_qualified(member, namespace) for member in kind]
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


def _doc(of: Schema) -> str:
    """Returns a documentation as the text of a docstring, in one line."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(of.get("doc") or "")).split())
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _text(text: str) -> str:
    return f'"{text}"' if re.fullmatch(r"[ !#-\[\]-~]*", text) else repr(text)
