"""`balance-service demo`: a scripted demonstration on a real stack, which checks each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from confluent_kafka import Producer

from balance_service.avro.codec import AvroCodec, frame_header
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.devtools.local.run import say, start_instances
from balance_service.devtools.local.stack import LocalStack
from balance_service.errors import BalanceServiceError
from balance_service.kafka.clients import producer_config
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.devtools.local.stack import LocalInstance

_CUSTOMERS = [f"customer-{n}" for n in range(20)]
_AMOUNTS = ("0.10", "0.20", "9999999999999999.99")
_BALANCE = sum(map(Decimal, _AMOUNTS))
_TAKE_OVER_SECONDS = 40.0
_POLL_SECONDS = 0.2
_RETRY_EVERY_SECONDS = 2
_HEALED_CUSTOMER = "zoe"
_HEALED_AMOUNT = Decimal("5.00")
_HEALED_WITHIN_SECONDS = 60.0


def play() -> None:
    """Run the demonstration. Raises BalanceServiceError, with the reason, if a step fails."""
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="balance-demo-")))
        say("1. Start a Kafka broker, a schema registry, and two instances of the service.")
        stack = cleanup.enter_context(LocalStack(folder))
        environment = {"BALANCE_RETRY_EVERY": str(_RETRY_EVERY_SECONDS)}
        first, second = start_instances(cleanup, stack, 2, environment=environment)
        client = cleanup.enter_context(httpx.Client(timeout=30.0, trust_env=False))
        demo = _Demo(stack, client, first, second)
        say(f"2. Add funds over HTTP: {' + '.join(_AMOUNTS)} for each of {len(_CUSTOMERS)} customers.")
        positions = {customer: demo.add_funds(customer) for customer in _CUSTOMERS}
        say("3. Query both instances for each customer; a header names the instance that answers.")
        demo.query_both(positions)
        say("4. Append two records that cannot be applied: one with an unknown schema, one that is not an event.")
        demo.dead_letters()
        say("5. Kill one instance. The other takes over its partitions when the group's session timeout expires.")
        first.kill()
        demo.query_all(second)
        say("6. Delete the read model, and rebuild it from the topic.")
        second.stop()
        _rebuild(first)
        second.start()
        demo.query_all(second)
        say("7. Add a second read model, which covers the whole history of the topic.")
        second.stop()
        second.environment["BALANCE_MODELS"] = "balance,activity"
        second.start()
        demo.query_activity()
        demo.query_all(second)
        say("8. Stop everything.")
    say("The demonstration is complete: all steps succeeded.")


@dataclass(frozen=True, slots=True)
class _Demo:
    stack: LocalStack
    client: httpx.Client
    first: LocalInstance
    second: LocalInstance

    def add_funds(self, customer: str) -> str:
        """Add all amounts and return the position of the last one."""
        position = ""
        for amount in _AMOUNTS:
            url, body = f"{self.first.url}/api/balance.addFunds", {"customerId": customer, "amount": amount}
            answer = self.client.post(url, json=body)
            _expect(answer.status_code == httpx.codes.ACCEPTED, f"the answer to addFunds is {answer.text}")
            position = str(answer.headers["Balance-Position"])
        return position

    def query_both(self, positions: dict[str, str]) -> None:
        shown: set[str] = set()
        for customer, position in positions.items():
            for instance in (self.first, self.second):
                parameters = {"customerId": customer, "minPosition": position}
                answer = self._balance(instance, parameters, time.monotonic())
                server = answer.headers["Balance-Application-Server"]
                how = "local" if instance.url.endswith(server) else "proxied"
                if how not in shown:
                    shown.add(how)
                    say(f"   {customer}, query to {instance.url}: {answer.text}  answered by {server} ({how})")
        _expect(shown == {"local", "proxied"}, f"all answers are {shown}, so one instance owns all partitions")

    def query_all(self, instance: LocalInstance) -> None:
        began = time.monotonic()
        for customer in _CUSTOMERS:
            self._balance(instance, {"customerId": customer}, began)
        say(f"   all {len(_CUSTOMERS)} balances are correct after {time.monotonic() - began:.1f} s")

    def query_activity(self) -> None:
        url, began = f"{self.second.url}/api/models/activity", time.monotonic()
        while self.client.get(f"{url}/count").json() != {"count": len(_CUSTOMERS) + 1}:
            _expect(time.monotonic() - began < _TAKE_OVER_SECONDS, "the history was not read in time")
            time.sleep(_POLL_SECONDS)
        entry = self.client.get(f"{url}/keys/{_CUSTOMERS[0]}", params={"maxLag": "0"})
        say(f"   {entry.text}")
        value = json.loads(entry.text, parse_float=Decimal)["value"]
        _expect(value["additions"] == len(_AMOUNTS), f"{value['additions']} additions instead of {len(_AMOUNTS)}")
        _expect(value["greatest"] == max(map(Decimal, _AMOUNTS)), f"the greatest amount is {value['greatest']}")
        top = self.client.get(f"{url}/top", params={"by": "additions", "limit": "1"})
        say(f"   top: {top.text}")
        _expect(top.is_success, f"the answer to top is {top.text}")

    def dead_letters(self) -> None:
        """One dead letter heals when its schema is registered; another is discarded."""
        settings = load_settings(
            bootstrap_servers=self.stack.bootstrap_servers, schema_registry_url=self.stack.schema_registry_url
        )
        schema = load_schema("FundsAdded")
        subject = subject_of(settings.topic, schema)
        with closing(SchemaRegistry.from_settings(settings)) as registry:
            # Ids are consecutive, and there is no other client that registers schemas.
            schema_id = registry.register(f"{subject}-probe", _extended(schema, "probe")) + 1
            event = {
                "id": "demo",
                "occurredOn": datetime.now(UTC),
                "customerId": _HEALED_CUSTOMER,
                "amount": _HEALED_AMOUNT,
            }
            body = AvroCodec(registry, subject, schema).encode(event)[len(frame_header(schema_id)) :] + b"\0"
            producer = Producer(producer_config(settings, settings.partitioner))
            for value in (frame_header(schema_id) + body, b"not an event"):
                producer.produce(settings.topic, value, _HEALED_CUSTOMER.encode())
            producer.flush()
            unknown, malformed = _poll("two dead letters", self._open_dead_letters, lambda found: len(found) == 2)
            for letter in (unknown, malformed):
                say(f"   {letter['id']} of {letter['key']}: {letter['cause']}, {letter['status']}")
            _expect(self._healed_balance() is None, f"{_HEALED_CUSTOMER} already has a balance")
            registry.register(subject, _extended(schema, "channel"))
        say("   the schema is registered; the dead letter is retried automatically")
        _poll("the balance", self._healed_balance, lambda text: text == f'{{"amount":{_HEALED_AMOUNT}}}')
        say(f"   {_HEALED_CUSTOMER} has {_HEALED_AMOUNT}: {unknown['id']} is {self._status(unknown['id'])}")
        decision = {"ids": [malformed["id"]], "reason": "a test record"}
        answer = self.client.post(f"{self.first.url}/api/deadLetters.discard", json=decision)
        _expect(answer.status_code == httpx.codes.ACCEPTED, f"the answer to discard is {answer.text}")
        say(f"   discarded by request: {malformed['id']} is {self._status(malformed['id'])}")

    def _balance(self, instance: LocalInstance, parameters: dict[str, str], began: float) -> httpx.Response:
        """The answer to a query, which must be right. Repeats it on 503, while the partition moves."""
        while True:
            answer = self.client.get(f"{instance.url}/api/customers.getBalance", params=parameters)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            _expect(time.monotonic() - began < _TAKE_OVER_SECONDS, f"no instance took over: {answer.text}")
            time.sleep(_POLL_SECONDS)
        expected = f'{{"amount":{_BALANCE}}}'
        _expect(answer.text == expected, f"the answer for {parameters} is {answer.text} instead of {expected}")
        return answer

    def _open_dead_letters(self) -> list[dict[str, Any]]:
        answer = self.client.get(f"{self.first.url}/api/deadLetters")
        letters: list[dict[str, Any]] = answer.json()["deadLetters"] if answer.is_success else []
        return letters

    def _status(self, letter_id: str) -> str:
        return str(self.client.get(f"{self.first.url}/api/deadLetters/{letter_id}").json()["status"])

    def _healed_balance(self) -> str | None:
        url = f"{self.first.url}/api/customers.getBalance"
        answer = self.client.get(url, params={"customerId": _HEALED_CUSTOMER})
        return answer.text if answer.is_success else None


def _rebuild(instance: LocalInstance) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "balance_service", "rebuild"],
        env={**os.environ, **instance.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    _expect(done.returncode == 0, f"the rebuild failed: {done.stdout}")
    say(f"   {done.stdout.strip().splitlines()[-1]}")


def _extended(schema: dict[str, Any], field: str) -> dict[str, Any]:
    """A schema with an additional nullable field."""
    return {**schema, "fields": [*schema["fields"], {"name": field, "type": ["null", "string"], "default": None}]}


def _poll(expected: str, get: Callable[[], Any], is_expected: Callable[[Any], bool]) -> Any:
    began = time.monotonic()
    while not is_expected(found := get()):
        _expect(
            time.monotonic() - began < _HEALED_WITHIN_SECONDS, f"{expected} did not appear in time; there is {found}"
        )
        time.sleep(_POLL_SECONDS)
    return found


def _expect(condition: bool, failure: str) -> None:
    if not condition:
        raise BalanceServiceError(f"the demonstration failed: {failure}")
