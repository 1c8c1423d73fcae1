"""What a read model is: a class that names its events, its key, and what its states are of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from balance_service.avro.schemas import load_schema
from balance_service.avro.types import fields_of, type_name
from balance_service.errors import InvalidInputError, PoisonRecordError
from balance_service.model.declaration import check_declaration
from balance_service.model.declared_source import refuse
from balance_service.model.folds import OutOfRangeError, StandardFold
from balance_service.model.outputs import EVENT

if TYPE_CHECKING:
    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.schemas import Schema
    from balance_service.model.addition import Addition
    from balance_service.model.flow import Leg, Stream
    from balance_service.model.folds import Combination
    from balance_service.model.keys import KeyType
    from balance_service.model.order import Order
    from balance_service.model.outputs import Emit, Sent
    from balance_service.model.routes import Collection, Routes

State = Mapping[str, Any]
"""What is kept per key: an Avro record of the read model's state schema."""

Update = Mapping[str, Any]
"""What an event, or several combined, changes, by name of an update column.

There is a column for each standard fold, by the name of its field. Where a `fold` or an `emit` is told of events, there
is one for each record of the source, by its simple name: the event's fields, None where it is of another record.
"""


# What every attempt at a command gives its event anew.
_ANEW = frozenset({"id", "occurredOn"})


class Event(dict[str, Any]):
    """An event's fields, by name."""

    record: str
    """The simple name of its record."""
    timestamp_ms: int
    """Of its record in the topic, in ms since 1970."""

    def __init__(self, record: str, fields: Mapping[str, Any], timestamp_ms: int) -> None:
        super().__init__(fields)
        self.record = record
        self.timestamp_ms = timestamp_ms


class ReadModel:
    """A queryable fold of events, one state per key. A subclass declares one; an instance has no state of its own.

    A subclass names standard folds, each as the attribute that has the name of its field in the state, or in `folds`.
    Or it overrides `fold`. One that cannot be right is refused as it is defined: a ConfigurationError says why.
    """

    name: ClassVar[str]
    """Names tasks, changelog and metrics; lower case, e.g. `balance`."""
    source: ClassVar[Stream]
    """The events that it folds; others on that topic are ignored."""
    key: ClassVar[str]
    """The column of every event that is its record's key too; in the state of standard folds a field.

    A string. Where the source goes on by a column (`Stream.by`), that is it, and need not be named.
    """
    state: ClassVar[str]
    """The simple name of the states' shipped schema. A model that only emits has none."""
    emits: ClassVar[Emit | tuple[Emit, ...]]
    """What it sends; a model without states may send to several topics."""
    queries: ClassVar[Routes | Collection | None] = None
    """Paths of its own, for queries of one key or of all."""
    order: ClassVar[Order]
    """Whether later events of a key wait for an earlier one that could not be applied yet.

    By default PER_KEY for a fold of its own, `Latest` and `Earliest`, ANY for others, and across a re-key.
    """
    fields: ClassVar[Mapping[str, str]]
    """The types of the view's fields, for people; only a model with a view of its own names them."""

    folds: ClassVar[Mapping[str, StandardFold]]
    """The standard folds by field of the state, in its order; empty if the model folds by its own function.

    Declared only for fields that cannot be attributes: `folds = {"name": Latest("Event.name")}`.
    """
    needs_events: ClassVar[bool]
    """Whether code of its own is told of each event, so that updates have their fields."""
    keeps_order: ClassVar[bool]
    """Whether its order is PER_KEY, declared or by default."""
    legs: ClassVar[tuple[Leg, ...]]
    """The way of its events, a stage each; the last one folds or emits."""
    outputs: ClassVar[tuple[Emit, ...]]
    """What it sends."""
    key_type: ClassVar[KeyType]
    """How the keys of its states are written; a model without states has none."""
    event_schemas: ClassVar[Mapping[str, Schema]]
    """The records that it folds: Avro full name → their shipped schema."""
    state_schema: ClassVar[Schema]
    """The Avro schema of its states; a model without states has none."""
    combine: ClassVar[Mapping[str, Combination] | None]
    """Update column → how to combine it; None: every event is folded singly, in offset order."""
    _steps: ClassVar[Sequence[tuple[str, Callable[[Any, Any], Any]]]]
    _anew: ClassVar[frozenset[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        declared = check_declaration(
            cls, own_fold=cls.fold is not ReadModel.fold, own_emit=cls.emit is not ReadModel.emit
        )
        if cls.view is not ReadModel.view and "fields" not in vars(cls):
            refuse(cls, "has a view of its own, and does not say by `fields` what that holds")
        known = _REGISTERED.setdefault(cls.name, cls)
        # The same class may be defined anew, as a module that is loaded again does.
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            refuse(cls, f"has the name '{cls.name}', which {known.__module__}.{known.__qualname__} has already")
        _REGISTERED[cls.name] = cls
        cls.legs = declared.legs
        cls.outputs = declared.outputs
        cls.event_schemas = cls.legs[-1].event_schemas
        cls.folds = declared.folds
        cls.needs_events = not cls.folds or any(emit.each is EVENT and emit.record for emit in cls.outputs)
        cls.combine = declared.combine
        cls.keeps_order = declared.keeps_order
        cls._anew = frozenset(field for field, fold in declared.folds.items() if fold.field in _ANEW)
        cls._steps = [(field, fold.step(declared.kinds[field])) for field, fold in declared.folds.items()]
        if declared.key_type is None:
            cls.fields = {}
            return
        cls.key_type = declared.key_type
        cls.state_schema = load_schema(cls.state)
        if cls.view is ReadModel.view:
            states = fields_of(cls.state_schema)
            cls.fields = {name: type_name(kind) for name, kind in states.items() if name != cls.key}

    def fold(self, state: State | None, event: Event) -> State | None:
        """The next state of a key; pure, and for a model without standard folds to override.

        Args:
            state: None if the key has none.
            event: its key is checked: text of 1 to 256 bytes without control characters.

        Returns:
            A record of the state schema; None: the key has no state from now on, until another event gives it one.

        Raises:
            PoisonRecordError: the event cannot be applied to this state; it becomes a dead letter.
        """
        raise NotImplementedError

    def emit(self, state: Any, event: Any) -> Sent:
        """What is sent of a key; pure. For a model whose `emits` names a record type to override.

        Args:
            state: a State, after the event or the last of the commit; None if the fold has deleted it.
            event: an Event; None where the last state of a commit is sent.

        Returns:
            A record of the type that `emits` names, or several, or none.

        Raises:
            PoisonRecordError: the event cannot be applied to this state; it becomes a dead letter.
        """
        raise NotImplementedError

    @classmethod
    def sent_schemas(cls) -> list[tuple[str, Schema]]:
        """The topics that it emits to, each with a record that is sent there."""
        as_it_is = [cls.state_schema] if cls.has_states() else [*cls.event_schemas.values()]
        sent = [(emit.topic, [load_schema(emit.record)] if emit.record else as_it_is) for emit in cls.outputs]
        return [(topic, schema) for topic, schemas in sent for schema in schemas]

    @classmethod
    def has_states(cls) -> bool:
        """Whether it keeps states; if not, it only emits, and cannot be asked."""
        return hasattr(cls, "state")

    def view(self, state: State) -> Any:
        """What a query answers: values of Avro types. By default the state without its key."""
        return {name: value for name, value in state.items() if name != self.key}

    def next_state(self, state: State | None, key: bytes, update: Update, event: Event | None = None) -> State | None:
        """The state after an update, of one event or combined; None if there is none then. For the engine to call.

        Args:
            event: what the update is of, for a fold of the model's own; None of a tombstone.

        Raises:
            PoisonRecordError: the update cannot be applied to this state.
        """
        before = {self.key: self._key(key)} if state is None else state
        if not self._steps:
            return None if event is None else self.fold(state, event)
        after = {self.key: before[self.key]}
        try:
            for name, step in self._steps:
                after[name] = step(before.get(name), update[name])
        except OutOfRangeError:
            raise PoisonRecordError(f"{self.name}-overflow", f"the {self.name} would not fit into its type") from None
        return after

    def repeated(self, update: Update) -> Mapping[str, Any]:
        """What of an event's update a retry of its command repeats; `id` and `occurredOn` are new each time."""
        kept = {name: value for name, value in update.items() if name not in self._anew}
        return {name: _without_new(value) for name, value in kept.items()}

    @classmethod
    def acceleration(cls, codec: AvroCodec) -> Addition | None:
        """What makes the states that `next_state` would, framed and many at once; None: nothing does.

        Args:
            codec: of the states.
        """
        if cls.key_type.is_number or len(cls.folds) != 1 or len(cls.state_schema["fields"]) != 2:
            return None
        ((field, fold),) = cls.folds.items()
        return fold.acceleration(field, cls.state_schema, codec)

    @classmethod
    def description(cls) -> dict[str, Any]:
        """The read model as queries for it are told: name, source, key, and the view's fields with their types."""
        key = cls.key if cls.has_states() else ""
        return {"name": cls.name, "source": cls.source.topic, "key": key, "fields": dict(cls.fields)}

    @classmethod
    def _key(cls, key: bytes) -> str | int:
        """A key that has no state yet as its column has it; those that have one were checked when they came."""
        try:
            return cls.key_type.decode(key)
        except InvalidInputError:
            words = words_of(cls.key)
            raise PoisonRecordError(
                f"{'-'.join(words)}-malformed", f"the {' '.join(words)} is empty, too long, or not text"
            ) from None


def event_of(records: Iterable[str], update: Update, timestamp_ms: int) -> Event | None:
    """The event of an update that has events' fields; None of a tombstone.

    Args:
        records: the simple names of those that it may be of.
    """
    for record in records:
        if (fields := update.get(record)) is not None:
            return Event(record, fields, timestamp_ms)
    return None


def _without_new(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_new(member) for name, member in sorted(value.items()) if name not in _ANEW}
    return [_without_new(member) for member in value] if isinstance(value, list) else value


def words_of(column: str) -> list[str]:
    """A column's name in words, for causes: `customerId` is customer and id."""
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", column).lower().split("_")


def registered() -> Mapping[str, type[ReadModel]]:
    """Every read model that is defined in this process, by name."""
    return _REGISTERED


_REGISTERED: dict[str, type[ReadModel]] = {}
