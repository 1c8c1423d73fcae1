"""The read model: a class that names its events, its key, and how states are computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import fields_of, type_name, without_null
from balance_service.errors import ConfigurationError, InvalidInputError, PoisonRecordError
from balance_service.model.class_checks import check_class, refuse
from balance_service.model.converters import StateConverter, returned_by
from balance_service.model.declaration import check_declaration
from balance_service.model.events import EVENT, HALT, Event, event_of, events_of, readers_for
from balance_service.model.keys import cause_of
from balance_service.model.made_records import PART, Making
from balance_service.model.record_folds import STATE, Upsert
from balance_service.model.record_keys import RecordKey
from balance_service.model.schemas import Schemas
from balance_service.model.sources import has_several, sources_of
from balance_service.model.standard_fold import OutOfRangeError, StandardFold

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.schemas import Schema
    from balance_service.model.addition import Addition
    from balance_service.model.events import Emit, OnFailure, Order, Readers, Sent, State, Update
    from balance_service.model.keys import KeyType
    from balance_service.model.made_records import Total
    from balance_service.model.stage import Stage
    from balance_service.model.standard_fold import Combination, Form
    from balance_service.model.stream import Stream


@dataclass(frozen=True, slots=True)
class Routes:
    """The path that answers queries for one key, in addition to `/api/models`.

    `key` is the query parameter with the key; those with its columns, in their order, if the key has several. Answers
    call the key `noun`.
    """

    path: str
    key: str | tuple[str, ...]
    noun: str = "key"


@dataclass(frozen=True, slots=True)
class Collection:
    """The path of a collection: all states, one key, a range of keys, and the number of keys.

    `key` is the parameter with the key; those with its columns, in their order, if the key has several: then a range is
    one of the last column. Answers call the key `noun`. `PATH/count` and `PATH/count/local` are the numbers of keys: no
    key is found there.
    """

    path: str
    key: str | tuple[str, ...]
    noun: str


_NO_FIELDS = "neither `fields` that name the types in it nor a return annotation that does: a dataclass or a TypedDict"
# Each attempt of a command sets these fields of its event to new values.
_ANEW = frozenset({"id", "occurredOn"})


class ReadModel:
    """A queryable fold of events with one state per key. Subclasses declare a model; instances hold no data.

    A subclass names standard folds, each as an attribute with the name of its state field, or in `folds`; or it
    overrides `fold`, with code or an `Upsert`. An invalid declaration raises ConfigurationError when the class is
    defined, or bound to schemas.
    """

    name: ClassVar[str]
    """Names tasks, changelog and metrics; lower case, such as `balance`."""
    source: ClassVar[Stream]
    """The events that the model reads. Others on the topic are ignored."""
    sources: ClassVar[Sequence[Stream]]
    """The events of several topics, in place of `source`. All are re-keyed by the columns of the model's key, into one
    topic, which the model folds in the order of arrival there, also in a rebuild."""
    key: str | tuple[str, ...]
    """The column whose values are the states' keys, or a tuple of several; in the state of standard folds, also fields.

    If the `source` is not re-keyed, this is the one column, a string, that is both in every event and its record's key.
    A source that is re-keyed (`Stream.by`) determines the key, so the model need not name it. `sources`, and the rows
    of a `transform` unless this column is the untouched key of the events, are re-keyed by it without a `Stream.by`.
    Each column of a re-key is a string, an int or a long.

    `RECORD_KEY` is the key of Kafka's record, in the source's `key_format`: neither events nor states repeat it.
    """
    state: ClassVar[str | type]
    """The simple name of the states' schema, or a dataclass (`states`). A model that only emits has none.

    The model's own code receives and returns instances of the dataclass.
    """
    version: ClassVar[int] = 1
    """The version of the model. A class whose states mean something else has a higher one.

    The service then builds a new generation of states next to the serving one. The former class, with its version, may
    stay in BALANCE_MODELS, and folds the serving generation until another one serves. A new version takes the newest
    schemas from the registry again.
    """
    emits: ClassVar[Emit | tuple[Emit, ...]]
    """The model's outputs. A model without states may emit to several topics."""
    queries: ClassVar[Routes | Collection | None] = None
    """The model's own HTTP paths, for queries of one key or of all keys."""
    order: ClassVar[Order]
    """Whether later events of a key wait for an earlier one that failed.

    The default is PER_KEY for a `fold` of the model's own, `Latest` and `Earliest`, and ANY for other folds and after a
    re-key. A model with an `Upsert` declares none: a later event supersedes one that failed.
    """
    on_failure: ClassVar[OnFailure] = HALT
    """What a task does if the model's own code fails at a new event: `HALT`, or `DEAD_LETTER`.

    With `DEAD_LETTER`, a task halts all the same if the code fails at more than 20 of the last 1,000 events of its
    partition, or at the first 5 after a start, since the code is probably wrong then; and at a `MemoryError`, an
    `ImportError`, or an output with `each=LAST`, which no single event explains.
    """
    answers_when_halted: ClassVar[bool] = False
    """Whether queries are answered from the last state of a partition whose task the model's own code has halted.

    By default, only those with `maxLag`, `maxAge` or `minPosition` are, because the answers become older until the code
    is corrected.
    """
    fields: ClassVar[Mapping[str, str]]
    """The types of the view's fields, for people. Only a model with its own view names them.

    By default, they are those of the dataclass or TypedDict that `view` is annotated to return.
    """
    folds: ClassVar[Mapping[str, StandardFold]]
    """Standard folds whose fields cannot be attributes: `folds = {"name": Latest("Event.name")}`."""

    _view: StateConverter | None = None
    """Converts what the model's own view returns."""
    standard_folds: Mapping[str, StandardFold]
    """By field of the state, in the state's order; an `Upsert` by `STATE`; empty if the model overrides `fold`."""
    update_forms: Mapping[str, Form]
    """What an event adds to the fields of standard folds."""
    field_types: Mapping[str, str]
    """The types of the view's fields, for people."""
    schemas: Schemas
    stages: tuple[Stage, ...]
    """The stages of the model, without the names of an application. The last one folds or emits."""
    outputs: tuple[Emit, ...]
    made_schemas: Mapping[str, Schema]
    """The records that the model makes to emit, by simple name."""
    needs_events: bool
    """Whether the model's own code receives events, so that updates carry event fields."""
    keeps_order: bool
    """Whether the order is PER_KEY, declared or by default."""
    placeholders: Sequence[bytes] = ()
    """What stands in records for a value that was not sent, because it is the one before: one of these."""
    keeps_newest: bool
    """Whether the newest event of a key is its state, so that it supersedes earlier ones that failed."""
    key_type: KeyType
    """The encoding of the states' keys. Not set for a model without states."""
    key_columns: tuple[str, ...] = ()
    """The columns of the states' keys; none for a model without states."""
    state_schema: Schema
    """The Avro schema of the states as they are stored. Not set for a model without states."""
    state_fields: Mapping[str, Any]
    """The fields of the stored states: name → Avro type, with named types inlined."""
    computes_answers: bool
    """Whether views differ from the stored states, so that without its class, a model cannot answer."""
    combine: Mapping[str, Combination] | None
    """Update column → how it combines; None if events are folded one by one, in offset order."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_class(cls)
        if cls.view is not ReadModel.view and not hasattr(cls, "fields") and "return" not in cls.view.__annotations__:
            refuse(cls, f"has a view of its own, but {_NO_FIELDS}")

    def __init__(self, schemas: Schemas | None = None) -> None:
        """Binds the declaration to its schemas.

        Args:
            schemas: by default, the files next to the model's module, and those of this package.

        Raises:
            ConfigurationError: the declaration is invalid, or a schema is not found.
            RetriableError: the registry does not answer.
        """
        own = type(self)
        self.schemas = schemas or Schemas.beside(own)
        declared = check_declaration(
            self,
            own_fold=own.fold is not ReadModel.fold and not isinstance(own.fold, Upsert),
            own_emit=own.emit is not ReadModel.emit,
        )
        self.stages = declared.stages
        self.outputs = tuple(map(self._with_instances, declared.outputs))
        self.made_schemas = declared.made
        self.standard_folds, self.update_forms = declared.folds, declared.forms
        self.needs_events = (own.has_states() and not declared.folds) or any(map(self._takes_events, self.outputs))
        self.combine = declared.combine
        self.keeps_order = declared.keeps_order
        self.keeps_newest = STATE in declared.folds
        self._lacks: Callable[[Any], Sequence[str]] = lambda _record: ()
        self._anew = frozenset(field for field, fold in declared.folds.items() if fold.field in _ANEW)
        self._upsert: Callable[[Any, Any], Any] | None = None
        self._steps: list[tuple[str, Callable[[Any, Any], Any]]] = []
        self._answers: list[tuple[str, Callable[[Any], Any]]] = []
        self.computes_answers = own.view is not ReadModel.view
        if declared.key_type is None or declared.state is None:
            self.field_types = {}
            return
        self.key_type, self.state_schema = declared.key_type, declared.state.schema
        self.key, self.key_columns = self.key_type.declared, self.key_type.columns
        self._states = declared.state
        self.state_fields = fields_of(expanded(self.state_schema))
        # The state of standard folds has the columns of its key, unless that is the record's own.
        self._repeated = [column for column in self.key_columns if column in self.state_fields]
        as_kept = {name: type_name(kind) for name, kind in declared.kinds.items() if name not in self.key_columns}
        self.field_types = getattr(own, "fields", as_kept)
        if own.view is not ReadModel.view:
            has_fields = hasattr(own, "fields")
            self._view = returned_by(own.view, self.name, has_fields=has_fields)
            if self._view is None and not has_fields:
                refuse(own, f"has a view of its own, but {_NO_FIELDS}")
            if self._view is not None and not has_fields:
                self.field_types = {name: type_name(kind) for name, kind in fields_of(self._view.schema).items()}
        self._records = tuple(self.stages[-1].events)
        self._for_fold = self._readers_for("fold", self.fold, 1)
        self._for_emit = self._readers_for("emit", self.emit, 1)
        for emit in self.outputs:
            if emit.fields:
                self._making = Making(emit, self.made_schemas[str(emit.record)], 0)
        for field, fold in declared.folds.items():
            if isinstance(fold, Upsert):
                self._upsert, self._lacks = fold.step(self.state_schema), fold.lacks
                self.placeholders = fold.placeholders
                continue
            self._steps.append((field, fold.step(without_null(self.state_fields[field])[0])))
            if (answer := fold.answer(without_null(declared.kinds[field])[0])) is not None:
                self._answers.append((field, answer))
        self.computes_answers |= bool(self._answers)

    def __getstate__(self) -> dict[str, Any]:
        """A Python worker of a batch job folds, and binds nothing: it gets neither settings nor the registry."""
        return {**vars(self), "schemas": Schemas(self.schemas.folders)}

    if TYPE_CHECKING:
        # With a second argument, if the model has several sources.
        transform: Callable[..., DataFrame]
    else:

        def transform(self, events: Any, *source: Stream) -> Any:
            """Returns the rows that the model folds in place of its events. Models that compute columns override it.

            Spark applies it to the events as they arrive, before keys and folds. It is called twice when the model is
            bound, must return the same plan each time, and may only use what Spark computes for single rows:
            projections, filters, `explode`, and built-in functions whose values depend on the row alone. See
            docs/how-to/spark.md.

            Args:
                events: the columns of the event, if the source names one record type, or else a struct for each type;
                    and `_key`, `_headers`, `_timestamp`, `_topic`, `_partition` and `_offset` of Kafka's record.
                source: only for a model with `sources`: the one that the events are of. The code is called for each of
                    them, and returns the same columns for all.

            Returns:
                A DataFrame made of that one, without sources of its own. Folds and the key name its columns; those
                whose names begin with an underscore are left out.
            """
            raise NotImplementedError

    if TYPE_CHECKING:
        # Code, or an `Upsert`.
        fold: Any
    else:

        def fold(self, state: Any, event: Any, /) -> Any:
            """Returns the next state of a key; pure. Models without standard folds override it.

            Args:
                state: None if the key has no state; an instance if states are a dataclass.
                event: an `Event`, which is a mapping; an instance if it is annotated with the dataclass that the source
                    names. Its key is valid: text of 1 to 256 bytes without control characters.

            Returns:
                A record of the state schema; None deletes the state, until another event creates one.

            Raises:
                PoisonRecordError: the event cannot be applied to this state, and becomes a dead letter.
            """
            raise NotImplementedError

    def emit(self, state: Any, event: Any, /) -> Sent:
        """Returns the records to emit for a key; pure. Models whose `emits` names a record type override it.

        Args:
            state: the state after the event, or the last one of the commit; None if the fold has deleted it.
            event: None if the last state of a commit is emitted.

        Returns:
            A record of the type that `emits` names, or several, or none.

        Raises:
            PoisonRecordError: the event cannot be applied to this state, and becomes a dead letter.
        """
        raise NotImplementedError

    def sent_schemas(self) -> list[tuple[str, Schema]]:
        """Returns (topic, schema) for each record type that the model emits in Avro."""
        unchanged = [self.state_schema] if self.has_states() else [*self.stages[-1].schemas.values()]
        kept = "avro" if self.has_states() else self.stages[-1].format
        sent = [
            (emit.topic, [self.made_schemas[emit.record]] if emit.record else unchanged)
            for emit in self.outputs
            if emit.format == "avro" and (emit.record or kept == "avro")
        ]
        return [(topic, schema) for topic, schemas in sent for schema in schemas]

    @classmethod
    def has_states(cls) -> bool:
        """Whether the model keeps states. A model without states only emits, and cannot be queried."""
        return hasattr(cls, "state")

    def view(self, state: Any, /) -> Any:
        """Returns the answer to a query: values of Avro types, or a dataclass of them, as annotated.

        By default, the state without its key.
        """
        return self._without_key(state if isinstance(state, Mapping) else self._states.to_record(state))

    def view_of(self, state: State) -> Any:
        """Returns the view of a stored state. Called by the service."""
        if type(self).view is ReadModel.view:
            return self._without_key(self._answered(state))
        answer = self.view(self._states.from_record(self._answered(state)))
        return answer if self._view is None or answer is None else self._view.to_record(answer)

    def _without_key(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if name not in self.key_columns}

    def _takes_events(self, emit: Emit) -> bool:
        """Whether the service makes the records of an output from events, which Spark must hand over then."""
        if not self.has_states():
            return emit.make is not None
        return emit.each is EVENT and emit.record is not None and not emit.fields

    @property
    def folds_rows(self) -> bool:
        """Whether each event is folded by itself, from the columns of its row."""
        return self.emits_steps or not self.standard_folds

    @property
    def emits_steps(self) -> bool:
        """Whether standard folds and `fields` make an output of each event, so that no code needs the event."""
        return (
            bool(self.standard_folds)
            and not self.keeps_newest
            and any(emit.each is EVENT and emit.fields for emit in self.outputs)
        )

    def parts_of_steps(self) -> Sequence[bytes | str | Total] | None:
        """Returns the parts of the output of each event, if those of the state are the only sum; otherwise None."""
        if not self.emits_steps or len(self.standard_folds) != 1:
            return None
        (field,) = self.standard_folds
        return self._making.of_total(field, without_null(self.state_fields[field])[0].get("scale", 0))

    def made(self, update: Update, state: State | None, key: bytes) -> bytes | None:
        """Returns the encoded record that the model's output makes of its `fields`; None if it sends none.

        Called by the engine, for a model with states.

        Raises:
            PoisonRecordError: a value does not fit the record.
        """
        of_key = self._key(key) if self._making.takes_key else {}
        return self._making.body(update, None if state is None else self._answered(state), of_key)

    def told(self, update: Update, timestamp_ms: int) -> Any:
        """Returns the event of an update as `fold` takes it; None for a tombstone. Called by the engine."""
        return event_of(self._records, update, timestamp_ms, self._for_fold)

    def told_all(self, rows: pa.RecordBatch) -> list[Any]:
        """As `told`, for each row of `timestamp` and the columns of updates."""
        return events_of(self._records, rows, self._for_fold)

    def told_all_to_emit(self, events: list[Any], rows: pa.RecordBatch) -> list[Any]:
        """As `told_to_emit`. `events` are those of `told_all`."""
        if not self._for_fold and not self._for_emit:
            return events
        made = events_of(self._records, rows, self._for_emit)
        if self._for_emit:
            return made
        return [told if told.__class__ is Event else new for told, new in zip(events, made, strict=True)]

    def told_to_emit(self, event: Any, update: Update, timestamp_ms: int) -> Any:
        """As `told`, for `emit`. `event` is what `fold` took; None if it took none."""
        if event.__class__ is Event and not self._for_emit:
            return event
        return event_of(self._records, update, timestamp_ms, self._for_emit)

    def sent(self, state: State | None, event: Any) -> Sent:
        """Returns the records to emit for a state, or an instance that lasts. Called by the engine.

        Args:
            event: as `emit` takes it.

        Raises:
            PoisonRecordError: as `emit`.
        """
        return self.emit(None if state is None else self._states.lent(self._answered(state)), event)

    def _answered(self, state: State) -> State:
        """Returns a stored state as the model declares it."""
        if not self._answers:
            return state
        found = {name: (state[name], answer) for name, answer in self._answers}
        return {**state, **{name: None if kept is None else answer(kept) for name, (kept, answer) in found.items()}}

    def next_state(self, state: State | None, key: bytes, update: Update, event: Any = None) -> State | None:
        """Returns the state after an update of one event or several; None if it is deleted. Called by the engine.

        Args:
            event: as `fold` takes it, for a model that overrides it; None for a tombstone. See `told`.

        Raises:
            PoisonRecordError: the update cannot be applied to this state.
        """
        before = self._key(key) if state is None else state
        if self._upsert is not None:
            upserted: State | None = self._upsert(state, update[STATE])
            return upserted
        if not self._steps:
            if event is None:
                return None
            folded = self.fold(None if state is None else self._states.lent(state), event)
            return None if folded is None else self._states.to_record(folded)
        after = {column: before[column] for column in self._repeated}
        name = ""
        try:
            for name, step in self._steps:
                after[name] = step(before.get(name), update[name])
        except OutOfRangeError:
            raise PoisonRecordError(f"{self.name}-overflow", f"the new '{name}' does not fit into its type") from None
        return after

    def lacks(self, update: Update) -> bool:
        """Whether an update has values that are those of the former state."""
        return bool(self._lacks(update.get(STATE)))

    def check_key(self, key: bytes) -> None:
        """Checks the key of a state that does not exist yet. Raises PoisonRecordError."""
        self._key(key)

    @property
    def state_converter(self) -> StateConverter:
        """Converts between the states of the model's own code and their records."""
        return self._states

    def _with_instances(self, output: Emit) -> Emit:
        make = output.make
        if make is None or not (readers := self._readers_for("make", make, 0)):
            return output

        def made(event: Event) -> Sent:
            read = readers.get(event.record)
            return make(event if read is None else read.from_record(event))

        return replace(output, make=made)

    def _readers_for(self, name: str, code: Callable[..., Any], number: int) -> Readers:
        """Returns what the model's own code takes events as, as the argument with that number; none for mappings."""
        own, last = type(self), self.stages[-1]
        try:
            readers = readers_for(code, number, last.events)
        except ConfigurationError as error:
            refuse(own, f"has a `{name}` that {error}")
        if readers and last.transform is None and last.wanted_schemas != last.event_schemas:
            refuse(
                own,
                f"selects columns, but its `{name}` takes whole events: annotate them as `Event`, or remove `select`",
            )
        return readers

    def repeated(self, update: Update) -> Mapping[str, Any]:
        """Returns the fields of an update that every attempt of a command repeats: all except `id` and `occurredOn`."""
        # A part of an output may have the event's id.
        kept = {name: of for name, of in update.items() if name not in self._anew and not name.startswith(PART)}
        return {name: _without_new(value) for name, value in kept.items()}

    def acceleration(self, codec: AvroCodec) -> Addition | None:
        """Returns an object that computes the states of `next_state` for many keys at once; None if there is none.

        Args:
            codec: encodes the states.
        """
        # A UUID is checked when it gets its first state, by a pattern.
        is_own = isinstance(self.key_type, RecordKey)
        fits = (
            self.key_type.key_format != "uuid" if isinstance(self.key_type, RecordKey) else not self.key_type.is_number
        )
        if not fits or len(self.standard_folds) != 1 or len(self.state_schema["fields"]) != (1 if is_own else 2):
            return None
        ((field, fold),) = self.standard_folds.items()
        return fold.acceleration(field, self.state_schema, codec)

    def description(self) -> dict[str, Any]:
        """Describes the model for `GET /api/models`: name, source topics, key, and types of the view's fields."""
        key = self.key_type.declared if self.has_states() else ""
        topics = [source.topic for source in sources_of(self)]
        several = {"sources": topics} if has_several(self) else {}
        return {"name": self.name, "source": topics[0], **several, "key": key, "fields": dict(self.field_types)}

    def _key(self, key: bytes) -> dict[str, str | int]:
        """Returns the columns of a key that has no state yet; keys with a state were checked when they got it."""
        try:
            return self.key_type.fields(key)
        except InvalidInputError as error:
            raise PoisonRecordError(f"{cause_of(self.key_columns)}-malformed", str(error)) from None


def _without_new(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_new(member) for name, member in sorted(value.items()) if name not in _ANEW}
    return [_without_new(member) for member in value] if isinstance(value, list) else value
