"""`balance-service local`: broker, registry and instances, until Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click
import httpx

from balance_service.errors import BalanceServiceError, FatalError
from balance_service.local.instances import LocalInstance
from balance_service.local.stack import LocalStack

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LOOK_EVERY_SECONDS = 1.0
_VISIBLE_SECONDS = 60.0
_SAMPLES = (
    ("alice", "12.34"),
    ("bob", "100"),
    ("alice", "0.10"),
    ("alice", "0.20"),
    ("carol", "9999999999999999.99"),
)


def run_local(
    instances: int,
    kafka_port: int,
    registry_port: int,
    http_port: int,
    data_dir: Path,
    *,
    sample_events: bool,
) -> None:
    """Run all of it in the foreground.

    Raises:
        ConfigurationError: a port or the data directory is in use, or Java is missing.
        FatalError: an instance ended by itself.
    """
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with ExitStack() as cleanup:
        say("starting Kafka and the schema registry …")
        stack = cleanup.enter_context(LocalStack(data_dir, kafka_port, registry_port))
        say(f"  Kafka            {stack.bootstrap_servers}")
        say(f"  schema registry  {stack.schema_registry_url}")
        running = start_instances(cleanup, stack, instances, http_port)
        for instance in running:
            say(f"  {instance.name}       {instance.url}   log: {instance.log}")
        if sample_events and running:
            add_samples(running)
        say("ready; Ctrl-C stops everything")
        while not stopping.wait(_LOOK_EVERY_SECONDS):
            for instance in running:
                if not instance.running:
                    raise FatalError(f"{instance.name} ended by itself; its log is {instance.log}")
        say("stopping …")
    say("stopped")


def start_instances(cleanup: ExitStack, stack: LocalStack, count: int, http_port: int = 0) -> list[LocalInstance]:
    """Start some instances side by side and wait until all are ready; `cleanup` stops them."""
    if not count:
        return []
    say(f"starting {count} instance(s) …")
    instances = [LocalInstance(n + 1, stack, http_port + n if http_port else 0) for n in range(count)]
    for instance in instances:
        cleanup.callback(instance.stop)
        instance.launch()
    for instance in instances:
        instance.wait_ready()
    return instances


def add_samples(instances: Sequence[LocalInstance]) -> None:
    """Add some funds, wait until every instance answers with them, and say what to try."""
    say("adding sample funds …")
    with httpx.Client(timeout=30.0, trust_env=False) as client:
        for customer, amount in _SAMPLES:
            answer = client.post(
                f"{instances[0].url}/api/balance.addFunds", json={"customerId": customer, "amount": amount}
            )
            if answer.is_error:
                raise BalanceServiceError(f"adding funds failed: {answer.text}")
            query = {"customerId": customer, "minPosition": answer.headers["Balance-Position"]}
            for instance in instances:
                _wait_until_answered(client, f"{instance.url}/api/customers.getBalance", query)
    say("try:")
    for instance in instances:
        say(f"  curl -i '{instance.url}/api/customers.getBalance?customerId=alice'")
    say(
        f"  curl -i -X POST {instances[0].url}/api/balance.addFunds "
        """-H 'Content-Type: application/json' -d '{"customerId": "alice", "amount": 1.23}'"""
    )
    say(f"  curl {instances[0].url}/api/status")


def _wait_until_answered(client: httpx.Client, url: str, query: dict[str, str]) -> None:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while (answer := client.get(url, params=query)).is_error:
        if time.monotonic() > deadline:
            raise BalanceServiceError(f"the sample funds do not show: {answer.text}")
        time.sleep(_LOOK_EVERY_SECONDS / 10)


def say(line: str) -> None:
    """Tell the person."""
    click.echo(line)
