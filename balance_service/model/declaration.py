"""Checks the declaration of a read model, and refuses an invalid one with an error that names the model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import fields_of, simple_name, type_name, without_null
from balance_service.model.class_checks import (
    check_columns,
    check_owners,
    column_names,
    declared_folds,
    declared_key,
    refuse,
    transforms,
)
from balance_service.model.conditions import col
from balance_service.model.converters import converter_of, unconverted
from balance_service.model.events import ANY, EVENT, PER_KEY, Emit, OnFailure, Order
from balance_service.model.key_forms import sent_misfit
from balance_service.model.keys import ColumnKey, KeyType, key_type_of
from balance_service.model.made_records import problem_of
from balance_service.model.record_folds import OFFSET, STATE, Debezium, Upsert
from balance_service.model.record_keys import RecordKey
from balance_service.model.sources import has_several, sources_of
from balance_service.model.stage_checks import (
    asked_topic,
    check_condition,
    check_reserved,
    checked_stages,
    events_of,
    found_schema,
    no_column,
)
from balance_service.model.standard_fold import Combine, StandardFold, columns_of
from balance_service.model.stream import By, Join
from balance_service.model.transform import ROW

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.converters import StateConverter
    from balance_service.model.stage import Stage
    from balance_service.model.standard_fold import Combination, Form


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
    if own or declared_folds(model) or model.queries is not None:
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
    folds = declared_folds(model)
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
    needed = [*filter(None, [*declared_key(model), *folded, *asked, *sent])]
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
    check_reserved(model, [*folds, *(events if own_emit else events.keys() & folds.keys())])
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
    if declared_folds(model):
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
    schema = fold.whole(found_schema(model, model.source.records[0], asked_topic(model.source)))
    state = fields_of(state_schema)
    try:
        fold = fold.of(schema)
    except ValueError as error:
        refuse(model, f"{name} of {fold.record}: {error}")
    # Debezium's records of a row have one key, so a re-key leaves them in their order.
    if model.source.steps and not (fold.re_keys and [*map(type, model.source.steps)] == [By]):
        refuse(model, f"{name}: {'one `.by` is the only step' if fold.re_keys else 'no step'} of its source")
    by = model.source.steps[0].columns if model.source.steps else declared_key(model)
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
            f"has queries with the key {column_names(names)}: name a parameter for each column of its key, which is "
            f"{column_names(key_type.columns)}",
        )
    check_columns(model, "has queries with the key", names)


def _state(model: Any) -> StateConverter:
    if isinstance(model.state, str):
        return unconverted(found_schema(model, model.state))
    return converter_of(model.state, model.name)


def _made(model: Any, outputs: Sequence[Emit]) -> dict[str, Schema]:
    check_owners(model, [output.record for output in outputs if output.record is not None])
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


def _key(model: Any, stage: Stage, events: Mapping[str, Schema]) -> KeyType:
    """Returns the encoding of the states' keys: of the columns of the last `.by`, or of the declared key."""
    if stage.own_key is not None:
        return stage.own_key
    declared = declared_key(model)
    if stage.key is not None:
        if declared not in ((), stage.key):
            refuse(
                model, f"has the key {column_names(declared)}, but its source continues by {column_names(stage.key)}"
            )
        return key_type_of([_part(model, column, stage, events) for column in stage.key])
    if not declared:
        refuse(model, "has no `key`")
    if len(declared) > 1:
        by = ", ".join([f'"{column}"' for column in declared])
        refuse(
            model,
            f"has the key {column_names(declared)}, which no topic has as its key: re-key the source, by `.by({by})`",
        )
    (key,) = declared
    for record, schema in events.items():
        kind = stage.row_fields(schema).get(key)
        if kind is None or simple_name(kind) != "string":
            found = no_column(schema) if kind is None else f"one of type {type_name(kind)}"
            refuse(model, f"has the key '{key}', which must be a string; {record} has {found}")
    return ColumnKey(key, is_number=False)


def _part(model: Any, column: str, stage: Stage, events: Mapping[str, Schema]) -> ColumnKey:
    # `checked_stages` checked the columns. All integer types share one encoding.
    types = {ColumnKey.from_column(column, stage.row_fields(schema)[column]) for schema in events.values()}
    if len(types) > 1:
        refuse(model, f"continues by '{column}', which is text in some of its records and a number in others")
    return types.pop() or ColumnKey(column, is_number=False)


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
        refuse(model, f"folds {fold.column} into '{name}', but {fold.record} has {no_column(schema)}")
    return written


def _as_stored(schema: Schema, stored: Mapping[str, Any]) -> Schema:
    """Returns the schema of states, given the types of the fields that are stored as another type than declared."""

    def changed(field: Mapping[str, Any]) -> dict[str, Any]:
        _, is_nullable = without_null(field["type"])
        kind = stored[field["name"]]
        # A default other than null is one of the declared type.
        kept = {name: value for name, value in field.items() if name != "default" or value is None}
        return {**kept, "type": ["null", kind] if is_nullable else kind}

    return {**schema, "fields": [changed(one) if one["name"] in stored else one for one in schema["fields"]]}
