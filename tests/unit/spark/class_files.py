"""Reads the declarations in class files of jars, without a JVM.

Source: the Java Virtual Machine Specification, chapter 4, "The class File Format".
"""

from __future__ import annotations

import re
import struct
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UTF8, _CLASS, _STRING = 1, 7, 8
_SIZES = {
    3: 4,
    4: 4,
    5: 8,
    6: 8,
    _CLASS: 2,
    _STRING: 2,
    9: 4,
    10: 4,
    11: 4,
    12: 4,
    15: 3,
    16: 2,
    17: 4,
    18: 4,
    19: 2,
    20: 2,
}
_TAKE_TWO_PLACES = (5, 6)
_PUBLIC, _STATIC = 0x0001, 0x0008
_PRIMITIVES = {
    "B": "byte",
    "C": "char",
    "D": "double",
    "F": "float",
    "I": "int",
    "J": "long",
    "S": "short",
    "Z": "boolean",
    "V": "void",
}
_TYPE = re.compile(r"(\[*)(?:L([^;]+);|([BCDFIJSZV]))")


@dataclass(frozen=True)
class ClassFile:
    """One class. Names have dots. A method is written `static name(Type, Type)`, types without their packages."""

    name: str
    parents: tuple[str, ...]
    """The class that it extends and the interfaces that it implements."""
    methods: frozenset[str]
    """Public methods; a constructor has the name of its class."""
    texts: frozenset[str]
    """Every string constant, and the names of referenced classes."""


class Jars:
    """The classes of a class path; the first of each name counts."""

    def __init__(self, jars: Iterable[str]) -> None:
        self._open = ExitStack()
        self._entries: dict[str, zipfile.ZipFile] = {}
        for jar in jars:
            archive = self._open.enter_context(zipfile.ZipFile(jar))
            for name in archive.namelist():
                self._entries.setdefault(name, archive)

    def close(self) -> None:
        self._open.close()

    def read(self, name: str) -> ClassFile | None:
        """Returns a class; None if there is none of that name."""
        entry = name.replace(".", "/") + ".class"
        return parse(self._entries[entry].read(entry)) if entry in self._entries else None

    def methods(self, name: str) -> set[str]:
        """Returns the methods of a class, including inherited ones."""
        found = self.read(name)
        if found is None:
            return set()
        inherited = (method for parent in found.parents for method in self.methods(parent) if method[0].islower())
        return {*found.methods, *inherited}


class _Reader(NamedTuple):
    data: memoryview
    at: list[int]

    def take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(f">{form}", self.data, self.at[0])
        self.skip(struct.calcsize(f">{form}"))
        return values

    def skip(self, size: int) -> None:
        self.at[0] += size


def parse(data: bytes) -> ClassFile:
    reader = _Reader(memoryview(data), [8])
    utf8, refers = _pool(reader)
    _, this, parent, interfaces = reader.take("4H")
    name = utf8[refers[this]].replace("/", ".")
    parents = [parent, *reader.take(f"{interfaces}H")]
    _fields, methods = ([_member(reader) for _ in range(*reader.take("H"))] for _ in range(2))
    return ClassFile(
        name,
        tuple(utf8[refers[p]].replace("/", ".") for p in parents if p),
        frozenset(_written(access, utf8[m], utf8[d], name) for access, m, d in methods if access & _PUBLIC),
        frozenset(utf8[place].replace("/", ".") if "/" in utf8[place] else utf8[place] for place in refers.values()),
    )


def _pool(reader: _Reader) -> tuple[dict[int, str], dict[int, int]]:
    """Returns the texts of the constant pool by index, and for classes and strings the index of their text."""
    (count,) = reader.take("H")
    utf8, refers, place = {}, {}, 1
    while place < count:
        (tag,) = reader.take("B")
        if tag == _UTF8:
            (size,) = reader.take("H")
            utf8[place] = bytes(reader.data[reader.at[0] : reader.at[0] + size]).decode(errors="replace")
            reader.skip(size)
        else:
            if tag in (_CLASS, _STRING):
                (refers[place],) = struct.unpack_from(">H", reader.data, reader.at[0])
            reader.skip(_SIZES[tag])
        place += 2 if tag in _TAKE_TWO_PLACES else 1
    return utf8, refers


def _member(reader: _Reader) -> tuple[int, int, int]:
    """Returns the access flags, and the indexes of name and descriptor in the constant pool."""
    access, name, descriptor, attributes = reader.take("4H")
    for _ in range(attributes):
        _, size = reader.take("HI")
        reader.skip(size)
    return access, name, descriptor


def _written(access: int, method: str, descriptor: str, of: str) -> str:
    types = ", ".join(_types(descriptor[1 : descriptor.index(")")]))
    return f"{'static ' if access & _STATIC else ''}{_simple(of) if method == '<init>' else method}({types})"


def _types(descriptor: str) -> Iterator[str]:
    for dimensions, name, primitive in _TYPE.findall(descriptor):
        yield (_simple(name.replace("/", ".")) if name else _PRIMITIVES[primitive]) + "[]" * len(dimensions)


def _simple(name: str) -> str:
    return name.rpartition(".")[2]
