"""Standbys of processes: they answer queries with maxLag while an owner is down, and take over."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.service import (
    PARTITIONS,
    SESSION_TIMEOUT_SECONDS,
    add,
    amount_of,
    application,
    ask,
    ask_again,
    customers_of,
    new_instance,
    owned,
    running,
    tasks,
    wait_until_spread,
    warm_up,
)
from tests.support.waiting import SHARED, eventually

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalInstance, LocalStack

_STANDBY_ANSWERS_WITHIN_SECONDS = 3.0 * SHARED
_OWNER_ANSWERS_WITHIN_SECONDS = SESSION_TIMEOUT_SECONDS + 5.0 * SHARED


def get(instance: LocalInstance, customer: str, **parameters: str) -> httpx.Response:
    """Queries a balance with optional bounds."""
    return httpx.get(
        instance.url + GET_BALANCE, params={"customerId": customer, **parameters}, timeout=30, verify=False
    )


@pytest.mark.shows("takeover")
def test_the_standby_of_a_killed_owner_answers_at_once_and_takes_over_without_restoring(
    stack: LocalStack,
) -> None:
    settings = application(BALANCE_NUM_STANDBY_REPLICAS="1")
    with running(new_instance(stack, settings), new_instance(stack, settings)) as (victim, survivor):
        wait_until_spread([victim, survivor])
        warm_up(survivor.url)
        (lost,) = owned(victim)
        (kept,) = owned(survivor)
        assert {lost, kept} == set(range(PARTITIONS))
        customer = customers_of(lost, 1)[0]
        position = add(survivor.url, customer, "12.34")
        assert amount_of(ask_again(survivor.url, customer, position)) == Decimal("12.34")
        eventually(lambda: lost in tasks(survivor, "standby", "TAILING"), "the survivor is a standby")
        eventually(
            lambda: get(survivor, customer, maxLag="0").headers.get("Balance-Role") is not None, "the lag is known"
        )

        victim.kill()
        killed_at = time.monotonic()
        while (answer := get(survivor, customer, maxLag="0")).status_code != 200:
            assert time.monotonic() - killed_at < _STANDBY_ANSWERS_WITHIN_SECONDS, answer.text
        assert amount_of(answer) == Decimal("12.34")
        assert answer.headers["Balance-Role"] == "standby"
        assert int(answer.headers["Balance-Lag"]) == 0
        assert ask(survivor.url, customer).status_code == 503

        while (answer := get(survivor, customer)).status_code != 200:
            assert time.monotonic() - killed_at < _OWNER_ANSWERS_WITHIN_SECONDS, answer.text
            time.sleep(0.05)
        print(f"a new owner answers {time.monotonic() - killed_at:.1f} s after the kill")
        assert answer.headers["Balance-Role"] == "active"
        assert answer.headers["Balance-Position"] == position
        assert tasks(survivor, "active", "RUNNING")[lost]["restored"] == 0


def test_a_repeated_command_with_an_idempotency_key_counts_once(stack: LocalStack) -> None:
    with running(new_instance(stack, application())) as (instance,):
        positions = [
            httpx.post(
                instance.url + ADD_FUNDS,
                json={"customerId": "c", "amount": "1.00"},
                headers={"Idempotency-Key": key},
                timeout=30,
                verify=False,
            ).headers["Balance-Position"]
            for key in ("order-1", "order-1", "order-2")
        ]
        assert len(set(positions)) == 3

        assert amount_of(ask_again(instance.url, "c", positions[-1])) == Decimal("2.00")


def test_peers_with_different_secrets_do_not_answer_each_other_and_report_why(stack: LocalStack) -> None:
    settings = application()
    one = new_instance(stack, settings | {"BALANCE_PEER_SECRET": "one secret of many"})
    other = new_instance(stack, settings | {"BALANCE_PEER_SECRET": "another secret of many"})
    # An unsigned record of the generations counts with either secret; one that the first signs ends the second's start.
    with running(new_instance(stack, settings)):
        pass
    with running(one, other):
        # Each ignores the other's directory records, so the status does not list the other one.
        eventually(lambda: len(owned(one)) == len(owned(other)) == 1, "each owns a partition")
        (partition,) = owned(other)
        (customer,) = customers_of(partition, 1)

        assert get(one, customer).status_code == 503
        told = [line for line in one.log.read_text().splitlines() if "a record of the directory was ignored" in line]
        assert any("give all instances the same BALANCE_PEER_SECRET" in line for line in told)
        unproven = httpx.get(
            other.url + GET_BALANCE,
            params={"customerId": customer},
            headers={"Balance-Forwarded": "somebody:1"},
            verify=False,
        )
        assert unproven.status_code == 403
        assert get(other, customer).status_code == 404
