"""Instances that reach the brokers but not each other, and an instance whose clock is an hour off."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.api import GET_BALANCE
from tests.support.service import (
    add,
    amount_of,
    application,
    ask,
    ask_again,
    customers_of,
    new_instance,
    owned,
    retried,
    running,
    status,
    tasks,
    wait_until_spread,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

# Python imports a module with this name at interpreter start.
HOOK = "sitecustomize.py"
LOADED = "loaded"
AN_HOUR_OFF = """\
import pathlib
import time
pathlib.Path(__file__).with_name("{loaded}").touch()
of_day = time.time
time.time = lambda: of_day() + ({seconds})
"""
# No process listens on these ports.
UNREACHABLE = ("127.0.0.1:1", "127.0.0.1:2")


def as_standby(instance: LocalInstance, customer: str) -> httpx.Response:
    """Queries a balance with maxLag=0, which a standby may answer; retries on 404 and 503."""
    query = {"customerId": customer, "maxLag": "0"}
    return retried(lambda: httpx.get(instance.url + GET_BALANCE, params=query, timeout=30), (404, 503))


def test_instances_without_a_network_between_them_answer_as_owners_and_standbys(
    stack: LocalStack,
) -> None:
    settings = application(BALANCE_NUM_STANDBY_REPLICAS="1")
    apart = [new_instance(stack, settings | {"BALANCE_APPLICATION_SERVER": server}) for server in UNREACHABLE]
    with running(*apart) as (one, other):
        wait_until_spread([one, other])
        for here, there in ((one, other), (other, one)):
            (partition,) = owned(here)
            customer = customers_of(partition, 1)[0]
            position = add(there.url, customer, "1.25")
            assert amount_of(ask_again(here.url, customer, position)) == Decimal("1.25")

            refused = ask(there.url, customer)
            assert refused.status_code == 503
            assert refused.headers["Retry-After"]
            answer = as_standby(there, customer)
            assert (answer.headers["Balance-Role"], amount_of(answer)) == ("standby", Decimal("1.25"))


@pytest.mark.parametrize("seconds", [-3_600, 3_600], ids=["behind", "ahead"])
def test_an_instance_with_a_wrong_clock_answers_and_takes_over(stack: LocalStack, tmp_path: Path, seconds: int) -> None:
    (tmp_path / HOOK).write_text(AN_HOUR_OFF.format(seconds=seconds, loaded=LOADED))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = application(BALANCE_NUM_STANDBY_REPLICAS="1")
    right, wrong = new_instance(stack, settings), new_instance(stack, settings | {"PYTHONPATH": path})
    customers = [customer for partition in range(2) for customer in customers_of(partition, 3)]
    expected = dict.fromkeys(customers, Decimal("0.50"))
    with running(right, wrong):
        wait_until_spread([right, wrong])
        for number, customer in enumerate(customers):
            position = add((right, wrong)[number % 2].url, customer, "0.50")
            for instance in (right, wrong):
                assert amount_of(ask_again(instance.url, customer, position)) == Decimal("0.50")
        eventually(lambda: bool(tasks(wrong, "standby", "TAILING")), "the instance has stores of both partitions")
        wrong.kill()
        wrong.launch()
        wrong.wait_ready()
        wait_until_spread([right, wrong])
        eventually(lambda: bool(tasks(wrong, "standby", "TAILING")), "the instance has stores of both partitions again")
        restored = [task["restored"] for task in status(wrong)["tasks"]]
        right.kill()

        eventually(lambda: owned(wrong) == {0, 1}, "the instance takes over")
        assert {customer: amount_of(ask_again(wrong.url, customer)) for customer in customers} == expected
    assert (tmp_path / LOADED).exists()
    assert max(restored) < len(customers), "the instance continues with its existing store"
