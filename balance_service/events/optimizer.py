"""Spark's optimiser, run once for each query instead of once for each micro-batch.

Spark plans each micro-batch anew, and a good part of that is a hundred rules of its optimiser, run until the plan no
longer changes. From batch to batch only ranges of offsets differ, and no rule looks at those: what the rules find in a
later batch they found in the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

_EXCLUDED = "spark.sql.optimizer.excludedRules"


class Optimizer:
    """The optimiser of one session. From then on the session runs only those rules that correctness needs."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        # Private names: PySpark has no others for the JVM's side of a session.
        session: Any = spark._jsparkSession
        self._session = session
        optimizer = session.sessionState().optimizer()
        rules = {rule.ruleName() for batch in _each(optimizer.batches()) for rule in _each(batch.rules())}
        self._optional = ",".join(sorted(rules - set(_each(optimizer.nonExcludableRules()))))
        spark.conf.set(_EXCLUDED, self._optional)

    def once(self, rows: DataFrame) -> DataFrame:
        """The same rows, by a plan on which all rules have been run."""
        frame: Any = rows
        jvm: Any = self._spark._jvm
        self._spark.conf.unset(_EXCLUDED)
        try:
            plan = self._session.sessionState().optimizer().execute(frame._jdf.queryExecution().analyzed())
        finally:
            self._spark.conf.set(_EXCLUDED, self._optional)
        dataset = jvm.org.apache.spark.sql.classic.Dataset.ofRows(self._session, plan)
        same: DataFrame = ClassicDataFrame(dataset, self._spark)
        return same


def _each(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(n) for n in range(sequence.size()))
