"""A stage of a read model: reads one topic, and either re-keys the records for the next stage, or folds or emits them.

A stage is a value with the names of its topics. `processor_of` in `engine.assembly` makes the object that processes its
records, for the service and for the test driver alike. Stages without a read model retry other consumers' dead letters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from balance_service.avro.schemas import fields_of, full_name, without_null
from balance_service.model.keys import key_problems
from balance_service.model.stream import By, Global, Join, Where
from balance_service.model.transform import ROW

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition
    from balance_service.model.events import FormatName
    from balance_service.model.record_folds import Refusal
    from balance_service.model.record_keys import KeyFormat, RecordKey
    from balance_service.model.stream import Partitioner, Stream, Table
    from balance_service.model.transform import Transform

_OF_GENERATION = re.compile(r"(.+)\.g([0-9]{1,9})", re.DOTALL)


def generation_name(model: str, number: int) -> str:
    """Returns the name of the last stage of a generation. No name of a read model contains a dot."""
    return model if number == 1 else f"{model}.g{number}"


def model_and_generation(name: str) -> tuple[str, int]:
    """Returns what `generation_name` made a name of; any other name is that of a first generation."""
    match = _OF_GENERATION.fullmatch(name)
    return (name, 1) if match is None else (match[1], int(match[2]))


FROM = "-from-"
"""Between the topic that several stages write and the source of one, in its name. No column contains a hyphen."""


def rekeyed_topics(stage: str, model: str) -> tuple[str, ...]:
    """Returns the topics that a stage of a model may write if it re-keys, by its name; empty if it does not re-key.

    All of them are the model's: one of the stage's own name, and those that it may share. Which of them it writes, the
    name does not tell: a column may be called `from`, a source's name may contain `-from-`, and of a source with
    several re-keys only the last one is into the shared topic.
    """
    prefix = f"{model}-by-"
    if not stage.startswith(prefix):
        return ()
    ends = [found.start() for found in re.finditer(f"(?={FROM})", stage)]
    return (*(stage[:end] for end in ends if end > len(prefix)), stage)


class Told(NamedTuple):
    """What tells the records of a JSON topic, as names of fields and of a header; each empty if nothing does."""

    field: str = ""
    """Of a document without the header."""
    header: str = ""
    data: str = ""
    """The field that holds the record, of a document without the header."""
    schema: str = ""
    """The only other field of a document that holds the record; one with other fields is the record."""


OF_HEADER = "header:"
"""Begins a `type` that names a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The tasks of a stage are called `<name>_<partition>`."""

    name: str
    """Unique in the application. The last stage of a read model has the model's name; of its generation N > 1,
    `<model>.gN`. Other stages have the name of the topic that they write, without the application id;
    with several sources, that and `-from-` and the source's name."""
    owner: str
    """The read model; for retries, the stage's own name."""
    source: str
    """The topic that the stage reads."""
    application_id: str = ""
    """Empty until the stage is placed in an application."""
    generation: int = 1
    """Which of the read model's builds the stage belongs to."""
    partitioner: Partitioner = "murmur2"
    """The function that the source's producers use to assign keys to partitions; re-keyed topics have murmur2."""
    tombstones: bool = False
    """Whether a record without a value deletes the state of its key."""
    compacted: bool = False
    """Whether the source may lack records that a later one of their key replaces, and tombstones after a time."""
    format: FormatName = "avro"
    """Of the source's records. Records that are passed on unchanged keep it."""
    type: str | None = None
    """The field, or as `header:NAME` the header, that tells the records of a JSON topic; None if there is only one."""
    written_to: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The topics whose subjects encode the source's records, and the simple names of those: re-keyed records keep the
    encoding that they had on the topic that they were first written to."""
    schemas: Mapping[str, Schema] = field(default_factory=dict, repr=False)
    """The records that the stage reads, by simple name. Stages for retries have none, and pass on any bytes."""
    conditions: tuple[Condition, ...] = ()
    """Of the records that are read, before the transform."""
    transform: Transform | None = None
    """Makes rows of the records, which the stage processes in their place."""
    key: tuple[str, ...] | None = None
    """The columns that are the source records' key; None if the key may be anything."""
    row: tuple[str, ...] = ()
    """The fields of the source's record that may have the row with its key, in their order; none: the record is it."""
    refusals: tuple[Refusal, ...] = ()
    """The events that the model's `fold` does not take; the first that applies counts."""
    own_key: RecordKey | None = None
    """The form of the source records' keys, if the key of the states is that and no column."""
    columns: frozenset[str] | None = None
    """The columns that are read, and fields of them by their path; None for all."""
    joins: tuple[Join, ...] = ()
    rows: Mapping[str, Schema] = field(default_factory=dict, repr=False)
    """The records of the joined tables, by simple name."""
    by: tuple[str, ...] | None = None
    """The columns whose values become the new key; None for the last stage."""
    passes_to: str = ""
    """The re-keyed topic, without the application id, if it is not named like the stage: several stages write it."""
    makes: Schema | None = field(default=None, repr=False)
    """The schema of the joined records, or rows, that are passed on; None if records are passed on unchanged."""
    next_table: Table | None = None
    """The table whose keys and number of partitions the re-keyed topic has; None if keys are encoded as in `keys`."""
    outputs: tuple[str, ...] = ()
    """The topics that the read model emits to."""
    reads_rekeyed: bool = False
    """Whether the source is the re-keyed topic of earlier stages."""
    retries: bool = False
    """Whether the stage has no read model, and its source holds another consumer's dead letters."""

    @property
    def passes_on(self) -> bool:
        """Whether the stage writes the topic that the next stage reads."""
        return self.by is not None

    @property
    def records(self) -> tuple[str, ...]:
        return tuple(self.schemas)

    @property
    def told(self) -> Told:
        """What tells the records of a JSON topic."""
        if self.format == "cloudevents":
            return Told("type", "ce_type", "data")
        if self.format == "connect":
            return Told(data="payload", schema="schema")
        # No document has a field that is called as a header.
        header = (self.type or "").removeprefix(OF_HEADER)
        return Told(self.type or "", header if header != self.type else "")

    @property
    def event_schemas(self) -> Mapping[str, Schema]:
        """The records that the stage reads, by Avro full name."""
        return {full_name(schema): schema for schema in self.schemas.values()}

    @property
    def wanted_schemas(self) -> Mapping[str, Schema]:
        """`event_schemas`, with only the columns that are read."""
        return {name: self._wanted(schema) for name, schema in self.event_schemas.items()}

    @property
    def events(self) -> Mapping[str, Schema]:
        """The records that the stage processes, by simple name: the rows of its transform, or those that it reads."""
        if self.transform is not None:
            return {ROW: self.transform.schema}
        return {record: self._wanted(schema) for record, schema in self.schemas.items()}

    @property
    def used(self) -> frozenset[str]:
        """The columns that conditions and the re-key need."""
        return frozenset(self.by or ()).union(*(condition.columns for condition in self.conditions))

    @property
    def tables(self) -> tuple[Table, ...]:
        """The joined tables that have as many partitions as the source, and its partitioner."""
        return tuple(dict.fromkeys(join.table for join in self.joins if not isinstance(join.table, Global)))

    @property
    def global_tables(self) -> tuple[Table, ...]:
        """The joined tables that may have any number of partitions."""
        return tuple(dict.fromkeys(join.table for join in self.joins if isinstance(join.table, Global)))

    @property
    def key_format(self) -> KeyFormat:
        """The form of the source's keys that the stage looks for; text if they are as the stores have them."""
        return "string" if self.own_key is None else self.own_key.key_format

    @property
    def may_have_any_key(self) -> bool:
        """Whether a key may begin with 0xFF, as negative numbers of a table's topic do: no store has it."""
        return any(table.key_format != "string" for table in (*self.tables, self.next_table) if table is not None)

    def key_problems(self, key: Sequence[str]) -> Mapping[str, str]:
        """As `keys.key_problems`, of the records that the stage reads."""
        return key_problems(key, self.by) if self.own_key is None else self.own_key.problems

    @property
    def identity(self) -> str:
        """The name that all generations share: records for other topics, dead letters and decisions have it."""
        return self.name if self.generation == 1 else self.owner

    @property
    def full_name(self) -> str:
        """The name that is unique among the stages of all applications."""
        return f"{self.application_id}-{self.name}"

    @property
    def mark(self) -> str:
        """Which stage of which application the positions in a changelog name as their owner.

        `full_name` does not tell stage `eu-balance` of application `pay` from stage `balance` of `pay-eu`.
        """
        return f"{self.application_id}\0{self.name}"

    @property
    def sender(self) -> str:
        """`identity`, unique among the stages of all applications."""
        return f"{self.application_id}-{self.identity}"

    @property
    def rekeyed(self) -> str:
        """The topic that the stage writes, if it passes records on."""
        return f"{self.application_id}-{self.passes_to or self.name}"

    @property
    def targets(self) -> tuple[str, ...]:
        """All topics that the stage writes, except its changelog and dead letters."""
        return (self.rekeyed,) if self.passes_on else self.outputs

    @property
    def changelog(self) -> str:
        """The compacted topic with all records of the stores."""
        return f"{self.full_name}-changelog"

    @property
    def dead_letters(self) -> str:
        """The topic for records of the source that could not be applied; all re-keyed topics share one."""
        return f"{self.application_id if self.reads_rekeyed else self.source}-dead-letters"

    def explained(self) -> str:
        """Returns what the stage's transform does, for people. The stage has one."""
        if self.transform is None:
            raise ValueError(f"stage {self.name} has no transform")
        names = self.transform.names
        by = "not re-keyed" if self.by is None else f"re-keyed by {', '.join(self.by)}, to {self.rekeyed}"
        return (
            f"Stage {self.name} of topic {self.source}\n{self.transform.analysed.explained}\n"
            f"columns read: {', '.join(sorted(self.transform.used)) or 'none'}\n"
            f"columns made: {', '.join(names)}\n{by}"
        )

    def of_generation(self, number: int) -> Stage:
        """The last stage of a read model in another generation, with a changelog and transactional ids of its own."""
        return replace(self, name=generation_name(self.owner, number), generation=number)

    def transactional_id(self, partition: int) -> str:
        """The id of the only producer that may write the changelog of a partition."""
        return f"{self.full_name}-{partition}"

    def row_fields(self, schema: Schema) -> Mapping[str, Any]:
        """Returns the fields of a record, or of the row in it, and their types."""
        for part in self.row[:1]:
            schema, _ = without_null(fields_of(schema)[part])
        return fields_of(schema)

    def row_in(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the row with the key in a record's values; empty if it has none."""
        if not self.row:
            return values
        return next((values[part] for part in self.row if values.get(part) is not None), {})

    def _wanted(self, schema: Schema) -> Schema:
        return schema if self.columns is None else _only(schema, self.columns)


def stages_of_stream(
    name: str,
    source: Stream,
    schema_of: Callable[[str, str | None], Schema],
    suffix: str,
    transform: Transform | None = None,
) -> list[Stage]:
    """Returns the stages that a stream is cut into at its re-keys, in order, at least one; the last one is the model's.

    Args:
        suffix: the end of the names of all stages but the last.
        schema_of: (simple name, topic that it is read from or None) → schema.
        transform: the rows that the first stage makes of its events; the last one, after a re-key of the events.
    """
    done: list[Stage] = []
    is_behind = any(isinstance(step, By) and step.unchanged for step in source.steps)
    # The registry is asked only for the topics that use it.
    topic = source.topic if source.format == "avro" else None
    schemas: Mapping[str, Schema] = {record: schema_of(record, topic) for record in source.records}
    stage = Stage(
        name=name,
        owner=name,
        source=source.topic,
        partitioner=source.partitioner,
        tombstones=source.tombstones,
        compacted=source.compacted,
        format=source.format,
        type=source.type,
        schemas=schemas,
        transform=None if is_behind else transform,
        columns=None if transform is None else _read_by(transform, [*schemas.values()]),
    )
    for step in source.steps:
        match step:
            case Where(condition):
                columns = None if stage.columns is None else stage.columns | condition.columns
                stage = replace(stage, conditions=(*stage.conditions, condition), columns=columns)
            case Join():
                table = step.table
                of_rows = schema_of(table.record, table.topic if table.format == "avro" else None)
                rows = {**stage.rows, table.record: of_rows}
                stage = replace(stage, joins=(*stage.joins, step), rows=rows)
                if done and not isinstance(table, Global):
                    done[-1] = replace(done[-1], next_table=table)
            case By(by, record):
                makes = None if record is None else schema_of(record, None)
                if stage.transform is not None:
                    record, makes = ROW, stage.transform.schema
                done.append(replace(stage, name=f"{name}-by-{'-'.join(by)}{suffix}", by=by, makes=makes))
                schemas = stage.schemas if makes is None or record is None else {record: makes}
                rekeyed = Stage(
                    name=name, owner=name, source=done[-1].name, schemas=schemas, key=by, reads_rekeyed=True
                )
                stage = rekeyed if makes is not None else replace(rekeyed, format=stage.format, type=stage.type)
                if is_behind:
                    # Both read the same columns, so a record that does not decode is a dead letter of the first.
                    columns = done[0].columns
                    stage = replace(stage, transform=transform, columns=columns)
    return [*done, stage]


def _only(schema: Schema, paths: frozenset[str]) -> Schema:
    """Returns a record's schema with some fields, and of the records in it those that a path names."""
    fields = []
    for one in schema["fields"]:
        outer = f"{one['name']}."
        inner = frozenset(path.removeprefix(outer) for path in paths if path.startswith(outer))
        kind, is_nullable = without_null(one["type"])
        if one["name"] in paths:
            fields.append(one)
        elif inner:
            part = _only(kind, inner)
            fields.append({**one, "type": ["null", part] if is_nullable else part})
    return {**schema, "fields": fields}


def _read_by(transform: Transform, schemas: Sequence[Schema]) -> frozenset[str] | None:
    """Returns the columns that are read for a transform; None for all: columns of several records are structs."""
    if len(schemas) > 1:
        return None
    # One at least, so that records that do not decode are found.
    return transform.used or frozenset([*fields_of(schemas[0])][:1])
