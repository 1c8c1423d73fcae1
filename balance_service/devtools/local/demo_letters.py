"""The demo's story of dead letters: one that heals without a hand, and one that needs one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
from confluent_kafka import Producer

from balance_service.avro.codec import AvroCodec, frame_header
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.devtools.local.run import say
from balance_service.errors import BalanceServiceError
from balance_service.kafka.clients import producer_config
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

RETRY_EVERY_SECONDS = 2
_BAD_RECORDS = 2
_CUSTOMER = "zoe"
_AMOUNT = Decimal("5.00")
_PATIENCE_SECONDS = 60.0
_LOOK_EVERY_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterStory:
    """Bad records, and what becomes of them; raises BalanceServiceError if a step is not as it should be."""

    client: httpx.Client
    stack: LocalStack
    instance: LocalInstance

    def tell(self) -> None:
        """Play it."""
        settings = load_settings(
            bootstrap_servers=self.stack.bootstrap_servers, schema_registry_url=self.stack.schema_registry_url
        )
        registry = SchemaRegistry.from_settings(settings)
        producer = Producer(producer_config(settings))
        schema = load_schema("FundsAdded")
        subject = subject_of(settings.topic, schema)
        another = _with(schema, "channel")
        # Ids are given one after the other, and nobody registers schemas meanwhile.
        coming = registry.register(f"{subject}-probe", _with(schema, "probe")) + 1
        event = {"id": "demo", "occurredOn": datetime.now(UTC), "customerId": _CUSTOMER, "amount": _AMOUNT}
        body = AvroCodec(registry, subject, schema).encode(event)[len(frame_header(coming)) :] + b"\0"
        producer.produce(settings.topic, frame_header(coming) + body, _CUSTOMER.encode())
        producer.produce(settings.topic, b"no event at all", _CUSTOMER.encode())
        producer.flush()
        unknown, malformed = self._until("two dead letters", self._letters, lambda found: len(found) == _BAD_RECORDS)
        for letter in (unknown, malformed):
            say(f"   {letter['id']} of {letter['key']}: {letter['cause']}, {letter['status']}")
        expect(self._balance() is None, f"{_CUSTOMER} has a balance already")
        registry.register(subject, another)
        registry.close()
        say("   the schema is registered; nobody does anything else")
        self._until("the balance", self._balance, lambda text: text == f'{{"amount":{_AMOUNT}}}')
        say(f"   {_CUSTOMER} has {_AMOUNT}: {unknown['id']} is {self._status(unknown['id'])}")
        decision = {"ids": [malformed["id"]], "reason": "a test record"}
        answer = self.client.post(f"{self.instance.url}/api/deadLetters.discard", json=decision)
        expect(answer.status_code == httpx.codes.ACCEPTED, f"the discard was answered {answer.text}")
        say(f"   by hand: {malformed['id']} is {self._status(malformed['id'])}")

    def _letters(self) -> list[dict[str, Any]]:
        answer = self.client.get(f"{self.instance.url}/api/deadLetters")
        letters: list[dict[str, Any]] = answer.json()["deadLetters"] if answer.is_success else []
        return letters

    def _status(self, letter_id: str) -> str:
        return str(self.client.get(f"{self.instance.url}/api/deadLetters/{letter_id}").json()["status"])

    def _balance(self) -> str | None:
        answer = self.client.get(f"{self.instance.url}/api/customers.getBalance", params={"customerId": _CUSTOMER})
        return answer.text if answer.is_success else None

    @staticmethod
    def _until(what: str, ask: Callable[[], Any], is_so: Callable[[Any], bool]) -> Any:
        began = time.monotonic()
        while not is_so(found := ask()):
            expect(time.monotonic() - began < _PATIENCE_SECONDS, f"{what} did not come; there is {found}")
            time.sleep(_LOOK_EVERY_SECONDS)
        return found


def _with(schema: dict[str, Any], field: str) -> dict[str, Any]:
    """A schema with one more field, which may be null."""
    return {**schema, "fields": [*schema["fields"], {"name": field, "type": ["null", "string"], "default": None}]}


def expect(condition: bool, otherwise: str) -> None:
    """Raises BalanceServiceError: a step of the demo is not as it should be."""
    if not condition:
        raise BalanceServiceError(f"the demo failed: {otherwise}")
