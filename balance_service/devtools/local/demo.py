"""`balance-service demo`: the whole story, on real parts, each step checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from balance_service.devtools.local.demo_letters import RETRY_EVERY_SECONDS, LetterStory, expect
from balance_service.devtools.local.run import say, start_instances
from balance_service.devtools.local.stack import LocalStack

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalInstance

_CUSTOMERS = [f"customer-{n}" for n in range(20)]
_AMOUNTS = ("0.10", "0.20", "9999999999999999.99")
_EXPECTED = sum(map(Decimal, _AMOUNTS))
_TAKE_OVER_SECONDS = 40.0


def play() -> None:
    """Play it.

    Raises:
        BalanceServiceError: a step is not as it should be; the message says which and how.
    """
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="balance-demo-")))
        say("1. A real Kafka broker and schema registry, and two instances of the service.")
        stack = cleanup.enter_context(LocalStack(folder))
        environment = {"BALANCE_RETRY_EVERY": str(RETRY_EVERY_SECONDS)}
        first, second = start_instances(cleanup, stack, 2, environment=environment)
        client = cleanup.enter_context(httpx.Client(timeout=30.0, trust_env=False))
        say(f"2. Funds added over HTTP: {' + '.join(_AMOUNTS)} for each of {len(_CUSTOMERS)} customers.")
        positions = {customer: _add(client, first, customer) for customer in _CUSTOMERS}
        say("3. Every customer asked of both instances; the headers say who answered.")
        _ask_both(client, first, second, positions)
        say("4. Two records that cannot be applied: one whose schema comes later, one that is no event.")
        LetterStory(client=client, stack=stack, instance=first).tell()
        say("5. One instance killed. The other takes over its partitions once the group notices.")
        first.kill()
        _ask_survivor(client, second)
        say("6. The read model dropped, and rebuilt from the topic.")
        second.stop()
        _rebuild(first)
        second.launch()
        second.wait_ready()
        _ask_survivor(client, second)
        say("7. A second read model switched on, over the topic as it is: it answers about all of it.")
        second.stop()
        second.environment["BALANCE_MODELS"] = "balance,activity"
        second.launch()
        second.wait_ready()
        _ask_about_activity(client, second)
        _ask_survivor(client, second)
        say("8. Everything stopped.")
    say("The demo is over: every step was as it should be.")


def _add(client: httpx.Client, instance: LocalInstance, customer: str) -> str:
    answer = None
    for amount in _AMOUNTS:
        answer = client.post(f"{instance.url}/api/balance.addFunds", json={"customerId": customer, "amount": amount})
        expect(answer.status_code == httpx.codes.ACCEPTED, f"adding funds was answered {answer.text}")
    return str(answer.headers["Balance-Position"]) if answer is not None else ""


def _ask_both(client: httpx.Client, first: LocalInstance, second: LocalInstance, positions: dict[str, str]) -> None:
    shown: set[str] = set()
    for customer, position in positions.items():
        for instance in (first, second):
            answer = _balance(client, instance, customer, position)
            server = answer.headers["Balance-Application-Server"]
            how = "local" if instance.url.endswith(server) else "proxied"
            if how not in shown:
                shown.add(how)
                say(f"   {customer} asked of {instance.url}: {answer.text}  answered by {server} ({how})")
    expect(shown == {"local", "proxied"}, f"the answers were only {shown}, so one instance owns everything")


def _ask_survivor(client: httpx.Client, instance: LocalInstance) -> None:
    began = time.monotonic()
    for customer in _CUSTOMERS:
        _answered(client, instance, customer, {"customerId": customer}, began)
    say(f"   all {len(_CUSTOMERS)} balances are right, {time.monotonic() - began:.1f} s later")


def _ask_about_activity(client: httpx.Client, instance: LocalInstance) -> None:
    url, began = f"{instance.url}/api/models/activity", time.monotonic()
    while client.get(f"{url}/count").json() != {"count": len(_CUSTOMERS) + 1}:
        expect(time.monotonic() - began < _TAKE_OVER_SECONDS, "the history was not read in time")
        time.sleep(0.2)
    of_one = client.get(f"{url}/keys/{_CUSTOMERS[0]}", params={"maxLag": "0"})
    say(f"   {of_one.text}")
    value = json.loads(of_one.text, parse_float=Decimal)["value"]
    expect(value["additions"] == len(_AMOUNTS), f"there were {len(_AMOUNTS)} additions, not {value['additions']}")
    expect(value["greatest"] == max(map(Decimal, _AMOUNTS)), f"the greatest amount is {value['greatest']}")
    top = client.get(f"{url}/top", params={"by": "additions", "limit": "1"})
    say(f"   top: {top.text}")
    expect(top.is_success, f"the top was answered {top.text}")


def _answered(
    client: httpx.Client, instance: LocalInstance, customer: str, parameters: dict[str, str], began: float
) -> httpx.Response:
    """The right answer; 503 means that the partition is moving and is asked again, as any client would."""
    while True:
        answer = client.get(f"{instance.url}/api/customers.getBalance", params=parameters)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        expect(time.monotonic() - began < _TAKE_OVER_SECONDS, f"nobody took over: {answer.text}")
        time.sleep(0.2)
    wanted = f'{{"amount":{_EXPECTED}}}'
    expect(answer.text == wanted, f"{customer} should have {wanted}, but the answer was {answer.text}")
    return answer


def _balance(client: httpx.Client, instance: LocalInstance, customer: str, position: str) -> httpx.Response:
    parameters = {"customerId": customer, "minPosition": position}
    return _answered(client, instance, customer, parameters, time.monotonic())


def _rebuild(instance: LocalInstance) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "balance_service", "rebuild"],
        env={**os.environ, **instance.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    expect(done.returncode == 0, f"the rebuild failed: {done.stdout}")
    say(f"   {done.stdout.strip().splitlines()[-1]}")
