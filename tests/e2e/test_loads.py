"""Generations that are loaded from files: through kills of their owners, damaged files, and from a job of Spark."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

import httpx
import pytest
from confluent_kafka import TopicCollection

from balance_service.avro.codec import AvroCodec
from balance_service.avro.frames import opened
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.engine.records import POSITION_KEY, RESERVED_PREFIX, Position
from balance_service.model.placing import stages_of
from balance_service.model.versions import declaration_of
from balance_service.settings import load_settings
from tests.support.commands import run
from tests.support.kafka import admin, ends_of, read_topic, recounted
from tests.support.loads import folder_of, write_folder
from tests.support.operator import Operator
from tests.support.service import PARTITIONS, all_balances, application, new_instance, on, owned, process_of, running
from tests.support.shipped import KNOWN
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance, LocalStack
    from balance_service.engine.records import Record
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings

pytestmark = pytest.mark.timeout(900)

_CUSTOMERS = 400
_EVENTS = 4000
_SECONDS = 120.0
_POINTS = ("load-begun", "committed", "part-ingested", "files-loaded", "files-deleted")


class Shop:
    """An application whose states are all of `customer-N`, and the folders that a job would make of them."""

    def __init__(self, stack: LocalStack, folder: Path, **settings: str) -> None:
        self.stack = stack
        self.files = folder
        self.given = application(BALANCE_SPARK_DRIVER_MEMORY="512m", **settings)
        self.environment = on(stack, self.given)
        assert self.run("topics", "create").code == 0
        assert self.run("load", "--events", str(_EVENTS), "--customers", str(_CUSTOMERS)).code == 0

    def run(self, *command: str, seconds: float = 120) -> Any:
        return run(self.environment, *command, seconds=seconds)

    @property
    def settings(self) -> Settings:
        return load_settings(
            bootstrap_servers=self.stack.bootstrap_servers,
            schema_registry_url=self.stack.schema_registry_url,
            application_id=self.given["BALANCE_APPLICATION_ID"],
            topic=self.given["BALANCE_TOPIC"],
        )

    def stage(self, generation: int) -> Stage:
        return stages_of(KNOWN["balance"], self.settings)[-1].of_generation(generation)

    def folder(self, generation: int, **changed: Any) -> str:
        """Writes the folder of a generation from the changelog of the first one; returns the digest."""
        changelog = self.stage(1).changelog
        states: list[dict[bytes, bytes]] = [{} for _ in range(PARTITIONS)]
        positions: dict[int, Position] = {}
        schema = load_schema("Position")
        registry = SchemaRegistry(self.stack.schema_registry_url)
        codec = AvroCodec(registry, subject_of(changelog, schema), schema)
        for record in read_topic(self.stack, changelog):
            partition, key, value = record.partition(), record.key(), record.value()
            if key == POSITION_KEY:
                positions[partition] = Position.of(codec.decode(value))
            elif not key.startswith(RESERVED_PREFIX):
                states[partition][key] = value
        registry.close()
        described = admin(self.stack).describe_topics(TopicCollection([self.given["BALANCE_TOPIC"]]))
        topic = described[self.given["BALANCE_TOPIC"]].result(10)
        files: list[list[list[Record]]] = [_in_two(of) for of in states]
        frame = next(iter(states[0].values()))
        given: dict[str, Any] = {
            "source_topic_id": str(topic.topic_id),
            "state_schema_id": opened(frame)[0],
            "partitions": [(positions[p].offset, files[p]) for p in range(PARTITIONS)],
            **changed,
        }
        return write_folder(
            self.files, self.stage(generation), self.settings, declaration_of(KNOWN["balance"]), **given
        ).digest

    def path(self, generation: int) -> Path:
        return self.files / self.given["BALANCE_APPLICATION_ID"] / f"balance.g{generation}"


def _in_two(states: Mapping[bytes, bytes]) -> list[list[Record]]:
    ordered = sorted(states.items())
    return [list(ordered[::2]), list(ordered[1::2])]


class Watching:
    """A thread that asks an instance for a generation all the time: it answers all of it, or nothing."""

    def __init__(self, instances: list[LocalInstance], generation: int, expected: Mapping[str, Decimal]) -> None:
        self._instances = instances
        self._generation = generation
        self._expected = expected
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.wrong: list[str] = []
        self.answers = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        asked = [*self._expected.items()]
        with httpx.Client(timeout=10) as http:
            at = 0
            while not self._stopping.wait(0.005):
                customer, amount = asked[at % len(asked)]
                at += 1
                path = f"/api/models/balance/keys/{customer}"
                parameters = {"generation": str(self._generation), "maxLag": "1000000"}
                try:
                    answer = http.get(f"{self._instances[at % len(self._instances)].url}{path}", params=parameters)
                except httpx.HTTPError:
                    continue
                if answer.status_code == 200:
                    self.answers += 1
                    found = Decimal(str(answer.json()["value"]["amount"]))
                    if found != amount:
                        self.wrong.append(f"{customer} has {found}, not {amount}")
                elif answer.status_code == 404 and "host" not in answer.text and "generation" not in answer.text:
                    self.wrong.append(f"{customer}: {answer.text}")


@contextmanager
def shop(
    stack: LocalStack, folder: Path, count: int, **settings: str
) -> Iterator[tuple[Shop, list[LocalInstance], Operator]]:
    """Instances, with standbys if they are several, that have folded everything."""
    one = Shop(stack, folder, BALANCE_NUM_STANDBY_REPLICAS=str(count - 1), **settings)
    instances = [new_instance(stack, one.given) for _ in range(count)]
    operator = Operator("balance", lambda: [instance.url for instance in instances], _SECONDS)
    with running(*instances):
        ends = ends_of(stack, one.given["BALANCE_TOPIC"])
        customers = [*recounted(stack, one.given)]
        expected = recounted(stack, one.given)
        eventually(lambda: all(owned(instance) for instance in instances), "both own partitions", 60)
        assert all_balances(instances[0], customers, ends) == expected
        yield one, instances, operator


def _status(operator: Operator, generation: int) -> dict[str, Any]:
    found = operator.generations().get("generations", [])
    return next((one for one in found if one["generation"] == generation), {})


@pytest.mark.shows("load")
def test_a_load_survives_a_kill_at_each_step_and_no_part_of_it_answers(stack: LocalStack, tmp_path: Path) -> None:
    offers = tmp_path / "offers"
    offers.mkdir()
    points = ",".join(f"{point}=kill" for point in _POINTS)
    # Disarmed until there is an offer.
    armed = {"BALANCE_FAILPOINTS": f"parts=20,{points},claims={offers}"}
    with shop(stack, tmp_path / "files", 2, **armed) as (one, instances, operator):
        expected = recounted(stack, one.given)
        for number, point in enumerate(_POINTS, 2):
            digest = one.folder(number)
            processes = [process_of(instance) for instance in instances]
            with Watching(instances, number, expected) as watching:
                (offers / point).touch()
                operator.ask("rebuild", switch="never", keepOld=0, files=str(one.files), digest=digest)
                eventually(
                    lambda processes=processes: any(not process.is_running() for process in processes),  # type: ignore[misc]
                    lambda point=point: f"no instance dies at {point}: {operator.generations()}",  # type: ignore[misc]
                    _SECONDS,
                )
                assert not (offers / point).exists()
                for instance, process in zip(instances, processes, strict=True):
                    if not process.is_running():
                        instance.stop()
                        instance.launch()
                eventually(
                    lambda number=number: _status(operator, number).get("status") == "ready",  # type: ignore[misc]
                    lambda point=point: f"{point}: {operator.generations()}",  # type: ignore[misc]
                    _SECONDS,
                )
                eventually(
                    lambda number=number: (
                        not one.path(number).exists()  # type: ignore[misc]
                        and _status(operator, number)["loaded"] is None
                    ),
                    lambda point=point: f"{point}: the files stay: {operator.generations()}",  # type: ignore[misc]
                    60,
                )
                time.sleep(0.5)
            assert (point, watching.wrong) == (point, [])
            compared = operator.generations()["comparison"]
            assert compared == {"equal": len(expected), "different": 0, "onlyServing": 0, "onlyBuilding": 0}
            operator.ask("drop", generation=number)
            for instance in instances:
                instance.wait_ready()


@pytest.mark.shows("load")
def test_files_that_are_altered_are_refused_with_a_sentence_and_deleted_with_their_generation(
    stack: LocalStack, tmp_path: Path
) -> None:
    with shop(stack, tmp_path / "files", 1) as (one, instances, operator):
        digest = one.folder(2, source_topic_id="another")
        http = httpx.Client(base_url=instances[0].url, timeout=30)
        body = {"model": "balance", "files": str(one.files), "digest": digest, "reason": "a test"}
        refused = http.post("/api/models.rebuild", json=body)
        assert (refused.status_code, "id of the source topic is 'another'" in refused.text) == (409, True)
        refused = http.post("/api/models.rebuild", json={**body, "files": "no-place"})
        assert (refused.status_code, "is neither an absolute path nor a URI" in refused.text) == (409, True)
        digest = one.folder(3)
        refused = http.post("/api/models.rebuild", json={**body, "digest": digest})
        assert (refused.status_code, "manifest.json has digest" in refused.text) == (409, True)

        digest = one.folder(2)
        altered = max((one.path(2) / "partition-00001").iterdir())
        altered.write_bytes(altered.read_bytes()[:-1])
        with Watching(instances, 2, recounted(stack, one.given)) as watching:
            operator.ask("rebuild", switch="always", files=str(one.files), digest=digest)
            eventually(lambda: "is cut or altered" in _status(operator, 2).get("halted", ""), "it is halted", _SECONDS)
        assert watching.wrong == []
        switched = http.post("/api/models.switch", json={"model": "balance", "anyway": True, "reason": "a test"})
        assert (switched.status_code, "is being loaded from files" in switched.text) == (409, True)
        assert one.path(2).exists()
        operator.ask("drop", generation=2)
        eventually(lambda: not one.path(2).exists(), "the files are deleted", 60)
        # It begins again.
        digest = one.folder(3)
        operator.ask("rebuild", switch="always", files=str(one.files), digest=digest, keepFiles=True)
        eventually(lambda: _status(operator, 3).get("status") == "serving", lambda: str(operator.generations()), 60)
        eventually(lambda: _status(operator, 3)["loaded"] is None, "the load has ended", 60)
        assert folder_of(one.files, one.stage(3)).manifest() is not None
        customers = [*recounted(stack, one.given)]
        ends = ends_of(stack, one.given["BALANCE_TOPIC"])
        assert all_balances(instances[0], customers, ends) == recounted(stack, one.given)


@pytest.mark.shows("load")
def test_a_generation_that_spark_folds_on_this_machine_equals_the_serving_one(
    stack: LocalStack, tmp_path: Path
) -> None:
    with shop(stack, tmp_path, 1) as (one, instances, _operator):
        files = tmp_path / "files"
        address = instances[0].url
        done = one.run(
            "rebuild", "balance", "--master", "local[2]", "--files", str(files), "--url", address, seconds=400
        )
        assert done.code == 0, done
        assert "balance 2  serving" in done.stdout
        assert f"keys: {len(recounted(stack, one.given))} equal, 0 different" in done.stdout
        eventually(lambda: [*files.rglob("*.*")] == [], lambda: str([*files.rglob("*")]), 30)
        assert one.run("load", "--events", "500", "--customers", str(_CUSTOMERS)).code == 0
        ends = ends_of(stack, one.given["BALANCE_TOPIC"])
        customers = [*recounted(stack, one.given)]
        assert all_balances(instances[0], customers, ends) == recounted(stack, one.given)
