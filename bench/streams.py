"""Kafka Streams as a side: the program in `kafka_streams/`, with a setting."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx
import psutil
from confluent_kafka.admin import AdminClient

from balance_service.errors import ConfigurationError
from bench.peer import KafkaStreams
from bench.sides import STATUS_SECONDS, THEIRS, Progress, asked, offsets_of_group

if TYPE_CHECKING:
    from collections.abc import Mapping
    from decimal import Decimal
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from bench.sides import Instance

CACHE_BYTES = 128 << 20
"""The size of the record cache, if it is on."""


class TheirSide:
    """Kafka Streams with one stream thread per core."""

    name = THEIRS

    def __init__(
        self,
        stack: LocalStack,
        *,
        cache_bytes: int,
        commit_interval_ms: int,
        program: str = "BalanceStreams",
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        program: a main class in `bench/kafka_streams`.
        more: additional options of the program.
        """
        self._stack = stack
        self._cache_bytes = cache_bytes
        self._commit_interval_ms = commit_interval_ms
        self._program = program
        self._more = more
        self._threads = os.cpu_count() or 1
        self.variant = f"cache {'on' if cache_bytes else 'off'}, commits every {commit_interval_ms:,} ms"

    @property
    def settings(self) -> Mapping[str, str]:
        """The options of the program. Other settings are in its source."""
        return {"record cache where on, bytes": str(CACHE_BYTES), "stream threads": str(self._threads)}

    def instance(self, number: int, topic: str, application_id: str) -> Instance:
        """An instance that is not started."""
        folder = self._stack.data_dir / f"kafka-streams-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        program = KafkaStreams(
            self._stack,
            topic,
            application_id,
            folder,
            stream_threads=self._threads,
            cache_bytes=self._cache_bytes,
            commit_interval_ms=self._commit_interval_ms,
            program=self._program,
            more=self._more,
        )
        return _Theirs(program, self._stack, topic, application_id, folder)


class _Theirs:
    def __init__(self, program: KafkaStreams, stack: LocalStack, topic: str, application_id: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._topic = topic
        self._application_id = application_id
        self._admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
        self._http = httpx.Client(timeout=STATUS_SECONDS, trust_env=False)
        self.url = program.url

    def launch(self) -> None:
        self._program.start()

    def progress(self) -> Progress | None:
        # One client for all polls: a new client for each poll would use as much CPU as the instance.
        try:
            status = self._http.get(f"{self.url}/status").json()
        except (httpx.HTTPError, ValueError):
            return None
        applied = {int(partition): int(position) for partition, position in status["positions"].items()}
        running = frozenset(applied if status["state"] == "RUNNING" else ())
        return Progress(running, int(status["restored"]), applied)

    def committed(self) -> Mapping[int, int]:
        return offsets_of_group(self._admin, self._application_id, self._topic)

    def amount(self, customer: str) -> Decimal | None:
        return asked(self._http, self.url, customer)

    def process(self) -> psutil.Process | None:
        with suppress(psutil.NoSuchProcess, ConfigurationError):
            return psutil.Process(self._program.pid)
        return None

    def stop(self) -> None:
        self._program.stop()

    def kill(self) -> None:
        self._program.kill()

    def wipe(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
