"""Dead letters from outside the service: records that cause them, the HTTP API, and the Kafka topics."""

from __future__ import annotations

import json
import struct
import uuid
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import fastavro
import httpx

from balance_service.avro.schemas import load_schema
from balance_service.kafka.partitioner import partition_of
from tests.support.kafka import Writer, read_topic
from tests.support.service import PARTITIONS, retried
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

PATH = "/api/deadLetters"
# Starting instances register schemas too, which use up ids.
_IDS_AHEAD = 10


class PoisonWriter(Writer):
    """Writes records that the service cannot read to an application's topic."""

    def __init__(self, stack: LocalStack, settings: Mapping[str, str]) -> None:
        super().__init__(stack, settings["BALANCE_TOPIC"])
        self._stack = stack
        self._decisions = f"{settings['BALANCE_APPLICATION_ID']}-dead-letter-decisions"

    def put(self, key: str | bytes, value: bytes, **more: Any) -> str:
        """Appends a record; returns the id of its dead letter."""
        placed: list[Any] = []
        self.send(key, value, on_delivery=lambda _, message: placed.append(message), **more)
        assert self.producer.flush(10) == 0
        return f"balance/{placed[0].partition()}:{placed[0].offset()}"

    def unknown_id(self) -> int:
        """Returns a schema id that is not registered yet."""
        return self._registered() + _IDS_AHEAD

    def put_unknown(self, schema_id: int, customer: str, amount: str) -> str:
        """Appends an event with a schema id that may be unknown; returns the id of its dead letter."""
        return self.put(customer, struct.pack(">bI", 0, schema_id) + self.frame(customer, amount)[5:])

    def make_known(self, schema_id: int) -> None:
        """Registers further versions of the shipped schema until one gets this id."""
        while (latest := self._registered()) < schema_id:
            pass
        assert latest == schema_id, "another schema has taken the id"

    def written(self) -> list[tuple[str, bytes]]:
        """Returns id and value of each record in the dead-letter topic."""
        letters = []
        for record in read_topic(self._stack, f"{self.topic}-dead-letters"):
            headers = dict(record.headers())
            partition, offset = (headers[f"dead-letter-{of}"].decode() for of in ("partition", "offset"))
            letters.append((f"balance/{partition}:{offset}", record.value()))
        return letters

    def decisions(self, *ids: str) -> list[dict[str, Any]]:
        """Returns the recorded decisions about some dead letters."""
        decisions = []
        for record in read_topic(self._stack, self._decisions):
            if not record.key():
                # A checkpoint of the signer.
                continue
            schema = self.registry.get_schema(int.from_bytes(record.value()[1:5], "big"))
            parsed = fastavro.parse_schema(json.loads(str(schema.schema_str)))
            decision: Any = fastavro.schemaless_reader(BytesIO(record.value()[5:]), parsed, None)
            if decision["id"] in ids:
                decisions.append(decision)
        return decisions

    def _registered(self) -> int:
        """Registers a schema and returns its id."""
        name = str(uuid.uuid4())
        return self.register(name, {**load_schema("FundsAdded"), "doc": name})


def customer_in(partition: int) -> str:
    """Returns a new customer whose events lie in a partition."""
    while partition_of((name := f"customer-{uuid.uuid4()}").encode(), PARTITIONS) != partition:
        pass
    return name


def list_order(letter_id: str) -> tuple[str, int, int]:
    """Returns stage, partition and offset of an id: the sort key of lists."""
    stage, _, record = letter_id.partition("/")
    partition, offset = map(int, record.split(":"))
    return stage, partition, offset


def get(instance: LocalInstance, path: str = "", **parameters: str) -> httpx.Response:
    """Sends a GET about dead letters; retries on 503."""
    return retried(lambda: httpx.get(f"{instance.url}{PATH}{path}", params=parameters, timeout=30))


def pages(instance: LocalInstance, **parameters: str) -> list[list[dict[str, Any]]]:
    """Returns all listed dead letters, page by page."""
    found: list[list[dict[str, Any]]] = []
    following: str | None = ""
    while following is not None:
        answer = get(instance, **parameters, **({"after": following} if following else {}))
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["deadLetters"])
        following = answer.json()["next"]
    return found


def letter(instance: LocalInstance, letter_id: str) -> dict[str, Any]:
    """Waits until a dead letter exists and returns it."""
    path = f"/{quote(letter_id, safe='')}"
    eventually(lambda: get(instance, path).status_code == 200, lambda: get(instance, path).text)
    known: dict[str, Any] = get(instance, path).json()
    return known


def wait_for(instance: LocalInstance, status: str, *ids: str) -> None:
    """Waits until dead letters have a status."""
    eventually(
        lambda: all(letter(instance, one)["status"] == status for one in ids),
        lambda: f"{status}: {[_in_short(letter(instance, one)) for one in ids]}",
    )


def _in_short(known: Mapping[str, Any]) -> str:
    return " ".join(str(known[name]) for name in ("id", "status", "attempt", "detail", "failedAt", "dueAt"))


def decide(instance: LocalInstance, decision: str, *ids: str, reason: str = "a test") -> httpx.Response:
    """Sends a decision; retries on 503."""
    body = {"ids": ids, "reason": reason}
    return retried(lambda: httpx.post(f"{instance.url}{PATH}.{decision}", json=body, timeout=30))
