"""The directory of instances on a real topic."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from balance_service.avro.codec import AvroCodec
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.cluster.directory import (
    SUSPECT_AFTER_SECONDS,
    Directory,
    PublishedModel,
    PublishedTask,
    ServerTable,
)
from balance_service.cluster.signatures import RecordSignatures
from balance_service.kafka.clients import producer_config, reader_config
from balance_service.kafka.topics import Topics
from tests.integration.engines import prepare, settings_for
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.settings import Settings

# So that the new topic is shorter than what was read of the old one.
_MORE = 100


@contextmanager
def following(settings: Settings, address: str) -> Iterator[Directory]:
    registry = SchemaRegistry.from_settings(settings)
    topic, schema = settings.application_servers_topic, load_schema("ApplicationServer")
    codec = AvroCodec(registry, f"{topic}-parts.code.balance.cluster.ApplicationServer", schema)
    task = PublishedTask("balance", 0, "ACTIVE", "RUNNING", 1, 7)
    directory = Directory(
        consumer_config=reader_config(settings),
        producer_config=producer_config(settings),
        topic=topic,
        address=address,
        incarnation="i",
        codec=codec,
        signatures=RecordSignatures(None, topic),
        models=[PublishedModel("balance", 2)],
        tasks=lambda: [task],
        table=ServerTable(),
    )
    directory.start()
    yield directory
    directory.stop(10)
    registry.close()


def heard_of(directory: Directory) -> set[str]:
    """The instances that it would route to."""
    return {server["applicationServer"] for server in directory.status() if not server["suspect"]}


def test_a_directory_whose_topic_was_made_anew_is_followed_on(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    topics = Topics(settings)
    prepare(topics, settings)
    with following(settings, "a:1") as one, following(settings, "b:1") as other:
        eventually(lambda: heard_of(one) == heard_of(other) == {"a:1", "b:1"}, "both know both")
        for _ in range(_MORE):
            one.publish_soon()
            time.sleep(0.05)

        topics.delete(settings.application_servers_topic)
        prepare(topics, settings)

        # Long enough for what was heard before to count no more.
        time.sleep(2 * SUSPECT_AFTER_SECONDS)
        eventually(lambda: heard_of(one) == heard_of(other) == {"a:1", "b:1"}, "both know both again")


def test_an_instance_hears_of_others_that_publish_all_the_time(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    prepare(Topics(settings), settings)
    with following(settings, "a:1") as busy:
        over = threading.Event()

        def publish() -> None:
            # Before a consumer's wait for more is over, there is more.
            while not over.wait(0.1):
                busy.publish_soon()

        publishing = threading.Thread(target=publish)
        publishing.start()
        try:
            eventually(lambda: heard_of(busy) == {"a:1"}, "it knows itself")
            with following(settings, "b:1") as new:
                eventually(lambda: new.is_read and "a:1" in heard_of(new), "it knows the others", 5)
        finally:
            over.set()
            publishing.join()
