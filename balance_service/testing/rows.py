"""Events as tests write them, and as the rows that Spark would make from them."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import fastavro
import pyarrow as pa

from balance_service.avro.codec import AvroCodec, misfit, parsed
from balance_service.avro.schemas import fields_of, is_fixed_uuid, simple_name, without_null
from balance_service.engine.records import RESERVED_PREFIX, DeadLetter
from balance_service.errors import InvalidInputError, PoisonRecordError
from balance_service.formats.json_format import JsonCodec
from balance_service.formats.json_values import JsonRecords
from balance_service.kafka.clients import IDEMPOTENCY_HEADER
from balance_service.model.conditions import Field
from balance_service.model.converters import record_of
from balance_service.model.keys import MAX_KEY_BYTES, ColumnKey, cause_of, key_type_of
from balance_service.model.made_records import columns_of, each_of, output_column
from balance_service.model.placing import place_stages
from balance_service.model.record_folds import IGNORED
from balance_service.spark.combine import NOTE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from _typeshed import DataclassInstance

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.model.events import Emit
    from balance_service.model.read_model import ReadModel
    from balance_service.model.record_folds import Refusal
    from balance_service.model.record_keys import RecordKey
    from balance_service.model.stage import Stage
    from balance_service.model.standard_fold import Form

_NOTE = {
    "cause": pa.string(),
    "detail": pa.string(),
    "record": pa.string(),
    "schema_id": pa.int64(),
    "timestamp": pa.int64(),
    "record_key": pa.binary(),
    "value": pa.binary(),
    "idempotency_key": pa.binary(),
    "traceparent": pa.string(),
}
RecordKeyOf = str | int | UUID | bytes
"""A record's key as tests write it."""
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_ARROW: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "enum": pa.string(),
    "uuid": pa.string(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("us", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "timestamp-nanos": pa.timestamp("us", "UTC"),
    "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
    "local-timestamp-nanos": pa.timestamp("us"),
}
_ZERO: Mapping[str, Any] = {"boolean": False, "bytes": b"", "string": "", "uuid": "", "array": [], "map": {}}


@dataclass(frozen=True)
class InputEvent:
    """An event as its producer sends it. `record_key` None stands for the event's key column, if the key is one.

    A tombstone has an empty `record`.
    """

    record: str
    fields: Mapping[str, Any]
    record_key: bytes | int | UUID | None = None
    idempotency_key: bytes | None = None
    timestamp_ms: int = 0
    unreadable: str | None = None
    """The cause for which the service cannot read the event yet."""
    detail: str = field(default="", repr=False, compare=False)
    """What is wrong with an event that cannot be read."""
    values: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The fields as a reader decodes them, once the event is encoded."""
    body: bytes | None = field(default=None, repr=False, compare=False)
    """The encoded event; None for a tombstone. Of Avro, without a frame. An event with a body and without a record is
    of bytes, as a topic has them."""
    line: int = field(default=0, repr=False, compare=False)
    """The line of `file` that the event, or the one that it was made of, was read from."""
    file: str = field(default="", repr=False, compare=False)
    topic: str | None = None
    """The source that the event comes from; None for the first one that has its record."""
    kind: str = ""
    """The header that names the record of an event of bytes; empty if there is none."""


@dataclass(frozen=True)
class TableRow:
    """A record of a table that events are joined with; `fields` None deletes the row."""

    topic: str
    key: str | int
    fields: Mapping[str, Any] | None
    timestamp_ms: int = 0


def encoded(given: InputEvent, stage: Stage) -> InputEvent:
    """Encodes an event for the topic that a stage reads, or reads one of bytes.

    Raises:
        ValueError: the event is not a record of that topic, or does not fit its schema.
    """
    given = replace(given, record_key=_sent_key(given.record_key, stage.own_key))
    if not given.record:
        return given if given.body is None else _read(given, stage)
    if given.record not in stage.schemas:
        raise ValueError(f"{given.record} is not a record of {stage.owner}'s source")
    body = body_of(given.fields, stage.schemas[given.record])
    if stage.format != "avro":
        codec = JsonCodec(stage.schemas[given.record], stage.told.field or None, is_connect=stage.format == "connect")
        try:
            body = codec.frame(body)
        except PoisonRecordError as error:
            raise ValueError(f"{given.fields} has no JSON form: {error}") from None
        return replace(given, values=codec.decode(body), body=body)
    values: Any = fastavro.schemaless_reader(io.BytesIO(body), parsed(stage.schemas[given.record]), None)
    return replace(given, values=values, body=body)


def _read(given: InputEvent, stage: Stage) -> InputEvent:
    """Reads an event of bytes. One that is no record of the stage has the cause for which the service refuses it."""
    told = stage.told
    records = JsonRecords([*stage.wanted_schemas.values()], told.field, told.data, told.schema)
    try:
        record, values = records.read(given.body or b"", given.kind)
    except PoisonRecordError as error:
        return replace(given, unreadable=error.cause, detail=error.detail)
    return replace(given, record=record, fields=values, values=values)


def _sent_key(key: bytes | int | UUID | None, own: RecordKey | None) -> bytes | None:
    """Returns a record's key as its producers write it. Raises ValueError: it has another form."""
    if key is None or isinstance(key, bytes):
        return key
    if own is None:
        return str(key).encode()
    try:
        return own.record_key(key)
    except InvalidInputError as error:
        raise ValueError(f"the record key {key!r}: {error}") from None


def body_of(fields: Mapping[str, Any], of: Schema) -> bytes:
    """Encodes the fields of a record; others get their default, or the zero of their type.

    Raises:
        ValueError: they do not fit the schema.
    """
    fields, schema, body = {**_zero(of), **fields}, parsed(of), io.BytesIO()
    try:
        fastavro.schemaless_writer(body, schema, fields, strict_allow_default=True)
    except Exception as error:  # fastavro raises many types of errors.
        why = misfit(schema, fields) or error
        raise ValueError(f"{fields} is not a valid {of['name']}: {why}") from error
    return body.getvalue()


def event(
    record: str | DataclassInstance,
    fields: Mapping[str, Any] | None = None,
    *,
    record_key: RecordKeyOf | None = None,
    idempotency_key: str | None = None,
    timestamp_ms: int = 0,
    unreadable: str | None = None,
    topic: str | None = None,
) -> InputEvent:
    """Returns an event of a record type, which is named by its simple name; or an instance of its dataclass as one.

    Args:
        fields: the relevant fields; others get their default, or the zero of their type. None for an instance.
        record_key: the record's key, if it is not the event's key column: a number or a UUID in the model's
            `key_format`, text, or the bytes that the producer sends.
        timestamp_ms: the timestamp of the record in the topic.
        unreadable: the cause for which the service cannot read the event yet, such as `schema-id-unknown`.
        topic: the source that it comes from, if several have its record; by default, the first of them.

    Raises:
        TypeError: an instance is given, and fields too.
    """
    if not isinstance(record, str) and fields is not None:
        raise TypeError(f"{record!r} has all fields of its event: give other ones by `dataclasses.replace`")
    key = record_key.encode() if isinstance(record_key, str) else record_key
    once = None if idempotency_key is None else idempotency_key.encode()
    name, given = (record, fields or {}) if isinstance(record, str) else (type(record).__name__, record_of(record))
    return InputEvent(name, given, key, once, timestamp_ms, unreadable, topic=topic)


def tombstone(record_key: RecordKeyOf, *, timestamp_ms: int = 0) -> InputEvent:
    """Returns a record with a key, as that of `event`, and without a value."""
    key = record_key.encode() if isinstance(record_key, str) else record_key
    return InputEvent("", {}, key, timestamp_ms=timestamp_ms)


def row(
    topic: str, key: str | int, fields: Mapping[str, Any] | DataclassInstance | None, *, timestamp_ms: int = 0
) -> TableRow:
    """Returns a row of the table on a topic, which the model joins events with.

    Args:
        fields: as those of `event`, or an instance of the row's dataclass; None deletes the row.
    """
    return TableRow(topic, key, record_of(fields), timestamp_ms)


def driven_stages(read_model: ReadModel, *, after_joins: bool = False) -> list[Stage]:
    """Returns the stages that the driver runs: all, or those after the last join, whose events are joined records.

    Of several sources, those without a join have all stages. After a transform, the events are its rows.
    """
    stages, joined = place_stages(read_model.stages, "driver", str), set[str]()
    if not after_joins:
        return stages
    behind = {stage.source for stage in stages if stage.transform is not None and stage.reads_rekeyed}
    for stage in reversed(stages):
        if stage.makes is not None or (stage.passes_on and stage.rekeyed in joined | behind):
            joined.add(stage.source)
    return [
        stage
        if stage.transform is None
        else replace(stage, schemas=stage.events, conditions=(), transform=None, columns=None)
        for stage in stages
        if stage.source not in joined
    ]


def way_of(stages: Sequence[Stage], given: InputEvent) -> list[Stage]:
    """Returns the stages that an event passes, in order: from the one that reads it to the last.

    Args:
        stages: as returned by `driven_stages`.
    """
    is_of_bytes = not given.record and given.body is not None
    reading = (
        one for one in stages if (is_of_bytes or given.record in one.schemas) and given.topic in (None, one.source)
    )
    way = [next(reading, stages[0])]
    while way[-1].passes_on:
        way.append(next(one for one in stages if one.source == way[-1].rekeyed))
    return way


def given_schemas(read_model: ReadModel, *, after_joins: bool = False) -> dict[str, Schema]:
    """Returns the records of the events that the stages of `driven_stages` are given, by simple name."""
    stages = driven_stages(read_model, after_joins=after_joins)
    written = {stage.rekeyed for stage in stages}
    first = [stage for stage in stages if stage.source not in written]
    last = [stages[-1]] if after_joins else []
    return {name: schema for stage in (*first, *last) for name, schema in stage.schemas.items()}


def rows_of(
    read_model: ReadModel, stage: Stage, events: Mapping[int, InputEvent], registry: SchemaRegistry
) -> pa.Table:
    """Returns the rows of the decoder's plan for the events that a stage reads, by offset."""
    if stage.transform is not None:
        return _transformed(read_model, stage, events, registry)
    types = _column_types(read_model, stage)
    rows = [_row(read_model, stage, given, offset) for offset, given in events.items()]
    note = pa.list_(pa.struct(list(_NOTE.items())))
    return pa.Table.from_pylist(rows, pa.schema({"offset": pa.int64(), "key": pa.binary(), **types, NOTE: note}))


def _transformed(
    read_model: ReadModel, stage: Stage, events: Mapping[int, InputEvent], registry: SchemaRegistry
) -> pa.Table:
    """Returns the rows that Spark makes, as in the service."""
    # Only models with a `transform` need Spark.
    from balance_service.spark.decode import Decoder
    from balance_service.spark.redrive import RECORDS
    from balance_service.spark.session import any_session

    spark = any_session()
    decoder = Decoder(spark, read_model, stage, registry)
    written = stage.schemas if stage.format == "avro" else {}
    codecs = {record: AvroCodec(registry, record, schema) for record, schema in written.items()}
    decoder.resolve(codec.schema_id for codec in codecs.values())
    read = {offset: given for offset, given in events.items() if given.unreadable is None}
    records = [
        {
            "key": key_of(read_model, stage, given),
            "value": given.body if stage.format != "avro" else given.body and codecs[given.record].frame(given.body),
            "offset": offset,
            "timestamp": given.timestamp_ms * 1000,
            "headers": given.idempotency_key and [{"key": IDEMPOTENCY_HEADER, "value": given.idempotency_key}],
            "partition": 0,
        }
        for offset, given in read.items()
    ]
    frame: Any = spark.createDataFrame(pa.Table.from_pylist(records, RECORDS))
    made = decoder.updates(frame).toArrow().drop_columns(["partition"])
    others = [_row(read_model, stage, given, offset) for offset, given in events.items() if offset not in read]
    return pa.concat_tables([made, pa.Table.from_pylist(others, made.schema)]).sort_by("offset")


def key_of(read_model: ReadModel, stage: Stage, given: InputEvent) -> bytes | None:
    """Returns the key of an event's record; None if it has none, which only some stages allow."""
    sent = _sent_key(given.record_key, stage.own_key)
    if sent is not None or stage.by is not None or not read_model.has_states() or stage.own_key is not None:
        return sent
    row = stage.row_in(given.values)
    return read_model.key_type.of(row) if row else None


def letter_of(read_model: ReadModel, stage: Stage, given: InputEvent, offset: int) -> DeadLetter:
    """Returns an event's record as a dead letter without a cause."""
    return DeadLetter(offset, given.timestamp_ms, key_of(read_model, stage, given), given.body, "")


def passed_on(stage: Stage, given: InputEvent) -> tuple[bytes | None, str | None]:
    """Returns the key with which a stage re-keys an event, or the cause why it does not."""
    by = stage.by or ()
    if not given.record:
        return None, IGNORED
    if (refusal := refusal_of(stage, given)) is not None:
        return None, refusal.cause
    row = stage.row_in(given.values)
    values: dict[str, Any] = {name: row.get(name) for name in by}
    if not all(condition.holds(given.values) for condition in stage.conditions):
        return None, IGNORED
    if None in values.values():
        return None, "field-null"
    if stage.next_table is None:
        parts = [ColumnKey(name, is_number=isinstance(value, int)) for name, value in values.items()]
        key = key_type_of(parts).of(values)
    else:
        key = stage.next_table.sent_key(values[by[0]])
    if len(key) > MAX_KEY_BYTES:
        return None, f"{cause_of(by)}-malformed"
    return (None, "key-reserved") if not stage.may_have_any_key and key >= RESERVED_PREFIX else (key, None)


def refusal_of(stage: Stage, given: InputEvent) -> Refusal | None:
    """Returns why the model's fold does not take an event; None if it does."""
    refusals = stage.refusals if given.record else ()
    return next((refusal for refusal in refusals if refusal.condition.holds(given.values)), None)


def _row(read_model: ReadModel, stage: Stage, given: InputEvent, offset: int) -> dict[str, Any]:
    record_key = key = key_of(read_model, stage, given)
    sent: dict[str, Any] = {}
    detail = ""
    cause: str | None
    if given.unreadable is not None:
        cause, detail = given.unreadable, given.detail
    elif (refusal := refusal_of(stage, given)) is not None:
        cause, detail = refusal.cause, refusal.detail
    elif stage.by is not None and not stage.joins:
        key, cause = passed_on(stage, given)
    elif not all(condition.holds(given.values) for condition in stage.conditions):
        cause = IGNORED
    else:
        key, cause = _stored(stage, key)
        cause = cause or _misfit(read_model, stage, given, key)
    if not cause and stage.by is None and given.record:
        try:
            sent = _sent(read_model, given)
        except PoisonRecordError as error:
            cause, detail = error.cause, error.detail
    note = None
    if cause or given.idempotency_key:
        note = {"cause": cause, "timestamp": given.timestamp_ms, "record_key": record_key, "value": given.body}
        note["detail"] = detail or stage.key_problems(read_model.key_columns).get(cause or "", "")
        note["idempotency_key"] = None if cause else given.idempotency_key
    row = {} if cause else _columns(read_model, stage, given) | sent
    return {"offset": offset, "key": None if cause else key, **row, NOTE: [note] if note else None}


def _stored(stage: Stage, record_key: bytes | None) -> tuple[bytes | None, str | None]:
    """Returns the key of a record as the store has it, or why it cannot have it."""
    if stage.own_key is None or stage.passes_on:
        return record_key, None
    if record_key is None:
        return None, "key-null"
    try:
        return stage.own_key.stored(record_key), None
    except InvalidInputError:
        return None, stage.own_key.cause


def _misfit(read_model: ReadModel, stage: Stage, given: InputEvent, key: bytes | None) -> str | None:
    if not given.record:
        if not stage.tombstones:
            return "value-null"
    elif (
        not stage.joins
        and read_model.has_states()
        and stage.own_key is None
        and _has_other_key(read_model, stage, given, key)
    ):
        return f"key-is-not-{cause_of(read_model.key_columns)}"
    if key is None or key < RESERVED_PREFIX or stage.may_have_any_key:
        return None
    return "key-reserved" if stage.own_key is None else stage.own_key.cause


def _has_other_key(read_model: ReadModel, stage: Stage, given: InputEvent, key: bytes | None) -> bool:
    row = stage.row_in(given.values)
    return bool(row) and key != read_model.key_type.of(row)


def _sent(read_model: ReadModel, given: InputEvent) -> dict[str, Any]:
    """Returns the columns for outputs. Raises PoisonRecordError if a value does not fit its record."""
    outputs = read_model.outputs
    sent: dict[str, Any] = {
        part.column: part.encoded(given.values) if _is_sent(emit, given) else None
        for emit, part in columns_of(outputs, read_model.made_schemas)
    }
    for number, emit in enumerate(() if read_model.has_states() else outputs):
        if emit.of is not None:
            items, made = given.values[emit.of], read_model.made_schemas[str(emit.record)]
            is_sent = items is not None and _is_sent(emit, given)
            sent[output_column(number)] = [each_of(made, item) for item in items] if is_sent else None
        elif not emit.fields:
            sent[output_column(number)] = True if _is_sent(emit, given) else None
    return sent


def _is_sent(emit: Emit, given: InputEvent) -> bool:
    return emit.where is None or emit.where.holds(given.values)


def _columns(read_model: ReadModel, stage: Stage, given: InputEvent) -> dict[str, Any]:
    headers = given.idempotency_key and [{"key": IDEMPOTENCY_HEADER, "value": given.idempotency_key}]
    own: dict[str, Any]
    if stage.joins:
        own = {given.record: given.values}
    elif stage.by is not None:
        own = {"record_key": key_of(read_model, stage, given)}
    else:
        own = _update(read_model, given) if given.record else {}
    return {**own, "timestamp": given.timestamp_ms, "value": given.body, "headers": headers or None}


def _update(read_model: ReadModel, given: InputEvent) -> dict[str, Any]:
    values = given.values
    update = {
        name: _made(read_model.update_forms[name], values)
        for name, fold in read_model.standard_folds.items()
        if fold.record == given.record
        and not (fold.field and values[fold.field] is None)
        and (fold.where is None or fold.where.holds(values))
    }
    return update | ({given.record: values} if read_model.needs_events else {})


def _made(form: Form, values: Mapping[str, Any]) -> Any:
    if isinstance(form, str) and "." in form:
        outer, _, rest = form.partition(".")
        return _made(rest, values[outer])
    match form:
        case str():
            return values[form]
        case list():
            return [_made(form[0], values)]
        case dict():
            return {name: _made(part, values) for name, part in form.items()}
    return form


def _column_types(read_model: ReadModel, stage: Stage) -> dict[str, pa.DataType]:
    time = {"timestamp": pa.int64()}
    unchanged = {"value": pa.binary(), "headers": _HEADERS}
    if stage.by is not None:
        return time | unchanged | (_event_types(stage) if stage.joins else {"record_key": pa.binary()})
    types = _update_types(read_model, stage)
    if read_model.outputs or not read_model.standard_folds:
        types |= time
    types |= {part.column: pa.binary() for _, part in columns_of(read_model.outputs, read_model.made_schemas)}
    if read_model.has_states():
        return types
    whole = {
        output_column(n): pa.bool_() if emit.of is None else pa.list_(pa.binary())
        for n, emit in enumerate(read_model.outputs)
        if not emit.fields
    }
    return types | unchanged | whole


def _update_types(read_model: ReadModel, stage: Stage) -> dict[str, pa.DataType]:
    events = {schema["name"]: schema for schema in stage.wanted_schemas.values()}
    types = {
        name: _type_of(read_model.update_forms[name], fields_of(events[fold.record]))
        for name, fold in read_model.standard_folds.items()
    }
    return types | (_event_types(stage) if read_model.needs_events else {})


def _event_types(stage: Stage) -> dict[str, pa.DataType]:
    return {schema["name"]: arrow_type(schema) for schema in stage.wanted_schemas.values()}


def _type_of(form: Form, columns: Mapping[str, Any]) -> pa.DataType:
    match form:
        case str():
            return arrow_type(Field(form).type_in({"type": "record", "name": "", "fields": _fields(columns)}))
        case list():
            return pa.list_(_type_of(form[0], columns))
        case dict():
            return pa.struct([(name, _type_of(part, columns)) for name, part in form.items()])
    return pa.int64()


def _fields(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "type": kind} for name, kind in columns.items()]


def arrow_type(kind: Any) -> pa.DataType:
    """Returns the Arrow type of an Avro type in the rows that Spark hands over."""
    kind, _ = without_null(kind)
    match simple_name(kind):
        case "decimal":
            return pa.decimal128(38, kind.get("scale", 0))
        case "array":
            return pa.list_(arrow_type(kind["items"]))
        case "map":
            return pa.map_(pa.string(), arrow_type(kind["values"]))
        case "record":
            return pa.struct([(name, arrow_type(field)) for name, field in fields_of(kind).items()])
        case name:
            return _ARROW[name]


def _zero(kind: Any) -> Any:
    kind, is_nullable = without_null(kind)
    if is_nullable:
        return None
    match simple_name(kind):
        case "record":
            return {f["name"]: _zero(f["type"]) for f in kind["fields"] if "default" not in f}
        case "decimal":
            return Decimal(0)
        case "enum":
            return kind["symbols"][0]
        case "fixed":
            return bytes(kind["size"])
        case "uuid" if is_fixed_uuid(kind):
            return str(UUID(int=0))
        case name:
            return _ZERO.get(name, 0)
