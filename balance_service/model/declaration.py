"""What must hold of a read model's declaration; one that cannot be right is refused in a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from balance_service.avro.schemas import fields_of, simple_name, type_name, without_null
from balance_service.model.declared_source import check_condition, checked_stages, events_of, found_schema, refuse
from balance_service.model.flow import Stream
from balance_service.model.folds import Combination, Count, Earliest, Greatest, Latest, StandardFold, Top
from balance_service.model.keys import KeyType
from balance_service.model.order import ANY, PER_KEY, Order
from balance_service.model.outputs import EVENT, Emit
from balance_service.model.states import as_they_are, converter_of, spelled_out

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.stage import Stage
    from balance_service.model.states import StateConverter

_NAME = re.compile(r"[a-z][a-z0-9-]*")
# Columns that rows have anyway.
_ENVELOPE = ("offset", "timestamp", "key", "record_key", "value", "headers", "idempotency_key", "traceparent")
_TAKEN = frozenset((*_ENVELOPE, "cause", "frame_cause", "note"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a read model's declaration comes to, once its schemas are known."""

    stages: tuple[Stage, ...]
    outputs: tuple[Emit, ...]
    made: Mapping[str, Schema]
    """The records that it makes to be sent, by simple name."""
    key: str = ""
    key_type: KeyType | None = None
    """Of its states; None if it has none."""
    state: StateConverter | None = None
    """Of the same."""
    folds: Mapping[str, StandardFold] = field(default_factory=dict)
    """Its standard folds by field."""
    kinds: Mapping[str, Any] = field(default_factory=dict)
    """The types of those fields."""
    combine: Mapping[str, Combination] | None = None
    """Update column → how updates combine; None: they do not."""
    keeps_order: bool = False


def check_class(model: Any) -> None:
    """Check what needs no schema of a read model's class. Raises ConfigurationError."""
    for attribute in ("name", "source"):
        if not hasattr(model, attribute):
            refuse(model, f"has no `{attribute}`")
    name, source = model.name, model.source
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse(model, f"has the name '{name}': a name is lower-case letters, digits and hyphens")
    if not isinstance(source, Stream) or not source.records:
        refuse(model, "has a source that is not a Stream of a topic and one or more records")


def check_declaration(model: Any, *, own_fold: bool, own_emit: bool) -> Declared:
    """Check that a read model can be; `schemas` finds those that it names.

    Args:
        own_fold: whether it overrides `fold`.
        own_emit: whether it overrides `emit`.

    Raises:
        ConfigurationError: it cannot be, or a schema is nowhere.
        RetriableError: the registry does not answer.
    """
    emits = getattr(model, "emits", ())
    outputs = (emits,) if isinstance(emits, Emit) else tuple(emits)
    if not hasattr(model, "state") and outputs:
        declared = _without_states(model, outputs, own=own_fold or own_emit)
    else:
        declared = _with_states(model, outputs, own_fold=own_fold, own_emit=own_emit)
    if model.source.tombstones and (model.source.steps or not own_fold):
        refuse(model, "has a source with tombstones: that takes no steps, and only a `fold` of its own deletes by them")
    return declared


def _without_states(model: Any, outputs: tuple[Emit, ...], *, own: bool) -> Declared:
    """Of a model that only emits."""
    if own or _folds(model) or model.queries is not None:
        refuse(model, "has no `state`, so it can neither fold, nor emit by `emit`, nor be asked")
    asked = [output.where.columns for output in outputs if output.where is not None]
    stages = checked_stages(model, outputs, frozenset[str]().union(*asked))
    events = events_of(model, stages[-1])
    for output in outputs:
        if output.each is not EVENT:
            refuse(model, f"emits to '{output.topic}' the last state of a key, and has no states")
        if (output.record is None) != (output.make is None):
            refuse(model, f"emits to '{output.topic}': what is made needs its record type and `make`, both or neither")
        if output.where is not None:
            check_condition(model, output.where, events)
    return Declared(stages=stages, outputs=outputs, made=_made(model, outputs))


def _with_states(model: Any, outputs: tuple[Emit, ...], *, own_fold: bool, own_emit: bool) -> Declared:
    if not hasattr(model, "state"):
        refuse(model, "has no `state`")
    folds = _folds(model)
    folded = [fold.field for fold in folds.values()]
    stages = checked_stages(model, outputs, filter(None, [getattr(model, "key", None), *folded]))
    events = events_of(model, stages[-1])
    key, key_type = _key(model, stages[-1], events)
    form = _state(model)
    state_schema = spelled_out(form.schema)
    state = fields_of(state_schema)
    if bool(folds) == own_fold:
        refuse(model, "has both standard folds and a `fold` of its own" if folds else "has nothing to fold by")
    if taken := (_TAKEN & {*folds, *events}) | (folds.keys() & events.keys()):
        refuse(model, f"has a field or record called '{min(taken)}', a name that the engine needs")
    _check_outputs(model, outputs, own_emit=own_emit)
    declared = Declared(
        stages=stages,
        outputs=outputs,
        made=_made(model, outputs),
        key=key,
        key_type=key_type,
        state=form,
        keeps_order=_keeps_order(model, stages, folds),
    )
    if not folds:
        return declared
    kind = "string" if not key_type.is_number else "long"
    named = state_schema["name"]
    if state.get(key) != kind:
        refuse(model, f"has states without its key: {named} has no {kind} '{key}'")
    if different := folds.keys() ^ (state.keys() - {key}):
        refuse(model, f"folds {sorted(folds)}, and {named} has other fields: {sorted(different)}")
    folds = {name: folds[name] for name in state if name != key}
    kinds = {name: without_null(state[name])[0] for name in folds}
    combine = {name: _combination(model, name, fold, events, state[name]) for name, fold in folds.items()}
    exact = {name: how for name, how in combine.items() if how is not None}
    # What is sent names its event, so each is folded singly.
    combines = len(exact) == len(folds) and not outputs
    return replace(declared, folds=folds, kinds=kinds, combine=exact if combines else None)


def _state(model: Any) -> StateConverter:
    """How states are written, by a schema or as instances of a dataclass."""
    if isinstance(model.state, str):
        return as_they_are(found_schema(model, model.state))
    return converter_of(model.state, model.name)


def _made(model: Any, outputs: Sequence[Emit]) -> dict[str, Schema]:
    """The records that are made to be sent."""
    return {output.record: found_schema(model, output.record) for output in outputs if output.record is not None}


def _keeps_order(model: Any, stages: Sequence[Stage], folds: Mapping[str, StandardFold]) -> bool:
    """Whether a model declares that order matters, or else whether its folds depend on it."""
    is_rekeyed = len(stages) > 1
    depends = not folds or any(isinstance(fold, Latest | Earliest) for fold in folds.values())
    order: Order = getattr(model, "order", PER_KEY if depends and not is_rekeyed else ANY)
    if order is PER_KEY and is_rekeyed:
        refuse(
            model,
            "has `order = PER_KEY` and goes on by another key: what failed before that would come out of order; keep "
            "the order by a source that has the state's key",
        )
    return order is PER_KEY


def _check_outputs(model: Any, outputs: tuple[Emit, ...], *, own_emit: bool) -> None:
    """Of a model with states: one output, by its `emit`, or the state itself."""
    if len(outputs) > 1:
        refuse(model, "has states and more than one output: name one, or emit the others from a model without states")
    if own_emit and not outputs:
        refuse(model, "has an `emit`, and does not say by `emits` where to")
    for output in outputs:
        if output.make is not None or output.where is not None:
            refuse(model, f"emits to '{output.topic}' by `make` or `where`, which are for models without states")
        if (output.record is None) == own_emit:
            refuse(model, f"emits to '{output.topic}': a record type needs an `emit`, and an `emit` a record type")


def _key(model: Any, stage: Stage, events: Mapping[str, Schema]) -> tuple[str, KeyType]:
    """Of the states: the column by which their events came, or else the one that the model names."""
    declared = getattr(model, "key", None)
    if stage.key is not None and declared not in (None, stage.key):
        refuse(model, f"has the key '{declared}', and its source goes on by '{stage.key}'")
    key = stage.key or declared
    if key is None:
        refuse(model, "has no `key`")
    kinds = {record: fields_of(schema).get(key) for record, schema in events.items()}
    if stage.key is not None:
        # The columns of all records were checked with the stage; keys of one kind are alike however wide the number.
        types = {KeyType.of(key, kind) for kind in kinds.values()}
        if len(types) > 1:
            refuse(model, f"goes on by '{key}', which is text in some of its records and a number in others")
        return key, types.pop() or KeyType(key, is_number=False)
    for record, kind in kinds.items():
        if kind != "string":
            found = "no such column" if kind is None else f"one of type {type_name(kind)}"
            refuse(model, f"has the key '{key}', a string; {record} has {found}")
    return key, KeyType(key, is_number=False)


def _folds(model: Any) -> dict[str, StandardFold]:
    """The standard folds by field, be they attributes or in `folds`."""
    declared = type(model)
    attributes = {name: fold for name in dir(declared) if isinstance(fold := getattr(declared, name), StandardFold)}
    contract = declared.__mro__[-2]
    if taken := attributes.keys() & {*dir(contract), *contract.__annotations__}:
        refuse(model, f"has a fold as its `{min(taken)}`, which says something else: name it in `folds` instead")
    return {**getattr(declared, "folds", {}), **attributes}


def _combination(
    model: Any, name: str, fold: StandardFold, events: Mapping[str, Schema], kept: Any
) -> Combination | None:
    """How the updates of a fold combine, once it is known to fit its column and its field."""
    schema = events.get(fold.record)
    if schema is None:
        refuse(model, f"folds {fold.column} into '{name}', and {fold.record} is no record of its source")
    written = _column(model, name, fold, schema)
    kind, is_nullable = without_null(written)
    kept, keeps_null = without_null(kept)
    if why := fold.misfit(kind, kept):
        refuse(model, f"folds {fold.column} into '{name}': {why}")
    # What is no number is passed over.
    is_skipped = isinstance(fold, Greatest) and simple_name(kind) in ("double", "float")
    if fold.starts_empty and not keeps_null and (is_nullable or is_skipped or len(events) > 1):
        refuse(model, f"may have no value of {fold.column} for '{name}', which must be nullable then")
    if isinstance(fold, Top):
        _check_entries(model, name, fields_of(kept["items"]), schema)
    return fold.combination(kind)


def _column(model: Any, name: str, fold: StandardFold, schema: Schema) -> Any:
    """The type of the column that is folded; of the event itself, its record's."""
    if isinstance(fold, Count) != (not fold.field):
        refuse(model, f"folds {fold.column} into '{name}': a count is of a record, any other fold of a column")
    written = schema if not fold.field else fields_of(schema).get(fold.field)
    if written is None:
        refuse(model, f"folds {fold.column} into '{name}', and {fold.record} has no column '{fold.field}'")
    return written


def _check_entries(model: Any, name: str, entries: Mapping[str, Any], schema: Schema) -> None:
    columns = fields_of(schema)
    for entry, kept in entries.items():
        if entry not in columns:
            refuse(model, f"keeps '{entry}' in '{name}', which {schema['name']} does not have, or is not selected")
        (kind, is_nullable), (inner, keeps_null) = without_null(columns[entry]), without_null(kept)
        why = StandardFold("").misfit(kind, inner)
        if why or (is_nullable and not keeps_null):
            refuse(model, f"keeps '{entry}' in '{name}': {why or 'it may be null'}")
