"""Analyses the `transform` of a read model, and makes of it the steps that `Decoder.updates` adds to its plan.

The code is applied once, to a DataFrame without rows that has the columns of the model's events. `java/Transform.java`
rewrites what Spark's analyser makes of it; so a failing expression, a filter or a generator concerns its record alone.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.java_gateway import JavaPackage
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql import types as T  # noqa: N812  (as above)
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

from balance_service.avro.named_types import contracted
from balance_service.avro.schemas import fields_of, without_null
from balance_service.errors import ConfigurationError
from balance_service.model.transform import ENVELOPE, ROW, Transform
from balance_service.spark.session import any_session

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from pyspark.sql import Column, SparkSession

    from balance_service.avro.schemas import Schema
    from balance_service.model.stream import Stream

_HEADERS = T.ArrayType(
    T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())]), containsNull=False
)
_OF_RECORD = dict(
    zip(
        ENVELOPE,
        (
            T.StructField("_key", T.BinaryType()),
            T.StructField("_headers", _HEADERS),
            T.StructField("_timestamp", T.TimestampType(), nullable=False),
            T.StructField("_topic", T.StringType(), nullable=False),
            T.StructField("_partition", T.IntegerType(), nullable=False),
            T.StructField("_offset", T.LongType(), nullable=False),
        ),
        strict=True,
    )
)
# Spark type → Avro type. docs/how-to/spark.md has the table for people.
_AVRO: Mapping[type[T.DataType], Any] = {
    T.BooleanType: "boolean",
    T.ByteType: "int",
    T.ShortType: "int",
    T.IntegerType: "int",
    T.LongType: "long",
    T.FloatType: "float",
    T.DoubleType: "double",
    T.StringType: "string",
    T.BinaryType: "bytes",
    T.DateType: {"type": "int", "logicalType": "date"},
    T.TimestampType: {"type": "long", "logicalType": "timestamp-micros"},
    T.TimestampNTZType: {"type": "long", "logicalType": "local-timestamp-micros"},
}
_MOST_SAID = 400
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The columns of `java/Transform.java`.
_STEP = "#step "


def analysed(model: Any, schemas: Mapping[str, Schema], source: Stream | None) -> Transform:
    """Returns the analysed `transform` of a read model. Arguments and errors as for `model.transform.transform_of`."""
    # Of its own, so that the code changes no setting of the others.
    spark = any_session(model.schemas.settings).newSession()
    if isinstance(_jvm_of(spark).Transform, JavaPackage):
        raise ConfigurationError(
            "has a `transform`, and a SparkSession runs in this process that the service has not started: stop it first"
        )
    events = spark.createDataFrame([], _columns_of(spark, schemas))
    made, plan = _plan_of(model, events, source)
    columns = [one for one in made.schema.fields if not one.name.startswith("_")]
    names = [one.name for one in columns]
    _check_names(names)
    fields = []
    numbers = count(1)
    for one in columns:
        try:
            kind = _avro_type(one.dataType, numbers)
        except ValueError as error:
            raise ConfigurationError(
                f"returns '{one.name}' from `transform`, {error}: cast it to a type that states can have, or drop it"
            ) from None
        fields.append({"name": one.name, "type": ["null", kind] if one.nullable else kind})
    # A literal such as the present time looks like any other.
    if _plan_of(model, events, source)[1].fingerprint(names) != plan.fingerprint(names):
        raise ConfigurationError(
            "returns another plan each time from `transform`, so a rebuild would have other values: use the columns of "
            "the event, such as `_timestamp`, the time of its record"
        )
    return Transform({"type": "record", "name": ROW, "fields": fields}, Analysis(plan, made))


def _plan_of(model: Any, events: DataFrame, source: Stream | None) -> tuple[DataFrame, Any]:
    """Calls a `transform`; returns its DataFrame, and that as a plan for single records. Raises as `analysed`."""
    spark = events.sparkSession
    before = spark.conf.getAll
    try:
        with _in_utc():
            made = model.transform(events) if source is None else model.transform(events, source)
    except ConfigurationError:
        raise
    except Exception as error:  # The model's own code, or what Spark says about it.
        raise ConfigurationError(f"has a `transform` that fails: {_said(error)}") from error
    if changed := {name for name, _ in before.items() ^ spark.conf.getAll.items()}:
        raise ConfigurationError(f"sets {min(changed)} in `transform`, which only the service sets: remove that")
    if not isinstance(made, DataFrame):
        raise ConfigurationError(f"returns {type(made).__name__} from `transform`, which is to return a DataFrame")
    try:
        return made, _jvm_of(spark).Transform(events._jdf, made._jdf)
    except (Py4JJavaError, PySparkException) as error:
        raise ConfigurationError(f"has a `transform` that {_said(error)}") from error


class Analysis:
    """The analysed code of a `transform`; see `model.transform.Analysed`."""

    def __init__(self, plan: Any, made: DataFrame) -> None:
        self._plan = plan
        self.multiplies: bool = plan.multiplies()
        # At once, because another session may replace this one.
        execution = made._jdf.queryExecution()
        self.explained: str = f"== As written ==\n{execution.analyzed()}\n== Optimised ==\n{_optimised(execution)}"

    def __reduce__(self) -> tuple[type[Elsewhere], tuple[bool, str]]:
        return Elsewhere, (self.multiplies, self.explained)

    def used(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(self._plan.used([*names])) - {*ENVELOPE}

    def untouched(self, name: str) -> str | None:
        found: str | None = self._plan.untouched(name)
        return found

    def fingerprint(self, names: Collection[str]) -> str:
        text: str = self._plan.fingerprint([*names])
        return text

    def apply(
        self, records: DataFrame, names: Sequence[str], columns: Mapping[str, Sequence[str]], topic: str, cause: str
    ) -> Made:
        """Adds the steps to the decoder's records.

        Args:
            names: the columns of rows that are wanted.
            columns: of an event: name → the path of a column of the records.
            topic: the value of `_topic`.
            cause: the column that is null if a record has an event.
        """
        paths = {name: [*path] for name, path in columns.items()}
        made = ClassicDataFrame(self._plan.apply(records._jdf, [*names], paths, topic, cause), records.sparkSession)
        steps = [name for name in made.columns if name.startswith(_STEP)]
        failure = F.coalesce(*(F.col(f"`{name}`.failure") for name in steps))
        return Made(made, F.col(f"`{steps[-1]}`.{'value.rows' if self.multiplies else 'value'}"), failure)


class Elsewhere(NamedTuple):
    """What a process without the JVM has of an `Analysis`: a Python worker folds rows, and makes none."""

    multiplies: bool
    explained: str


class Made:
    """The decoder's records with what a `transform` makes of them.

    Attributes:
        records: with a column for each step.
        row: the row of a record, a struct, or the list of its rows if the code has a generator; null if it has none.
        failure: why an expression failed; null if none did.
    """

    def __init__(self, records: DataFrame, row: Column, failure: Column) -> None:
        self.records = records
        self.row = row
        self.failure = failure


def _jvm_of(spark: SparkSession) -> Any:
    """Returns the classes of `java/`."""
    jvm: Any = spark._jvm
    return jvm.parts.code.balance


def _optimised(execution: Any) -> str:
    try:
        return str(execution.optimizedPlan())
    except (Py4JJavaError, PySparkException) as error:
        # A constant that cannot be computed.
        return _said(error)


@contextmanager
def _in_utc() -> Iterator[None]:
    """Sets the time zone of the process: PySpark reads a time without a zone as one of that."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        os.environ.pop("TZ")
        os.environ.update({} if before is None else {"TZ": before})
        time.tzset()


def _columns_of(spark: SparkSession, schemas: Mapping[str, Schema]) -> T.StructType:
    """Returns the columns of events: those of the record if there is one type, a struct for each of several."""
    read = _jvm_of(spark).Resolving([json.dumps(contracted(schema)) for schema in schemas.values()], False).type()
    records = T.StructType.fromJson(json.loads(read.json())).fields[-len(schemas) :]
    if len(records) == 1:
        (schema,) = schemas.values()
        record: Any = records[0].dataType
        fields = fields_of(schema)
        records = [
            T.StructField(one.name, one.dataType, nullable=without_null(fields[one.name])[1]) for one in record.fields
        ]
    if taken := {*ENVELOPE} & {one.name for one in records}:
        raise ConfigurationError(f"has a `transform`, and a field '{min(taken)}', which is a column of Kafka's record")
    return T.StructType([*records, *_OF_RECORD.values()])


def _check_names(names: Sequence[str]) -> None:
    """Refuses names of columns that fields of a record cannot have, or that Spark does not tell apart."""
    known: set[str] = set()
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"returns '{name}' from `transform`, which is not a name of letters, digits and underscores: name the "
                "column with `alias`"
            )
        if name.lower() in known:
            raise ConfigurationError(f"returns two columns '{name}' from `transform`: rename or drop one of them")
        known.add(name.lower())


def _avro_type(kind: T.DataType, numbers: Iterator[int]) -> Any:
    """Returns the Avro type of values of a Spark type.

    Args:
        numbers: of the records that are made of structs.

    Raises:
        ValueError: states cannot have such values; the message is the rest of a sentence about a column.
    """
    match kind:
        case T.DecimalType():
            return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
        case T.StringType() if not kind.isUTF8BinaryCollation():
            raise ValueError(f"whose collation is {kind.collation}")
        case T.ArrayType():
            return {"type": "array", "items": _nullable(kind.elementType, numbers, is_nullable=kind.containsNull)}
        case T.MapType() if isinstance(kind.keyType, T.StringType):
            return {"type": "map", "values": _nullable(kind.valueType, numbers, is_nullable=kind.valueContainsNull)}
        case T.StructType():
            if misnamed := [one.name for one in kind.fields if not _NAME.fullmatch(one.name)]:
                raise ValueError(f"whose member '{misnamed[0]}' is not a name of letters, digits and underscores")
            fields = [
                {"name": one.name, "type": _nullable(one.dataType, numbers, is_nullable=one.nullable)}
                for one in kind.fields
            ]
            return {"type": "record", "name": f"{ROW}{next(numbers)}", "fields": fields}
    found = _AVRO.get(type(kind))
    if found is None:
        raise ValueError(f"whose type is {kind.simpleString()}")
    return found


def _nullable(kind: T.DataType, numbers: Iterator[int], *, is_nullable: bool) -> Any:
    found = _avro_type(kind, numbers)
    return ["null", found] if is_nullable else found


def _said(error: BaseException) -> str:
    """Returns the first line of what an error says."""
    cause = getattr(error, "java_exception", None)
    text = str(cause.getMessage() if cause is not None else error) or type(error).__name__
    if isinstance(error, PySparkException):
        text = error.getMessage() or text
    return text.strip().partition("\n")[0][:_MOST_SAID]
