"""`balance-service demo`: a scripted demonstration on a real stack, which checks each step."""

from __future__ import annotations

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

from confluent_kafka import Producer

from balance_service.avro.codec import AvroCodec
from balance_service.avro.frames import frame_header
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.devtools.local.run import say, start_instances
from balance_service.devtools.local.stack import LocalStack
from balance_service.errors import BalanceServiceError
from balance_service.kafka.clients import producer_config
from balance_service.model.json_view import exact_json
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from balance_service.client import Balance, Client, Position
    from balance_service.devtools.local.stack import LocalInstance

_CUSTOMERS = [f"customer-{n}" for n in range(20)]
_AMOUNTS = ("0.10", "0.20", "9999999999999999.99")
_BALANCE = sum(map(Decimal, _AMOUNTS))
_LEAST_FOR_POINTS = Decimal("0.20")
_TAKE_OVER_SECONDS = 40.0
_POLL_SECONDS = 0.2
_RETRY_EVERY_SECONDS = 2
_HEALED_CUSTOMER = "zoe"
_HEALED_AMOUNT = Decimal("5.00")
_HEALED_WITHIN_SECONDS = 60.0
_LOYALTY = '''
from dataclasses import dataclass
from decimal import Decimal

from balance_service import ReadModel, Stream


@dataclass
class Loyalty:
    customerId: str
    points: int


class LoyaltyV1(ReadModel):
    """One point for each addition."""

    name = "loyalty"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = Loyalty

    def fold(self, state, event):
        return Loyalty(event["customerId"], (state.points if state else 0) + self.points(event["amount"]))

    def points(self, amount):
        return 1


class LoyaltyV2(LoyaltyV1):
    """Small additions give no points."""

    version = 2

    def points(self, amount):
        return 0 if amount < Decimal("0.20") else 1
'''


def play() -> None:
    """Run the demonstration. Raises BalanceServiceError, with the reason, if a step fails."""
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="balance-demo-")))
        say("1. Start a Kafka broker, a schema registry, and two instances of the service.")
        stack = cleanup.enter_context(LocalStack(folder))
        environment = {"BALANCE_RETRY_EVERY": str(_RETRY_EVERY_SECONDS)}
        first, second = start_instances(cleanup, stack, 2, environment=environment)
        clients = [cleanup.enter_context(i.client(retry_seconds=_TAKE_OVER_SECONDS)) for i in (first, second)]
        demo = _Demo(stack, *clients)
        say(f"2. Add funds over HTTP: {' + '.join(_AMOUNTS)} for each of {len(_CUSTOMERS)} customers.")
        positions = {customer: demo.add_funds(customer) for customer in _CUSTOMERS}
        say("3. Query both instances for each customer; a header names the instance that answers.")
        demo.query_both(positions)
        say("4. Append two records that cannot be applied: one with an unknown schema, one that is not an event.")
        demo.dead_letters()
        say("5. Kill one instance. The other takes over its partitions when the group's session timeout expires.")
        first.kill()
        demo.query_all()
        say("6. Delete the read model, and rebuild it from the topic.")
        second.stop()
        _rebuild(first)
        second.start()
        demo.query_all()
        say("7. Add a second read model, which covers the whole history of the topic.")
        second.stop()
        second.environment["BALANCE_MODELS"] = "balance,activity"
        second.start()
        demo.query_activity()
        demo.query_all()
        say("8. Correct a read model while it answers: its class gets a version 2, and version 1 stays next to it.")
        demo.correct((first, second))
        say("9. Stop everything.")
    say("The demonstration is complete: all steps succeeded.")


@dataclass(frozen=True, slots=True)
class _Demo:
    stack: LocalStack
    first: Client
    second: Client

    def add_funds(self, customer: str) -> Position:
        """Add all amounts and return the position of the last one."""
        return [self.first.add_funds(customer, amount).position for amount in _AMOUNTS][-1]

    def query_both(self, positions: dict[str, Position]) -> None:
        shown: set[str] = set()
        for customer, position in positions.items():
            for client in (self.first, self.second):
                balance = _expected_balance(client, customer, position)
                server = balance.application_server
                how = "local" if client.url.endswith(server) else "proxied"
                if how not in shown:
                    shown.add(how)
                    say(f"   {customer}, query to {client.url}: {balance.amount}  answered by {server} ({how})")
        _expect(shown == {"local", "proxied"}, f"all answers are {shown}, so one instance owns all partitions")

    def query_all(self) -> None:
        began = time.monotonic()
        for customer in _CUSTOMERS:
            _expected_balance(self.second, customer)
        say(f"   all {len(_CUSTOMERS)} balances are correct after {time.monotonic() - began:.1f} s")

    def query_activity(self) -> None:
        began = time.monotonic()
        while self.second.count("activity").count != len(_CUSTOMERS) + 1:
            _expect(time.monotonic() - began < _TAKE_OVER_SECONDS, "the history was not read in time")
            time.sleep(_POLL_SECONDS)
        state = self.second.get("activity", _CUSTOMERS[0], max_lag=0)
        say(f"   {state.key}: {exact_json(state.value)}")
        additions, greatest = state.value["additions"], state.value["greatest"]
        _expect(additions == len(_AMOUNTS), f"{additions} additions instead of {len(_AMOUNTS)}")
        _expect(greatest == max(map(Decimal, _AMOUNTS)), f"the greatest amount is {greatest}")
        (top,) = self.second.top("activity", by="additions", limit=1).entries
        say(f"   top: {top.key}: {exact_json(top.value)}")

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
            unknown, malformed = _poll(
                "two dead letters", lambda: [*self.first.dead_letters()], lambda found: len(found) == 2
            )
            for letter in (unknown, malformed):
                say(f"   {letter['id']} of {letter['key']}: {letter['cause']}, {letter['status']}")
            _expect(self._healed_balance() is None, f"{_HEALED_CUSTOMER} already has a balance")
            registry.register(subject, _extended(schema, "channel"))
        say("   the schema is registered; the dead letter is retried automatically")
        _poll("the balance", self._healed_balance, lambda amount: amount == _HEALED_AMOUNT)
        say(f"   {_HEALED_CUSTOMER} has {_HEALED_AMOUNT}: {unknown['id']} is {self._status(unknown['id'])}")
        self.first.discard([malformed["id"]], reason="a test record")
        say(f"   discarded by request: {malformed['id']} is {self._status(malformed['id'])}")

    def correct(self, instances: Sequence[LocalInstance]) -> None:
        """A read model is corrected; a generation of its new version is built, compared, and serves."""
        (self.stack.data_dir / "loyalty.py").write_text(_LOYALTY)
        for instance in instances:
            instance.stop()
            instance.environment["BALANCE_MODELS"] = "balance,loyalty:LoyaltyV1"
            instance.launch()
        for instance in instances:
            instance.wait_ready()
        wrong, right = len(_AMOUNTS), len([amount for amount in _AMOUNTS if Decimal(amount) >= _LEAST_FOR_POINTS])
        self._points("version 1 serves", wrong)
        for instance in instances:
            instance.stop()
            instance.environment["BALANCE_MODELS"] = "balance,loyalty:LoyaltyV1,loyalty:LoyaltyV2"
            instance.start()
            self._points(f"version 1 serves, and {instance.name} has version 2 next to it", wrong)
        told = _poll("a generation of version 2", self._generations, lambda found: found["comparison"] is not None)
        say(f"   generation 2 has caught up; keys by comparison: {told['comparison']}")
        found = [one for client in (self.first, self.second) for one in client.differences("loyalty")]
        say(f"   the first difference: {exact_json(found[0])}")
        self._points("version 1 still serves", wrong)
        self.first.switch("loyalty", reason="small additions give no points")
        self._points("switched: version 2 serves", right)
        self.first.switch("loyalty", reason="the demonstration shows the way back")
        self._points("switched back: version 1 serves", wrong)

    def _generations(self) -> dict[str, Any]:
        return self.first.generations("loyalty")

    def _points(self, why: str, expected: int) -> None:
        for client in (self.first, self.second):
            _poll(
                f"{expected} points of {_CUSTOMERS[0]}",
                lambda asked=client: asked.get("loyalty", _CUSTOMERS[0]).value,  # type: ignore[misc]
                lambda value: value == {"points": expected},
            )
        say(f"   {why}: {_CUSTOMERS[0]} has {expected} points")

    def _status(self, letter_id: str) -> str:
        return str(self.first.dead_letter(letter_id)["status"])

    def _healed_balance(self) -> Decimal | None:
        return self.first.get_balance(_HEALED_CUSTOMER).amount


def _expected_balance(client: Client, customer: str, position: Position | None = None) -> Balance:
    """The answer to a query, which must be right."""
    balance = client.get_balance(customer, min_position=position)
    _expect(balance.amount == _BALANCE, f"the balance of {customer} is {balance.amount} instead of {_BALANCE}")
    return balance


def _rebuild(instance: LocalInstance) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "balance_service", "rebuild", "--offline"],
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
