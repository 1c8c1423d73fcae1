"""Dead letters of other producers: their retry topic and operators' decisions about them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from confluent_kafka import TopicPartition

from balance_service.devtools.local.processes import READY_TIMEOUT_SECONDS
from tests.e2e.clients import assert_problem
from tests.e2e.dead_letters import decide, letter, pages, wait_for
from tests.support.commands import assert_refused, run
from tests.support.kafka import Writer, admin, create_topic, read_topic
from tests.support.service import PARTITIONS, application, new_instance, on, running, status
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

_COUNT = 300
# Tasks write their epochs first: two partitions of the balance and one of dead letters.
_FIRST = PARTITIONS + 2
_IN_16_SECONDS, _IN_64_SECONDS = ("retry-attempt", b"4"), ("retry-attempt", b"6")


class Orders(Writer):
    """A producer with a dead-letter topic of one partition."""

    def __init__(self, stack: LocalStack, settings: dict[str, str]) -> None:
        super().__init__(stack, settings["BALANCE_RETRY_TOPICS"])
        self.stage = f"retries-{self.topic}"
        self._stack = stack
        self._retries = f"{settings['BALANCE_APPLICATION_ID']}-retries"
        create_topic(stack, self.topic, {"retention.ms": "86400000"}, partitions=1)

    def fail(self, *values: bytes, headers: Any = ()) -> list[str]:
        """Appends records to the dead-letter topic; returns the ids of the dead letters."""
        placed: list[Any] = []
        for value in values:
            self.send(value, value, headers=[*headers], on_delivery=lambda _, message: placed.append(message))
        assert self.producer.flush(10) == 0
        return [f"{self.stage}/0:{message.offset()}" for message in placed]

    def received(self) -> list[bytes]:
        """Returns the values that a read-committed consumer of the retry topic has received."""
        return [message.value() for message in read_topic(self._stack, self._retries)]

    def wait_until_received(self, *values: bytes) -> None:
        """Waits until the consumer has received these values."""
        eventually(lambda: {*self.received()} >= {*values}, lambda: f"{len(self.received())} received")


def settings_of_retries() -> dict[str, str]:
    settings = application(BALANCE_RETRY_EVERY="1")
    return settings | {"BALANCE_RETRY_TOPICS": f"orders-{settings['BALANCE_APPLICATION_ID']}-dead-letters"}


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return settings_of_retries()


@pytest.fixture(scope="module")
def orders(stack: LocalStack, settings: dict[str, str]) -> Iterator[Orders]:
    with Orders(stack, settings) as writer:
        yield writer


@pytest.fixture(scope="module")
def instance(stack: LocalStack, settings: dict[str, str], orders: Orders) -> Iterator[LocalInstance]:
    """The instance, in the state that each test leaves."""
    with running(new_instance(stack, settings)) as (started,):
        yield started


@pytest.mark.shows("outputs-once")
@pytest.mark.parametrize(
    ("failpoints", "is_scheduled"),
    [
        ((f"produced=kill@{_FIRST}", f"committed=kill@{_FIRST}"), False),
        (("letters-read=kill", f"produced=kill@{_FIRST}", f"committed=kill@{_FIRST}"), True),
    ],
    ids=["while it schedules", "while it sends"],
)
def test_an_instance_killed_repeatedly_sends_each_record_once(
    instance: LocalInstance, orders: Orders, failpoints: tuple[str, ...], is_scheduled: bool
) -> None:
    records = [f"{is_scheduled} {number}".encode() for number in range(_COUNT)]
    before = orders.received()
    if is_scheduled:
        wait_for(instance, "scheduled", *orders.fail(*records, headers=[_IN_16_SECONDS])[::100])
    instance.stop()
    if not is_scheduled:
        orders.fail(*records)
    assert orders.received() == before

    for failpoint in failpoints:
        instance.environment["BALANCE_FAILPOINTS"] = failpoint
        instance.launch()
        del instance.environment["BALANCE_FAILPOINTS"]
        eventually(lambda: not instance.running, "the instance has started and been killed", READY_TIMEOUT_SECONDS)
        assert "a fail point strikes" in instance.log.read_text()
        is_sent = is_scheduled and failpoint.startswith("committed")
        assert len(orders.received()) == len(before) + is_sent * _COUNT
        instance.stop()
    instance.launch()
    instance.wait_ready()

    orders.wait_until_received(*records)
    last = f"{is_scheduled} last".encode()
    orders.fail(last)
    orders.wait_until_received(last)
    assert sorted(orders.received()) == sorted([*before, *records, last])


def test_operators_list_redrive_and_discard_retries(instance: LocalInstance, orders: Orders) -> None:
    before = orders.received()
    redriven, discarded = orders.fail(b"a", b"b", headers=[_IN_64_SECONDS, ("trace", b"t")])
    (parked,) = orders.fail(b"c", headers=[("retry-attempt", b"10")])
    listed = [redriven, discarded, parked]
    wait_for(instance, "scheduled", redriven, discarded)
    wait_for(instance, "parked", parked)

    first = letter(instance, redriven)
    assert (first["model"], first["cause"], first["attempt"], first["key"]) == (orders.stage, "retry", 6, "a")
    assert first["headers"] == [{"name": "retry-attempt", "value": "6"}, {"name": "trace", "value": "t"}]
    assert first["dueAt"] is not None
    for parameters in ({"model": orders.stage}, {"cause": "retry"}, {}):
        found = [one["id"] for page in pages(instance, limit="1000", **parameters) for one in page]
        assert found[-3:] == listed

    assert decide(instance, "discard", discarded).json() == {"accepted": [discarded], "refused": []}
    assert decide(instance, "redrive", redriven, parked).status_code == 202
    wait_for(instance, "applied", redriven, parked)
    assert_problem(decide(instance, "redrive", discarded), 409, f"{discarded}: it is discarded already")
    assert letter(instance, discarded)["status"] == "discarded"
    assert sorted(orders.received()) == sorted([*before, b"a", b"c"])


def test_a_letter_whose_record_was_deleted_is_listed_and_can_be_discarded(
    stack: LocalStack, instance: LocalInstance, orders: Orders
) -> None:
    (gone,) = orders.fail(b"gone", headers=[_IN_64_SECONDS])
    wait_for(instance, "scheduled", gone)
    end = TopicPartition(orders.topic, 0, int(gone.rpartition(":")[2]) + 1)
    admin(stack).delete_records([end])[end].result(10)

    assert decide(instance, "redrive", gone).status_code == 202
    wait_for(instance, "waiting", gone)
    told = letter(instance, gone)
    assert (told["cause"], told["key"], told["valueBase64"], told["headers"]) == ("record-gone", "gone", None, None)
    # The list decodes no record.
    of_list = {name: value for name, value in told.items() if name not in ("decoded", "problem")}
    assert [one for page in pages(instance) for one in page if one["id"] == gone] == [of_list]
    assert_problem(decide(instance, "redrive", gone), 409, "never goes away: discard it")
    assert decide(instance, "discard", gone).status_code == 202


def test_a_retry_stage_is_no_read_model_but_its_tasks_are_shown(
    stack: LocalStack, settings: dict[str, str], instance: LocalInstance, orders: Orders, tmp_path: Path
) -> None:
    stage = orders.stage

    models = httpx.get(f"{instance.url}/api/models", timeout=10).json()["models"]
    assert [model["name"] for model in models] == ["balance"]
    assert httpx.get(f"{instance.url}/api/models/{stage}/keys/a", timeout=10).status_code == 404
    assert [model["name"] for model in status(instance)["models"]] == ["balance"]
    (task,) = [task for task in status(instance)["tasks"] if task["readModel"] == stage]
    assert (task["task"], task["state"], task["role"]) == (f"{stage}_0", "RUNNING", "active")
    metrics = httpx.get(f"{instance.url}/metrics", timeout=10).text
    assert f'balance_position{{partition="0",read_model="{stage}",role="active"}}' in metrics
    assert httpx.get(f"{instance.url}/health/ready", timeout=10).status_code == 200
    assert f"{orders.topic}-dead-letters" not in admin(stack).list_topics(timeout=10).topics

    done = run(on(stack, settings) | {"BALANCE_STATE_DIR": str(tmp_path)}, "rebuild", "--offline", stage)
    assert_refused(done, 2, f"'{stage}' is unknown")


@pytest.mark.parametrize("command", [("serve",), ("topics", "create")])
def test_a_missing_retry_source_topic_is_refused(stack: LocalStack, tmp_path: Path, command: tuple[str, ...]) -> None:
    began = time.monotonic()
    settings = on(stack, settings_of_retries()) | {"BALANCE_STATE_DIR": str(tmp_path), "BALANCE_HTTP_PORT": "0"}

    done = run(settings, *command)

    assert_refused(done, 2, "BALANCE_RETRY_TOPICS", settings["BALANCE_RETRY_TOPICS"], "does not exist")
    assert time.monotonic() - began < 60
