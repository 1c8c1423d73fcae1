"""An `Upsert` over a topic that the broker compacts: what it leaves is folded, and what was deleted stays deleted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.dead_letter import Status
from balance_service.errors import ConfigurationError
from balance_service.kafka import topic_specs
from balance_service.kafka.topic_specs import prepare_topics
from balance_service.kafka.topics import Topics
from balance_service.model.placing import stages_of
from balance_service.model.read_model import ReadModel
from balance_service.model.record_folds import Upsert
from balance_service.model.record_keys import RECORD_KEY
from balance_service.model.stream import Stream
from tests.integration.engines import catch_up, hosted, running_engine, settings_for, tasks_of
from tests.support.kafka import Writer, read_topic
from tests.support.shipped import KNOWN
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine

pytestmark = pytest.mark.timeout(600)
KEPT_MS = 10_000
COMPACTED = {
    "cleanup.policy": "compact",
    "delete.retention.ms": str(KEPT_MS),
    "min.cleanable.dirty.ratio": "0.0",
    "segment.ms": "100",
    "max.compaction.lag.ms": "100",
}


@dataclass
class Row:
    name: str


def model_of(topic: str, name: str) -> ReadModel:
    members = {
        "name": name,
        "source": Stream(topic, Row, format="json", compacted=True),
        "key": RECORD_KEY,
        "state": Row,
        "fold": Upsert(Row),
    }
    made: ReadModel = type("KeptRows", (ReadModel,), members)()
    return made


def rows(engine: Engine) -> dict[str, str]:
    """Returns the name of each key in the stores of the engine."""
    stage = hosted(engine)
    found: dict[str, str] = {}
    for task in tasks_of(engine).all():
        assert task.view is not None
        states = task.view.scan(b"", b"\xff", 1_000)
        found |= {key.decode(): stage.view(frame)["name"] for key, frame in states}
    return found


def newest(stack: LocalStack, topic: str) -> dict[bytes, list[bytes | None]]:
    """Returns what the topic has of each key."""
    found: dict[bytes, list[bytes | None]] = {}
    for message in read_topic(stack, topic):
        found.setdefault(message.key() or b"", []).append(message.value())
    return found


def put(writer: Writer, **named: str | None) -> None:
    for key, name in named.items():
        writer.send(key, None if name is None else f'{{"name": "{name}"}}'.encode())
    writer.producer.flush(10)


@pytest.mark.shows("deleted-keys", "newest")
def test_a_partition_whose_deletions_the_broker_has_dropped_is_folded_again(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the broker keeps a deletion for longer than a test may take.
    monkeypatch.setattr(topic_specs, "_LEAST_TOMBSTONES_KEPT_MS", KEPT_MS)
    topic, name = f"{names['application_id']}.rows", f"rows-{names['application_id']}"
    KNOWN[name] = model_of(topic, name)
    settings = settings_for(stack, names, tmp_path / "state", models=(name,))
    topics = Topics(settings)
    topics.create(topic, 1, COMPACTED)
    with Writer(stack, topic) as writer:
        put(writer, kept="first", gone="first", bad="first")
        writer.send("bad", b"no JSON")
        put(writer, kept="second")
        with running_engine(settings) as engine:
            catch_up(engine)
            assert rows(engine) == {"kept": "second", "gone": "first", "bad": "first"}
            (task,) = tasks_of(engine).all()
            position = task.position

        put(writer, gone=None, bad="newest")

        def has_dropped_the_deletion() -> bool:
            # The cleaner looks at closed segments only.
            put(writer, **{f"more-{time.monotonic_ns()}": "x"})
            time.sleep(1.0)
            return b"gone" not in newest(stack, topic)

        eventually(has_dropped_the_deletion, lambda: f"the deletion is dropped: {newest(stack, topic)}", 240)

        with running_engine(settings) as again:
            catch_up(again)
            found = {key: name for key, name in rows(again).items() if not key.startswith("more")}
            assert found == {"kept": "second", "bad": "newest"}
            (task,) = tasks_of(again).all()
            assert task.position > position
            assert task.view is not None
            statuses = {letter.status for letter in hosted(again).processor.letters.page(task.view, 0, 10)}
            assert statuses == {Status.SUPERSEDED}
            snapshot: Mapping[str, Any] = {"again": task.snapshot().again_up_to}
            assert snapshot == {"again": 0}


def test_a_compacted_topic_is_refused_for_a_model_that_needs_all_records(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    short, topic = f"{names['application_id']}.short", f"{names['application_id']}.rows"
    kept = model_of(topic, "kept")

    class Folded(ReadModel):
        name = "folded"
        source = Stream(topic, Row, format="json")
        key = RECORD_KEY
        state = Row
        fold = Upsert(Row)

    settings = settings_for(stack, names, tmp_path / "state", models=("balance",))
    topics = Topics(settings)
    topics.create(short, 1, COMPACTED)
    topics.create(topic, 1, {"cleanup.policy": "compact"})
    with pytest.raises(ConfigurationError, match="a deletion may be gone before it is read"):
        prepare_topics(topics, settings, stages_of(model_of(short, "short"), settings))
    prepare_topics(topics, settings, stages_of(kept, settings))
    with pytest.raises(ConfigurationError, match=r"declare `fold = Upsert\(…\)` and `Stream\(…, compacted=True\)`"):
        prepare_topics(topics, settings, [*stages_of(kept, settings), *stages_of(Folded(), settings)])
