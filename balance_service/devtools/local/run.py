"""`balance-service local`: runs a broker, a registry and instances until Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from balance_service.devtools.local.processes import HOST
from balance_service.devtools.local.samples import add_samples
from balance_service.devtools.local.stack import LocalInstance, LocalStack
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings

_CHECK_EVERY_SECONDS = 1.0


def run_local(
    instances: int,
    kafka_port: int,
    registry_port: int,
    http_port: int,
    data_dir: Path,
    *,
    known: Callable[[Settings], Sequence[ReadModel]],
    sample_events: bool,
) -> None:
    """Run a stack in the foreground.

    Args:
        known: returns the known read models; called with the settings of the stack.
        sample_events: append samples for the hosted read models.

    Raises:
        ConfigurationError: a port or the data directory is in use, or Java is missing.
        FatalError: the broker, the registry or an instance ended unexpectedly.
    """
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with ExitStack() as cleanup:
        say("starting Kafka and the schema registry …")
        stack = cleanup.enter_context(LocalStack(data_dir, kafka_port, registry_port))
        say(f"  Kafka            {stack.bootstrap_servers}")
        say(f"  schema registry  {stack.schema_registry_url}")
        running = start_instances(cleanup, stack, instances, http_port, _import_path())
        for instance in running[:1]:
            say(f"  console          {instance.url}/")
        for instance in running:
            say(f"  {instance.name}       {instance.url}   log: {instance.log}")
        say("for other commands:")
        say(f"  export {' '.join(f'{name}={value}' for name, value in _addresses(stack, running).items())}")
        if sample_events and running:
            say("adding samples …")
            settings = load_settings(
                bootstrap_servers=stack.bootstrap_servers, schema_registry_url=stack.schema_registry_url
            )
            tries = add_samples(running, settings, known(settings))
            say("try:")
            for command in tries:
                say(f"  {command}")
        say("ready; Ctrl-C stops everything")
        while not stopping.wait(_CHECK_EVERY_SECONDS):
            stack.require_running()
            for instance in running:
                instance.require_running()
        say("stopping …")
    say("stopped")


def start_instances(
    cleanup: ExitStack,
    stack: LocalStack,
    count: int,
    http_port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> list[LocalInstance]:
    """Start instances and wait until all are ready; `cleanup` stops them."""
    if not count:
        return []
    say(f"starting {count} {'instance' if count == 1 else 'instances'} …")
    instances = [LocalInstance(n + 1, stack, http_port + n if http_port else 0, environment) for n in range(count)]
    for instance in instances:
        cleanup.callback(instance.stop)
        instance.launch()
    for instance in instances:
        instance.wait_ready()
    return instances


def _addresses(stack: LocalStack, instances: Sequence[LocalInstance]) -> dict[str, str]:
    """The settings of commands that connect to the stack."""
    server = {"BALANCE_APPLICATION_SERVER": f"{HOST}:{instances[0].port}"} if instances else {}
    return {
        "BALANCE_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "BALANCE_SCHEMA_REGISTRY_URL": stack.schema_registry_url,
        **server,
    }


def _import_path() -> dict[str, str]:
    """Lets instances, which have another working directory, import read models from this one."""
    paths = filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths)}


def say(line: str) -> None:
    click.echo(line)
