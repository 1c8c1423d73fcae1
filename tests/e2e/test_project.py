"""A project of its own, with the service from its wheel: written, tested, tried, and served by two instances.

Its model has a `transform` with a window and a computed key, and sends an output. One of the instances is killed.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import fastavro
import httpx
import pytest

from tests.e2e.projects import Project
from tests.support.commands import run, started
from tests.support.kafka import read_topic
from tests.support.recount import schema_of
from tests.support.service import application, new_instance, on, retried, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

pytestmark = pytest.mark.timeout(900)

FILES = {
    "shop/baskets.py": '''"""What is sold of each article in each hour."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Annotated

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from balance_service import EVENT, Count, Emit, OfState, ReadModel, RunningSum, Stream, scale

Money = Annotated[Decimal, scale(2)]


@dataclass
class Line:
    article: str
    pieces: int
    amount: Money


@dataclass
class BasketPaid:
    """A customer has paid. The record's key is the store."""

    basketId: str
    store: str
    paidAt: datetime
    isTest: bool
    lines: list[Line]


@dataclass
class Hour:
    article: str
    hour: str
    lines: int
    revenue: Money


@dataclass
class Sold:
    basketId: str
    article: str
    price: Money
    revenue: Money


class Hourly(ReadModel):
    """Lines and revenue by article and hour. A line without pieces has no price: its basket is a dead letter."""

    name = "hourly"
    source = Stream("baskets", BasketPaid)
    key = ("article", "hour")
    state = Hour
    lines = Count()
    revenue = RunningSum("amount")
    emits = Emit(
        "sold",
        Sold,
        each=EVENT,
        fields={"basketId": "basketId", "article": "article", "price": "price", "revenue": OfState("revenue")},
    )

    def transform(self, events: DataFrame) -> DataFrame:
        hour = F.date_format(F.date_trunc("hour", "paidAt"), "yyyy-MM-dd'T'HH")
        paid = events.where(~F.col("isTest"))
        lines = paid.select("basketId", hour.alias("hour"), F.explode("lines").alias("line"))
        amount = F.col("line.amount")
        return lines.select(
            "basketId",
            "hour",
            F.upper("line.article").alias("article"),
            amount.alias("amount"),
            (amount / F.col("line.pieces")).cast("decimal(38,2)").alias("price"),
        )
''',
    "tests/test_baskets.py": '''"""Tests of the read model `hourly`, with Spark and without a broker."""

from datetime import UTC, datetime
from decimal import Decimal

from balance_service.testing import Driver, check_contract

from shop.baskets import BasketPaid, Hourly, Line, Sold

TEN = datetime(2026, 3, 2, 10, 59, tzinfo=UTC)
ELEVEN = datetime(2026, 3, 2, 11, 0, tzinfo=UTC)


def paid(at: datetime, *lines: Line, is_test: bool = False) -> BasketPaid:
    return BasketPaid("b-1", "store-1", at, is_test, [*lines])


def test_lines_are_added_up_by_article_and_hour() -> None:
    tea = Line("tea", 2, Decimal("5.00"))
    with Driver(Hourly()) as driver:
        driver.given(paid(TEN, tea, Line("TEA", 1, Decimal("2.00"))), paid(ELEVEN, tea), paid(TEN, tea, is_test=True))
        assert driver.view({"article": "TEA", "hour": "2026-03-02T10"}) == {"lines": 2, "revenue": Decimal("7.00")}
        assert driver.view({"article": "TEA", "hour": "2026-03-02T11"}) == {"lines": 1, "revenue": Decimal("5.00")}
        assert driver.emitted("sold", into=Sold)[:2] == [
            Sold("b-1", "TEA", Decimal("2.50"), Decimal("5.00")),
            Sold("b-1", "TEA", Decimal("2.00"), Decimal("7.00")),
        ]


def test_a_line_without_pieces_concerns_its_basket_alone() -> None:
    tea = Line("tea", 2, Decimal("5.00"))
    with Driver(Hourly()) as driver:
        driver.given(paid(TEN, tea, Line("tea", 0, Decimal("1.00"))), paid(TEN, tea))
        assert driver.view({"article": "TEA", "hour": "2026-03-02T10"}) == {"lines": 1, "revenue": Decimal("5.00")}
        assert [letter.cause for letter in driver.dead_letters()] == ["transform-failed"]


def test_the_model_keeps_the_contract() -> None:
    check_contract(Hourly(), examples=10)
''',
}
ARTICLES = ("tea", "Tea", "milk", "rye", "salt")
_SERVICE = ("-m", "balance_service")
STORES, HOURS, BASKETS = 7, 3, 6_000
_FIRST, _CATCH_UP_SECONDS = 300, 150.0


def line_of(number: int) -> str:
    """Returns a line of `produce`: every 11th basket is a test, every 17th has a line without pieces."""
    lines = [
        {"article": ARTICLES[(number + n) % len(ARTICLES)], "pieces": n + 1, "amount": f"{number % 50 + n}.25"}
        for n in range(number % 4)
    ]
    if number % 17 == 16:
        lines.append({"article": "salt", "pieces": 0, "amount": "1.00"})
    basket = {
        "basketId": f"b-{number}",
        "store": f"store-{number % STORES}",
        "paidAt": f"2026-03-02T{10 + number % HOURS}:{number % 60:02}:00Z",
        "isTest": number % 11 == 10,
        "lines": lines,
    }
    return f"{basket['store']}|{json.dumps(basket)}\n"


@pytest.fixture
def project(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The project that `init` writes, with the model of this test, as the working directory."""
    monkeypatch.chdir(tmp_path)
    paths = os.pathsep.join(map(str, (installed, tmp_path / "shop")))
    environment = {"PYTHONPATH": paths, "BALANCE_MODELS": "shop.baskets:Hourly"}
    done = run(environment, "init", "shop")
    assert done.code == 0, done
    for name, text in FILES.items():
        (tmp_path / "shop" / name).write_text(text, encoding="utf-8")
    (tmp_path / "shop/samples/baskets.jsonl").write_text("".join(map(line_of, range(40))), encoding="utf-8")
    monkeypatch.chdir(tmp_path / "shop")
    made = Project(tmp_path / "shop", environment)
    found = made.run("-c", "import balance_service; print(balance_service.__file__)")
    assert found.stdout.startswith(str(installed)), found
    return made


def test_the_project_is_tested_tried_and_explained(project: Project) -> None:
    tested = project.run("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout + tested.stderr

    tried = project.run(*_SERVICE, "try", "shop.baskets:Hourly", "--events", "samples/baskets.jsonl")
    assert tried.returncode == 0, tried.stderr
    expected = Recount.of([json.loads(line_of(n).partition("|")[2]) for n in range(40)])
    rows = [line.split() for line in tried.stdout.splitlines()]
    for (article, hour), amounts in expected.amounts.items():
        assert any({article, str(len(amounts)), str(sum(amounts))} <= {*row} and hour in " ".join(row) for row in rows)
    assert tried.stdout.count("transform-failed") == expected.failed > 0

    explained = project.run(*_SERVICE, "explain", "shop.baskets:Hourly")
    assert explained.returncode == 0, explained.stderr
    assert "explode" in explained.stdout


@pytest.mark.shows("exactly-once")
def test_outputs_and_answers_equal_a_recount_after_a_kill(project: Project, stack: LocalStack) -> None:
    settings = {**application(), **project.environment}
    _, second = instances = [new_instance(stack, settings) for _ in range(2)]
    produce = ("produce", "baskets", "--key-separator", "|")
    lines = [line_of(number).encode() for number in range(BASKETS)]
    with running(*instances):
        sent = run(on(stack, settings), *produce, stdin=b"".join(lines[:_FIRST]), seconds=_CATCH_UP_SECONDS)
        assert sent.code == 0, sent
        eventually(lambda: outputs(stack) > 0, "the first outputs are sent")
        with started(on(stack, settings), *produce, stdin=b"".join(lines[_FIRST:])) as producing:
            before = outputs(stack)
            eventually(lambda: outputs(stack) > before, "further outputs are sent")
            second.kill()
            assert producing.wait(_CATCH_UP_SECONDS).code == 0
        recount = Recount.of(values(stack, "baskets"))
        wanted = sum(map(len, recount.amounts.values()))
        eventually(lambda: outputs(stack) >= wanted, lambda: f"{outputs(stack)} of {wanted}", _CATCH_UP_SECONDS)
        second.launch()
        second.wait_ready()

        assert recount.baskets == BASKETS
        assert_as_recounted(stack, recount)
        for instance in instances:
            # An instance passes queries for keys of the other one on.
            eventually(lambda: len(assert_answers(instance.url, recount)) == 2, "both own keys")  # noqa: B023
            with instance.client() as client:
                causes = Counter(letter["cause"] for letter in client.dead_letters(model="hourly"))
            assert causes == {"transform-failed": recount.failed}


@dataclass
class Recount:
    """What baskets should come to, in plain Python."""

    baskets: int
    failed: int
    amounts: Mapping[tuple[str, str], Sequence[Decimal]]
    """By article and hour: the amount of each line that counts."""
    sold: Counter[tuple[str, str, Decimal]]
    """Basket, article and price of each line that counts."""

    @staticmethod
    def of(baskets: Sequence[Mapping[str, Any]]) -> Recount:
        failed = 0
        amounts: dict[tuple[str, str], list[Decimal]] = defaultdict(list)
        sold: Counter[tuple[str, str, Decimal]] = Counter()
        for basket in baskets:
            if basket["isTest"]:
                continue
            if any(line["pieces"] == 0 for line in basket["lines"]):
                failed += 1
                continue
            for line in basket["lines"]:
                article, amount = line["article"].upper(), Decimal(line["amount"])
                amounts[article, str(basket["paidAt"]).replace(" ", "T")[:13]].append(amount)
                sold[basket["basketId"], article, _rounded(amount / line["pieces"])] += 1
        return Recount(len(baskets), failed, amounts, sold)


def _rounded(amount: Decimal) -> Decimal:
    return amount.quantize(Decimal("0.01"), "ROUND_HALF_UP")


def outputs(stack: LocalStack) -> int:
    """Returns the number of outputs that are committed."""
    return len(read_topic(stack, "sold"))


def values(stack: LocalStack, topic: str) -> list[dict[str, Any]]:
    """Returns the committed records of a topic, decoded with the registry's schemas, by partition and offset."""
    schemas: dict[int, Any] = {}
    found = []
    for message in read_topic(stack, topic):
        number = int.from_bytes(message.value()[1:5], "big")
        if number not in schemas:
            schemas[number] = fastavro.parse_schema(schema_of(stack.schema_registry_url, number))
        record: Any = fastavro.schemaless_reader(io.BytesIO(message.value()[5:]), schemas[number], None)
        found.append({**record, "#key": message.key()})
    return found


def assert_as_recounted(stack: LocalStack, recount: Recount) -> None:
    """Checks that each line is sent once, with the revenue after it: each output adds its own line's amount."""
    sent = values(stack, "sold")
    assert Counter((one["basketId"], one["article"], one["price"]) for one in sent) == recount.sold
    revenues: dict[bytes, list[Decimal]] = defaultdict(list)
    for one in sent:
        revenues[one["#key"]].append(one["revenue"])
    found = Counter[tuple[Decimal, ...]]()
    for totals in revenues.values():
        found[tuple(sorted(after - before for before, after in zip([Decimal(0), *totals], totals, strict=False)))] += 1
    assert found == Counter(tuple(sorted(amounts)) for amounts in recount.amounts.values())


def assert_answers(url: str, recount: Recount) -> set[str]:
    """Checks that an instance answers for every key, owned or not, and for a range of hours.

    Returns:
        The instances that own the keys.
    """
    owners = set()
    with httpx.Client(base_url=url, timeout=30) as http:
        for (article, hour), amounts in recount.amounts.items():
            parameters = {"article": article, "hour": hour}
            answer = retried(partial(http.get, "/api/models/hourly/keys", params=parameters))
            assert answer.status_code == 200, answer.text
            owners.add(answer.headers["Balance-Application-Server"])
            found = json.loads(answer.text, parse_float=Decimal)["value"]
            assert (found["lines"], found["revenue"]) == (len(amounts), sum(amounts)), (parameters, found)
        answer = retried(partial(http.get, "/api/models/hourly/entries", params={"article": "TEA"}))
        hours = [one["key"]["hour"] for one in answer.json()["entries"]]
        assert hours == sorted(hour for article, hour in recount.amounts if article == "TEA")
    return owners
