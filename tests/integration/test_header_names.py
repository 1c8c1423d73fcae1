"""Records with a header whose name is not UTF-8: the client fails at them, and nothing else does."""

from __future__ import annotations

from contextlib import closing
from threading import Event
from typing import TYPE_CHECKING

import pytest

from balance_service.devtools.tail import tail
from balance_service.engine.dead_letter import Status
from balance_service.errors import PoisonRecordError
from balance_service.kafka.log_reader import reader_to_end
from balance_service.kafka.messages import headers_of, offset_of
from balance_service.kafka.topics import Topics
from tests.integration.engines import customers_in, hosted, prepare, running_engine, settings_for, tasks_of
from tests.integration.test_directory import following, known_servers
from tests.support.kafka import Writer, append_with_header
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings

NO_UTF_8 = b"\xff\xfe"
UNKNOWN_SCHEMA = b"\0\x7f\xff\xff\xfe" + b"nobody knows"
(IN_0,) = customers_in(0, count=1)
SECONDS = 60.0
# Repeats, because CPython specializes calls after some executions.
OFTEN = 40


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    return settings_for(stack, names, tmp_path / "state", retry_every_seconds=1)


def append_strange(settings: Settings, topic: str, value: bytes) -> None:
    append_with_header(settings.bootstrap_servers, topic, 0, IN_0.encode(), value, NO_UTF_8)


def letters_of(engine: Engine) -> list[tuple[str, Status]]:
    """Returns cause and status of each dead letter of partition 0."""
    task = tasks_of(engine).task(0)
    view = None if task is None else task.view
    found = [] if view is None else hosted(engine).processor.letters.page(view, 0, 99)
    return [(letter.cause, letter.status) for letter in found]


def test_each_record_with_a_malformed_header_name_is_reported(stack: LocalStack, settings: Settings) -> None:
    topics = Topics(settings)
    prepare(topics, settings)
    with Writer(stack, settings.topic) as writer:
        writer.add(IN_0, "1.00")
        writer.producer.flush(20)
        for _ in range(OFTEN):
            append_strange(settings, settings.topic, b"x")
    topic = topics.find(settings.topic)
    assert topic is not None
    told = 0
    with reader_to_end(settings, topics, topic) as reader:
        for message in reader:
            if offset_of(message):
                with pytest.raises(PoisonRecordError, match="whose name is not UTF-8"):
                    headers_of(message)
                told += 1

    assert told == OFTEN
    stopping = Event()
    with closing(tail(settings, settings.topic, stopping, from_beginning=True)) as lines:
        seen = [next(lines) for _ in range(OFTEN + 1)]
    assert sum('"headers":null' in line for line in seen) == OFTEN


def test_a_dead_letter_with_a_malformed_header_name_is_final_and_delays_no_other(
    stack: LocalStack, settings: Settings
) -> None:
    with Writer(stack, settings.topic) as writer, running_engine(settings) as engine:
        append_strange(settings, settings.topic, UNKNOWN_SCHEMA)
        writer.send(IN_0, UNKNOWN_SCHEMA)
        writer.producer.flush(20)
        expected = [("header-malformed", Status.WAITING), ("schema-id-unknown", Status.SCHEDULED)]
        eventually(lambda: letters_of(engine) == expected, lambda: f"{letters_of(engine)} {engine.problems}", SECONDS)
        writer.add(IN_0, "5.00")

        def applied() -> bool:
            task = tasks_of(engine).task(0)
            view = None if task is None else task.view
            return view is not None and view.get(IN_0.encode()) is not None

        eventually(applied, "the next event is applied", SECONDS)


def test_the_directory_skips_a_record_with_a_malformed_header_name(settings: Settings) -> None:
    prepare(Topics(settings), settings)
    with following(settings, "a:1") as one:
        for _ in range(OFTEN):
            append_strange(settings, settings.application_servers_topic, b"x")
        with following(settings, "b:1") as other:
            eventually(
                lambda: known_servers(one) == known_servers(other) == {"a:1", "b:1"},
                "both instances know each other",
                SECONDS,
            )
