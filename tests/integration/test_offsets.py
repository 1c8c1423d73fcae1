"""End offsets of a topic while the broker is killed and restarted."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from confluent_kafka import Producer

from balance_service.errors import RetriableError
from balance_service.kafka.topics import Topics
from tests.integration.engines import prepare, settings_for
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

_RECORDS = 5
_RESTARTS = 3
_TOPICS = 20
_KNOWN_WITHIN_SECONDS = 15


def test_offsets_are_correct_or_an_error_during_a_broker_kill_and_known_afterwards(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path)
    topics = Topics(settings)
    topic = prepare(topics, settings).name
    producer = Producer({"bootstrap.servers": stack.bootstrap_servers})
    for _ in range(_RECORDS):
        producer.produce(topic, b"", partition=0)
    assert producer.flush(20) == 0
    answers: list[int] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.002):
            try:
                answers.append(topics.offsets(topic, [0])[0])
            except RetriableError:
                time.sleep(0.1)

    def wait_for_one_more() -> None:
        before = len(answers)
        eventually(lambda: len(answers) > before, "the end offset is known", _KNOWN_WITHIN_SECONDS)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    try:
        for _ in range(_RESTARTS):
            wait_for_one_more()
            stack.broker.kill()
            stack.broker.start()
        time.sleep(1)
        wait_for_one_more()
    finally:
        over.set()
        for thread in asking:
            thread.join()

    assert set(answers) == {_RECORDS}


def test_offsets_of_new_topics_are_returned_before_a_leader_is_elected(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path)
    topics = Topics(settings)
    for number in range(_TOPICS):
        topic = topics.create(f"{settings.topic}-{number}", 12, {})
        assert topics.offsets(topic.name, range(12)) == dict.fromkeys(range(12), 0)
