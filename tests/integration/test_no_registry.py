"""JSON models on a real broker without a schema registry: re-keyed rows, joins, dead letters, rebuilds, both forms."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import fastavro
import pytest
from confluent_kafka import Producer
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.avro.frames import SCHEMA_PREFIX, SINGLE_OBJECT
from balance_service.devtools.local.stack import LocalStack
from balance_service.devtools.produce import produce
from balance_service.engine.decisions import Decision, Verdict
from balance_service.errors import ConfigurationError
from balance_service.hosting.offline_rebuild import rebuild
from balance_service.hosting.removal import Removal
from balance_service.model.binding import require_registry
from balance_service.model.events import Emit
from balance_service.model.folds import Count, RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Global, Stream, Table
from balance_service.model.value_types import scale
from balance_service.settings import Settings, load_settings
from tests.integration.engines import SESSION_TIMEOUT_MS, running_engine
from tests.support.kafka import admin, create_topic, read_topic
from tests.support.shipped import KNOWN
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame

    from balance_service.hosting.engine import Engine

pytestmark = pytest.mark.timeout(600)
Money = Annotated[Decimal, scale(2)]
KEPT_FOREVER = {"retention.ms": "-1"}


@dataclass
class Sale:
    sale: str
    shop: str
    amount: Money


@dataclass
class Shop:
    name: str
    city: str


@dataclass
class SaleInCity:
    sale: str
    city: str
    amount: Money


@dataclass
class City:
    city: str
    sales: int
    total: Money


@dataclass
class ShopTotal:
    shop: str
    sales: int
    total: Money


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A broker, and no registry."""
    with LocalStack(tmp_path_factory.mktemp("broker"), registry_port=None) as running:
        yield running


@dataclass(frozen=True)
class World:
    """An application's models and topics. `settings` has no registry."""

    stack: LocalStack
    settings: Settings

    @property
    def name(self) -> str:
        return self.settings.application_id

    @property
    def sales(self) -> str:
        return f"{self.name}.sales"

    def hosting(self, *models: type[ReadModel]) -> Settings:
        return self.settings.model_copy(update={"models": tuple(model.name for model in models)})

    def sell(self, **amounts: Any) -> None:
        """Appends a sale of each amount; the name says which shop, up to an underscore."""
        for sale, amount in amounts.items():
            shop = sale.partition("_")[0]
            self.write(self.sales, {shop: json.dumps({"sale": sale, "shop": shop, "amount": amount}).encode()})

    def write(self, topic: str, records: Mapping[str, bytes]) -> None:
        producer = Producer({"bootstrap.servers": self.stack.bootstrap_servers, "partitioner": "murmur2_random"})
        for key, value in records.items():
            producer.produce(topic, value, key)
        assert producer.flush(20) == 0


@pytest.fixture
def world(broker: LocalStack, names: dict[str, str], tmp_path: Path) -> World:
    return world_on(broker, names, tmp_path)


def world_on(stack: LocalStack, names: Mapping[str, str], folder: Path, **more: Any) -> World:
    settings = load_settings(
        bootstrap_servers=stack.bootstrap_servers,
        state_dir=folder / "state",
        session_timeout_ms=SESSION_TIMEOUT_MS,
        create_topics=True,
        **names,
        **more,
    )
    made = World(stack, settings)
    for topic in (made.sales, f"{made.name}.shops"):
        create_topic(stack, topic, KEPT_FOREVER if topic == made.sales else {"cleanup.policy": "compact"})
    return made


def totals_of(world: World) -> type[ReadModel]:
    class Totals(ReadModel):
        name = f"totals-{world.name}"
        source = Stream(world.sales, Sale, format="json")
        key = "shop"
        state = ShopTotal
        sales = Count("Sale")
        total = RunningSum("Sale.amount")

    return Totals


def doubled_of(world: World) -> type[ReadModel]:
    """Rows of a transform behind a re-key."""

    class Doubled(ReadModel):
        name = f"doubled-{world.name}"
        source = Stream(world.sales, Sale, format="json")
        key = ("sale", "shop")
        state = _DoubledState
        total = RunningSum("amount")

        def transform(self, events: DataFrame) -> DataFrame:
            return events.select("sale", "shop", (F.col("amount") * 2).cast("decimal(38,2)").alias("amount"))

    return Doubled


@dataclass
class _DoubledState:
    sale: str
    shop: str
    total: Money


def cities_of(world: World) -> type[ReadModel]:
    """Records of a join, re-keyed."""
    shops = Global(f"{world.name}.shops", Shop, format="json")

    class Cities(ReadModel):
        name = f"cities-{world.name}"
        source = (
            Stream(world.sales, Sale, format="json")
            .join(shops, on="shop", take={"city": "city"})
            .by("city", record=SaleInCity)
        )
        key = "city"
        state = City
        sales = Count("SaleInCity")
        total = RunningSum("SaleInCity.amount")

    return Cities


@contextmanager
def hosted(world: World, monkeypatch: pytest.MonkeyPatch, *models: type[ReadModel], **more: Any) -> Iterator[Engine]:
    for model in models:
        monkeypatch.setitem(KNOWN, model.name, model())
    settings = world.hosting(*models).model_copy(update=more)
    with running_engine(settings) as engine:
        yield engine


def states(engine: Engine, name: str) -> dict[str, Any]:
    tasks = engine.stages[name]
    found: dict[str, Any] = {}
    for task in tasks.all():
        if (view := task.view) is not None:
            found |= {key.decode(): tasks.hosted.state(frame) for key, frame in view.scan(b"", b"\xff", 100)}
    return found


def totals(engine: Engine, name: str) -> dict[str, Decimal]:
    """Returns the first column of the key of each state → its total."""
    return {next(iter(state.values())): state["total"] for state in states(engine, name).values()}


def decoded(messages: list[Any]) -> list[tuple[bytes, Any]]:
    """Returns key and record of what is no text of a schema, by the texts that precede it in its partition."""
    texts: dict[tuple[int, bytes], Any] = {}
    found = []
    for one in messages:
        if one.key().startswith(SCHEMA_PREFIX):
            number = int(one.key()[len(SCHEMA_PREFIX) :], 16).to_bytes(8, "little")
            texts[one.partition(), number] = fastavro.parse_schema(json.loads(one.value()))
        # Indexes of dead letters have empty values.
        elif one.value():
            assert one.value()[:2] == SINGLE_OBJECT, one.value()
            schema = texts[one.partition(), one.value()[2:10]]
            found.append((one.key(), fastavro.schemaless_reader(io.BytesIO(one.value()[10:]), schema, None)))
    return found


@pytest.mark.parametrize(
    ("model_of", "by", "first", "then"),
    [
        (doubled_of, "sale-shop", {"a_1": "2.20", "b_1": "4.00", "a_2": "1.80"}, ("b_2", "10.00")),
        (cities_of, "city", {"Ulm": "2.00", "Bonn": "2.00"}, ("Bonn", "7.00")),
    ],
    ids=["rows of a transform", "joined records"],
)
def test_what_a_stage_makes_is_passed_on_with_the_text_of_its_schema(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    model_of: Callable[[World], type[ReadModel]],
    by: str,
    first: Mapping[str, str],
    then: tuple[str, str],
) -> None:
    model = model_of(world)
    world.write(f"{world.name}.shops", {"a": b'{"name": "a", "city": "Ulm"}', "b": b'{"name": "b", "city": "Bonn"}'})
    world.sell(a_1="1.10", b_1=2, a_2="0.90")
    expected = {key: Decimal(total) for key, total in first.items()}

    with hosted(world, monkeypatch, model) as engine:
        eventually(lambda: totals(engine, model.name) == expected, lambda: str(engine.problems), 150)
        rows = read_topic(world.stack, f"{world.name}-{model.name}-by-{by}")
        assert {one.partition() for one in rows if one.key().startswith(SCHEMA_PREFIX)} == {0, 1}
        assert sum(record["amount"] for _, record in decoded(rows)) == sum(expected.values())
        assert read_topic(world.stack, f"{world.name}-dead-letters") == []

    # Instances without a store read the rows again.
    shutil.rmtree(world.settings.state_dir)
    with hosted(world, monkeypatch, model) as engine:
        eventually(lambda: totals(engine, model.name) == expected, lambda: str(engine.problems), 150)
        world.sell(b_2="5.00")
        key, total = then
        eventually(lambda: totals(engine, model.name).get(key) == Decimal(total), lambda: str(engine.problems), 150)


def test_dead_letters_rebuilds_and_removal_need_no_registry(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model = totals_of(world)
    world.sell(a_1="1.00", a_2="0.001", b_1="2.50", b_2="0.002")
    good = {"a": Decimal("1.00"), "b": Decimal("2.50")}

    with hosted(world, monkeypatch, model) as engine:
        eventually(lambda: totals(engine, model.name) == good, lambda: str(engine.problems), 150)
        tasks = engine.stages[model.name]
        letters = {
            dict(letter.headers())["dead-letter-cause"]: letter
            for letter in read_topic(world.stack, f"{world.sales}-dead-letters")
        }
        assert letters.keys() == {b"decimal-loses-digits"}
        headers = dict(letters[b"decimal-loses-digits"].headers())
        place = int(headers["dead-letter-partition"]), int(headers["dead-letter-offset"])
        tasks.decide(place[0], [place[1]], Verdict(Decision.DISCARD, "test", "it is wrong"))
        of_decisions = read_topic(world.stack, world.settings.dead_letter_decisions_topic)
        ((_, decision),) = decoded(of_decisions)
        assert decision["reason"] == "it is wrong"
        changelog = decoded(read_topic(world.stack, f"{world.name}-{model.name}-changelog"))
        assert {key.decode(): state["total"] for key, state in changelog if key[:1] != b"\xff"} == good

    settings = world.hosting(model)
    done = rebuild(settings, model(), lambda _done, _total: None)
    assert done.done.applied == 2
    with hosted(world, monkeypatch, model) as engine:
        ((name, _),) = engine.models.items()
        assert name == f"{model.name}.g2"
        eventually(lambda: totals(engine, name) == good, lambda: str(engine.problems), 150)

    # Its farewell was published.
    removal = Removal(settings, model.name)
    assert f"{world.name}-{name}-changelog" in removal.topics
    removal.run()
    left = admin(world.stack).list_topics(timeout=10).topics
    assert not [topic for topic in left if topic.startswith(f"{world.name}-{model.name}")]


def test_an_avro_topic_that_is_added_later_changes_nothing_that_is_written(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_on(stack, names, tmp_path)
    model = totals_of(world)
    world.sell(a_1="1.00")
    with hosted(world, monkeypatch, model) as engine:
        eventually(lambda: totals(engine, model.name) == {"a": Decimal("1.00")}, lambda: str(engine.problems), 150)

    registry = {"schema_registry_url": stack.schema_registry_url}
    with_avro = replace(world, settings=world.settings.model_copy(update=registry))
    with hosted(with_avro, monkeypatch, model, type(KNOWN["balance"])) as engine:
        world.sell(a_2="2.00")
        eventually(lambda: totals(engine, model.name) == {"a": Decimal("3.00")}, lambda: str(engine.problems), 150)
        eventually(lambda: bool(read_topic(stack, f"{world.name}-balance-changelog")), "balance has positions")

    for topic in (f"{model.name}-changelog", "balance-changelog", "generations"):
        assert decoded(read_topic(stack, f"{world.name}-{topic}")), topic


def test_an_application_that_began_with_a_registry_keeps_to_it(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = world_on(stack, names, tmp_path, schema_registry_url=stack.schema_registry_url)
    model = totals_of(began)
    began.sell(a_1="1.00")
    with hosted(began, monkeypatch, model) as engine:
        eventually(lambda: totals(engine, model.name) == {"a": Decimal("1.00")}, lambda: str(engine.problems), 150)

    changed = {"schema_registry_url": None, "state_dir": tmp_path / "another"}
    without = replace(began, settings=began.settings.model_copy(update=changed))
    with (
        pytest.raises(
            ConfigurationError, match="name schemas of a registry, and BALANCE_SCHEMA_REGISTRY_URL is not set"
        ),
        hosted(without, monkeypatch, model),
    ):
        pass

    with hosted(began, monkeypatch, model) as engine:
        began.sell(a_2="2.00")
        eventually(lambda: totals(engine, model.name) == {"a": Decimal("3.00")}, lambda: str(engine.problems), 150)
    changelog = read_topic(stack, f"{began.name}-{model.name}-changelog")
    assert {one.value()[:1] for one in changelog} == {b"\0"}


@pytest.mark.parametrize("kind", ["source", "table", "output"])
def test_a_model_with_an_avro_topic_is_refused_without_a_registry(kind: str) -> None:
    by_kind: dict[str, Any] = {"source": "avro", "table": "avro", "output": "avro"}
    formats = dict.fromkeys(by_kind, "json") | {kind: "avro"}

    class Mixed(ReadModel):
        name = "mixed"
        source = (
            Stream("sales", Sale, format=formats["source"])  # type: ignore[arg-type]
            .join(Table("shops", Shop, format=formats["table"]), on="shop", take={"city": "city"})  # type: ignore[arg-type]
            .by("city", record=SaleInCity)
        )
        key = "city"
        state = City
        sales = Count("SaleInCity")
        total = RunningSum("SaleInCity.amount")
        emits = Emit("sent", format=formats["output"])  # type: ignore[arg-type]

    topic = {"source": "sales", "table": "shops", "output": "sent"}[kind]
    with pytest.raises(
        ConfigurationError, match=f"'mixed' has Avro on topic '{topic}', and BALANCE_SCHEMA_REGISTRY_URL"
    ):
        require_registry([Mixed], load_settings(schema_registry_url=None))
    require_registry([Mixed], load_settings(schema_registry_url="http://registry"))


def test_documents_are_sent_to_a_topic_that_no_read_model_reads(world: World) -> None:
    lines = [b'a|{"any": [1, 2.50]}', b"", b'b| "text" ']

    assert produce(world.settings, [], world.sales, lines, key_separator="|", topic_format="json") == 2

    sent = {one.key(): one.value() for one in read_topic(world.stack, world.sales)}
    assert sent == {b"a": b'{"any": [1, 2.50]}', b"b": b'"text"'}
    with suppress(ConfigurationError):
        produce(world.settings, [], world.sales, lines, key_separator="|")
        pytest.fail("a topic that no read model reads has no declared records")
    with pytest.raises(Exception, match=r"line 1: .* is there twice"):
        produce(world.settings, [], world.sales, [b'a|{"b": 1, "b": 2}'], key_separator="|", topic_format="json")
