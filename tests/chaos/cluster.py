"""The cluster under test: a broker, a registry, three instances, one of which reaches the broker through the proxy."""

from __future__ import annotations

import json
import shutil
import signal
import uuid
from contextlib import ExitStack, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import httpx
import psutil
from confluent_kafka.admin import AdminClient, NewTopic

from balance_service.devtools.local.processes import HOST, free_port
from balance_service.devtools.local.stack import LocalInstance, LocalStack
from tests.chaos.proxy import SilentProxy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

PARTITIONS = 4
INSTANCES = 3
SESSION_TIMEOUT_SECONDS = 6.0
READ_TIMEOUT_SECONDS = 2.0
IDEMPOTENCY_WINDOW_SECONDS = 20.0
"""So short that markers expire in every round, so long that some of what is sent again comes within it."""
_STATUS_SECONDS = 5.0
NEVER_TOLD = (
    "a step of the task failed",
    "a thread failed; stopping",
    "a request failed",
    "task halted",
    "the directory failed",
    "the read model's code failed",
    "the table cannot be followed",
)
"""What an instance logs of an exception that was not foreseen, of its own end, and of what a person has to see to."""
_FEW_RECORDS = 7
_STRUCK = '"event": "a fail point strikes"'


class Strike(NamedTuple):
    """The fail point at which a process has died, and when, in seconds since 1970."""

    point: str
    at: float


class Member:
    """One instance of the three, by what is done to it. Used by one thread at a time.

    Every other time that it is started, a few records are many, so that its commits and restores go in parts.
    """

    def __init__(self, instance: LocalInstance, stack: LocalStack, part: int, *, is_next_small: bool) -> None:
        """Args:
        part: of how many records parts are when they are small.
        is_next_small: whether they are when it is started first.
        """
        self._part, self._is_next_small = part, is_next_small
        self.instance = instance
        self.name = instance.name
        self.host, self.port = HOST, instance.port
        self.address = instance.environment["BALANCE_APPLICATION_SERVER"]
        self.state_dir = instance.state_dir
        self._all_logs = stack.data_dir / "logs" / f"{self.name}.all.log"
        self.should_run = False
        """Whether it was started and nobody has ended it since."""

    @property
    def running(self) -> bool:
        """Whether the process is there, be it stopped."""
        return self.instance.running

    def launch(self, failpoints: str = "", *, in_parts: bool = False) -> None:
        """Start the process, armed or not; `in_parts`: a few records are many for it in any case."""
        self.keep_log()
        is_small, self._is_next_small = self._is_next_small, not self._is_next_small
        bounds = f"parts={self._part}" if is_small or in_parts else ""
        self.instance.environment["BALANCE_FAILPOINTS"] = ",".join(filter(None, (bounds, failpoints)))
        self.should_run = True
        self.instance.launch()

    def kill(self) -> None:
        """End the process by SIGKILL, or forget one that has ended."""
        self.should_run = False
        self.instance.kill()

    def stop(self) -> None:
        """End the process in good order."""
        self.should_run = False
        self.instance.stop()

    def wait_ready(self) -> None:
        """Return once it wants queries. Raises ConfigurationError if it has ended, or takes far too long."""
        self.instance.wait_ready()

    def keep_log(self) -> None:
        """Add the log of the last run to that of all runs; the local stack keeps only two."""
        if self.instance.log.exists():
            with self.instance.log.open("rb") as last, self._all_logs.open("ab") as kept:
                shutil.copyfileobj(last, kept)

    def strike(self) -> Strike | None:
        """The fail point at which the last process died or stopped; None if it has reached none."""
        for line in self.instance.log.read_text(encoding="utf-8", errors="replace").splitlines():
            if _STRUCK in line:
                told = json.loads(line)
                return Strike(told["failpoint"], datetime.fromisoformat(told["timestamp"]).timestamp())
        return None

    def unexpected(self) -> Iterator[str]:
        """What any of its processes has told that nobody should ever read. Ask when it is stopped."""
        for line in self._all_logs.read_text(encoding="utf-8", errors="replace").splitlines():
            if any(f'"{told}"' in line for told in NEVER_TOLD):
                yield f"{self.name}: {line}"

    def stores(self) -> list[Path]:
        """The directories of the stores of its tasks that answer; none of tasks that have left."""
        status = self.status()
        assert status is not None, f"{self.name} does not say what it has"
        return [self.state_dir / task["task"] for task in status["tasks"] if task["state"] in ("RUNNING", "TAILING")]

    def process(self) -> psutil.Process | None:
        """The service's own process, below its guard; None if it is gone."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # some are short-lived, or killed and not reaped yet
                serves = process.cmdline()[1:] == ["-m", "balance_service", "serve"]
                if serves and process.environ().get("BALANCE_HTTP_PORT") == str(self.port):
                    return process
        return None

    def is_stopped(self) -> bool:
        """Whether the process exists and does not run."""
        process = self.process()
        with suppress(psutil.NoSuchProcess):
            return process is not None and process.status() == psutil.STATUS_STOPPED
        return False

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the process and its JVM, as a machine that is paused would stop both."""
        process = self.process()
        if process is not None:
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)

    def status(self) -> dict[str, Any] | None:
        """What it says of itself; None if it does not answer."""
        try:
            known: dict[str, Any] = _http.get(f"{self.instance.url}/api/status").json()
        except (httpx.HTTPError, ValueError):
            return None
        return known

    def metrics(self) -> str:
        """What it has counted."""
        return _http.get(f"{self.instance.url}/metrics").text


class Cluster:
    """Everything up from entering to leaving; the topic is made, and empty."""

    def __init__(self, data_dir: Path, standbys: int, seed: int) -> None:
        name = uuid.uuid4().hex[:8]
        self.topic = f"balance-{name}"
        self.application_id = f"chaos-{name}"
        self.standbys = standbys
        self._seed = seed
        behind, front = free_port(), free_port()
        self.stack = LocalStack(data_dir, proxied=(behind, front))
        self.proxy = SilentProxy(front, behind)
        self.members: list[Member] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            opening.enter_context(self.stack)
            opening.enter_context(self.proxy)
            config = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
            admin = AdminClient({"bootstrap.servers": self.stack.bootstrap_servers, "log_level": 0})
            wanted = NewTopic(self.topic, num_partitions=PARTITIONS, replication_factor=1, config=config)
            admin.create_topics([wanted])[self.topic].result(20)
            through_proxy = {"BALANCE_BOOTSTRAP_SERVERS": f"{HOST}:{self.proxy.port}"}
            for number in range(INSTANCES):
                self.members.append(self.member(number, through_proxy if number == 0 else {}))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            self.stop_instances()

    def member(self, number: int, settings: Mapping[str, str]) -> Member:
        """An instance with a port and a state directory of its own, not started."""
        environment = {
            "BALANCE_TOPIC": self.topic,
            "BALANCE_APPLICATION_ID": self.application_id,
            "BALANCE_SESSION_TIMEOUT_MS": str(int(SESSION_TIMEOUT_SECONDS * 1000)),
            "BALANCE_NUM_STANDBY_REPLICAS": str(self.standbys),
            "BALANCE_READ_TIMEOUT": str(READ_TIMEOUT_SECONDS),
            "BALANCE_RETRY_EVERY": "2",
            "BALANCE_IDEMPOTENCY_WINDOW": str(IDEMPOTENCY_WINDOW_SECONDS),
            "BALANCE_PEER_SECRET": "a secret of the chaos suite",
            "BALANCE_SPARK_DRIVER_MEMORY": "640m",
            **settings,
        }
        instance = LocalInstance(number + 1, self.stack, environment=environment)
        return Member(instance, self.stack, _FEW_RECORDS, is_next_small=(number + self._seed) % 2 == 0)

    def stop_instances(self) -> None:
        """Stop all of them at once, in good order."""
        for member in self.members:
            member.signal_all(signal.SIGCONT)
        running = [process for member in self.members if (process := member.process()) is not None]
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for member in self.members:
            member.stop()
            member.keep_log()


def active_positions(members: Iterable[Member]) -> dict[int, int]:
    """Partition → position of its running owner, as the instances say themselves."""
    positions: dict[int, int] = {}
    for task in tasks_of(members):
        if task["role"].upper() == "ACTIVE" and task["state"] == "RUNNING":
            partition = int(task["partition"])
            positions[partition] = max(positions.get(partition, -1), int(task["position"]))
    return positions


def stood_by(members: Iterable[Member]) -> set[int]:
    """The partitions of which one of these has a standby that is caught up, as they say themselves."""
    return {int(task["partition"]) for task in tasks_of(members) if task["state"] == "TAILING"}


def tasks_of(members: Iterable[Member]) -> Iterator[dict[str, Any]]:
    """All tasks of those that answer, as they say themselves."""
    for member in members:
        yield from (member.status() or {}).get("tasks", ())


_http = httpx.Client(timeout=_STATUS_SECONDS, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
