"""Topics of public producers in a running instance: each record is right, or a dead letter with its cause and path.

See `tests/data/wild`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from balance_service.avro.frames import frame_header
from tests.integration.engines import running_engine, settings_for
from tests.support.kafka import Writer, read_topic
from tests.support.shipped import KNOWN
from tests.support.waiting import eventually
from tests.support.wild import WILD, records_of, schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine

pytestmark = pytest.mark.timeout(600)
_SECONDS = 240.0
_HEADER_BYTES = 5
# The id of the schema in the recorded records.
_RECORDED = frame_header(1)


def test_every_topic_is_folded_or_refused_as_its_records_mean(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wild in WILD.values():
        monkeypatch.setitem(KNOWN, wild.model.name, wild.model())
    models = tuple(wild.model.name for wild in WILD.values())
    settings = settings_for(stack, names, tmp_path / "state", models=models, create_topics=True)
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    # With one partition, offsets are the numbers of the records.
    created = admin.create_topics([NewTopic(topic, 1, 1, config={"retention.ms": "-1"}) for topic in WILD])
    for future in created.values():
        future.result()
    for topic in WILD:
        send(stack, topic)

    with running_engine(settings) as engine:
        for topic, wild in WILD.items():
            eventually(
                lambda wild=wild: answers(engine, wild.model.name, wild.states) == wild.states,  # type: ignore[misc]
                lambda wild=wild: f"{wild.model.name}: {answers(engine, wild.model.name, wild.states)}",  # type: ignore[misc]
                _SECONDS,
            )
            if wild.letters:
                eventually(
                    lambda topic=topic, wild=wild: letters(stack, topic).keys() >= wild.letters.keys(),  # type: ignore[misc]
                    lambda topic=topic: f"{topic}: {letters(stack, topic)}",  # type: ignore[misc]
                    _SECONDS,
                )
                assert letters(stack, topic) == {offset: cause for offset, (cause, _) in wild.letters.items()}, topic


def send(stack: LocalStack, topic: str) -> None:
    """Writes the recorded bytes; a frame has the id that this registry gave the schema."""
    schema = schema_of(topic)
    with Writer(stack, topic) as writer:
        header = None if schema is None else frame_header(writer.register(f"{topic}-value", schema))
        for one in records_of(topic):
            value = one.value
            if header is not None and value is not None:
                assert value.startswith(_RECORDED)
                value = header + value[_HEADER_BYTES:]
            writer.send(one.key, value, headers=[*one.headers])


def answers(engine: Engine, model: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answers for some keys, found as queries find them; None for those without a state."""
    tasks: Any = engine.stages.get(model)
    found: dict[str, Any] = {}
    for text in keys if tasks is not None else ():
        stage = tasks.hosted
        key = stage.key_type.parse(text)
        task = tasks.task(stage.partitioning.of(key))
        frame = None if task is None or task.view is None else task.view.get(key)
        found[text] = None if frame is None else stage.view(frame)
    return found


def letters(stack: LocalStack, topic: str) -> dict[int, str]:
    """Returns the causes of the dead letters of a topic, by offset."""
    headers = [dict(message.headers()) for message in read_topic(stack, f"{topic}-dead-letters")]
    return {int(one["dead-letter-offset"]): one["dead-letter-cause"].decode() for one in headers}
