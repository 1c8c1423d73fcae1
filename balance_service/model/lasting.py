"""Dataclasses whose instances stay what they are: they cannot change, and a codec returns each as it was given."""

from __future__ import annotations

from functools import cached_property
from itertools import product
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any

from balance_service.model.value_types import LONG_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balance_service.model.value_types import ValueType

# A number, the length of a text, the member of a union, and a byte for whether there is a value.
_MOST_BYTES = 24
_MOST_NULLABLE = 6
_NOT_AS_GENERATED = ("__post_init__", "__new__", "__getattribute__", "__getattr__")


def lasting(owner: type, fields: Mapping[str, ValueType]) -> Callable[[Any, int], bool] | None:
    """Returns what says of an instance whether it lasts, and takes at most so many bytes as a record.

    It looks at the types of the values, the range of numbers and the size of texts. What it does not know, such as a
    subclass of a type, it denies. None is returned if instances of the class may change, or be read as another.

    Args:
        fields: the types of its fields, in their order.
    """
    kinds = [(kind.beside_null or kind).lasting for kind in fields.values()]
    nullable = [kind.beside_null is not None for kind in fields.values()]
    if None in kinds or sum(nullable) > _MOST_NULLABLE or not _is_frozen(owner):
        return None
    shapes = {*product(*((one, NoneType) if or_null else (one,) for one, or_null in zip(kinds, nullable, strict=True)))}
    numbers = [at for at, kind in enumerate(kinds) if kind is int]
    texts = [at for at, kind in enumerate(kinds) if kind is str]
    data = [at for at, kind in enumerate(kinds) if kind is bytes]
    of_fields = attrgetter(*fields)
    values_of = of_fields if len(fields) > 1 else lambda instance: (of_fields(instance),)
    own_bytes = _MOST_BYTES * (len(fields) + 1)
    slots = [vars(base).get("__slots__") for base in owner.__mro__[:-1]]
    has_dict, in_slots = None in slots, {name for some in slots for name in some or ()}
    in_dict = sum(name not in in_slots for name in fields)

    def lasts(instance: Any, most_bytes: int) -> bool:
        if instance.__class__ is not owner or (has_dict and len(instance.__dict__) != in_dict):
            return False
        values = values_of(instance)
        if tuple(map(type, values)) not in shapes:
            return False
        for at in numbers:
            number = values[at]
            if number is not None and not -LONG_LIMIT <= number < LONG_LIMIT:
                return False
        size = own_bytes
        for at in texts:
            text = values[at]
            if text is not None:
                size += len(text) if text.isascii() else _size_of(text, most_bytes)
        for at in data:
            size += len(values[at] or b"")
        return size <= most_bytes

    return lasts


def _size_of(text: str, most_bytes: int) -> int:
    """Returns the bytes of a text in UTF-8; more than the most if it has a character that UTF-8 has not."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return most_bytes + 1


def _is_frozen(owner: type) -> bool:
    """Whether an instance has the values that it is made of, for ever."""
    for base in owner.__mro__[:-1]:
        members = vars(base)
        is_as_generated = "__dataclass_params__" in members and members["__dataclass_params__"].frozen
        # `dataclass` keeps an `__init__` of one's own. What it generates has no file.
        init = getattr(members.get("__init__"), "__code__", None)
        if not is_as_generated or init is None or init.co_filename != "<string>":
            return False
        if any(name in members for name in _NOT_AS_GENERATED):
            return False
        if any(isinstance(member, cached_property) for member in members.values()):
            return False
    return True
