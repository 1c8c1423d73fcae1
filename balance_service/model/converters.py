"""Converts between instances of dataclasses and Avro records: states, views, events, and records that are sent."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, get_type_hints, is_typeddict

from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import fields_of, simple_name, without_null
from balance_service.errors import ConfigurationError, PoisonRecordError
from balance_service.model.dataclass_types import check_names, hints_of, record_type
from balance_service.model.value_types import STATE, VIEW, Place, same

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.avro.schemas import Schema


_OF_OTHERS = frozenset({"record", "error", "array", "map", "union"})
_CHANGEABLE = frozenset({dict, list})
"""The types of decoded values that own code may change."""


@dataclass(frozen=True, slots=True)
class StateConverter:
    """Converts between a read model's states, or its events, and Avro records. Thread-safe."""

    schema: Schema
    to_record: Callable[[Any], dict[str, Any]]
    """Returns the record of an instance, for an AvroCodec of the schema.

    Raises PoisonRecordError (`state-does-not-fit`) if a field's type cannot hold a value exactly. Values that no codec
    encodes, such as a number beyond 64 bits, or text in a field for bytes, are left to the codec.
    """
    from_record: Callable[[Mapping[str, Any]], Any]
    """Returns the instance of a decoded record, without sharing mutable objects with it.

    Fields that the record lacks get the dataclass's default.
    """
    lent: Callable[[Any], Any]
    """Returns what a model's own code receives of a record: as `from_record`, or a copy of a record that stays one.

    An instance that lasts is returned unchanged.
    """
    columns_of: Callable[[Sequence[Any]], Sequence[Sequence[Any]]] | None = None
    """Returns the columns of the records of instances that last; None if instances do not. See `lasting`."""
    from_columns: Callable[[Mapping[str, Sequence[Any]]], list[Any]] | None = None
    """As `from_record`, for each row of columns; None if records stay records."""


def converter_of(state: type, name: str) -> StateConverter:
    """Returns the converter for a dataclass whose instances are the states of a read model.

    The schema is called `<read model>.State`, a type in it `<read model>.<class>`, so classes may move between modules.
    A dataclass default becomes an Avro default, for states that were written without the field. There is no Avro
    default for NaN and infinities, nor for factories other than `list`, `dict` and a dataclass whose fields all have
    defaults.

    Raises:
        ConfigurationError: the class cannot be a state; the message says where it is, why, and what to do.
    """
    return _converter(state, name.replace("-", "_"), "State", STATE)


def _converter(owner: type, namespace: str, name: str, use: str) -> StateConverter:
    kind = record_type(owner, namespace, name, use)
    read = kind.read

    def lent(state: Any) -> Any:
        return state if state.__class__ is owner else read(state)

    return StateConverter(kind.schema, kind.write, read, lent, kind.columns_of, kind.read_all)


@lru_cache
def record_converter(owner: type) -> StateConverter:
    """Returns the converter for a dataclass whose instances are events, rows, or records that a read model sends.

    The schema has the name of the class, and its `__namespace__`, or none; and as `kind` its `__kind__`, by which JSON
    topics of several records tell them.

    Raises:
        ConfigurationError: as `converter_of`.
    """
    place, name, namespace = Place(owner, "a record"), owner.__name__, getattr(owner, "__namespace__", "")
    check_names(place, namespace, name)
    made, kind = _converter(owner, namespace, name, place.use), getattr(owner, "__kind__", None)
    if kind is None:
        return made
    if not isinstance(kind, str) or not kind:
        place.refuse(f"has the `__kind__` {kind!r}: write the text that names the record in a document or a header")
    return replace(made, schema={**made.schema, "kind": kind})


def record_of(value: Any) -> Any:
    """Returns the record of an instance of a dataclass; any other value unchanged.

    Raises:
        ConfigurationError: the class cannot be a record.
        ValueError: a field's type cannot hold its value exactly.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    try:
        return record_converter(type(value)).to_record(value)
    except PoisonRecordError as error:
        raise ValueError(str(error)) from None


def annotated_type(annotation: Any, function: Any) -> Any:
    """Returns an annotation of a function as a type.

    Raises:
        Exception: of any type; the annotation cannot be resolved.
    """
    # Of the annotations, only this one: others may be of types that are not imported.
    alone = type("Alone", (), {"__annotations__": {"annotation": annotation}})
    return get_type_hints(alone, getattr(_code_of(function), "__globals__", {}), include_extras=True)["annotation"]


def _code_of(function: Any) -> Any:
    """Returns what has the code of a callable, which may be a wrapper, a partial function, a class or an object."""
    function = inspect.unwrap(function)
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    if isinstance(function, type):
        return function.__init__  # type: ignore[misc]
    return function if hasattr(function, "__globals__") else type(function).__call__


def returned_by(view: Any, name: str, *, has_fields: bool) -> StateConverter | None:
    """Returns the converter for what a read model's view returns; None if it is annotated with no type that has fields.

    A dataclass is converted to a record; the value of a TypedDict is one.

    Args:
        has_fields: whether the model names the fields, so that an annotation may name what only a type checker imports.

    Raises:
        ConfigurationError: as `converter_of`, or the annotation cannot be resolved.
    """
    try:
        returned = annotated_type(view.__annotations__.get("return"), view)
    except Exception as error:  # An annotation may be any expression.
        if has_fields:
            return None
        raise ConfigurationError(
            f"the return type of {view.__qualname__} cannot be resolved ({error}): import it at run time, or give "
            "`fields`"
        ) from error
    if not isinstance(returned, type) or not (dataclasses.is_dataclass(returned) or is_typeddict(returned)):
        return None
    owner = returned
    if is_typeddict(returned):
        owner = dataclasses.make_dataclass(returned.__name__, [*hints_of(Place(returned, VIEW)).items()])
        owner.__module__, owner.__qualname__ = returned.__module__, returned.__qualname__
    of_view = _converter(owner, name.replace("-", "_"), "View", VIEW)
    return StateConverter(of_view.schema, of_view.to_record if owner is returned else same, same, same)


def unconverted(schema: Schema) -> StateConverter:
    """Returns a converter that leaves records unchanged, for a read model that names a schema."""
    kinds = [without_null(kind)[0] for kind in fields_of(expanded(schema)).values()]
    is_flat = not any(simple_name(kind) in _OF_OTHERS for kind in kinds)
    return StateConverter(schema, same, same, dict if is_flat else _copied)


def _copied(value: Any) -> Any:
    if value.__class__ is dict:
        return {name: _copied(member) if member.__class__ in _CHANGEABLE else member for name, member in value.items()}
    return [_copied(member) if member.__class__ in _CHANGEABLE else member for member in value]
