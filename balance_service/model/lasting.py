"""Dataclasses whose instances stay what they are: they cannot change, and decoding returns an equal one."""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from balance_service.avro.flat_records import NotFlatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.model.value_types import ValueType

    Columns = Sequence[Sequence[Any]]

_NOT_AS_GENERATED = ("__post_init__", "__new__", "__getattribute__", "__getattr__")


def lasting(owner: type, fields: Mapping[str, ValueType]) -> Callable[[Sequence[Any]], Columns] | None:
    """Returns what makes columns of instances, as the columns of their records; see `FlatRecords`.

    An instance lasts if the columns are exact. The function raises NotFlatError or PoisonRecordError if one does not,
    such as an instance of a subclass. None is returned if instances of the class may change, or be read as another.

    Args:
        fields: the types of its fields, in their order.
    """
    kinds = [(kind.beside_null or kind).lasting for kind in fields.values()]
    if None in kinds or not _is_frozen(owner):
        return None
    converted = [
        (at, kind.write)
        for at, (kind, of) in enumerate(zip(fields.values(), kinds, strict=True))
        if isinstance(of, type) and issubclass(of, Enum)
    ]
    of_fields = attrgetter(*fields)
    values_of = of_fields if len(fields) > 1 else lambda instance: (of_fields(instance),)
    slots = [vars(base).get("__slots__") for base in owner.__mro__[:-1]]
    has_dict, in_slots = None in slots, {name for some in slots for name in some or ()}
    in_dict = sum(name not in in_slots for name in fields)

    def columns_of(instances: Sequence[Any]) -> Columns:
        if not {owner}.issuperset(map(type, instances)):
            raise NotFlatError
        if has_dict and not {in_dict}.issuperset(map(len, map(vars, instances))):
            raise NotFlatError
        columns: list[Sequence[Any]] = [*zip(*map(values_of, instances), strict=True)] or [()] * len(fields)
        for at, write in converted:
            columns[at] = [*map(write, columns[at])]
        return columns

    return columns_of


def _is_frozen(owner: type) -> bool:
    """Whether an instance always has the values that it is made of."""
    for base in owner.__mro__[:-1]:
        members = vars(base)
        is_as_generated = "__dataclass_params__" in members and members["__dataclass_params__"].frozen
        # `dataclass` keeps an `__init__` of the author's. The one that it generates has no file.
        init = getattr(members.get("__init__"), "__code__", None)
        if not is_as_generated or init is None or init.co_filename != "<string>":
            return False
        if any(name in members for name in _NOT_AS_GENERATED):
            return False
        if any(isinstance(member, cached_property) for member in members.values()):
            return False
    return True
