"""`balance-service local`: runs a broker, a registry and instances until Ctrl-C, and starts an instance again."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import click

from balance_service.client import Client, ClientError
from balance_service.devtools.local.processes import HOST, READY_TIMEOUT_SECONDS
from balance_service.devtools.local.samples import add_samples
from balance_service.devtools.local.stack import LocalInstance, LocalStack
from balance_service.errors import BalanceServiceError, ConfigurationError
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings

_CHECK_EVERY_SECONDS = 1.0
_TELL_EVERY_SECONDS = 10.0
_POLL_SECONDS = 0.2
_TAKEN_WITHIN_SECONDS = 60.0
_INSTANCES = "instances.json"
"""In the data directory while a stack runs: number → URL of each instance."""


def run_local(
    instances: int,
    kafka_port: int,
    registry_port: int | None,
    http_port: int,
    data_dir: Path,
    *,
    hosted: Callable[[Settings], Sequence[ReadModel]],
    sample_events: bool,
) -> None:
    """Run a stack in the foreground.

    Args:
        registry_port: None to run no registry.
        hosted: returns the hosted read models; called with the settings of the stack.
        sample_events: append samples for the hosted read models.

    An instance that ends stays so until `restart`.

    Raises:
        ConfigurationError: a port or the data directory is in use, or Java is missing.
        FatalError: the broker or the registry ended unexpectedly.
    """
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with ExitStack() as cleanup:
        servers = "Kafka" if registry_port is None else "Kafka and the schema registry"
        say(f"starting {servers} …")
        with telling(f"{servers} start; the first time, their programs are downloaded"):
            stack = cleanup.enter_context(LocalStack(data_dir, kafka_port, registry_port))
        say(f"  Kafka            {stack.bootstrap_servers}")
        if stack.has_registry:
            say(f"  schema registry  {stack.schema_registry_url}")
        logs = stack.data_dir / "logs"
        with telling(f"instances start; their logs are {logs}/instance-*.log"):
            running = start_instances(cleanup, stack, instances, http_port, _import_path())
        for instance in running[:1]:
            say(f"  console          {instance.url}/")
        for instance in running:
            say(f"  {instance.name}       {instance.url}   log: {instance.log}")
        say("for other commands:")
        say(f"  export {' '.join(f'{name}={value}' for name, value in _addresses(stack, running).items())}")
        if sample_events and running:
            say("adding samples …")
            url = stack.schema_registry_url if stack.has_registry else None
            settings = load_settings(bootstrap_servers=stack.bootstrap_servers, schema_registry_url=url)
            with telling("samples are sent, and folded"):
                tries = add_samples(running, settings, hosted(settings))
            say("try:")
            for command in tries:
                say(f"  {command}")
        supervisor = cleanup.enter_context(Supervisor(running, stack.data_dir))
        say("ready; Ctrl-C stops everything")
        while not stopping.wait(_CHECK_EVERY_SECONDS):
            stack.require_running()
            supervisor.look()
        say("stopping …")
    say("stopped")


class Supervisor:
    """Tells which instances have ended, and starts instances again when `restart` asks for it. For one thread."""

    def __init__(self, instances: Sequence[LocalInstance], data_dir: Path) -> None:
        self._instances = dict(enumerate(instances, 1))
        self._data_dir = data_dir
        self._running = {*self._instances}

    def __enter__(self) -> Self:
        self._forget_requests()
        told = {str(number): instance.url for number, instance in self._instances.items()}
        (self._data_dir / _INSTANCES).write_text(json.dumps(told), encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        (self._data_dir / _INSTANCES).unlink(missing_ok=True)
        self._forget_requests()

    def look(self) -> None:
        """Returns at once, except that an instance that runs is stopped before it is started again."""
        for number, instance in self._instances.items():
            if not instance.running and number in self._running:
                self._running.discard(number)
                others = "the others take its partitions over; " if len(self._running) else ""
                say(
                    f"{instance.name} has ended (log: {instance.log}); {others}start it again: `balance-service local "
                    f"restart {number} --data-dir {self._data_dir}`"
                )
            request = _request(self._data_dir, number)
            if request.exists():
                self._start_again(number, instance)
                request.unlink(missing_ok=True)

    def _start_again(self, number: int, instance: LocalInstance) -> None:
        say(f"{instance.name} is started again …")
        instance.stop()
        try:
            instance.launch()
        except BalanceServiceError as error:
            say(f"{instance.name} cannot be started: {error}")
        else:
            self._running.add(number)

    def _forget_requests(self) -> None:
        for number in self._instances:
            _request(self._data_dir, number).unlink(missing_ok=True)


def restart(data_dir: Path, number: int) -> None:
    """Have the stack that runs on a data directory start an instance again, and wait until that is ready.

    Raises:
        ConfigurationError: no stack runs there, or it has no such instance.
        BalanceServiceError: the instance was not ready in time.
    """
    instances = _running_instances(data_dir)
    if str(number) not in instances:
        known = ", ".join(instances) or "none"
        raise ConfigurationError(f"the local stack on {data_dir} has no instance {number}; its instances: {known}")
    request, url = _request(data_dir, number), instances[str(number)]
    request.touch()
    began = time.monotonic()
    with telling(f"instance {number} starts; the stack's terminal and {data_dir}/logs/instance-{number}.log say more"):
        while request.exists() or not _is_ready(url):
            seconds = time.monotonic() - began
            if seconds > (_TAKEN_WITHIN_SECONDS if request.exists() else READY_TIMEOUT_SECONDS):
                raise BalanceServiceError(
                    f"instance {number} was not ready within {seconds:.0f} s: see {data_dir}/logs/instance-{number}.log"
                )
            time.sleep(_POLL_SECONDS)
    say(f"instance {number} is ready: {url}")


def _running_instances(data_dir: Path) -> dict[str, str]:
    """Returns number → URL of the instances of the stack that runs on a data directory."""
    with suppress(OSError), (data_dir / "lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found: dict[str, str] = json.loads((data_dir / _INSTANCES).read_text(encoding="utf-8"))
            return found
    raise ConfigurationError(
        f"no local stack is ready on {data_dir}: start one by `balance-service local`, or name its --data-dir"
    )


def _request(data_dir: Path, number: int) -> Path:
    return data_dir / f"restart-{number}"


def _is_ready(url: str) -> bool:
    with Client(url, trust_env=False, retry_seconds=0) as client, suppress(ClientError):
        return client.ready().is_ready
    return False


@contextmanager
def telling(what: str, every_seconds: float = _TELL_EVERY_SECONDS) -> Iterator[None]:
    """Prints a line, with the seconds so far, every few seconds until the block ends."""
    ended, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(every_seconds):
            say(f"  … {time.monotonic() - began:.0f} s: {what}")

    thread = threading.Thread(target=tell, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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
    return {**{name: value for name, value in stack.addresses.items() if value}, **server}


def _import_path() -> dict[str, str]:
    """Lets instances, which have another working directory, import read models from this one."""
    paths = filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths)}


def say(line: str) -> None:
    click.echo(line)
