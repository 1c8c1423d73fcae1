"""The Quix Streams program in `quix_streams/`, in its own environment, which has an older confluent-kafka."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import venv
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from balance_service.devtools.local.processes import ChildProcess
from balance_service.errors import ConfigurationError
from balance_service.process.jars import cache_folder, locked
from balance_service.process.package import resource
from bench.sides import ADMIN_SECONDS, QUIX, Progress, offsets_of_group

if TYPE_CHECKING:
    from collections.abc import Mapping

    import psutil

    from balance_service.devtools.local.stack import LocalStack

_PROGRAM = Path(__file__).parent / "quix_streams"
_REQUIREMENTS = _PROGRAM / "requirements.txt"
_INSTALL_SECONDS = 300
_BATCH = 10_000
_KEY_ENDS = b'|"cents"'


def environment() -> Path:
    """The interpreter of the environment, which is created at first need.

    Raises:
        ConfigurationError: the installation failed.
    """
    digest = hashlib.sha256(_REQUIREMENTS.read_bytes() + sys.version.encode())
    folder = cache_folder() / f"quix-{digest.hexdigest()[:16]}"
    python, done = folder / "bin/python", folder / "done"
    with locked(folder):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            command = [str(python), "-m", "pip", "install", "--quiet", "-r", str(_REQUIREMENTS)]
            try:
                venv.create(folder, with_pip=True)
                subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                raise ConfigurationError(f"Quix Streams cannot be installed: {error}") from error
            done.touch()
    return python


class QuixSide:
    """Runs a process for each partition, because a process uses one core."""

    name = QUIX
    variant = ""

    def __init__(self, stack: LocalStack) -> None:
        """Raises:
        ConfigurationError: the installation failed.
        """
        self._stack = stack
        self._python = environment()

    @property
    def settings(self) -> Mapping[str, str]:
        """The version. Other settings are in the source of the program."""
        return {"version": _REQUIREMENTS.read_text().strip()}

    def instance(self, number: int, topic: str, application_id: str) -> QuixInstance:
        """A process that is not started."""
        return QuixInstance(self._stack, self._python, number, topic, application_id)


class QuixInstance:
    """A process. It does not answer queries, so balances are read from its changelog."""

    url = ""

    def __init__(self, stack: LocalStack, python: Path, number: int, topic: str, application_id: str) -> None:
        self._stack = stack
        self._topic = topic
        self._application_id = application_id
        self._client = f"quix-{number}"
        self._folder = stack.data_dir / self._client
        self._admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
        self._cents: dict[str, int] = {}
        given = [stack.bootstrap_servers, topic, application_id, self._client, str(self._folder / "state")]
        self._command = [str(python), str(_PROGRAM / "balance.py"), *given, str(resource("schemas/FundsAdded.avsc"))]
        self._process = ChildProcess("Quix Streams program", self._folder, self._folder / "quix-streams.log")
        self.wipe()

    def launch(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process.run(self._command)

    def progress(self) -> Progress | None:
        described = self._admin.describe_consumer_groups([self._application_id])
        try:
            group = described[self._application_id].result(ADMIN_SECONDS)
        except KafkaException:
            # The group or its coordinator does not exist yet.
            return None
        mine = [member for member in group.members if member.client_id == self._client and member.assignment]
        return Progress(frozenset(p.partition for member in mine for p in member.assignment.topic_partitions))

    def committed(self) -> dict[int, int]:
        return offsets_of_group(self._admin, self._application_id, self._topic)

    def amount(self, customer: str) -> Decimal | None:
        if not self._cents:
            self._cents = self._changelog()
        cents = self._cents.get(customer)
        return None if cents is None else Decimal(cents).scaleb(-2)

    def process(self) -> psutil.Process | None:
        return None

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()

    def wipe(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _changelog(self) -> dict[str, int]:
        topics = self._admin.list_topics(timeout=ADMIN_SECONDS).topics
        (changelog,) = [t for t in topics if t.startswith("changelog__") and self._application_id in t]
        partitions = self._admin.list_topics(changelog, timeout=ADMIN_SECONDS).topics[changelog].partitions
        given = {"bootstrap.servers": self._stack.bootstrap_servers, "isolation.level": "read_committed"}
        more = {"group.id": "bench-changelog", "enable.auto.commit": False, "enable.partition.eof": True}
        consumer = Consumer({**given, **more, "log_level": 0})
        cents: dict[str, int] = {}
        consumer.assign([TopicPartition(changelog, partition, 0) for partition in partitions])
        unread = set(partitions)
        while unread:
            for message in consumer.consume(_BATCH, 0.2):
                error, key, value = message.error(), message.key() or b"", message.value()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    unread.discard(message.partition())
                elif error is None and value is not None and key.endswith(_KEY_ENDS):
                    cents[key.removesuffix(_KEY_ENDS).decode()] = json.loads(value)
        consumer.close()
        return cents
