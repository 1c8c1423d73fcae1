"""Which schemas of others may be read by: those under which a few bytes cannot keep fastavro busy for long."""

from __future__ import annotations

from typing import Any

# Records of records of nothing may double with each level.
_MOST_EMPTY_VALUES = 1_000
_UNFINISHED = -1


def check_bounded(schema: Any) -> None:
    """Look through a schema as fastavro has parsed it.

    fastavro follows a recursive one as deep as the bytes say, which can end the process, and reads items that take no
    bytes as often as the array's count says, in one go that nothing interrupts.

    Raises:
        ValueError: it is such a one; says why.
    """
    _empty_values(schema, {})


def _empty_values(kind: Any, named: dict[str, int]) -> int:
    """How many values are in one of a type that takes no bytes; 0 of a type that takes some."""
    if isinstance(kind, list):
        for member in kind:
            _empty_values(member, named)
        # Which member it is takes a byte.
        return 0
    if isinstance(kind, str):
        if named.get(kind) == _UNFINISHED:
            raise ValueError(f"{kind} contains itself")
        return 1 if kind == "null" else named.get(kind, 0)
    match kind["type"]:
        case "array":
            if _empty_values(kind["items"], named):
                raise ValueError("an array's items take no bytes")
            return 0
        case "map":
            _empty_values(kind["values"], named)
            return 0
        case "record" | "error" | "enum" | "fixed":
            return _empty_values_of_named(kind, named)
        case other:
            return 1 if other == "null" else 0


def _empty_values_of_named(kind: dict[str, Any], named: dict[str, int]) -> int:
    name = kind["name"]
    # fastavro lets members of a union do that, and would read by the last.
    if name in named:
        raise ValueError(f"{name} is defined twice")
    named[name] = _UNFINISHED
    match kind["type"]:
        case "enum":
            empty = 0
        case "fixed":
            empty = 0 if kind["size"] > 0 else 1
        case _:
            of_fields = [_empty_values(field["type"], named) for field in kind["fields"]]
            empty = 1 + sum(of_fields) if all(of_fields) else 0
    if empty > _MOST_EMPTY_VALUES:
        raise ValueError(f"{name} holds more than {_MOST_EMPTY_VALUES} values that take no bytes")
    named[name] = empty
    return empty
