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

# Makes the old topic longer than the new one.
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


def known_servers(directory: Directory) -> set[str]:
    """Returns the instances to which the directory would route."""
    return {server["applicationServer"] for server in directory.status() if not server["suspect"]}


def test_a_directory_follows_its_topic_after_the_topic_was_recreated(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    topics = Topics(settings)
    prepare(topics, settings)
    with following(settings, "a:1") as one, following(settings, "b:1") as other:
        eventually(lambda: known_servers(one) == known_servers(other) == {"a:1", "b:1"}, "both know both")
        for _ in range(_MORE):
            one.publish_soon()
            time.sleep(0.05)

        topics.delete(settings.application_servers_topic)
        prepare(topics, settings)

        # Waits until both have forgotten the earlier records.
        time.sleep(2 * SUSPECT_AFTER_SECONDS)
        eventually(lambda: known_servers(one) == known_servers(other) == {"a:1", "b:1"}, "both know both again")


def test_an_instance_learns_of_others_that_publish_continuously(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    prepare(Topics(settings), settings)
    with following(settings, "a:1") as busy:
        over = threading.Event()

        def publish() -> None:
            # The next record always arrives before the consumer's poll times out.
            while not over.wait(0.1):
                busy.publish_soon()

        publishing = threading.Thread(target=publish)
        publishing.start()
        try:
            eventually(lambda: known_servers(busy) == {"a:1"}, "the instance knows itself")
            with following(settings, "b:1") as new:
                eventually(lambda: new.is_read and "a:1" in known_servers(new), "the new instance knows the other", 5)
        finally:
            over.set()
            publishing.join()
