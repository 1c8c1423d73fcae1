"""The outputs of a model without states as Spark columns: whether an event is sent, and the records made of columns."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.classic.column import Column as ClassicColumn

from balance_service.avro.named_types import contracted, expanded
from balance_service.avro.schemas import fields_of, without_null
from balance_service.model.conditions import Field
from balance_service.model.made_records import MISFIT, UNFIT, columns_of, output_column
from balance_service.spark.columns import event_column, holds_in

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from balance_service.avro.schemas import Schema
    from balance_service.model.events import Emit
    from balance_service.model.made_records import OfEvent
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage


_WITHOUT_HEADER = b""


class MadeRecords:
    """Encodes the parts of records that are columns of the event; see `java/Writing.java`."""

    def __init__(self, spark: SparkSession, read_model: ReadModel, stage: Stage) -> None:
        jvm: Any = spark._jvm
        self._writing = jvm.parts.code.balance.Writing
        self._stage = stage
        outputs = read_model.outputs if stage.by is None else ()
        self._parts = {part.column: (emit, part) for emit, part in columns_of(outputs, read_model.made_schemas)}
        self._made = read_model.made_schemas
        self._items = {output_column(number): emit for number, emit in enumerate(outputs) if emit.of is not None}
        self._whole = {
            output_column(number): emit
            for number, emit in enumerate(outputs)
            if not emit.fields and emit.of is None and not read_model.has_states()
        }

    def tried(self) -> dict[str, Column]:
        """Returns the columns for outputs; null if an event is not sent.

        Each is true for an output that makes no record of columns, or else a struct of a `frame`, the part of the
        record without a header, or a list of those of an array; or of the `misfit` that it has.
        """
        parts = {name: self._sent(emit, self._part(part)) for name, (emit, part) in self._parts.items()}
        parts |= {name: self._sent(emit, self._all_of(emit)) for name, emit in self._items.items()}
        return parts | {name: self._sent(emit, F.lit(True)) for name, emit in self._whole.items()}

    def columns(self) -> dict[str, Column]:
        """Returns the columns that are handed over, of those of `tried`."""
        parts = {name: F.col(f"`{name}`.frame") for name in (*self._parts, *self._items)}
        return parts | {name: F.col(f"`{name}`") for name in self._whole}

    def cause(self) -> Column:
        """Returns the cause for which an event cannot be sent; null if it can."""
        return F.when(self.detail().isNotNull(), UNFIT)

    def detail(self) -> Column:
        """Returns which field of the first record that does not fit has which value; null if all fit."""
        misfits = [F.concat(F.lit(f"{MISFIT}: "), F.col(f"`{name}`.misfit")) for name in (*self._parts, *self._items)]
        return F.coalesce(F.lit(None).cast("string"), *misfits)

    def _sent(self, emit: Emit, sent: Column) -> Column:
        return sent if emit.where is None else F.when(holds_in(self._stage.events, emit.where), sent)

    def _part(self, part: OfEvent) -> Column:
        made = [self._of_record(part, expanded(schema)) for schema in self._stage.events.values()]
        return made[0] if len(made) == 1 else F.coalesce(*made)

    def _all_of(self, emit: Emit) -> Column:
        """Returns the records of an array, each encoded; null without an array."""
        made = []
        for record, schema in self._stage.events.items():
            items, _ = without_null(without_null(fields_of(expanded(schema))[str(emit.of)])[0]["items"])
            writing = self._writing(
                _text(self._made[str(emit.record)]), _WITHOUT_HEADER, self._writing.typeOf(_text(items))
            )
            array = event_column(record, str(emit.of))
            made.append(F.when(array.isNotNull(), ClassicColumn(writing.allTried(array._jc))))
        return made[0] if len(made) == 1 else F.coalesce(*made)

    def _of_record(self, part: OfEvent, given: Schema) -> Column:
        record = given["name"]
        columns = [{"name": field, "type": Field(path).type_in(given)} for field, path in part.paths.items()]
        typed = self._writing.typeOf(_text({"type": "record", "name": "Taken", "fields": columns}))
        taken = F.struct(*(event_column(record, path).alias(field) for field, path in part.paths.items()))
        tried = self._writing(_text(part.schema), _WITHOUT_HEADER, typed).tried(taken._jc)
        return F.when(event_column(record).isNotNull(), ClassicColumn(tried))


def _text(schema: Schema) -> str:
    return json.dumps(contracted(schema))
