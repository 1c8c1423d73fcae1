"""The command line, for people and for programs."""

from __future__ import annotations

import json
import uuid
from decimal import Decimal
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.commands import assert_refused, run, started
from tests.support.kafka import admin
from tests.support.service import address, application, on
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance, LocalStack


@pytest.fixture
def customer() -> str:
    return f"cli-{uuid.uuid4()}"


def test_topics_are_created_once_with_the_policies_that_the_service_needs(stack: LocalStack) -> None:
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
    }


def test_funds_are_added_and_the_balance_read_back(warm_instance: LocalInstance, customer: str) -> None:
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


def test_an_unknown_customer_is_said_to_be_unknown(warm_instance: LocalInstance, customer: str) -> None:
    done = run(warm_instance.environment, "get-balance", customer)

    assert_refused(done, 1, "no such customer")


@pytest.mark.parametrize("amount", ["0", "1.234", "abc", "1e400"])
def test_an_amount_that_is_not_money_is_a_usage_error(warm_instance: LocalInstance, customer: str, amount: str) -> None:
    done = run(warm_instance.environment, "add-funds", customer, amount)

    assert done.code == 2
    assert "Error: " in done.stderr
    assert "amount" in done.stderr
    assert "Traceback" not in done.stderr
    assert run(warm_instance.environment, "get-balance", customer).code == 1


def test_the_status_names_every_task_of_every_instance(warm_instance: LocalInstance) -> None:
    for_people = run(warm_instance.environment, "status")
    for_programs = run(warm_instance.environment, "status", "--json")

    assert (for_people.code, for_programs.code) == (0, 0)
    assert f"{address(warm_instance)} is ready" in for_people.stdout
    known = json.loads(for_programs.stdout)
    assert [task["task"] for task in known["tasks"]] == ["balance_0", "balance_1"]
    for task in known["tasks"]:
        assert f"{task['task']}  active RUNNING  epoch {task['epoch']}  position " in for_people.stdout


def test_an_instance_that_is_not_there_is_named(stack: LocalStack) -> None:
    nowhere = {"BALANCE_APPLICATION_SERVER": "127.0.0.1:1"}

    for command in (["status"], ["get-balance", "c1"]):
        assert_refused(run(nowhere, *command), 1, "127.0.0.1:1", "BALANCE_APPLICATION_SERVER")


def test_a_load_says_what_it_has_appended(warm_instance: LocalInstance) -> None:
    before = _applied(warm_instance)

    done = run(warm_instance.environment, "load", "--events", "1000", "--customers", "3", "--rate", "2000")

    assert done.code == 0, done
    assert done.stdout.startswith("1000 events of "), done
    total = Decimal(done.stdout.split()[3])
    eventually(lambda: _applied(warm_instance) == before + 1000, "all is applied")
    balances = [
        json.loads(run(warm_instance.environment, "get-balance", f"customer-{n}", "--json").stdout, parse_float=Decimal)
        for n in range(3)
    ]
    assert sum(balance["amount"] for balance in balances) == total


def test_a_local_stack_without_instances_ends_at_ctrl_c_and_leaves_no_child(tmp_path: Path) -> None:
    ports = ["--kafka-port", "0", "--registry-port", "0", "--data-dir", str(tmp_path / "data")]
    with started({}, "local", "--instances", "0", *ports) as command:
        eventually(lambda: "ready; Ctrl-C stops everything" in command.stdout, "it is ready")
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
