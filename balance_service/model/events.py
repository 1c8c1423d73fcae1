"""The values that a model's code receives, events, updates and states; and the records that it emits."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, overload

import numpy as np

from balance_service.avro.arrow_rows import values_of
from balance_service.errors import ConfigurationError
from balance_service.model.conditions import checked, column_name
from balance_service.model.converters import StateConverter, annotated_type, record_converter
from balance_service.model.value_types import located

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from balance_service.model.conditions import Condition
    from balance_service.model.record_keys import KeyFormat

FormatName = Literal["avro", "json", "cloudevents", "connect"]
"""How the records of a topic are encoded: as Avro in the frame of a schema registry, or as JSON (`formats`).

`cloudevents` and `connect` are the JSON of CloudEvents, and that of Kafka Connect's JsonConverter.
"""
FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)

State = Mapping[str, Any]
"""The state of a key: an Avro record of the read model's state schema."""

Update = Mapping[str, Any]
"""The changes that one event, or several combined events, make to a state, by update column.

Each standard fold has a column with the name of its field. If the model's own code receives events, each record of the
source has a column with its simple name: the event's fields, or None if the event is of another record.
"""


class Event(dict[str, Any]):
    __slots__ = ("record", "timestamp_ms")

    record: str
    """The simple name of its record."""
    timestamp_ms: int
    """The timestamp of its record in the topic, in ms since 1970."""

    def __init__(self, record: str, fields: Mapping[str, Any], timestamp_ms: int) -> None:
        super().__init__(fields)
        self.record = record
        self.timestamp_ms = timestamp_ms


Readers = Mapping[str, StateConverter]
"""What makes instances of dataclasses of events, by the simple name of the event. Other events are an `Event`."""


@overload
def event_of(records: Iterable[str], update: Update, timestamp_ms: int) -> Event | None: ...


@overload
def event_of(records: Iterable[str], update: Update, timestamp_ms: int, readers: Readers) -> Any: ...


def event_of(records: Iterable[str], update: Update, timestamp_ms: int, readers: Readers | None = None) -> Any:
    """Returns the event of an update that carries event fields, as an author's function takes it; None for a tombstone.

    Args:
        records: the simple names of the possible records.
    """
    for record in records:
        if (fields := update.get(record)) is not None:
            read = None if not readers else readers.get(record)
            return Event(record, fields, timestamp_ms) if read is None else read.from_record(fields)
    return None


def events_of(records: Iterable[str], rows: pa.RecordBatch, readers: Readers) -> list[Any]:
    """Returns the event of each row, as `event_of`.

    Args:
        rows: `timestamp`, and a column for each record.
    """
    found: list[Any] = [None] * rows.num_rows
    for record in reversed([record for record in records if record in rows.schema.names]):
        column = rows[record]
        places: Iterable[int] = range(rows.num_rows)
        times = rows["timestamp"]
        if column.null_count:
            is_given = column.is_valid()
            column, times = column.filter(is_given), times.filter(is_given)
            places = np.flatnonzero(is_given.to_numpy(zero_copy_only=False)).tolist()
        if not len(column):
            continue
        names = [field.name for field in column.type]
        columns = dict(zip(names, map(values_of, column.flatten()), strict=True))
        reader = readers.get(record)
        if reader is not None and reader.from_columns is not None:
            made = reader.from_columns(columns)
        else:
            made = _events(record, names, columns.values(), times.to_pylist())
        for place, event in zip(places, made, strict=True):
            found[place] = event
    return found


def _events(record: str, names: Sequence[str], columns: Iterable[Sequence[Any]], times: Sequence[int]) -> list[Event]:
    made = []
    for row, timestamp_ms in zip(zip(*columns, strict=True), times, strict=True):
        # Without a dict in between.
        event = Event.__new__(Event)
        event.update(zip(names, row, strict=True))
        event.record, event.timestamp_ms = record, timestamp_ms
        made.append(event)
    return made


class DeclaredRecord(str):
    """The simple name of a record type that a dataclass declares."""

    owner: type

    @classmethod
    def named(cls, record: str | type) -> str:
        """Returns the simple name of a record type, given by it or by its dataclass. Raises TypeError."""
        if isinstance(record, str):
            return record
        if not isinstance(record, type):
            raise TypeError(f"{record!r} is neither the simple name of a record nor a dataclass")
        name = cls(record.__name__)
        name.owner = record
        return name


def readers_for(code: Callable[..., Any], number: int, records: Iterable[str]) -> Readers:
    """Returns what makes instances of dataclasses of a function's events, where its annotation names them.

    An event whose dataclass the annotation does not include remains an `Event`.

    Args:
        code: a function of a model's author.
        number: of the argument that takes the event, from 0.
        records: the simple names of the events.

    Raises:
        ConfigurationError: the annotation names dataclasses, but not of every event; or a dataclass declares an event,
            and the annotation cannot be resolved, or names what no event arrives as. The message is the rest of a
            sentence about the function.
    """
    owners: dict[str, type] = {one: one.owner for one in records if isinstance(one, DeclaredRecord)}
    members = _members(code, number, is_resolved=bool(owners))
    kept = {record: owner for record, owner in owners.items() if any(member in owner.__mro__ for member in members)}
    if (
        members
        and all(map(dataclasses.is_dataclass, members))
        and (left := [one for one in records if one not in kept])
    ):
        raise ConfigurationError(
            f"takes events as {' or '.join(map(located, members))}, which '{left[0]}' of the source is not: name the "
            "dataclass of each record in the source and in the annotation, or annotate the event as `Event`"
        )
    given = [Any, *(base for owner in owners.values() for base in owner.__mro__)]
    if owners and (odd := [member for member in members if member not in given and not _is_mapping(member)]):
        raise ConfigurationError(
            f"takes events as {located(odd[0])}, which is neither a mapping nor the dataclass of a record of the "
            "source: name that dataclass, or annotate the event as `Event`"
        )
    return {record: record_converter(owner) for record, owner in kept.items()}


def _members(code: Callable[..., Any], number: int, *, is_resolved: bool) -> tuple[Any, ...]:
    """Returns the types that a parameter may have, without None; none if they are not known."""
    try:
        annotation = [*inspect.signature(code).parameters.values()][number].annotation
    except (ValueError, TypeError, IndexError):
        # A function without signature, or with `*args`.
        return ()
    try:
        members = [*_meant(annotated_type(annotation, code))]
    except Exception as error:  # An annotation may be any expression.
        if not is_resolved:
            return ()
        raise ConfigurationError(
            f"takes events of a type that cannot be resolved ({error}): define or import it at the top of the module, "
            "and not only under TYPE_CHECKING"
        ) from error
    return tuple(member for member in members if member not in (NoneType, inspect.Parameter.empty))


def _meant(found: Any) -> Iterator[Any]:
    """Yields the types that a union, an alias or an annotated type stands for."""
    if get_origin(found) in (Union, UnionType):
        for member in get_args(found):
            yield from _meant(member)
    elif get_origin(found) is Annotated:
        yield from _meant(get_args(found)[0])
    elif hasattr(found, "__value__"):
        yield from _meant(found.__value__)
    else:
        yield found


def _is_mapping(kind: Any) -> bool:
    kind = get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, Mapping)


class Order(Enum):
    """The treatment of a key's later events while an earlier one is a dead letter that may still be applied."""

    ANY = "any"
    PER_KEY = "per-key"


ANY = Order.ANY
"""Later events are applied, and the dead letter whenever it can be. For folds whose result does not depend on order."""
PER_KEY = Order.PER_KEY
"""Later events become dead letters too, and are applied after the earlier one, in their original order."""


class OnFailure(Enum):
    """What a task does if the model's own code fails at a new event, rather than refuses it."""

    HALT = "halt"
    DEAD_LETTER = "dead-letter"


HALT = OnFailure.HALT
"""The task halts until the code is corrected: queries for its keys get 503, and nothing is applied out of turn."""
DEAD_LETTER = OnFailure.DEAD_LETTER
"""The event becomes a dead letter, which is applied late, once the code is corrected and an operator redrives it."""


Sent = Any
"""A record to emit, or several, or none. A record is a mapping, or an instance of its dataclass."""


class Each(Enum):
    """How often a read model emits the state of a key."""

    EVENT = "event"
    LAST = "last"


EVENT = Each.EVENT
"""For each event, with the state after it."""
LAST = Each.LAST
"""Once for each key that a commit has changed, with the key's last state."""


@dataclass(frozen=True, slots=True)
class OfState:
    """A field of the state after an event, as the model declares it, for `fields` of an output."""

    field: str


@dataclass(frozen=True, slots=True, init=False)
class Emit:
    """Records for a topic, written in the transaction of the commit that produces them.

    A record type is named by the simple name of its schema, or by its dataclass. Without one, a model with states emits
    the state itself, and one without states the event's record unchanged. The record's key is the key of the state;
    without states, the key of the event's record. With `key_format="long"`, a number is written as Java's
    LongSerializer does, and not in the order of our stores; a model with `key = RECORD_KEY` writes it as it was read.
    """

    topic: str
    record: str | None = None
    each: Each = EVENT
    where: Condition | None = None
    """The events to emit; None for all. For models without states."""
    make: Callable[[Any], Sent] | None = None
    """Makes the records for an event; pure. For models without states; one with states overrides `emit`."""
    fields: Mapping[str, str | OfState] = field(default_factory=dict, hash=False)
    """The fields of the record: a column of the event each, by its name or path, or a field of the state after it.

    The record is made without code of the model's own: in Spark, if the model has no states. Other fields have their
    default. An event that leaves no state sends none that has a field of the state.
    """
    format: FormatName = "avro"
    """Of the records. An event's record that is sent unchanged keeps the format of the source."""
    key_format: KeyFormat | None = None
    """The form of the keys; None if they are as the stores, or the event's records, have them."""
    of: str | None = None
    """A column of the event that is an array of records: each is sent, with the fields that the record type has.

    As `fields`, it needs no code of the model's own. For models without states.
    """

    def __init__(
        self,
        topic: str,
        record: str | type | None = None,
        each: Each = EVENT,
        where: Condition | None = None,
        make: Callable[[Any], Sent] | None = None,
        fields: Mapping[str, str | OfState] | None = None,
        format: FormatName = "avro",  # noqa: A002  (the word of every source and output)
        of: str | None = None,
        key_format: KeyFormat | None = None,
    ) -> None:
        object.__setattr__(self, "topic", topic)
        object.__setattr__(self, "record", None if record is None else DeclaredRecord.named(record))
        object.__setattr__(self, "each", each)
        object.__setattr__(self, "where", None if where is None else checked(where))
        object.__setattr__(self, "make", make)
        object.__setattr__(self, "format", format)
        object.__setattr__(self, "fields", {name: _source(one) for name, one in (fields or {}).items()})
        object.__setattr__(self, "of", None if of is None else column_name(of, "of"))
        object.__setattr__(self, "key_format", key_format)

    @property
    def columns(self) -> frozenset[str]:
        """The columns of the event that `fields`, `of` and `where` name."""
        named = [self.of, *self.fields.values()]
        taken = {one.partition(".")[0] for one in named if isinstance(one, str)}
        return frozenset(taken) if self.where is None else self.where.columns | taken


def _source(of: object) -> str | OfState:
    if not isinstance(of, str | OfState):
        raise TypeError(
            f"{of!r} is no source of a field: name a column of the event, or `OfState` a field of the state"
        )
    return of


def listed(sent: Sent) -> Sequence[Any]:
    if sent is None:
        return ()
    if sent.__class__ is dict:
        return (sent,)
    return (sent,) if isinstance(sent, Mapping) or dataclasses.is_dataclass(sent) else sent
