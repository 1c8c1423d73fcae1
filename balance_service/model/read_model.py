"""What a read model is: a class that names its events, its key, and what its states are of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from balance_service.avro.schemas import fields_of, type_name
from balance_service.errors import InvalidInputError, PoisonRecordError
from balance_service.model.declaration import check_class, check_declaration
from balance_service.model.declared_source import refuse
from balance_service.model.folds import OutOfRangeError, StandardFold
from balance_service.model.keys import words_of
from balance_service.model.outputs import EVENT
from balance_service.model.schemas import Schemas
from balance_service.model.states import spelled_out

if TYPE_CHECKING:
    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.schemas import Schema
    from balance_service.model.addition import Addition
    from balance_service.model.event import Event, State, Update
    from balance_service.model.flow import Stream
    from balance_service.model.folds import Combination
    from balance_service.model.keys import KeyType
    from balance_service.model.order import Order
    from balance_service.model.outputs import Emit, Sent
    from balance_service.model.routes import Collection, Routes
    from balance_service.model.stage import Stage

# What every attempt at a command gives its event anew.
_ANEW = frozenset({"id", "occurredOn"})


class ReadModel:
    """A queryable fold of events, one state per key. A subclass declares one; an instance has no state of its own.

    A subclass names standard folds, each as the attribute that has the name of its field in the state, or in `folds`.
    Or it overrides `fold`. One that cannot be right is refused as it is defined: a ConfigurationError says why.
    """

    name: ClassVar[str]
    """Names tasks, changelog and metrics; lower case, e.g. `balance`."""
    source: ClassVar[Stream]
    """The events that it folds; others on that topic are ignored."""
    key: str
    """The column of every event that is its record's key too; in the state of standard folds a field.

    A string. Where the source goes on by a column (`Stream.by`), that is it, and need not be named.
    """
    state: ClassVar[str | type]
    """The simple name of the states' schema, or a dataclass (`states`). A model that only emits has none.

    A model's own code is given and returns instances of the dataclass.
    """
    version: ClassVar[int] = 1
    """Of the declaration: another one has the newest schemas taken from the registry again."""
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
    """Standard folds whose fields cannot be attributes: `folds = {"name": Latest("Event.name")}`."""

    standard_folds: Mapping[str, StandardFold]
    """By field of the state, in its order; empty if the model folds by its own function."""
    field_types: Mapping[str, str]
    """The types of the view's fields, for people."""
    schemas: Schemas
    """Finds the schemas that it names."""
    stages: tuple[Stage, ...]
    """The way of its events, not yet placed in an application; the last one folds or emits."""
    outputs: tuple[Emit, ...]
    """What it sends."""
    made_schemas: Mapping[str, Schema]
    """The records that it makes to be sent, by simple name."""
    needs_events: bool
    """Whether code of its own is told of each event, so that updates have their fields."""
    keeps_order: bool
    """Whether its order is PER_KEY, declared or by default."""
    key_type: KeyType
    """How the keys of its states are written; a model without states has none."""
    state_schema: Schema
    """The Avro schema of its states; a model without states has none."""
    state_fields: Mapping[str, Any]
    """The fields of its states: name → Avro type, every type in full."""
    combine: Mapping[str, Combination] | None
    """Update column → how to combine it; None: every event is folded singly, in offset order."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_class(cls)
        if cls.view is not ReadModel.view and not hasattr(cls, "fields"):
            refuse(cls, "has a view of its own, and does not say by `fields` what that holds")

    def __init__(self, schemas: Schemas | None = None) -> None:
        """Bind the declaration to its schemas.

        Args:
            schemas: by default those beside its module, and ours.

        Raises:
            ConfigurationError: it cannot be as it is declared, or a schema is nowhere.
            RetriableError: the registry is asked for a schema, and does not answer.
        """
        own = type(self)
        self.schemas = schemas or Schemas.beside(own)
        declared = check_declaration(
            self, own_fold=own.fold is not ReadModel.fold, own_emit=own.emit is not ReadModel.emit
        )
        self.stages = declared.stages
        self.outputs = declared.outputs
        self.made_schemas = declared.made
        self.standard_folds = declared.folds
        self.needs_events = not declared.folds or any(emit.each is EVENT and emit.record for emit in self.outputs)
        self.combine = declared.combine
        self.keeps_order = declared.keeps_order
        self._anew = frozenset(field for field, fold in declared.folds.items() if fold.field in _ANEW)
        self._steps = [(field, fold.step(declared.kinds[field])) for field, fold in declared.folds.items()]
        if declared.key_type is None or declared.state is None:
            self.field_types = {}
            return
        self.key, self.key_type, self.state_schema = declared.key, declared.key_type, declared.state.schema
        self._states = declared.state
        self.state_fields = fields_of(spelled_out(self.state_schema))
        as_kept = {name: type_name(kind) for name, kind in self.state_fields.items() if name != self.key}
        self.field_types = getattr(own, "fields", as_kept)

    def fold(self, state: Any, event: Event) -> Any:
        """The next state of a key; pure, and for a model without standard folds to override.

        Args:
            state: None if the key has none; an instance where states are of a dataclass.
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

    def sent_schemas(self) -> list[tuple[str, Schema]]:
        """The topics that it emits to, each with a record that is sent there."""
        as_it_is = [self.state_schema] if self.has_states() else [*self.stages[-1].schemas.values()]
        sent = [(emit.topic, [self.made_schemas[emit.record]] if emit.record else as_it_is) for emit in self.outputs]
        return [(topic, schema) for topic, schemas in sent for schema in schemas]

    @classmethod
    def has_states(cls) -> bool:
        """Whether it keeps states; if not, it only emits, and cannot be asked."""
        return hasattr(cls, "state")

    def view(self, state: Any) -> Any:
        """What a query answers: values of Avro types. By default the state without its key."""
        return self._without_key(state if isinstance(state, Mapping) else self._states.to_record(state))

    def told(self, state: State) -> Any:
        """What a query answers of a state's record. For the service to call."""
        if type(self).view is ReadModel.view:
            return self._without_key(state)
        return self.view(self._states.from_record(state))

    def _without_key(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if name != self.key}

    def sent(self, state: State | None, event: Event | None) -> Sent:
        """What is sent of a state's record. For the engine to call. Raises as `emit`."""
        return self.emit(None if state is None else self._states.from_record(state), event)

    def next_state(self, state: State | None, key: bytes, update: Update, event: Event | None = None) -> State | None:
        """The state after an update, of one event or combined; None if there is none then. For the engine to call.

        Args:
            event: what the update is of, for a fold of the model's own; None of a tombstone.

        Raises:
            PoisonRecordError: the update cannot be applied to this state.
        """
        before = {self.key: self._key(key)} if state is None else state
        if not self._steps:
            return None if event is None else self._folded(state, event)
        after = {self.key: before[self.key]}
        try:
            for name, step in self._steps:
                after[name] = step(before.get(name), update[name])
        except OutOfRangeError:
            raise PoisonRecordError(f"{self.name}-overflow", f"the {self.name} would not fit into its type") from None
        return after

    def _folded(self, state: State | None, event: Event) -> State | None:
        after = self.fold(None if state is None else self._states.from_record(state), event)
        return None if after is None else self._states.to_record(after)

    def repeated(self, update: Update) -> Mapping[str, Any]:
        """What of an event's update a retry of its command repeats; `id` and `occurredOn` are new each time."""
        kept = {name: value for name, value in update.items() if name not in self._anew}
        return {name: _without_new(value) for name, value in kept.items()}

    def acceleration(self, codec: AvroCodec) -> Addition | None:
        """What makes the states that `next_state` would, framed and many at once; None: nothing does.

        Args:
            codec: of the states.
        """
        if self.key_type.is_number or len(self.standard_folds) != 1 or len(self.state_schema["fields"]) != 2:
            return None
        ((field, fold),) = self.standard_folds.items()
        return fold.acceleration(field, self.state_schema, codec)

    def description(self) -> dict[str, Any]:
        """The read model as queries for it are told: name, source, key, and the view's fields with their types."""
        key = self.key if self.has_states() else ""
        return {"name": self.name, "source": self.source.topic, "key": key, "fields": dict(self.field_types)}

    def _key(self, key: bytes) -> str | int:
        """A key that has no state yet as its column has it; those that have one were checked when they came."""
        try:
            return self.key_type.decode(key)
        except InvalidInputError:
            words = words_of(self.key)
            raise PoisonRecordError(
                f"{'-'.join(words)}-malformed", f"the {' '.join(words)} is empty, too long, or not text"
            ) from None


def _without_new(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_new(member) for name, member in sorted(value.items()) if name not in _ANEW}
    return [_without_new(member) for member in value] if isinstance(value, list) else value
