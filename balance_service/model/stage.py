"""A stage: the work on one topic for a read model, or for retries; how it is called, in Kafka and on disk.

A stage reads a topic, and either passes the records on by another key, which ends it, or is the last of its read model,
which folds or emits. It is a value: `engine` puts together what does the work, for the service and for the test driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from balance_service.avro.schemas import full_name
from balance_service.model.flow import By, Select, Where
from balance_service.model.joins import Global, Join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition
    from balance_service.model.flow import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Its tasks are `<name>_<partition>`."""

    name: str
    """Of the last stage, the read model's; else that of the topic it writes, but for the application id."""
    owner: str
    """The read model that it works for; of retries, its own name."""
    source: str
    """The topic that it reads."""
    application_id: str = ""
    """Empty until the stage is placed in an application."""
    written_to: str = ""
    """The topic for which the source's records were encoded: most are passed on as they are."""
    schemas: Mapping[str, Schema] = field(default_factory=dict, repr=False)
    """The records that it reads, by simple name. Retries have none, and take all records as they are."""
    conditions: tuple[Condition, ...] = ()
    key: str | None = None
    """The column that is the key of what it reads; None where that may be anything."""
    columns: frozenset[str] | None = None
    """The columns of its records that are read; None: all."""
    joins: tuple[Join, ...] = ()
    rows: Mapping[str, Schema] = field(default_factory=dict, repr=False)
    """The records of the tables that it joins with, by simple name."""
    by: str | None = None
    """The column whose value is the key of what it passes on; None: it is the last."""
    makes: Schema | None = field(default=None, repr=False)
    """The record of what it passes on, where that is joined; None: records go on as they are."""
    next_table: str | None = None
    """The table by whose keys it passes records on, to a topic of as many partitions; None: keys are as `keys` says."""
    outputs: tuple[str, ...] = ()
    """The topics that its read model emits to."""
    reads_rekeyed: bool = False
    """Whether its source is the topic that the stage before it writes, which may be purged."""
    retries: bool = False
    """Whether it has no read model, and its source is where another producer keeps its dead letters."""

    @property
    def passes_on(self) -> bool:
        """Whether it writes the topic that the next stage of its read model reads."""
        return self.by is not None

    @property
    def records(self) -> tuple[str, ...]:
        """The simple names of the records that it reads."""
        return tuple(self.schemas)

    @property
    def event_schemas(self) -> Mapping[str, Schema]:
        """The records that it reads, by Avro full name."""
        return {full_name(schema): schema for schema in self.schemas.values()}

    @property
    def wanted_schemas(self) -> Mapping[str, Schema]:
        """The same records, with the columns alone that are read."""
        return {name: self._wanted(schema) for name, schema in self.event_schemas.items()}

    @property
    def tables(self) -> tuple[str, ...]:
        """The topics of the tables that it joins with, which have as many partitions as its source."""
        return tuple(dict.fromkeys(join.table.topic for join in self.joins if not isinstance(join.table, Global)))

    @property
    def global_tables(self) -> tuple[str, ...]:
        """The topics of the tables that it joins with, and that may have any number of partitions."""
        return tuple(dict.fromkeys(join.table.topic for join in self.joins if isinstance(join.table, Global)))

    @property
    def full_name(self) -> str:
        """What tells it from the stages of all applications."""
        return f"{self.application_id}-{self.name}"

    @property
    def rekeyed(self) -> str:
        """The topic that it writes, if it passes records on."""
        return self.full_name

    @property
    def targets(self) -> tuple[str, ...]:
        """Every topic that it sends to, beside its own."""
        return (self.rekeyed,) if self.passes_on else self.outputs

    @property
    def changelog(self) -> str:
        """The compacted topic that holds the stores, record for record."""
        return f"{self.full_name}-changelog"

    @property
    def dead_letters(self) -> str:
        """The topic that keeps the source's records which could not be applied; the topics between stages share one."""
        return f"{self.application_id if self.reads_rekeyed else self.source}-dead-letters"

    def transactional_id(self, partition: int) -> str:
        """Of the one producer that may write the changelog of a partition."""
        return f"{self.full_name}-{partition}"

    def _wanted(self, schema: Schema) -> Schema:
        columns = self.columns
        if columns is None:
            return schema
        return {**schema, "fields": [field for field in schema["fields"] if field["name"] in columns]}


def declared_stages(
    name: str,
    source: Stream,
    outputs: Iterable[str],
    needed: Iterable[str],
    schema_of: Callable[[str, str | None], Schema],
) -> tuple[Stage, ...]:
    """The stages of a read model, in order, at least one; they are not placed in an application yet.

    Args:
        outputs: the topics that it emits to.
        needed: columns that are read, be they selected or not.
        schema_of: simple name, and the topic that it is read from if it is → schema.
    """
    done: list[Stage] = []
    columns: frozenset[str] | None = None
    used = set(needed)
    schemas: Mapping[str, Schema] = {record: schema_of(record, source.topic) for record in source.records}
    stage = Stage(name=name, owner=name, source=source.topic, schemas=schemas)
    for step in source.steps:
        match step:
            case Select():
                columns = step.columns
            case Where(condition):
                used |= condition.columns
                stage = replace(stage, conditions=(*stage.conditions, condition))
            case Join():
                table = step.table
                rows = {**stage.rows, table.record: schema_of(table.record, table.topic)}
                stage = replace(stage, joins=(*stage.joins, step), rows=rows)
                if done and not isinstance(table, Global):
                    done[-1] = replace(done[-1], next_table=table.topic)
            case By(column, record):
                used.add(column)
                makes = None if record is None else schema_of(record, None)
                done.append(replace(stage, name=f"{name}-by-{column}", by=column, makes=makes))
                schemas = stage.schemas if makes is None or record is None else {record: makes}
                stage = Stage(
                    name=name, owner=name, source=done[-1].name, schemas=schemas, key=column, reads_rekeyed=True
                )
    last = replace(stage, outputs=tuple(outputs))
    # The same in all of them: what cannot be decoded in the end becomes a dead letter where it comes in.
    return tuple(replace(one, columns=None if columns is None else columns | used) for one in (*done, last))
