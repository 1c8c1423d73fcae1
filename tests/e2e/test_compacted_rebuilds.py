"""Rebuilds of a read model of the rows that a compacted topic has left, online and offline, against a recount of it."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from confluent_kafka.admin import NewTopic

from tests.chaos.kept_rows import KeptRows
from tests.support.commands import run, started
from tests.support.kafka import Writer, admin, read_topic
from tests.support.service import PARTITIONS, application, new_instance, on, retried, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

pytestmark = pytest.mark.timeout(900)

_KEYS, _SECONDS = 200, 240.0
_SHARE_DELETED, _SHARE_BAD = 0.25, 0.05
_COMPACTED = {
    "cleanup.policy": "compact",
    # Longer than the test takes, so that no partition is folded again.
    "delete.retention.ms": "3600000",
    "min.cleanable.dirty.ratio": "0.0",
    "segment.ms": "100",
    "max.compaction.lag.ms": "100",
}


class Rows:
    """The topic: rows of some keys, again and again, and deletions."""

    def __init__(self, stack: LocalStack, topic: str, writer: Writer) -> None:
        self._stack, self._topic, self._writer = stack, topic, writer
        self._chosen = random.Random(119)
        self.written = 0

    def write(self, count: int) -> None:
        for _ in range(count):
            key = f"k{self._chosen.randrange(_KEYS)}"
            if self._chosen.random() < _SHARE_BAD:
                # The next row of the key supersedes it. Without one, a rebuild may lack the row before.
                self._send(key, b"no JSON")
            is_deleted = self._chosen.random() < _SHARE_DELETED
            row = {"name": f"name {self.written}", "number": self.written}
            self._send(key, None if is_deleted else json.dumps(row).encode())
        assert self._writer.producer.flush(30) == 0

    def _send(self, key: str, value: bytes | None) -> None:
        self._writer.send(key, value)
        self.written += 1

    def recount(self) -> dict[str, Any]:
        """Returns the newest row of each key that has one."""
        found: dict[str, Any] = {}
        for message in read_topic(self._stack, self._topic):
            key, value = message.key().decode(), message.value()
            if value is None:
                found.pop(key, None)
            elif value != b"no JSON":
                found[key] = json.loads(value)
        return found

    def wait_until_compacted(self, part: float) -> None:
        """Waits until the broker has removed a part of the records."""

        def is_compacted() -> bool:
            # The cleaner looks at closed segments only.
            self.write(2)
            time.sleep(1.0)
            return len(read_topic(self._stack, self._topic)) < (1 - part) * self.written

        eventually(is_compacted, f"{self._topic} is compacted", _SECONDS)


def answers(instance: LocalInstance, model: str) -> tuple[set[str], dict[str, Any]]:
    """Returns the generations that answer, and the row of each key."""
    answer = retried(
        lambda: httpx.get(f"{instance.url}/api/models/{model}/entries", params={"limit": "1000"}, timeout=30)
    )
    assert answer.status_code == 200, answer.text
    entries = answer.json()
    assert entries["next"] is None
    return {answer.headers["Balance-Generation"]}, {one["key"]: one["value"] for one in entries["entries"]}


def check(instance: LocalInstance, model: str, rows: Rows, generation: int) -> None:
    """Checks that an instance answers with the rows of a recount."""
    wanted = {str(generation)}, rows.recount()
    assert 0 < len(wanted[1]) < _KEYS, "some keys are deleted"
    eventually(lambda: answers(instance, model) == wanted, lambda: str((answers(instance, model), wanted)), _SECONDS)


@pytest.mark.shows("rebuild", "deleted-keys", "newest")
def test_rebuilds_of_a_compacted_topic_have_the_rows_of_a_recount(stack: LocalStack, tmp_path: Path) -> None:
    name = KeptRows.name
    settings = application(BALANCE_MODELS=f"{KeptRows.__module__}:{KeptRows.__name__}")
    admin(stack).create_topics([NewTopic(name, PARTITIONS, 1, config=_COMPACTED)])[name].result(30)
    instance = new_instance(stack, settings)
    environment = on(stack, settings) | {
        "BALANCE_STATE_DIR": str(tmp_path / "state"),
        "BALANCE_APPLICATION_SERVER": instance.url.removeprefix("http://"),
    }

    with Writer(stack, name) as writer:
        rows = Rows(stack, name, writer)
        rows.write(1_000)
        with running(instance):
            rows.write(2_000)
            check(instance, name, rows, 1)
            rows.wait_until_compacted(0.5)

            with started(environment, "rebuild", name, "--reason", "a test") as rebuilding:
                rows.write(1_000)
                rebuilt = rebuilding.wait(_SECONDS)
            assert rebuilt.code == 0, rebuilt
            assert f"{name} 2  serving" in rebuilt.stdout
            check(instance, name, rows, 2)
            letters = httpx.get(f"{instance.url}/api/deadLetters", params={"model": name, "limit": "1000"}).json()
            assert {one["status"] for one in letters["deadLetters"]} <= {"superseded"}

        rows.write(1_000)
        rows.wait_until_compacted(0.5)
        offline = run(environment, "rebuild", "--offline", seconds=_SECONDS)
        assert offline.code == 0, offline
        with running(instance):
            check(instance, name, rows, 3)
