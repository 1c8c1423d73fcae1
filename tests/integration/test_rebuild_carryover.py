"""A rebuild keeps decisions about dead letters, even after the letters have expired."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from balance_service.avro.registry import SchemaRegistry
from balance_service.engine import dead_letters as layout
from balance_service.engine.dead_letter import Status
from balance_service.engine.decisions import Decision, Verdict
from balance_service.hosting.rebuild import Carryover
from balance_service.kafka.clients import producer_config
from balance_service.kafka.partitioner import partition_of
from balance_service.kafka.producers import BulkProducer
from balance_service.kafka.topics import Topics
from tests.integration.engines import hosted, running_engine, settings_for, tasks_of
from tests.support.kafka import Writer
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine

IN_0 = next(key for n in range(99) if partition_of((key := f"c{n}").encode(), 2) == 0)
SECONDS = 60.0
UNKNOWN_SCHEMA = b"\0\x7f\xff\xff\xff" + b"nobody knows"


def letters_of(engine: Engine) -> dict[int, Status]:
    """Returns the status of the dead letters of partition 0, by offset."""
    task = tasks_of(engine).task(0)
    view = None if task is None else task.view
    return {} if view is None else {at.offset: at.status for at in hosted(engine).processor.letters.page(view, 0, 10)}


def test_a_discarded_record_stays_discarded_after_its_letter_has_expired(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer, running_engine(settings) as engine:
        writer.send(IN_0, UNKNOWN_SCHEMA)
        writer.producer.flush(20)
        eventually(lambda: len(letters_of(engine)) == 1, lambda: f"dead letters: {letters_of(engine)}", SECONDS)
        (offset,) = letters_of(engine)
        assert tasks_of(engine).decide(0, [offset], Verdict(Decision.DISCARD, "me", "a test")) == {}
        stage, source = hosted(engine).stage, hosted(engine).source
    # The letter expires, as it does after a week.
    producer = BulkProducer(producer_config(settings), stage.changelog)
    producer.send(layout._AT + layout._number(offset), None, 0)
    producer.finish()

    with closing(SchemaRegistry.from_settings(settings)) as registry:
        carryover = Carryover(settings, Topics(settings), registry, stage, source, keeps_order=False)

    assert {at: letter.status for at, letter in carryover._known[0].items()} == {offset: Status.DISCARDED}
