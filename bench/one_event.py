"""`python -m bench.one_event`: the steps from an event's acknowledgement to its view, in milliseconds.

An engine in this process folds a topic that receives one event per second. The steps of a commit are marked by fail
points, which here record the time.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from confluent_kafka import Producer

from balance_service.devtools.local.stack import LocalStack
from balance_service.engine.state_directory import StateDirectory
from balance_service.hosting.engine import Engine, StartupRetries
from balance_service.model.placing import stages_of
from balance_service.observability.metrics import Metrics
from balance_service.process import failpoints
from balance_service.process.runtime import favour_short_work
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from balance_service.spark.row_query import PartitionStream
from bench.events import encoded
from bench.load import PRODUCER, generate

_EVENTS = 60
_WARM_EVENTS = 20
_EVERY_SECONDS = 1.0
_STEPS = {
    "pulled": "fetched by Spark, decoded, handed over, pulled",
    "batch-read": "combined",
    "folded": "folded",
    "begun": "transaction begun",
    "produced": "records written to the changelog",
    "committed": "transaction committed",
    "stored": "store written, view replaced",
}


class _Times(dict[str, tuple[str, int]]):
    """Replaces the armed fail points: none is armed, and each look-up is recorded with its time."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, float] = {}

    def __contains__(self, name: object) -> bool:
        self.noted[str(name)] = time.monotonic()
        return False


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Print the median of each step."""
    times = _Times()
    vars(failpoints)["_armed"] = times
    pull = PartitionStream.pull

    def noted(stream: PartitionStream, timeout_seconds: float) -> Any:
        rows = pull(stream, timeout_seconds)
        if rows is not None:
            times.noted["pulled"] = time.monotonic()
        return rows

    setattr(PartitionStream, "pull", noted)  # noqa: B010  (to mypy, methods are not assigned to)
    with tempfile.TemporaryDirectory(prefix="balance-bench-") as folder, LocalStack(Path(folder)) as stack:
        load = generate(stack, "way", 1_000, 100, lambda _more: None)
        settings = load_settings(
            bootstrap_servers=stack.bootstrap_servers,
            schema_registry_url=stack.schema_registry_url,
            topic=load.topic,
            application_id="way",
            state_dir=Path(folder) / "state",
        )
        retries = StartupRetries(threading.Event(), lambda _reason: None)
        engine = Engine(
            settings,
            StateDirectory(settings.state_dir, settings.application_id),
            stages_of(Balance(), settings),
            [Balance()],
            Metrics(),
            retries,
        )
        engine.start()
        favour_short_work()
        try:
            _print(_taken(stack, load.topic, load.header, times))
        finally:
            engine.stop()


def _taken(stack: LocalStack, topic: str, header: bytes, times: _Times) -> dict[str, list[float]]:
    """Seconds of each step of each event since the previous step."""
    producer = Producer({"bootstrap.servers": stack.bootstrap_servers, **PRODUCER, "linger.ms": 0})
    taken: dict[str, list[float]] = defaultdict(list)
    for number in range(_WARM_EVENTS + _EVENTS):
        time.sleep(_EVERY_SECONDS)
        times.noted.clear()
        for key, frame in encoded(header, np.array([number % 100]), np.array([1])):
            producer.produce(topic, frame, key)
        producer.flush()
        before = acknowledged = time.monotonic()
        while "stored" not in times.noted:
            time.sleep(0.0005)
        if number >= _WARM_EVENTS:
            for step in _STEPS:
                taken[step].append(times.noted[step] - before)
                before = times.noted[step]
            taken["in all"].append(before - acknowledged)
    return taken


def _print(taken: dict[str, list[float]]) -> None:
    for step, seconds in taken.items():
        click.echo(f"{_STEPS.get(step, step):<50} {1000 * statistics.median(seconds):6.2f} ms")


if __name__ == "__main__":
    main()
