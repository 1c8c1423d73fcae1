"""Checks the declaration of a read model, and refuses an invalid one with an error that names the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from balance_service import api
from balance_service.avro.named_types import expanded
from balance_service.avro.resolution import difference
from balance_service.avro.schemas import fields_of, full_name, simple_name, type_name, without_null
from balance_service.errors import ConfigurationError
from balance_service.model.conditions import col
from balance_service.model.converters import converter_of, record_converter, unconverted
from balance_service.model.events import ANY, EVENT, PER_KEY, DeclaredRecord, Emit, OnFailure, Order
from balance_service.model.key_forms import form_misfit, join_key_misfit, sent_misfit
from balance_service.model.keys import ColumnKey, KeyType, key_type_of
from balance_service.model.made_records import problem_of
from balance_service.model.record_folds import OFFSET, STATE, Debezium, Upsert
from balance_service.model.record_keys import RecordKey, is_record_key
from balance_service.model.sources import declared_stages, has_several, sources_misfit, sources_of
from balance_service.model.standard_fold import Combine, StandardFold, columns_of
from balance_service.model.stream import PARTITIONERS, By, Global, Join, Select, Stream, Table, Where, join_misfit
from balance_service.model.transform import ROW, transform_of
from balance_service.model.value_types import located

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition
    from balance_service.model.converters import StateConverter
    from balance_service.model.stage import Stage
    from balance_service.model.standard_fold import Combination, Form
    from balance_service.model.transform import Transform

_NAME = re.compile(r"[a-z][a-z0-9-]*")
_MOST_VERSION = 2**31 - 1
_MOST_NAMES = 20
_COPY = "balance-service topics copy"
# The columns that every row has.
_ENVELOPE = ("offset", "timestamp", "key", "record_key", "value", "headers", "idempotency_key", "traceparent")
TAKEN = frozenset((*_ENVELOPE, "note", "partition"))
"""The names of columns that Spark has for each record, in lower case."""
READ_TYPES = frozenset(
    (
        *("boolean", "int", "long", "float", "double", "string", "bytes", "fixed", "enum", "decimal", "uuid", "date"),
        *(
            "timestamp-millis",
            "timestamp-micros",
            "timestamp-nanos",
            "local-timestamp-millis",
            "local-timestamp-micros",
        ),
        "local-timestamp-nanos",
    )
)
"""The Avro types of single values that events may have; `spark/java/Reading.java` reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The checked declaration of a read model, with its schemas."""

    stages: tuple[Stage, ...]
    outputs: tuple[Emit, ...]
    made: Mapping[str, Schema]
    """The records that the model makes to emit, by simple name."""
    key_type: KeyType | None = None
    """How keys of states are encoded; None if the model has no states."""
    state: StateConverter | None = None
    """How states are written; None if the model has no states."""
    kinds: Mapping[str, Any] = field(default_factory=dict)
    """The fields of states as the model declares them, and their Avro types."""
    folds: Mapping[str, StandardFold] = field(default_factory=dict)
    """Standard folds by field."""
    forms: Mapping[str, Form] = field(default_factory=dict)
    """What an event adds to these fields."""
    combine: Mapping[str, Combination] | None = None
    """Update column → how updates combine; None if they do not."""
    keeps_order: bool = False


def refuse(model: Any, why: str) -> NoReturn:
    """Raises ConfigurationError for the declaration of a read model or of its class."""
    raise ConfigurationError(f"the read model {located(model if isinstance(model, type) else type(model))} {why}")


def check_names(models: Iterable[Any], setting: str) -> None:
    """Raises ConfigurationError if two model classes have the same name and version; `setting` lists the models."""
    known: dict[tuple[str, int], Any] = {}
    for model in models:
        if (other := known.setdefault((model.name, model.version), model)) is not model:
            raise ConfigurationError(
                f"{setting}: {located(other)} and {located(model)} both have the name '{model.name}' and the version "
                f"{model.version}; rename one of them, give the newer one a higher version, or remove one"
            )


def check_class(model: Any) -> None:
    """Checks the parts of a class that need no schema. Raises ConfigurationError."""
    if not hasattr(model, "name"):
        refuse(model, "has no `name`")
    name, why = model.name, sources_misfit(model)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse(model, f"has the name '{name}': a name consists of lower-case letters, digits and hyphens")
    if why:
        refuse(model, why)
    if isinstance(model.version, bool) or not isinstance(model.version, int) or not 1 <= model.version <= _MOST_VERSION:
        refuse(model, f"has the version {model.version!r}: it must be a whole number from 1 to {_MOST_VERSION}")
    sources = sources_of(model)
    for source in sources:
        _check_compacted(model, source)
        _check_steps(model, source)
        _check_partitioners(model, source)
        if why := form_misfit(model, source):
            refuse(model, why)
    _check_owners(model, [record for source in sources for record in source.records])
    steps = [step for source in sources for step in source.steps]
    _check_owners(model, [step.table.record for step in steps if isinstance(step, Join)])


def _check_compacted(model: Any, source: Stream) -> None:
    """Refuses a model that needs records which a compacted topic may lack."""
    if not source.compacted:
        return
    if not isinstance(getattr(model, "fold", None), Upsert):
        refuse(
            model,
            f"has '{source.topic}' with compacted=True, so it may have only the newest record of a key: that suffices "
            "for an `Upsert` or a `Debezium` as the model's `fold`, and for no other",
        )
    if source.steps:
        refuse(
            model,
            f"has '{source.topic}' with compacted=True, and a step: the records that a re-key passes on remain when "
            "the topic no longer has their deletion; read the topic by its own key",
        )


def _check_owners(model: Any, records: Iterable[str]) -> None:
    """Refuses two classes of one name, because records are distinguished by their names."""
    owners: dict[str, type | None] = {}
    for record in records:
        owner = record.owner if isinstance(record, DeclaredRecord) else None
        if (other := owners.setdefault(record, owner)) is not owner:
            named = " and ".join("its schema" if one is None else located(one) for one in (other, owner))
            refuse(model, f"names two records {record}, by {named}: rename a class, or use one model for each")


def _check_steps(model: Any, source: Stream) -> None:
    """Checks what the steps name, before a schema is looked for."""
    is_joined = False
    for step in source.steps:
        match step:
            case Join(table=table) if not isinstance(table, Table):
                refuse(
                    model,
                    f"joins {type(table).__name__}, which is neither a Table nor a Global: a stream is joined with the "
                    "newest rows of a compacted topic; events of several topics are folded by a model with `sources`",
                )
            case Join(take=take) if not isinstance(take, Mapping):
                refuse(model, f'takes {take!r} of a table: write `take={{"column": "name"}}`')
            case Join():
                is_joined = True
            case By(columns=columns):
                _check_by(model, columns, step.record, is_joined=is_joined)
                is_joined = False


def _check_by(model: Any, columns: Sequence[Any], record: str | None, *, is_joined: bool) -> None:
    named = _named(columns)
    if record is not None and not is_joined:
        refuse(model, f"continues by {named} as `record='{record}'`: that is a joined record, and nothing is joined")
    for column in columns:
        if isinstance(column, type):
            refuse(model, f"continues by {named}: name the joined record with `record={column.__name__}`")
        if not isinstance(column, str):
            refuse(model, f'continues by {named}: `.by` takes the names of columns, such as `.by("card", "day")`')
    if is_joined and record is None and len(columns) > 1:
        refuse(model, f"continues by {named}, but joins: name the joined record, such as `record='{columns[-1]}'`")
    _check_columns(model, "continues by", columns)


def _check_columns(model: Any, says: str, columns: Sequence[str]) -> None:
    """Checks the names of the columns of a key."""
    if not columns:
        refuse(model, f"{says} no column")
    if len({*columns}) < len(columns):
        refuse(model, f"{says} {_named(columns)}: name each column once")
    if len(columns) > 1 and (taken := api.NO_PART_NAMES & {*columns}):
        refuse(model, f"{says} {_named(columns)}, but '{min(taken)}' is a parameter of queries: rename the column")


def _named(columns: Iterable[Any]) -> str:
    return " and ".join([column.__name__ if isinstance(column, type) else repr(column) for column in columns])


def _check_reserved(model: Any, names: Iterable[str]) -> None:
    """Refuses fields and records whose columns Spark would not tell apart from others: it ignores case."""
    known = {*TAKEN}
    for name in names:
        if name.lower() in known:
            refuse(model, f"has a field or record called '{name}', which is a reserved name in upper and lower case")
        known.add(name.lower())


def _check_partitioners(model: Any, source: Stream) -> None:
    """Refuses a model that would look for a key on another partition than its producers write it to."""
    tables = [step.table for step in source.steps if isinstance(step, Join)]
    topics: list[Stream | Table] = [source, *tables]
    for topic in topics:
        if topic.partitioner not in PARTITIONERS:
            refuse(
                model,
                f"has '{topic.topic}' with the partitioner {topic.partitioner!r}: "
                f"it must be one of {', '.join(PARTITIONERS)}",
            )
    if source.partitioner == "any" and hasattr(model, "state") and not any(isinstance(s, By) for s in source.steps):
        refuse(
            model,
            f"folds '{source.topic}', which has partitioner=\"any\", so events of one key may be on several "
            "partitions: re-key them first, with a `.by` the key's column in the source",
        )
    for table in tables:
        if table.partitioner == "any":
            refuse(
                model,
                f"joins the table '{table.topic}', which has partitioner=\"any\", so rows of one key may be on several "
                f"partitions, and none is the newest: copy it with `{_COPY} {table.topic} NEW --partitioner murmur2`, "
                "and join the copy",
            )
        if not isinstance(table, Global) and table.partitioner != "murmur2":
            refuse(
                model,
                f"joins the table '{table.topic}', which has partitioner=\"{table.partitioner}\", with records that "
                "are re-keyed by murmur2, so a record and its row would be on different partitions: make it a Global; "
                f"or copy it with `{_COPY} {table.topic} NEW --partitioner murmur2`, and join the copy",
            )


def check_declaration(model: Any, *, own_fold: bool, own_emit: bool) -> Declared:
    """Checks the declaration of a read model; `model.schemas` finds the schemas that it names.

    Args:
        own_fold: whether the model overrides `fold`.
        own_emit: whether the model overrides `emit`.

    Raises:
        ConfigurationError: the declaration is invalid, or a schema is not found.
        RetriableError: the registry does not answer.
    """
    emits = getattr(model, "emits", ())
    outputs = (emits,) if isinstance(emits, Emit) else tuple(emits)
    if odd := [one for one in outputs if one.format not in ("avro", "json")]:
        refuse(model, f"emits to '{odd[0].topic}' in the format {odd[0].format!r}: it must be avro or json")
    if not hasattr(model, "state") and outputs:
        declared = _without_states(model, outputs, own=own_fold or own_emit)
    else:
        declared = _with_states(model, outputs, own_fold=own_fold, own_emit=own_emit)
    is_own = own_fold and not sources_of(model)[0].steps
    if declared.stages[0].tombstones and not is_own and STATE not in declared.folds:
        refuse(
            model, "has a source with tombstones: that allows no steps, and needs an `Upsert` or a `fold` of its own"
        )
    return declared


def _without_states(model: Any, outputs: tuple[Emit, ...], *, own: bool) -> Declared:
    if own or _folds(model) or model.queries is not None:
        refuse(model, "has no `state`, so it cannot have a fold, an `emit` or `queries`")
    columns = frozenset[str]().union(*(output.columns for output in outputs))
    # Code of the model's own receives all columns, and so does a topic that rows are passed on to.
    makes = any(output.make is not None or (output.record is None and transforms(model)) for output in outputs)
    stages = checked_stages(model, outputs, [*columns], is_all_needed=makes)
    events, made = events_of(model, stages[-1]), _made(model, outputs)
    for output in outputs:
        if output.each is not EVENT:
            refuse(model, f"emits the last state of a key to '{output.topic}', but has no states")
        if bool(output.record) != (output.make is not None or bool(output.fields) or output.of is not None):
            refuse(
                model, f"emits to '{output.topic}': name both a record type and `fields`, `of` or `make`, or neither"
            )
        if output.where is not None:
            check_condition(model, output.where, events)
        _check_fields(model, output, made, events)
    if why := sent_misfit(outputs, _key_of_events(model, stages[-1], events)):
        refuse(model, why)
    return Declared(stages=stages, outputs=outputs, made=made)


def _key_of_events(model: Any, last: Stage, events: Mapping[str, Schema]) -> KeyType | None:
    """Returns the type of the keys of a last stage without states; None if they may be anything."""
    if last.key is not None:
        return key_type_of([_part(model, column, last, events) for column in last.key])
    form = sources_of(model)[0].key_format
    return None if form is None else RecordKey.of_format(form)


def _check_fields(
    model: Any,
    output: Emit,
    made: Mapping[str, Schema],
    events: Mapping[str, Schema],
    state: Mapping[str, Any] | None = None,
    key: Sequence[str] = (),
) -> None:
    if output.record is None or not (output.fields or output.of):
        return
    if (output.make is not None) + bool(output.fields) + (output.of is not None) > 1:
        refuse(model, f"emits to '{output.topic}' with two of `fields`, `of` and `make`: write one of them")
    if why := problem_of(output, made[output.record], events, state or {}, key):
        refuse(model, why)


def _with_states(model: Any, outputs: tuple[Emit, ...], *, own_fold: bool, own_emit: bool) -> Declared:
    if not hasattr(model, "state"):
        refuse(model, "has no `state`")
    if not isinstance(model.on_failure, OnFailure):
        refuse(model, f"has `on_failure = {model.on_failure!r}`, which is neither HALT nor DEAD_LETTER")
    if not isinstance(model.answers_when_halted, bool):
        refuse(model, f"has `answers_when_halted = {model.answers_when_halted!r}`, which is neither True nor False")
    form = _state(model)
    state_schema = expanded(form.schema)
    if isinstance(model.fold, Upsert):
        return _with_upsert(model, model.fold, outputs, form, state_schema, own_emit=own_emit)
    folds = _folds(model)
    state = fields_of(state_schema)
    if transforms(model) and not any(isinstance(step, Join) for source in sources_of(model) for step in source.steps):
        folds = {name: _of_rows(model, name, fold) for name, fold in folds.items()}
    folded = [
        column
        for name, fold in folds.items()
        if name in state
        for column in _columns_of(fold, without_null(state[name])[0])
    ]
    asked = [column for fold in folds.values() if fold.where is not None for column in fold.where.columns]
    sent = [column for output in outputs for column in output.columns]
    needed = [*filter(None, [*_declared_key(model), *folded, *asked, *sent])]
    stages = checked_stages(model, outputs, needed, is_all_needed=own_fold or own_emit)
    events = events_of(model, stages[-1])
    key_type = _key(model, stages[-1], events)
    if isinstance(key_type, RecordKey) and key_type.column in state:
        refuse(
            model,
            f"has states with a '{key_type.column}', which is what answers call its key, RECORD_KEY: rename the field, "
            "or remove it",
        )
    _check_queries(model, key_type)
    if bool(folds) == own_fold:
        refuse(model, "has both standard folds and a `fold` of its own" if folds else "has no fold")
    # Only an `emit` of the model's own has the events handed over next to the fields.
    _check_reserved(model, [*folds, *(events if own_emit else events.keys() & folds.keys())])
    _check_outputs(model, outputs, own_emit=own_emit)
    if why := sent_misfit(outputs, key_type):
        refuse(model, why)
    made = _made(model, outputs)
    for output in outputs:
        _check_fields(model, output, made, events, state, key_type.columns)
    declared = Declared(
        stages=stages,
        outputs=outputs,
        made=made,
        key_type=key_type,
        state=form,
        kinds=state,
        keeps_order=_keeps_order(model, stages, folds),
    )
    if not folds:
        return declared
    is_own = isinstance(key_type, RecordKey)
    named, keys = state_schema["name"], frozenset[str]() if is_own else frozenset(key_type.columns)
    for part in () if is_own else key_type.parts:
        kind = "long" if part.is_number else "string"
        if part.column not in state or simple_name(state[part.column]) != kind:
            refuse(model, f"has states without its key: {named} has no {kind} '{part.column}'")
    if unknown := folds.keys() - state.keys() | folds.keys() & keys:
        refuse(model, f"has folds for {sorted(unknown)}, but the fields of {named} are {[*state]}")
    if missing := state.keys() - folds.keys() - keys:
        refuse(model, f"has no fold for {sorted(missing)} of {named}: name a fold for each field, or remove the field")
    folds = {name: folds[name] for name in state if name not in keys}
    columns = {name: _checked_column(model, name, fold, events, state[name]) for name, fold in folds.items()}
    kinds = {name: without_null(state[name])[0] for name in folds}
    stored = {name: fold.stored(columns[name], kinds[name], name) for name, fold in folds.items()}
    combine = {name: fold.combination(columns[name]) for name, fold in folds.items()}
    exact = {name: how for name, how in combine.items() if how is not None}
    # An emitted record names its event, so the events of a model with outputs are folded one by one.
    combines = len(exact) == len(folds) and not outputs
    return replace(
        declared,
        folds=folds,
        forms={name: fold.form(kinds[name]) for name, fold in folds.items()},
        combine=exact if combines else None,
        state=replace(form, schema=_as_stored(form.schema, {n: k for n, k in stored.items() if k is not kinds[n]})),
    )


def _with_upsert(
    model: Any, fold: Upsert, outputs: tuple[Emit, ...], form: StateConverter, state_schema: Schema, *, own_emit: bool
) -> Declared:
    name = f"has the fold {type(fold).__name__}"
    if _folds(model):
        refuse(model, f"{name}, which is of the whole state, and folds of its fields: remove either")
    if hasattr(model, "order"):
        refuse(model, f"{name} and an `order`: a later record supersedes one that failed, so none waits; remove it")
    if transforms(model) or has_several(model):
        refuse(model, f"{name}: the newest record of a topic's key is a state, so it has one `source`, no `transform`")
    if fold.field:
        refuse(model, f"{name} of {fold.column}: name the record without a column")
    if model.source.records != (fold.record,):
        refuse(model, f"{name} of {fold.record}: its source must be of that record, and no other")
    if isinstance(fold, Debezium) and model.source.format not in ("avro", "connect"):
        refuse(model, f'{name}, whose change events in JSON are those of Kafka Connect: write format="connect"')
    schema = fold.whole(found_schema(model, model.source.records[0], _asked(model.source)))
    state = fields_of(state_schema)
    try:
        fold = fold.of(schema)
    except ValueError as error:
        refuse(model, f"{name} of {fold.record}: {error}")
    # Debezium's records of a row have one key, so a re-key leaves them in their order.
    if model.source.steps and not (fold.re_keys and [*map(type, model.source.steps)] == [By]):
        refuse(model, f"{name}: {'one `.by` is the only step' if fold.re_keys else 'no step'} of its source")
    by = model.source.steps[0].columns if model.source.steps else _declared_key(model)
    read = partial(
        replace,
        row=fold.row,
        columns=fold.columns([*state], by),
        refusals=tuple(fold.refusals),
        tombstones=True,
        schemas={fold.record: schema},
    )
    stages = checked_stages(model, outputs, [*state], is_all_needed=True, as_read=read)
    events = {name: one for stage in stages for name, one in events_of(model, stage).items()}
    if model.source.compacted and outputs:
        refuse(
            model,
            f"emits to '{outputs[0].topic}', and its source is compacted: a record that compaction removes before it "
            "is read is never sent, nor is a deletion; let consumers read the source, or follow the changes over HTTP",
        )
    if fold.where is not None:
        check_condition(model, fold.where, events)
    if why := fold.misfit(schema, state_schema, stages[-1].row_fields(schema)):
        refuse(model, f"{name} of {fold.record}: {why}")
    key_type = _key(model, stages[-1], events)
    _check_queries(model, key_type)
    _check_outputs(model, outputs, own_emit=own_emit)
    made = _made(model, outputs)
    for output in outputs:
        _check_fields(model, output, made, events, state, key_type.columns)
    return Declared(
        stages=stages,
        outputs=outputs,
        made=made,
        key_type=key_type,
        state=form,
        kinds=state,
        folds={STATE: fold},
        forms={STATE: fold.form(state_schema)},
        combine=None if outputs else {STATE: fold.combination(schema), OFFSET: Combine.MAX},
    )


def _check_queries(model: Any, key_type: KeyType) -> None:
    if model.queries is None:
        return
    names = (model.queries.key,) if isinstance(model.queries.key, str) else model.queries.key
    if len(names) != len(key_type.parts):
        refuse(
            model,
            f"has queries with the key {_named(names)}: name a parameter for each column of its key, which is "
            f"{_named(key_type.columns)}",
        )
    _check_columns(model, "has queries with the key", names)


def _state(model: Any) -> StateConverter:
    if isinstance(model.state, str):
        return unconverted(found_schema(model, model.state))
    return converter_of(model.state, model.name)


def _made(model: Any, outputs: Sequence[Emit]) -> dict[str, Schema]:
    _check_owners(model, [output.record for output in outputs if output.record is not None])
    return {output.record: found_schema(model, output.record) for output in outputs if output.record is not None}


def _keeps_order(model: Any, stages: Sequence[Stage], folds: Mapping[str, StandardFold]) -> bool:
    """Returns the declared order; by default, whether the folds depend on the order."""
    is_rekeyed = len(stages) > 1
    depends = not folds or any(fold.keeps_order for fold in folds.values())
    order: Order = getattr(model, "order", PER_KEY if depends and not is_rekeyed else ANY)
    if order is PER_KEY and is_rekeyed:
        refuse(
            model,
            "has `order = PER_KEY` and continues by another key: a record that fails before the re-key would arrive "
            "out of order; to keep the order, use a source whose key is the state's key",
        )
    return order is PER_KEY


def _check_outputs(model: Any, outputs: tuple[Emit, ...], *, own_emit: bool) -> None:
    """Checks the output of a model with states: at most one, either its `emit` or the state."""
    if len(outputs) > 1:
        refuse(model, "has states and more than one output: name one, and emit the others from a model without states")
    if own_emit and not outputs:
        refuse(model, "has an `emit`, but `emits` names no topic")
    for output in outputs:
        if output.make is not None or output.where is not None or output.of is not None:
            why = "with `make`, `of` or `where`, which only models without states may use"
            refuse(model, f"emits to '{output.topic}' {why}")
        if own_emit and output.fields:
            refuse(model, f"emits to '{output.topic}' with `fields`, and has an `emit` of its own: write one of them")
        if (output.record is None) == (own_emit or bool(output.fields)):
            refuse(
                model,
                f"emits to '{output.topic}': a record type needs `fields` or an `emit`, and these need a record type",
            )


def _declared_key(model: Any) -> tuple[str, ...]:
    """Returns the columns of the key that a model names; none if it names none, or the records' own key."""
    key = getattr(model, "key", None)
    if key is None or is_record_key(key):
        return ()
    columns = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(column, str) for column in columns):
        refuse(model, f"has the key {key!r}: name a column, or a tuple of columns")
    _check_columns(model, "has the key", columns)
    return columns


def _key(model: Any, stage: Stage, events: Mapping[str, Schema]) -> KeyType:
    """Returns the encoding of the states' keys: of the columns of the last `.by`, or of the declared key."""
    if stage.own_key is not None:
        return stage.own_key
    declared = _declared_key(model)
    if stage.key is not None:
        if declared not in ((), stage.key):
            refuse(model, f"has the key {_named(declared)}, but its source continues by {_named(stage.key)}")
        return key_type_of([_part(model, column, stage, events) for column in stage.key])
    if not declared:
        refuse(model, "has no `key`")
    if len(declared) > 1:
        by = ", ".join([f'"{column}"' for column in declared])
        refuse(
            model, f"has the key {_named(declared)}, which no topic has as its key: re-key the source, by `.by({by})`"
        )
    (key,) = declared
    for record, schema in events.items():
        kind = stage.row_fields(schema).get(key)
        if kind is None or simple_name(kind) != "string":
            found = _no_column(schema) if kind is None else f"one of type {type_name(kind)}"
            refuse(model, f"has the key '{key}', which must be a string; {record} has {found}")
    return ColumnKey(key, is_number=False)


def _part(model: Any, column: str, stage: Stage, events: Mapping[str, Schema]) -> ColumnKey:
    # `checked_stages` checked the columns. All integer types share one encoding.
    types = {ColumnKey.from_column(column, stage.row_fields(schema)[column]) for schema in events.values()}
    if len(types) > 1:
        refuse(model, f"continues by '{column}', which is text in some of its records and a number in others")
    return types.pop() or ColumnKey(column, is_number=False)


def _folds(model: Any) -> dict[str, StandardFold]:
    """Returns the standard folds by field, from attributes and from `folds`."""
    declared = type(model)
    attributes = {name: fold for name in dir(declared) if isinstance(fold := getattr(declared, name), StandardFold)}
    if isinstance(declared.fold, Upsert):
        del attributes["fold"]
    contract = declared.__mro__[-2]
    if taken := attributes.keys() & {*dir(contract), *contract.__annotations__}:
        refuse(model, f"has a fold as its `{min(taken)}`, which has another meaning: name it in `folds` instead")
    folds = {**getattr(declared, "folds", {}), **attributes}
    for name, fold in folds.items():
        if isinstance(fold, Upsert):
            refuse(model, f"folds {fold.column} into '{name}': name {type(fold).__name__} as the model's `fold`")
    return folds


def transforms(model: Any) -> bool:
    """Whether a model, or a class of models, makes rows of its events."""
    declared: Any = model if isinstance(model, type) else type(model)
    is_own: bool = declared.transform is not declared.__mro__[-2].transform
    return is_own


def _transformed(
    model: Any, sources: Sequence[Stream], needed: Sequence[str] | None, *, several: bool
) -> tuple[tuple[Stream, ...], tuple[Transform, ...]]:
    """Returns a model's sources, which continue by the rows' key unless that is the events', and the rows of each.

    Args:
        needed: the columns that the model uses; None for all.
    """
    continued: list[Stream] = []
    made: list[Transform] = []
    for source in sources:
        if any(isinstance(step, Select) for step in source.steps):
            refuse(model, "has a `transform` and a `select`: the columns that the rows need are read")
        if source.tombstones:
            refuse(model, "has a `transform` and a source with tombstones, which have no columns")
        schemas = {record: found_schema(model, record, _asked(source)) for record in source.records}
        try:
            whole = transform_of(model, schemas, source if several else None)
        except ConfigurationError as error:
            refuse(model, str(error))
        key = _declared_key(model)
        keys = [column for step in source.steps if isinstance(step, By) for column in step.columns]
        joins = any(isinstance(step, Join) for step in source.steps)
        asked = {*whole.names}
        if needed is not None and not joins:
            asked = {*needed, *keys, *key, *_conditions_of_rows(source)}
        required = asked if joins else {*asked, *keys, *key}
        if missing := required - {*whole.names}:
            refuse(model, f"names '{min(missing)}', but the rows of its `transform` have {_no_column(whole.schema)}")
        transform = whole.only(asked)
        multiplies = transform.analysed.multiplies
        if any(isinstance(step, By) and step.unchanged for step in source.steps):
            _check_unchanged(model, source, transform, several=several)
            made.append(transform)
            continued.append(source)
            continue
        if multiplies and not key and not keys:
            refuse(model, "makes several rows of an event: name a `key`, the columns by which they are passed on")
        made.append(transform)
        is_keyed = len(key) == 1 and key[0] in transform.names
        is_keyed = is_keyed and transform.analysed.untouched(key[0]) == (source.keyed_by or key[0])
        stays = keys or not key or (is_keyed and not multiplies)
        continued.append(source if stays else source.by(*key))
    if unlike := [one.schema for one in made if one.schema != made[0].schema]:
        refuse(
            model,
            f"makes rows of different columns or types of its sources: {made[0].schema['fields']} and "
            f"{unlike[0]['fields']}; return the same columns, in the same order",
        )
    return tuple(continued), tuple(made)


def _check_unchanged(model: Any, source: Stream, transform: Transform, *, several: bool) -> None:
    """Refuses what cannot be behind a re-key of the events themselves."""
    says = "passes its events on unchanged"
    if several or sum(isinstance(step, By) for step in source.steps) > 1:
        refuse(model, f"{says}, and has several sources or re-keys: let the rows be passed on")
    if any(isinstance(step, Join) for step in source.steps):
        refuse(model, f"{says}, and joins: let the rows be passed on, and joined")
    if transform.analysed.multiplies:
        refuse(model, f"{says}, and makes several rows of an event, which are passed on together: remove `unchanged`")
    for column in next(step.columns for step in source.steps if isinstance(step, By)):
        if transform.analysed.untouched(column) != column:
            refuse(
                model, f"{says} by '{column}', which its `transform` computes: keep the column as it is in the event"
            )


def _conditions_of_rows(source: Stream) -> set[str]:
    """Returns the columns of the conditions after the first re-key, which are those of rows."""
    first = next((at for at, step in enumerate(source.steps) if isinstance(step, By)), len(source.steps))
    return {name for step in source.steps[first:] if isinstance(step, Where) for name in step.condition.columns}


def _columns_of(fold: StandardFold, kept: Any) -> Iterable[str]:
    """Returns the columns that a fold of a field of an Avro type reads."""
    try:
        return columns_of(fold.form(kept))
    except (KeyError, TypeError):
        # The field is of a wrong type, which `_checked_column` says.
        return filter(None, [fold.field])


def _of_rows(model: Any, name: str, fold: StandardFold) -> StandardFold:
    """Returns a fold of a column of rows as one of their record."""
    if "." in fold.column:
        refuse(model, f"folds {fold.column} into '{name}': after a `transform`, a fold names a column of its rows")
    if fold.takes_column or not fold.column:
        return replace(fold, column=f"{ROW}.{fold.column}" if fold.column else ROW)
    is_there = ~col(fold.column).is_null()
    return replace(fold, column=ROW, where=is_there if fold.where is None else fold.where & is_there)


def _checked_column(model: Any, name: str, fold: StandardFold, events: Mapping[str, Schema], kept: Any) -> Any:
    """Checks that a fold fits its column and its field; returns the type of the column."""
    schema = events.get(fold.record)
    if schema is None:
        refuse(model, f"folds {fold.column} into '{name}', but {fold.record} is not a record of its source")
    kind, is_nullable = without_null(_column(model, name, fold, schema))
    if fold.where is not None:
        check_condition(model, fold.where, {fold.record: schema})
    kept, keeps_null = without_null(kept)
    if why := fold.unfit(kind) or fold.misfit(kind, kept, fields_of(schema)):
        refuse(model, f"folds {fold.column} into '{name}': {why}")
    may_be_empty = is_nullable or fold.where is not None or fold.may_skip(kind) or len(events) > 1
    if fold.starts_empty and not keeps_null and may_be_empty:
        refuse(
            model,
            f"may have no value of {fold.column} for '{name}': make the field nullable, with `| None` or in the schema",
        )
    return kind


def _column(model: Any, name: str, fold: StandardFold, schema: Schema) -> Any:
    if fold.takes_column != bool(fold.field):
        refuse(model, f"folds {fold.column} into '{name}': a count needs a record, any other fold a column")
    written = schema if not fold.field else fields_of(schema).get(fold.field)
    if written is None:
        refuse(model, f"folds {fold.column} into '{name}', but {fold.record} has {_no_column(schema)}")
    return written


def _no_column(schema: Schema) -> str:
    names = [*fields_of(schema)]
    return f"no such column; it has {', '.join(names[:_MOST_NAMES])}{', …' if len(names) > _MOST_NAMES else ''}"


def _as_stored(schema: Schema, stored: Mapping[str, Any]) -> Schema:
    """Returns the schema of states, given the types of the fields that are stored as another type than declared."""

    def changed(field: Mapping[str, Any]) -> dict[str, Any]:
        _, is_nullable = without_null(field["type"])
        kind = stored[field["name"]]
        # A default other than null is one of the declared type.
        kept = {name: value for name, value in field.items() if name != "default" or value is None}
        return {**kept, "type": ["null", kind] if is_nullable else kind}

    return {**schema, "fields": [changed(one) if one["name"] in stored else one for one in schema["fields"]]}


def checked_stages(
    model: Any,
    outputs: Sequence[Emit],
    needed: Sequence[str],
    *,
    is_all_needed: bool = False,
    as_read: Callable[[Stage], Stage] | None = None,
) -> tuple[Stage, ...]:
    """Returns the checked stages of a model.

    Args:
        needed: columns that the declaration names outside of its source.
        is_all_needed: whether the model's own code receives all columns.
        as_read: changes the stages before they are checked.
    """
    sources, several = sources_of(model), has_several(model)
    tables = {step.table.topic for source in sources for step in source.steps if isinstance(step, Join)}
    known: dict[str, Schema] = {}

    def schema_of(name: str, topic: str | None) -> Schema:
        found = found_schema(model, name, topic)
        if not several or topic in tables or transforms(model):
            return found
        # The last stage tells records apart by their names.
        read = known.setdefault(name, found)
        if why := _unlike(read, found):
            refuse(model, f"reads {name} from several sources, and they differ: {why}; fold them by two models")
        return read

    emits = [output.topic for output in outputs]
    of_sources: Sequence[Transform] = ()
    if transforms(model):
        asked = None if is_all_needed else needed
        sources, of_sources = _transformed(model, sources, asked, several=several)
    stages = declared_stages(model.name, sources, emits, needed, schema_of, several=several, transforms=of_sources)
    stages = stages if as_read is None else tuple(map(as_read, stages))
    for source, first in zip(sources, (stage for stage in stages if not stage.reads_rekeyed), strict=True):
        _check_selected(model, source, first)
    for stage in stages:
        _check_connect(model, stage)
        events = events_of(model, stage)
        if not isinstance(getattr(model, "fold", None), Upsert):
            _check_reserved(model, events)
        for condition in stage.conditions:
            check_condition(model, condition, events if stage.transform is None else stage.schemas)
        _check_joins(model, stage, events)
        if stage.by is None:
            continue
        made = events if stage.makes is None else {stage.makes["name"]: stage.makes}
        for record, column, schema in [(name, column, made[name]) for name in made for column in stage.by]:
            kind = stage.row_fields(schema).get(column)
            if kind is None or ColumnKey.from_column(column, kind) is None:
                found = _no_column(schema) if kind is None else f"one of type {type_name(kind)}"
                refuse(model, f"continues by '{column}', which must be a string, int or long; {record} has {found}")
    if is_record_key(getattr(model, "key", None)) and hasattr(model, "state"):
        stages = (*stages[:-1], replace(stages[-1], own_key=RecordKey.of_format(sources[0].key_format or "string")))
    if len({stage.name for stage in stages}) < len(stages):
        refuse(model, "continues by the same column twice")
    return stages


def _check_connect(model: Any, stage: Stage) -> None:
    """Refuses decimals of Kafka Connect whose form is not declared: digits may be base64, and a number a double."""
    read = [*stage.wanted_schemas.values()] if stage.format == "connect" else []
    read += [stage.rows[join.table.record] for join in stage.joins if join.table.format == "connect"]
    for schema in read:
        if path := _formless(schema, schema["name"]):
            refuse(
                model,
                f"reads the decimal '{path}' from Kafka Connect's JSON: name its form, which the converter and the "
                "connector choose: Annotated[Decimal, scale(2), BASE64] (the default), NUMERIC (decimal.format), or "
                "DIGITS (decimal.handling.mode=string)",
            )


def _formless(kind: Any, path: str) -> str:
    """Returns the path of a decimal without the property `json`; empty if there is none."""
    kind, _ = without_null(kind)
    match simple_name(kind):
        case "record":
            return next(filter(None, (_formless(of, f"{path}.{name}") for name, of in fields_of(kind).items())), "")
        case "array":
            return _formless(kind["items"], f"{path}[]")
        case "map":
            return _formless(kind["values"], path + "{}")
        case "decimal":
            return "" if "json" in kind else path
    return ""


def _unlike(read: Schema, other: Schema) -> str:
    """Returns why records of one schema cannot be read as those of another; empty if they can."""
    names = [full_name(schema) for schema in (read, other)]
    return difference(other, read) if names[0] == names[1] else f"one is {names[0]}, and the other {names[1]}"


def _check_selected(model: Any, source: Stream, first: Stage) -> None:
    events = [fields_of(schema) for schema in first.schemas.values()]
    selected = [step for step in source.steps if isinstance(step, Select)]
    if len(selected) > 1:
        refuse(model, "selects columns twice")
    if selected and any(isinstance(step, Join) for step in source.steps):
        refuse(model, "selects columns and joins: the joined record determines which columns are kept")
    if unknown := frozenset[str]().union(*(step.columns for step in selected)).difference(*events):
        refuse(model, f"selects '{min(unknown)}', but {' or '.join(source.records)} has no such column")


def _check_joins(model: Any, stage: Stage, events: Mapping[str, Schema]) -> None:
    if stage.transform is not None and stage.joins:
        refuse(model, "joins the rows of its `transform`: put a `.by` that names the join's column before the join")
    if stage.transform is None and bool(stage.joins) != (stage.makes is not None):
        refuse(model, "needs both a join and a `.by` that names the joined record, or neither")
    for join in stage.joins:
        table = stage.rows[join.table.record]
        if not isinstance(join.table, Global) and (not stage.reads_rekeyed or stage.key != (join.on,)):
            refuse(
                model, f"joins the table '{join.table.topic}' on '{join.on}': put a `.by` that column before the join"
            )
        for record, schema in events.items():
            kind = fields_of(schema).get(join.on)
            if why := join_key_misfit(join, kind):
                refuse(model, f"joins {table['name']}, {why} of {record}")
    if stage.joins and stage.makes is not None:
        if len(stage.records) > 1:
            refuse(model, f"joins records of several types: {', '.join(stage.records)}")
        if why := join_misfit(stage.makes, stage.schemas[stage.records[0]], stage.joins, stage.rows):
            refuse(model, why)


def check_condition(model: Any, condition: Condition, events: Mapping[str, Schema]) -> None:
    """Checks that a condition applies to events. Raises ConfigurationError."""
    for record, schema in events.items():
        for predicate in condition.predicates:
            kind = predicate.field.type_in(schema)
            if kind is None:
                refuse(model, f"has a condition on '{predicate.field.path}', but {record} has {_no_column(schema)}")
            if why := predicate.misfit(kind):
                refuse(model, f"has a condition that cannot be evaluated: {why}")


def events_of(model: Any, stage: Stage) -> dict[str, Schema]:
    """Returns the stage's records by simple name, after checking that each can be read."""
    for schema in stage.wanted_schemas.values():
        record = schema["name"]
        columns = fields_of(schema)
        if not columns:
            refuse(model, f"selects no column of {record}: select one, so that records that do not decode are found")
        for column, kind in columns.items():
            if unread := _unread(kind):
                refuse(model, f"folds {record}, whose '{column}' has {unread}, a type that events may not have")
    return {**stage.events}


def _asked(source: Stream) -> str | None:
    """Returns the topic whose schemas the registry may have."""
    return source.topic if source.format == "avro" else None


def found_schema(model: Any, name: str, topic: str | None = None) -> Schema:
    """Returns the schema with a simple name.

    Args:
        topic: the topic that its records are read from, if they are read.

    Raises:
        ConfigurationError: the schema is not found, or its dataclass cannot be a record.
        RetriableError: the registry does not answer.
    """
    if isinstance(name, DeclaredRecord):
        declared: Schema = expanded(record_converter(name.owner).schema)
        return declared
    try:
        found: Schema = model.schemas.find(name, topic)
    except ConfigurationError as error:
        refuse(model, f"names the schema {name}: {error}")
    return found


def _unread(kind: Any) -> str:
    """Returns the name of the first unsupported type inside a type; empty if all are supported."""
    kind, _ = without_null(kind)
    match simple_name(kind):
        case "array" | "map" as nesting:
            return _unread(kind["items" if nesting == "array" else "values"])
        case "record":
            return next(filter(None, map(_unread, fields_of(kind).values())), "")
        case name:
            return "" if name in READ_TYPES else type_name(kind)
