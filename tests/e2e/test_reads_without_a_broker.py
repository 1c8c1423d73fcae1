"""While the broker is away, any instance answers for any key from the last state, and says how old that is."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING

import httpx
import pytest

from balance_service.devtools.local.stack import LocalStack
from tests.support.api import GET_BALANCE
from tests.support.commands import started
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
    on,
    running,
    wait_until_spread,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance

# Beyond the sessions in the groups, which the instances end by themselves then.
_AWAY_SECONDS = SESSION_TIMEOUT_SECONDS + 20.0
_SETTLED_SECONDS = 5.0
_FRESH_SECONDS = 3.0


def _old(instance: LocalInstance, customer: str, max_age: float) -> httpx.Response:
    parameters = {"customerId": customer, "maxAge": str(max_age)}
    return httpx.get(instance.url + GET_BALANCE, params=parameters, timeout=30, verify=False)


@pytest.mark.shows("max-age")
def test_any_instance_answers_for_any_key_with_max_age_while_the_broker_is_away(tmp_path: Path) -> None:
    settings = application()
    with (
        LocalStack(tmp_path) as stack,
        running(new_instance(stack, settings), new_instance(stack, settings)) as instances,
    ):
        wait_until_spread(instances)
        customers = [customers_of(partition, 1)[0] for partition in range(PARTITIONS)]
        for customer in customers:
            position = add(instances[0].url, customer, "12.34")
            assert amount_of(ask_again(instances[1].url, customer, position)) == Decimal("12.34")
        # Some commits are under way when the broker goes.
        with started(on(stack, settings), "load", "--events", "100000", "--rate", "1000"):
            time.sleep(_SETTLED_SECONDS)
            stack.broker.kill()
            away_since = time.monotonic()
        while (away := time.monotonic() - away_since) < _AWAY_SECONDS:
            for instance in instances:
                for customer in customers:
                    answer = _old(instance, customer, away + _FRESH_SECONDS)
                    assert answer.status_code == 200, f"{away:.1f} s: {answer.text}"
                    assert amount_of(answer) == Decimal("12.34")
                    assert away - _FRESH_SECONDS < float(answer.headers["Balance-Age"]) <= away + _FRESH_SECONDS
            time.sleep(0.5)
        assert {ask(instance.url, customer).status_code for instance in instances for customer in customers} == {503}
        missing = _old(instances[0], "nobody", 60)
        assert (missing.status_code, "a newer copy may have it" in missing.json()["detail"]) == (503, True)

        stack.broker.start()

        for instance in instances:
            for customer in customers:
                eventually(lambda: ask(instance.url, customer).status_code == 200, "the owners answer")  # noqa: B023
                assert amount_of(ask(instance.url, customer)) == Decimal("12.34")
