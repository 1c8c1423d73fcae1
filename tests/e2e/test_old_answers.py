"""Answers from old states: while the broker is away, and of an owner that its model's own code has halted."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING

import httpx
import pytest

from balance_service.devtools.local.stack import LocalStack
from tests.support.api import GET_BALANCE
from tests.support.commands import started
from tests.support.kafka import Writer
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


_SUPERSTITIOUS = """
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from balance_service import ReadModel, Stream, scale


@dataclass
class Last:
    customerId: str
    amount: Annotated[Decimal, scale(2)]


class Superstitious(ReadModel):
    name = "superstitious"
    source = Stream("{topic}", "FundsAdded")
    key = "customerId"
    state = Last

    def fold(self, state, event):
        if event["amount"] == 13:
            raise ValueError("not this one")
        return Last(event["customerId"], event["amount"])


class Stubborn(Superstitious):
    name = "stubborn"
    answers_when_halted = True
"""


@pytest.mark.shows("own-code")
def test_a_halted_owner_answers_queries_that_say_how_recent_the_answer_must_be(
    stack: LocalStack, tmp_path: Path
) -> None:
    settings = application(BALANCE_MODELS="halting:Superstitious,halting:Stubborn", PYTHONPATH=str(tmp_path))
    (tmp_path / "halting.py").write_text(_SUPERSTITIOUS.format(topic=settings["BALANCE_TOPIC"]))
    one, other = new_instance(stack, settings), new_instance(stack, settings)
    with running(one, other), Writer(stack, settings["BALANCE_TOPIC"]) as writer:
        (customer,) = customers_of(0, 1)

        def ask_both(model: str, **parameters: str) -> list[httpx.Response]:
            path = f"/api/models/{model}/keys/{customer}"
            return [httpx.get(f"{i.url}{path}", params=parameters, timeout=30) for i in (one, other)]

        def answers(model: str, **parameters: str) -> list[tuple[int, str | None]]:
            return [(a.status_code, a.headers.get("Balance-Role")) for a in ask_both(model, **parameters)]

        writer.add(customer, "12.00")
        eventually(
            lambda: answers("superstitious") == answers("stubborn") == [(200, "active")] * 2, "the event is folded"
        )
        writer.add(customer, "13.00", "14.00")

        halted = [(200, "halted")] * 2
        eventually(lambda: answers("stubborn") == halted, lambda: f"it answers as halted: {answers('stubborn')}")
        eventually(lambda: answers("superstitious", maxLag="2") == halted, "it answers with maxLag")
        # The end of the topic is read every second.
        eventually(
            lambda: {a.headers.get("Balance-Lag") for a in ask_both("superstitious", maxLag="2")} == {"2"}, "it lags"
        )
        for answer in (*ask_both("stubborn"), *ask_both("superstitious", maxLag="2")):
            assert answer.json()["value"]["amount"] == 12
            assert answer.headers["Balance-Position"] == "0:1"
        assert answers("superstitious", maxLag="1") == [(503, None)] * 2
        for refused in ask_both("superstitious"):
            assert refused.status_code == 503
            assert "with maxLag, maxAge or minPosition, it answers as of offset 1" in refused.json()["detail"]
