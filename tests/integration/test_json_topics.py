"""JSON topics on a real broker: folded, re-keyed, joined, sent on, and dead letters that are redriven."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from balance_service.devtools.produce import produce
from balance_service.devtools.tail import tail
from balance_service.engine.decisions import Decision, Verdict
from balance_service.model.events import Emit
from balance_service.model.folds import Count, RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.model.value_types import scale
from tests.integration.engines import running_engine, settings_for
from tests.support.kafka import Writer, read_topic
from tests.support.shipped import KNOWN
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine

pytestmark = pytest.mark.timeout(400)
Money = Annotated[Decimal, scale(2)]


@dataclass
class JsonOrder:
    order: str
    customer: str
    amount: Money


@dataclass
class JsonTotal:
    customer: str
    orders: int
    total: Money


@dataclass
class JsonSent:
    customer: str
    total: Money


def states(engine: Engine, name: str) -> dict[str, Any]:
    tasks = engine.stages[name]
    found: dict[str, Any] = {}
    for task in tasks.all():
        if (view := task.view) is not None:
            found |= {key.decode(): tasks.hosted.state(frame) for key, frame in view.scan(b"", b"\xff", 100)}
    return found


def test_documents_are_folded_rekeyed_and_sent_and_dead_letters_are_redriven(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source_topic, target_topic = f"{names['application_id']}.orders", f"{names['application_id']}.totals"
    model = f"json-{names['application_id']}"

    class Totals(ReadModel):
        name = model
        source = Stream(source_topic, JsonOrder, format="json").by("customer")
        key = "customer"
        state = JsonTotal
        emits = Emit(target_topic, JsonSent, fields={"customer": "customer", "total": "amount"}, format="json")
        orders = Count("JsonOrder")
        total = RunningSum("JsonOrder.amount")

    monkeypatch.setitem(KNOWN, model, Totals())
    settings = settings_for(stack, names, tmp_path / "state", models=model, create_topics=True)
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    for future in admin.create_topics(
        [NewTopic(topic, 2, 1, config={"retention.ms": "-1"}) for topic in (source_topic, target_topic)]
    ).values():
        future.result()

    def document(order: str, amount: Any, **more: Any) -> bytes:
        return json.dumps({"order": order, "customer": "ada", "amount": amount, **more}).encode()

    with running_engine(settings) as engine, Writer(stack, source_topic) as writer:
        line = b'1|{"order": "1", "customer": "ada", "amount": 1.10}'
        assert produce(settings, [Totals()], source_topic, [line], key_separator="|") == 1
        with closing(tail(settings, source_topic, threading.Event(), from_beginning=True)) as lines:
            assert '"value":{"order":"1","customer":"ada","amount":1.10}' in next(lines)
        writer.send("2", b"\0\0\0\0\7" + document("2", 2.2, unknown=[{"a": None}]))
        writer.send("3", document("3", "0.001"))
        writer.send("4", b'{"order": "4"}')
        writer.send("5", b"not JSON")
        writer.producer.flush(10)
        eventually(
            lambda: states(engine, model) == {"ada": {"customer": "ada", "orders": 2, "total": Decimal("3.30")}},
            "the documents are folded",
        )
        first = f"{model}-by-customer"
        eventually(
            lambda: len(read_topic(stack, f"{source_topic}-dead-letters")) == 3, "the dead letters are in their topic"
        )
        letters = {letter.key(): dict(letter.headers()) for letter in read_topic(stack, f"{source_topic}-dead-letters")}
        assert {key: headers["dead-letter-cause"] for key, headers in letters.items()} == {
            b"3": b"decimal-loses-digits",
            b"4": b"field-missing",
            b"5": b"json-malformed",
        }
        tasks = engine.stages[first]
        headers = letters[b"3"]
        partition, offset = int(headers["dead-letter-partition"]), int(headers["dead-letter-offset"])
        tasks.decide(partition, [offset], Verdict(Decision.REDRIVE, "test", "again"))

        def attempts() -> int:
            (task,) = [task for task in tasks.all() if task.task_id.partition == partition]
            view: Any = task.view
            return sum(one.attempt for one in tasks.hosted.processor.letters.page(view, 0, 10))

        eventually(lambda: attempts() == 1, "the dead letter is tried again")
        sent = [json.loads(message.value()) for message in read_topic(stack, target_topic)]
        assert sorted(one["total"] for one in sent) == [1.1, 2.2]
