"""A topic keyed by Java's longs on a real broker: folded, restored, found by the number, and sent on under it."""

from __future__ import annotations

import struct
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import subject_of
from balance_service.kafka import topic_specs
from balance_service.kafka.topics import Topics
from balance_service.model.converters import record_converter
from balance_service.model.events import EVENT, Emit
from balance_service.model.folds import Count, RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.record_keys import RECORD_KEY
from balance_service.model.stream import Stream
from tests.integration.engines import catch_up, hosted, running_engine, settings_for, tasks_of
from tests.support.kafka import Writer, read_topic
from tests.support.record_keys import Order, Orders
from tests.support.shipped import KNOWN

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine

pytestmark = pytest.mark.timeout(600)
NUMBERS = [*range(-10, 10), 2**63 - 1, -(2**63)]


def long(number: int) -> bytes:
    return struct.pack(">q", number)


def totals(engine: Engine) -> dict[int, int]:
    """The total of each number, found as a query finds it: on the partition of its bytes, by its text."""
    stage = hosted(engine)
    found: dict[int, int] = {}
    for number in NUMBERS:
        key = stage.key_type.parse(str(number))
        task = tasks_of(engine).task(stage.partitioning.of(key))
        assert task is not None
        assert task.view is not None
        if (frame := task.view.get(key)) is not None:
            found[number] = stage.view(frame)["total"]
    return found


def test_events_of_longs_are_folded_restored_and_sent_on(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    topic, sent = f"{names['application_id']}.orders", f"{names['application_id']}.totals"

    class Totals(ReadModel):
        name = f"totals-{names['application_id']}"
        source = Stream(topic, Order, key_format="long")
        key = RECORD_KEY
        state = Orders
        total = RunningSum("Order.amount")
        orders = Count("Order")
        emits = Emit(sent, each=EVENT)

    KNOWN[Totals.name] = Totals()
    settings = settings_for(stack, names, tmp_path / "first", models=(Totals.name,))
    Topics(settings).create(topic, 3, topic_specs.FOREVER)
    schema = record_converter(Order).schema
    with closing(SchemaRegistry.from_settings(settings)) as registry, Writer(stack, topic) as writer:
        frame = AvroCodec(registry, subject_of(topic, schema), schema).encode({"amount": 2})
        for number in NUMBERS * 2:
            writer.producer.produce(topic, key=long(number), value=frame)
        for wrong in (b"12345", None):
            writer.producer.produce(topic, key=wrong, value=frame)
    expected = dict.fromkeys(NUMBERS, 4)

    with running_engine(settings) as engine:
        catch_up(engine)
        assert totals(engine) == expected
    with running_engine(settings.model_copy(update={"state_dir": tmp_path / "second"})) as restored:
        catch_up(restored)
        assert totals(restored) == expected

    letters = {message.key(): dict(message.headers() or []) for message in read_topic(stack, f"{topic}-dead-letters")}
    causes = {key: headers["dead-letter-cause"] for key, headers in letters.items()}
    assert causes == {b"12345": b"key-malformed", None: b"key-null"}
    keys = sorted(struct.unpack(">q", message.key() or b"")[0] for message in read_topic(stack, sent))
    assert keys == sorted(NUMBERS * 2)
