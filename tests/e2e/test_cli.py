"""Commands for balances, topics, status, load and the local stack, and `produce` and `tail`."""

from __future__ import annotations

import json
import uuid
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from confluent_kafka import Producer

from tests.support.commands import Done, assert_refused, run, started
from tests.support.kafka import admin, create_topic, ends_of
from tests.support.service import address, application, on
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance, LocalStack


@pytest.fixture
def customer() -> str:
    return f"cli-{uuid.uuid4()}"


def test_topics_create_is_idempotent(stack: LocalStack) -> None:
    settings = application(BALANCE_PARTITIONS="3", BALANCE_CREATE_TOPICS="false")
    topic, application_id = settings["BALANCE_TOPIC"], settings["BALANCE_APPLICATION_ID"]

    for _ in range(2):
        done = run(on(stack, settings), "topics", "create")
        assert (done.code, done.stderr) == (0, ""), done
        assert f"topic {topic} with 3 partitions" in done.stdout

    there = admin(stack).list_topics(timeout=10).topics
    assert {name: len(there[name].partitions) for name in there if topic in name or application_id in name} == {
        topic: 3,
        f"{topic}-dead-letters": 3,
        f"{application_id}-balance-changelog": 3,
        f"{application_id}-application-servers": 1,
        f"{application_id}-dead-letter-decisions": 1,
        f"{application_id}-generations": 1,
    }


def test_add_funds_and_get_balance_agree(warm_instance: LocalInstance, customer: str) -> None:
    environment = warm_instance.environment

    added = run(environment, "add-funds", customer, "12.34", "--json")
    assert (added.code, added.stderr) == (0, ""), added
    position = json.loads(added.stdout)["position"]
    read = run(environment, "get-balance", customer, "--min-position", position, "--json")
    assert (read.code, read.stdout.strip()) == (0, '{"amount":12.34}'), read

    added = run(environment, "add-funds", customer, "0.10")
    assert added.stdout.startswith("added 0.10; visible from position "), added
    position = added.stdout.split("position ")[1].split()[0]
    read = run(environment, "get-balance", customer, "--min-position", position)
    assert read.stdout == f"12.44  (from {address(warm_instance)})\n", read


def test_get_balance_names_an_unknown_customer(warm_instance: LocalInstance, customer: str) -> None:
    done = run(warm_instance.environment, "get-balance", customer)

    assert_refused(done, 1, "no such customer")


@pytest.mark.parametrize("amount", ["0", "1.234", "abc", "1e400"])
def test_an_invalid_amount_is_a_usage_error(warm_instance: LocalInstance, customer: str, amount: str) -> None:
    done = run(warm_instance.environment, "add-funds", customer, amount)

    assert done.code == 2
    assert "Error: " in done.stderr
    assert "amount" in done.stderr
    assert "Traceback" not in done.stderr
    assert run(warm_instance.environment, "get-balance", customer).code == 1


def test_status_prints_every_task(warm_instance: LocalInstance) -> None:
    for_people = run(warm_instance.environment, "status")
    for_programs = run(warm_instance.environment, "status", "--json")

    assert (for_people.code, for_programs.code) == (0, 0)
    assert f"{address(warm_instance)} is ready" in for_people.stdout
    known = json.loads(for_programs.stdout)
    assert [task["task"] for task in known["tasks"]] == ["balance_0", "balance_1"]
    for task in known["tasks"]:
        assert f"{task['task']}  active RUNNING  epoch {task['epoch']}  position " in for_people.stdout


def test_an_unreachable_instance_is_named(stack: LocalStack) -> None:
    nowhere = {"BALANCE_APPLICATION_SERVER": "127.0.0.1:1"}

    for command in (["status"], ["get-balance", "c1"]):
        assert_refused(run(nowhere, *command), 1, "127.0.0.1:1", "BALANCE_APPLICATION_SERVER")


def test_load_reports_the_appended_total(warm_instance: LocalInstance) -> None:
    before = _applied(warm_instance)

    done = run(warm_instance.environment, "load", "--events", "1000", "--customers", "3", "--rate", "2000")

    assert done.code == 0, done
    assert done.stdout.startswith("1000 events of "), done
    total = Decimal(done.stdout.split()[3])
    eventually(lambda: _applied(warm_instance) == before + 1000, "all events are applied")
    balances = [
        json.loads(run(warm_instance.environment, "get-balance", f"customer-{n}", "--json").stdout, parse_float=Decimal)
        for n in range(3)
    ]
    assert sum(balance["amount"] for balance in balances) == total


def test_local_ends_on_ctrl_c_and_leaves_no_process(tmp_path: Path) -> None:
    ports = ["--kafka-port", "0", "--registry-port", "0", "--data-dir", str(tmp_path / "data")]
    with started({}, "local", "--instances", "0", *ports) as command:
        eventually(lambda: "ready; Ctrl-C stops everything" in command.stdout, "the stack is ready")
        children = psutil.Process(command.process.pid).children(recursive=True)

        command.interrupt()
        done = command.wait(30)

    assert done.code == 0, done
    assert done.stdout.endswith("stopped\n")
    assert "Traceback" not in done.stderr
    assert len(children) == 4, "a guard for each server"
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def _applied(instance: LocalInstance) -> int:
    tasks = json.loads(run(instance.environment, "status", "--json").stdout)["tasks"]
    return sum(task["position"] for task in tasks)


FUNDS_ADDED = "parts.code.balance.events.FundsAdded"
_AT = "2026-01-01T00:00:00.000Z"


def event(customer: str, amount: str) -> str:
    return f'{{"id": "{uuid.uuid4()}", "occurredOn": "{_AT}", "customerId": "{customer}", "amount": {amount}}}'


def keyed(customer: str, *amounts: str, separator: str = "|") -> bytes:
    return "".join(f"{customer}{separator}{event(customer, amount)}\n" for amount in amounts).encode()


def lines_of(done: Done) -> list[Any]:
    assert (done.code, done.stderr) == (0, ""), done
    # Not splitlines(): it also splits at characters that a JSON string may hold, such as U+2028.
    return [json.loads(line, parse_float=Decimal) for line in done.stdout.removesuffix("\n").split("\n")]


@pytest.fixture
def topic(stack: LocalStack) -> str:
    """A new source topic."""
    name = f"balance-{uuid.uuid4().hex[:8]}"
    create_topic(stack, name, {})
    return name


@pytest.fixture
def environment(stack: LocalStack, topic: str) -> dict[str, str]:
    return on(stack, application(BALANCE_TOPIC=topic))


def test_produced_events_are_folded_and_shown_exactly(warm_instance: LocalInstance) -> None:
    environment, customer = warm_instance.environment, f"produced\u2028{uuid.uuid4()}"
    amounts = ("12.34", '"0.10"', "9999999999999999.99")

    produced = run(
        environment, "produce", environment["BALANCE_TOPIC"], "--key-separator", "|", stdin=keyed(customer, *amounts)
    )

    assert (produced.code, produced.stdout, produced.stderr) == (0, "3 records acknowledged\n", ""), produced

    def balance() -> Done:
        return run(environment, "get-balance", customer, "--json")

    eventually(lambda: balance().stdout == '{"amount":10000000000000012.43}\n', "all three events are in the balance")
    with started(environment, "tail", environment["BALANCE_TOPIC"], "--from-beginning") as tail:
        eventually(lambda: tail.stdout.count(customer) == 6, "tail shows all three events, each with its key")
        tail.interrupt()
        shown = [line for line in lines_of(tail.wait(10)) if line["key"] == customer]
    assert [line["value"]["amount"] for line in shown] == [
        Decimal("12.34"),
        Decimal("0.10"),
        Decimal("9999999999999999.99"),
    ]
    assert {line["record"] for line in shown} == {FUNDS_ADDED}
    assert {line["value"]["occurredOn"] for line in shown} == {_AT}


def test_produce_stops_at_an_invalid_line_and_names_its_number_and_field(
    stack: LocalStack, topic: str, environment: dict[str, str]
) -> None:
    lines = keyed("c1", "1", "2") + b"\n" + keyed("c1", "3.001", "4")

    done = run(environment, "produce", topic, "--key-separator", "|", stdin=lines)

    assert_refused(done, 1, "line 4: 'amount' must be a number", "not 3.001; 2 records before it were acknowledged")
    assert sum(ends_of(stack, topic).values()) == 2
    shown = lines_of(run(environment, "tail", topic, "--from-beginning", "--limit", "2"))
    assert [line["value"]["amount"] for line in shown] == [1, 2]


def test_tail_shows_committed_records_with_all_their_parts(
    stack: LocalStack, topic: str, environment: dict[str, str]
) -> None:
    producer = Producer({"bootstrap.servers": stack.bootstrap_servers, "transactional.id": f"{topic}-writer"})
    producer.init_transactions(30)
    for number, end in enumerate((producer.abort_transaction, producer.commit_transaction)):
        producer.begin_transaction()
        headers: list[tuple[str, str | bytes | None]] = [
            ("origin", b"pos:1:42"),
            ("twice", b"a"),
            ("twice", b"\xff"),
            ("none", None),
            ("twice", b"b"),
        ]
        producer.produce(topic, b"no frame", b"\x80\x01", partition=1, headers=headers, timestamp=number + 1)
        producer.produce(topic, None, None, partition=1, timestamp=number + 1)
        assert producer.flush(10) == 0
        end()

    shown = lines_of(run(environment, "tail", topic, "--from-beginning", "--limit", "2"))

    assert shown == [
        {
            "partition": 1,
            "offset": 3,
            "timestamp": "1970-01-01T00:00:00.002Z",
            "keyBase64": "gAE=",
            "headers": [
                {"name": "origin", "value": "pos:1:42"},
                {"name": "twice", "value": "a"},
                {"name": "twice", "valueBase64": "/w=="},
                {"name": "none", "value": None},
                {"name": "twice", "value": "b"},
            ],
            "problem": "a record's frame starts with 110, not 0",
            "valueBase64": "bm8gZnJhbWU=",
        },
        {
            "partition": 1,
            "offset": 4,
            "timestamp": "1970-01-01T00:00:00.002Z",
            "key": None,
            "headers": [],
            "value": None,
        },
    ]


def test_tail_starts_at_the_end_and_shows_new_records(topic: str, environment: dict[str, str]) -> None:
    def produce(amount: str) -> None:
        assert (
            run(environment, "produce", topic, "--key-separator", ": ", stdin=keyed("c1", amount, separator=": ")).code
            == 0
        )

    produce("1")
    with started(environment, "tail", topic, "--limit", "1") as tail:
        # The start offset is unknown until tail shows a record, so the test produces until it does.
        for number in range(2, 100):
            produce(str(number))
            if tail.stdout:
                break
        (shown,) = lines_of(tail.wait(10))

    assert shown["value"]["amount"] > 1


def test_a_missing_topic_or_one_without_a_model_is_named(stack: LocalStack) -> None:
    environment = on(stack, application())
    missing = environment["BALANCE_TOPIC"]

    assert_refused(
        run(environment, "produce", missing, stdin=b"{}"), 2, f"topic '{missing}' does not exist", "topics create"
    )
    assert_refused(run(environment, "tail", missing), 2, f"topic '{missing}' does not exist")
    assert_refused(run(environment, "produce", "other"), 2, "no read model reads topic 'other'", missing)
    assert_refused(run(environment, "produce", missing, "--record", "Player"), 2, "has no record Player", "FundsAdded")


def test_an_empty_separator_is_a_usage_error(stack: LocalStack) -> None:
    done = run(on(stack, application()), "produce", "balance", "--key-separator", "")

    assert done.code == 2
    assert "--key-separator must not be empty" in done.stderr
