"""Fingerprints of transforms: texts that are the same in every process, and differ where the computation does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.errors import ConfigurationError
from balance_service.model.folds import Count
from balance_service.model.generations import Generations
from balance_service.model.read_model import ReadModel
from balance_service.model.versions import Versions, declaration_of
from balance_service.settings import load_settings
from balance_service.spark.session import start_spark
from tests.integration.transformed import Seen, Transformed
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

    from tests.integration.transformed import Code

_ROOT = Path(__file__).parents[2]
_RECORDED = _ROOT / "tests" / "data" / "transforms"


def points(events: DataFrame, rate: Any = 0.02, kind: str = "12", cast: str = "bigint") -> DataFrame:
    earned = F.floor(F.col("paid") * F.lit(rate)).cast(cast)
    return events.where(F.col("text") == kind).select("id", earned.alias("points"))


def lines(events: DataFrame) -> DataFrame:
    items = events.withColumn("day", F.to_date("at")).select("id", "day", F.explode("items").alias("item"))
    return items.where("item.qty > 0").select("id", F.date_format("day", "yyyy-MM").alias("month"), "item.cost")


def nested(events: DataFrame) -> DataFrame:
    items = events.select("id", "small", F.inline_outer("items"))
    notes = items.select("id", "code", F.posexplode_outer("notes").alias("at", "note"), (F.col("qty") / F.col("small")))
    return notes.select("id", "code", "at", "note")


def of_arrays(events: DataFrame) -> DataFrame:
    large = F.filter("nums", lambda number: number > F.col("n"))
    return events.select(
        "id",
        F.transform(large, lambda number, index: number * index).alias("large"),
        F.aggregate("nums", F.lit(0).cast("bigint"), lambda total, number: total + F.coalesce(number, F.lit(0))).alias(
            "sum"
        ),
        F.expr("map_filter(counts, (k, v) -> v > 0 and k != 'x')").alias("counts"),
    )


def once(events: DataFrame) -> DataFrame:
    return events.select(
        "id",
        F.expr("(n + 1) between small and big").alias("between"),
        F.expr("nullif(n + 1, small)").alias("nullif"),
        F.expr("case when is_on then price when n > 1 then paid end").alias("price"),
        F.expr("named_struct('at', at, 'city', place.city)").alias("place"),
    )


def of_record(events: DataFrame) -> DataFrame:
    return events.select(
        "id",
        F.col("_key").cast("string").alias("key"),
        F.col("_topic").alias("topic"),
        F.expr("_headers[0].value").alias("first"),
    )


CODES: Mapping[str, Code] = {
    "points": points,
    "lines": lines,
    "nested": nested,
    "of_arrays": of_arrays,
    "once": once,
    "of_record": of_record,
}


def fingerprint(code: Code) -> str:
    transform = Transformed(code).stages[0].transform
    assert transform is not None
    return transform.fingerprint


def fingerprints(names: Iterable[str]) -> dict[str, str]:
    return {name: fingerprint(CODES[name]) for name in names}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


def recorded() -> dict[str, str]:
    return {file.stem: file.read_text(encoding="utf-8") for file in _RECORDED.glob("*.txt")}


@pytest.mark.usefixtures("spark")
def test_fingerprints_are_those_that_were_recorded() -> None:
    assert fingerprints(CODES) == recorded()


def test_another_process_that_binds_in_another_order_finds_the_same_fingerprints() -> None:
    code = (
        "import json\n"
        "from tests.integration.test_transform_fingerprints import CODES, fingerprints\n"
        "print(json.dumps(fingerprints(reversed([*CODES, *CODES]))))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )

    assert json.loads(done.stdout.splitlines()[-1]) == recorded()


def renamed(events: DataFrame) -> DataFrame:
    of_kind = events.where(F.col("text") == "12").withColumn("unused", F.expr("n / small")).withColumn("n", F.lit(1))
    amount = of_kind.withColumnRenamed("paid", "amount").select("id", "amount")
    return amount.select("id", F.floor(F.col("amount") * F.lit(0.02)).cast("bigint").alias("points"))


@pytest.mark.usefixtures("spark")
def test_names_and_columns_that_are_not_used_do_not_change_a_fingerprint() -> None:
    one = fingerprint(lambda events: events.select("id", F.transform("nums", lambda one: one + 1).alias("c")))
    other = fingerprint(lambda events: events.select("id", F.transform("nums", lambda other: other + 1).alias("c")))

    assert fingerprint(renamed) == recorded()["points"]
    assert one == other


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    "changed",
    [
        lambda events: points(events, 0.03),
        lambda events: points(events, F.lit("0.02").cast("decimal(3,2)")),
        lambda events: points(events, F.lit(0.02).cast("float")),
        lambda events: points(events, kind="13"),
        lambda events: points(events, cast="int"),
        lambda events: points(events).where("points > 0"),
        lambda events: points(events.where("n > 0")),
        lambda events: points(events.withColumn("paid", F.col("price"))),
        lambda events: points(events).select("id", F.try_add("points", F.lit(0)).alias("points")),
    ],
    ids=[
        "another rate",
        "a decimal",
        "a float",
        "another filter",
        "another type",
        "one more filter",
        "one before",
        "another column",
        "one more function",
    ],
)
def test_another_computation_has_another_fingerprint(changed: Code) -> None:
    assert fingerprint(changed) != recorded()["points"]


def by_id(rate: float) -> Code:
    return lambda events: points(events, rate).where("points > 0")


def by_city(rate: float) -> Code:
    return lambda events: by_id(rate)(events.withColumn("id", F.col("place.city"))).where("id is not null")


def counted(code: Code, version: int) -> Transformed:
    """Returns a version of a model that counts rows."""
    attributes = {"version": version, "rows": Count(), "fold": ReadModel.fold, "state": Seen}
    made: type[Transformed] = type("Counted", (Transformed,), attributes)
    return made(code)


@pytest.mark.usefixtures("spark")
def test_another_transform_under_the_same_key_is_built_as_a_new_generation() -> None:
    former, newer = counted(by_id(0.02), 1), counted(by_id(0.03), 2)
    same = counted(by_id(0.02), 2)

    one, two = declaration_of(former), declaration_of(newer)
    assert one.reads == two.reads
    assert one.fingerprint != two.fingerprint
    assert one.fingerprint == declaration_of(same).fingerprint
    Versions([former, newer], load_settings(), lambda _name: Generations(former.name).begun(one))


@pytest.mark.usefixtures("spark")
def test_another_transform_in_front_of_a_re_key_is_refused_as_a_generation() -> None:
    former, newer = counted(by_city(0.02), 1), counted(by_city(0.03), 2)

    assert len(former.stages) == 2
    with pytest.raises(ConfigurationError, match="'test-transformed', version 2, reads another topic, re-keys "):
        Versions([former, newer], load_settings(), lambda _name: Generations(former.name).begun(declaration_of(former)))
    Versions([former, counted(by_city(0.02), 2)], load_settings(), lambda _name: Generations(former.name))
