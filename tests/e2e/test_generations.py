"""Generations: a read model is built again while it answers, compared, switched, switched back, and dropped."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

import httpx
import pytest
from confluent_kafka import KafkaException

from balance_service.avro.registry import SchemaRegistry
from balance_service.client import AsyncClient, Change, Client, ClientError, SnapshotBegin
from balance_service.devtools.local.stack import LocalStack
from tests.e2e.dead_letters import PoisonWriter, wait_for
from tests.integration.purchases import Till, invoice
from tests.support.commands import Done, run, started
from tests.support.kafka import ends_of, read_topic, recounted
from tests.support.service import all_balances, application, new_instance, on, owned, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance

pytestmark = pytest.mark.timeout(600)

_CUSTOMERS = 300
_CARDS = 40


class Readers:
    """Threads that ask both instances for random customers; each keeps what it was answered."""

    def __init__(self, instances: Sequence[LocalInstance]) -> None:
        self._instances = instances
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(instance,)) for instance in instances]
        self.refused: list[str] = []
        self.backwards: list[str] = []
        self.answered: Counter[str] = Counter()
        """Answers by generation."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, instance: LocalInstance) -> None:
        reached: dict[tuple[str, str], int] = {}
        chooser = random.Random(instance.name)
        with httpx.Client(base_url=instance.url, timeout=30) as http:
            while not self._stopping.is_set():
                customer = f"customer-{chooser.randrange(_CUSTOMERS)}"
                answer = http.get("/api/customers.getBalance", params={"customerId": customer})
                if answer.status_code not in (200, 404):
                    self.refused.append(f"{answer.status_code} {answer.text}")
                    continue
                partition, _, offset = answer.headers["Balance-Position"].partition(":")
                place = answer.headers["Balance-Generation"], partition
                if int(offset) < reached.get(place, 0):
                    self.backwards.append(f"{place} from {reached[place]} to {offset}")
                reached[place] = int(offset)
                self.answered[answer.headers["Balance-Generation"]] += 1
                time.sleep(0.002)


def _states(instance: LocalInstance, model: str) -> dict[int, str]:
    with Client(instance.url) as client:
        return {one["generation"]: one["status"] for one in client.generations(model)["generations"]}


@pytest.mark.shows("rebuild")
def test_queries_are_answered_through_a_rebuild_a_switch_and_the_way_back(stack: LocalStack) -> None:
    settings = application()
    instances = [new_instance(stack, settings) for _ in range(2)]
    environment = on(stack, settings) | {"BALANCE_APPLICATION_SERVER": instances[0].url.removeprefix("http://")}

    def command(*arguments: str) -> Done:
        done = run(environment, *arguments, seconds=120)
        assert done.code == 0, done
        return done

    command("load", "--events", "20000", "--customers", str(_CUSTOMERS))
    with running(*instances):
        eventually(lambda: all(owned(instance) for instance in instances), "both own partitions", 60)
        load = ["load", "--events", "30000", "--customers", str(_CUSTOMERS), "--rate", "1000"]
        with started(environment, *load) as loading:
            with Readers(instances) as readers:
                done = command("rebuild", "balance", "--keep-old", "600", "--reason", "a test")
                assert "balance 2  serving" in done.stdout
                assert "balance 1  kept" in done.stdout
                time.sleep(2)
                command("switch", "balance", "--reason", "back")
                time.sleep(2)
                drop = ("drop", "balance", "--generation", "2", "--reason", "over")
                # Until all partitions have switched, it is refused.
                eventually(lambda: run(environment, *drop).code == 0, "generation 2 is dropped", 30)
                time.sleep(2)
            loaded = loading.wait(90)
        assert loaded.code == 0, loaded.stderr

        assert readers.refused == []
        assert readers.backwards == []
        assert set(readers.answered) == {"1", "2"}
        ends = ends_of(stack, settings["BALANCE_TOPIC"])
        customers = [f"customer-{number}" for number in range(_CUSTOMERS)]
        for instance in instances:
            assert all_balances(instance, customers, ends) == recounted(stack, settings)

        changelog = f"{settings['BALANCE_APPLICATION_ID']}-balance.g2-changelog"
        eventually(lambda: not _exists(stack, changelog), "the dropped generation's changelog is deleted", 60)
        with closing(SchemaRegistry(stack.schema_registry_url)) as registry:
            subjects = registry.client.get_subjects()
        assert [subject for subject in subjects if subject.startswith(changelog)] == []
        left = [path.name for instance in instances for path in instance.state_dir.iterdir() if ".g2" in path.name]
        assert left == []
        refused = run(environment, "switch", "balance", "--reason", "again")
        assert refused.code == 1
        assert "has no other generation than 1" in refused.stderr


class Followers:
    """Clients that follow all balances and one customer at each instance, and keep what they receive."""

    def __init__(self, instances: Sequence[LocalInstance], customer: str) -> None:
        self._instances = instances
        self._customer = customer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self.of_ranges: list[dict[str, Decimal]] = [{} for _ in instances]
        self.of_keys: list[list[Change[Any]]] = [[] for _ in instances]
        self.generations: list[list[int]] = [[] for _ in instances]
        """The generations that each follower of a range has received, in order."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._following.cancel)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._follow())

    async def _follow(self) -> None:
        self._following = asyncio.gather(
            *[self._follow_range(number) for number in range(len(self._instances))],
            *[self._follow_key(number) for number in range(len(self._instances))],
        )
        await self._following

    async def _follow_range(self, number: int) -> None:
        balances, generations = self.of_ranges[number], self.generations[number]
        async with AsyncClient(self._instances[number].url) as client:
            async for event in client.changes("balance", prefix="customer-"):
                if generations[-1:] != [event.generation]:
                    generations.append(event.generation)
                match event:
                    case SnapshotBegin():
                        balances.clear()
                    case Change(key=key, value=value):
                        balances[key] = value["amount"]

    async def _follow_key(self, number: int) -> None:
        async with AsyncClient(self._instances[number].url) as client:
            async for change in client.changes("balance", key=self._customer):
                self.of_keys[number].append(change)


@pytest.mark.shows("listener", "rebuild")
def test_change_streams_stay_open_through_a_switch_and_the_way_back(
    stack: LocalStack, caplog: pytest.LogCaptureFixture
) -> None:
    settings = application()
    instances = [new_instance(stack, settings) for _ in range(2)]
    environment = on(stack, settings) | {"BALANCE_APPLICATION_SERVER": instances[0].url.removeprefix("http://")}
    done = run(environment, "load", "--events", "5000", "--customers", str(_CUSTOMERS), seconds=120)
    assert done.code == 0, done
    with running(*instances), Client(instances[0].url) as client:
        eventually(lambda: all(owned(instance) for instance in instances), "both own partitions", 60)
        load = ["load", "--events", "15000", "--customers", str(_CUSTOMERS), "--rate", "300"]
        with Followers(instances, "customer-0") as followers, started(environment, *load) as loading:
            eventually(lambda: followers.generations == [[1], [1]], "both follow generation 1", 60)
            client.rebuild("balance", switch="always", keep_old_seconds=600)
            eventually(lambda: followers.generations == [[1, 2], [1, 2]], "both follow generation 2", 120)
            eventually(
                lambda: {of[-1].generation for of in followers.of_keys} == {2}, "the customer's followers too", 30
            )
            of_second = followers.of_keys[0][-1]
            last = f"{of_second.generation}/{','.join(f'{p}:{o}' for p, o in of_second.positions.items())}"
            _switch(client, "balance")
            eventually(lambda: followers.generations == [[1, 2, 1], [1, 2, 1]], "both follow generation 1", 60)
            eventually(
                lambda: {of[-1].generation for of in followers.of_keys} == {1}, "the customer's followers too", 30
            )
            came_back = _first_state(instances[1], "customer-0", last)
            loaded = loading.wait(150)
            assert loaded.code == 0, loaded.stderr
            expected = recounted(stack, settings)
            eventually(lambda: followers.of_ranges == [expected] * 2, "both have all balances", 60)

            def has_newest() -> bool:
                return [of_key[-1].value["amount"] for of_key in followers.of_keys] == [expected["customer-0"]] * 2

            eventually(has_newest, "both have the customer's balance", 30)
        assert came_back == 1
        for of_key in followers.of_keys:
            told = [change.generation for change in of_key]
            assert [one for one, before in zip(told, [0, *told], strict=False) if one != before] == [1, 2, 1]
    assert "is interrupted" not in caplog.text


def _first_state(instance: LocalInstance, key: str, last: str) -> int:
    """Returns the generation of the first state that a client gets that names the last event it has."""
    headers = {"Accept": "text/event-stream", "Last-Event-ID": last}
    with httpx.stream("GET", f"{instance.url}/api/models/balance/keys/{key}", headers=headers, timeout=30) as answer:
        return next(
            int(json.loads(line.removeprefix("data: "))["generation"])
            for line in answer.iter_lines()
            if line.startswith("data: ")
        )


def _exists(stack: LocalStack, topic: str) -> bool:
    try:
        ends_of(stack, topic)
    except KafkaException:
        return False
    return True


@pytest.mark.shows("rebuild")
def test_a_generation_survives_kills_and_answers_those_who_name_it(stack: LocalStack) -> None:
    settings = application(BALANCE_NUM_STANDBY_REPLICAS="1")
    instances = [new_instance(stack, settings) for _ in range(2)]
    environment = on(stack, settings) | {"BALANCE_APPLICATION_SERVER": instances[0].url.removeprefix("http://")}
    done = run(environment, "load", "--events", "50000", "--customers", str(_CUSTOMERS), seconds=120)
    assert done.code == 0, done
    with running(*instances):
        begun = run(environment, "rebuild", "balance", "--switch", "never", "--max-rate", "5000", "--detach")
        assert begun.code == 0, begun
        again = run(environment, "rebuild", "balance")
        assert again.code == 1
        assert "generation 2 of 'balance' is being built" in again.stderr
        for victim in instances:
            time.sleep(2)
            victim.kill()
            victim.launch()
            victim.wait_ready()

        eventually(lambda: _states(instances[1], "balance").get(2) == "ready", "generation 2 has caught up", 120)
        with Client(instances[1].url) as client:
            comparison = client.generations("balance")["comparison"]
        assert comparison == {"equal": _CUSTOMERS, "different": 0, "onlyServing": 0, "onlyBuilding": 0}
        expected = recounted(stack, settings)
        for instance in instances:
            with httpx.Client(base_url=f"{instance.url}/api/models/balance", timeout=30) as http:
                pages = http.get("/entries", params={"limit": 1000, "generation": 2})
                assert pages.headers["Balance-Generation"] == "2"
                found = {one["key"]: one["value"]["amount"] for one in pages.json(parse_float=Decimal)["entries"]}
                assert found == expected
                unknown = http.get("/count", params={"generation": 3})
                assert (unknown.status_code, "no generation 3" in unknown.text) == (404, True)
        # The next instance to start knows of the switch.
        switched = run(environment, "switch", "balance", "--to", "2", "--reason", "it is equal")
        assert switched.code == 0, switched
        for instance in instances:
            instance.kill()
        for instance in instances:
            instance.launch()
        for instance in instances:
            instance.wait_ready()
        for instance in instances:
            answer = httpx.get(f"{instance.url}/api/models/balance/count", timeout=30)
            assert (answer.headers["Balance-Generation"], answer.json()) == ("2", {"count": _CUSTOMERS})


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[LocalStack]:
    """A stack of its own, because the shipped models have fixed topic names."""
    with LocalStack(tmp_path / "stack") as stack:
        yield stack


@pytest.mark.shows("rebuild")
def test_outputs_are_sent_once_through_switches_and_kills(own_stack: LocalStack) -> None:
    settings = application(BALANCE_MODELS="rewards")
    instances = [new_instance(own_stack, settings) for _ in range(2)]
    sold = 0

    def sell(till: Till, count: int) -> None:
        nonlocal sold
        for number in range(sold, sold + count):
            till.sell(invoice(number, f"card-{number % _CARDS}", f"{number % 50}.10"))
        sold += count

    with running(*instances), Till(own_stack, "pos") as till:
        sell(till, 400)
        with Client(instances[0].url) as client:
            eventually(lambda: _sent(own_stack, 400), "all outputs are sent", 60)
            client.rebuild("rewards", switch="when_equal", keep_old_seconds=600)
            sell(till, 200)
            eventually(lambda: _states(instances[0], "rewards").get(2) == "serving", "it has switched", 120)
            for turn in range(4):
                sell(till, 150)
                _switch(client, "rewards")
                victim = instances[turn % 2]
                time.sleep(0.05 * turn)
                victim.kill()
                sell(till, 50)
                victim.launch()
                victim.wait_ready()
        eventually(lambda: _sent(own_stack, sold), "all outputs are sent", 90)
        time.sleep(3)
        counted = Counter(_origin(record) for record in read_topic(own_stack, "notifications"))
        assert [origin for origin, times in counted.items() if times != 1] == []
        assert len(counted) == sold


_NOTED = """
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from balance_service import EVENT, Emit, ReadModel, RunningSum, Stream, scale


@dataclass
class Total:
    customerId: str
    total: Annotated[Decimal, scale(2)]


class Noted(ReadModel):
    name = "noted"
    source = Stream("{topic}", "FundsAdded")
    key = "customerId"
    state = Total
    emits = Emit("{outputs}", each=EVENT)
    total = RunningSum("FundsAdded.amount")
"""


@pytest.mark.shows("outputs-once", "rebuild")
def test_records_that_the_old_generation_could_not_read_are_sent_once_by_the_new_one(
    stack: LocalStack, tmp_path: Path
) -> None:
    settings = application(BALANCE_MODELS="noted:Noted", PYTHONPATH=str(tmp_path))
    outputs = f"{settings['BALANCE_APPLICATION_ID']}-notes"
    (tmp_path / "noted.py").write_text(_NOTED.format(topic=settings["BALANCE_TOPIC"], outputs=outputs))
    instance = new_instance(stack, settings)
    with running(instance), Client(instance.url) as client, PoisonWriter(stack, settings) as poison:
        customers = [f"customer-{number % 5}" for number in range(40)]
        for customer in customers:
            poison.add(customer, "1.00")
        schema_id = poison.unknown_id()
        late = [poison.put_unknown(schema_id, customer, "1.00") for customer in customers[:10]]
        letters = [name.replace("balance/", "noted/") for name in late]
        wait_for(instance, "scheduled", *letters)
        poison.make_known(schema_id)

        # The new generation could read them at once; the old one retries them in five minutes.
        client.rebuild("noted", switch="when_equal", keep_old_seconds=600)
        eventually(lambda: _states(instance, "noted").get(2) == "serving", "it has switched", 120)
        wait_for(instance, "applied", *letters)
        for customer in customers[:5]:
            poison.add(customer, "1.00")

        eventually(lambda: len(read_topic(stack, outputs)) >= 55, "all outputs are sent", 60)
        counted = Counter(_origin(record) for record in read_topic(stack, outputs))
        assert (len(counted), set(counted.values())) == (55, {1})
        assert sorted(name for name, _ in poison.written()) == sorted(late)
        totals = [client.get("noted", customer).value for customer in customers[:5]]
        assert totals == [{"total": Decimal("11.00")}] * 5


def _switch(client: Client, model: str) -> None:
    def done() -> bool:
        try:
            client.switch(model, reason="to and back")
        except ClientError:
            return False
        return True

    eventually(done, "the switch is written", 30)


def _sent(stack: LocalStack, count: int) -> bool:
    return len(read_topic(stack, "notifications")) >= count


def _origin(record: Any) -> str:
    return str(dict(record.headers())["origin"].decode())
