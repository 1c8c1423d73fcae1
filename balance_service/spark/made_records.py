"""The outputs of a model without states as Spark columns: whether an event is sent, and the records made of columns."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.classic.column import Column as ClassicColumn

from balance_service.avro.named_types import contracted, expanded
from balance_service.avro.schemas import subject_of
from balance_service.model.conditions import Field
from balance_service.model.made_records import MISFIT, UNFIT, output_column
from balance_service.spark.columns import holds_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, SparkSession

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.model.events import Emit
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage


class MadeRecords:
    """Encodes the records of outputs with `fields`; see `java/Writing.java`."""

    def __init__(self, spark: SparkSession, read_model: ReadModel, stage: Stage, registry: SchemaRegistry) -> None:
        """Registers the schemas of the records. Raises as `SchemaRegistry.register`."""
        self._jvm: Any = spark._jvm
        self._registry = registry
        is_sending = stage.by is None and not read_model.has_states()
        self._stage = stage
        self._outputs = {output_column(n): emit for n, emit in enumerate(read_model.outputs if is_sending else ())}
        self._writings = {
            (name, schema["name"]): self._writing(emit, read_model.made_schemas[str(emit.record)], expanded(schema))
            for name, emit in self._outputs.items()
            for schema in (stage.wanted_schemas.values() if emit.fields else ())
        }

    def tried(self) -> dict[str, Column]:
        """Returns a column for each output: null if an event is not sent.

        Otherwise it is true; or, for an output with `fields`, a struct of the `frame`, or the `misfit` that it has.
        """
        return {name: self._tried(name, emit) for name, emit in self._outputs.items()}

    def sent(self) -> dict[str, Column]:
        """Returns a column for each column of `tried`: null if an event is not sent, else true or the frame."""
        return {name: F.col(f"`{name}`.frame" if emit.fields else f"`{name}`") for name, emit in self._outputs.items()}

    def cause(self) -> Column:
        """Returns the cause for which an event cannot be sent; null if it can."""
        return F.when(self.detail().isNotNull(), UNFIT)

    def detail(self) -> Column:
        """Returns which field of the first record that does not fit has which value; null if all fit."""
        return F.coalesce(F.lit(None).cast("string"), *self._misfits())

    def _misfits(self) -> Iterator[Column]:
        for name, emit in self._outputs.items():
            if emit.fields:
                yield F.concat(F.lit(MISFIT), F.col(f"`{name}`.misfit"))

    def _tried(self, name: str, emit: Emit) -> Column:
        holds = F.lit(True) if emit.where is None else holds_in(self._stage, emit.where)
        if not emit.fields:
            return F.when(holds, F.lit(True))
        made = [self._made(name, emit, record) for record in self._stage.records]
        return F.when(holds, made[0] if len(made) == 1 else F.coalesce(*made))

    def _made(self, name: str, emit: Emit, record: str) -> Column:
        taken = F.struct(*(F.col(f"{record}.{path}").alias(field) for field, path in emit.fields.items()))
        tried = ClassicColumn(self._writings[name, record].tried(taken._jc))
        return F.when(F.col(record).isNotNull(), tried)

    def _writing(self, emit: Emit, made: Schema, given: Schema) -> Any:
        """Returns the writer of a record of columns that an event has."""
        columns = [{"name": field, "type": Field(str(path)).type_in(given)} for field, path in emit.fields.items()]
        typed = {"type": "record", "name": "Taken", "fields": columns}
        schema_id = self._registry.register(subject_of(emit.topic, made), contracted(made))
        writing = self._jvm.parts.code.balance.Writing
        return writing(json.dumps(contracted(made)), schema_id, writing.typeOf(json.dumps(contracted(typed))))
