"""The cluster under test: brokers, registry, and three instances, one of them behind a proxy that can fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import struct
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import httpx
import psutil
from confluent_kafka.admin import AdminClient, NewTopic

from balance_service.devtools.local.processes import HOST, free_port
from balance_service.devtools.local.stack import LocalInstance, LocalStack
from balance_service.kafka.topics import in_sync_replicas

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.chaos.recount import Recount

_END_TXN = 26
_CHUNK = 1 << 16


class SilentProxy:
    """Forwards ports to brokers, and can fall silent right after a request to end a transaction.

    It parses just enough of Kafka's protocol: four bytes of length, two of api key, the rest. After it has forwarded an
    EndTxn request, it forwards nothing on any connection for the given time, then closes all connections and forwards
    again. So the broker has committed, and the client cannot know.

    Runs an event loop in its own thread; `silence` may be called from any other.
    """

    def __init__(self, upstream_ports: Mapping[int, int]) -> None:
        """Args:
        upstream_ports: port → port of the broker that it is forwarded to.
        """
        self._upstream_ports = upstream_ports
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="silent-proxy", daemon=True)
        self._started = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._speaking = asyncio.Event()
        self._armed: float | None = None
        self._struck = threading.Event()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def silence(self, seconds: float, patience_seconds: float) -> bool:
        """Waits for an EndTxn request and the end of the silence that follows it.

        Returns:
            Whether there was such a request within `patience_seconds`.
        """
        self._struck.clear()
        self._over.clear()
        self._armed = seconds
        if not self._struck.wait(patience_seconds):
            self._armed = None
            return False
        assert self._over.wait(seconds + 10)
        return True

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._speaking.set()
        servers = [
            self._loop.run_until_complete(asyncio.start_server(partial(self._serve, upstream), HOST, port))
            for port, upstream in self._upstream_ports.items()
        ]
        self._started.set()
        self._loop.run_forever()
        for server in servers:
            server.close()
        self._loop.run_until_complete(self._shut_down())
        self._loop.close()

    async def _shut_down(self) -> None:
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_all()
        await asyncio.sleep(0.05)

    async def _serve(self, upstream_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        mine = [writer]
        self._writers.add(writer)
        try:
            await self._speaking.wait()
            up_reader, up_writer = await asyncio.open_connection(HOST, upstream_port)
            mine.append(up_writer)
            self._writers.add(up_writer)
            await asyncio.gather(self._requests(reader, up_writer), self._replies(up_reader, writer))
        except (OSError, EOFError):
            pass
        finally:
            for each in mine:
                each.close()
                self._writers.discard(each)
            self._tasks.discard(task)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = await reader.readexactly(6)
                size, api_key = struct.unpack(">ih", head)
                body = await reader.readexactly(size - 2)
                await self._speaking.wait()
                writer.write(head + body)
                if api_key == _END_TXN and self._armed is not None:
                    self._fall_silent()
                await writer.drain()
        writer.close()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                await self._speaking.wait()
                writer.write(chunk)
                await writer.drain()
        writer.close()

    def _fall_silent(self) -> None:
        assert self._armed is not None
        seconds, self._armed = self._armed, None
        self._speaking.clear()
        self._struck.set()
        self._loop.call_later(seconds, self._speak)

    def _speak(self) -> None:
        # Closing the connections drops the data held back.
        self._close_all()
        self._speaking.set()
        self._over.set()

    def _close_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()


INSTANCES = 3
SESSION_TIMEOUT_SECONDS = 6.0
READ_TIMEOUT_SECONDS = 2.0
IDEMPOTENCY_WINDOW_SECONDS = 20.0
"""Short enough that keys expire in every round, long enough that some repeated events come within the window."""
_STATUS_SECONDS = 5.0
UNEXPECTED_EVENTS = (
    "a step of the task failed",
    "a thread failed; stopping",
    "a request failed",
    "task halted",
    "the directory failed",
    "the read model's code failed",
    "the table cannot be followed",
)
"""Log events of unexpected exceptions, of the end of an instance, and of faults that need an operator."""
_FEW_RECORDS = 7
_STRUCK = '"event": "a fail point strikes"'


class Strike(NamedTuple):
    """The fail point at which a process died, and the Unix time."""

    point: str
    at: float


class Member:
    """One of the three instances. Used by one thread at a time.

    At every other start, parts are limited to a few records, so that commits and restores go in parts.
    """

    def __init__(self, instance: LocalInstance, stack: LocalStack, part: int, *, is_next_small: bool) -> None:
        """Args:
        instance: named as `instance-N`.
        part: the number of records in a small part.
        is_next_small: whether the first start uses small parts.
        """
        self._part, self._is_next_small = part, is_next_small
        self._stack, self._number = stack, int(instance.name.rpartition("-")[2])
        self.instance = instance
        self.name = instance.name
        self.host, self.port = HOST, instance.port
        self.address = instance.environment["BALANCE_APPLICATION_SERVER"]
        self.state_dir = instance.state_dir
        self._all_logs = stack.data_dir / "logs" / f"{self.name}.all.log"
        self.should_run = False
        """Whether the instance was started and not ended on purpose."""

    @property
    def running(self) -> bool:
        """Whether the process exists, even if it is stopped."""
        return self.instance.running

    def launch(self, failpoints: str = "", *, in_parts: bool = False) -> None:
        """Starts the process, with fail points if given. `in_parts` forces small parts."""
        self.keep_log()
        is_small, self._is_next_small = self._is_next_small, not self._is_next_small
        bounds = f"parts={self._part}" if is_small or in_parts else ""
        self.instance.environment["BALANCE_FAILPOINTS"] = ",".join(filter(None, (bounds, failpoints)))
        self.should_run = True
        self.instance.launch()

    def change_version(self, checkout: Path | None) -> None:
        """Makes the next start run another checkout, as of `LocalInstance`. The process must have ended."""
        of_now = self.instance
        self.instance = LocalInstance(self._number, self._stack, of_now.port, of_now.environment, checkout)

    def kill(self) -> None:
        """Kills the process, or clears one that has ended."""
        self.should_run = False
        self.instance.kill()

    def stop(self) -> None:
        """Stops the process in an orderly way."""
        self.should_run = False
        self.instance.stop()

    def wait_ready(self) -> None:
        """Waits until the instance is ready. Raises ConfigurationError if it ends or takes far too long."""
        self.instance.wait_ready()

    def keep_log(self) -> None:
        """Appends the log of the last run to the log of all runs; the local stack keeps only two."""
        if self.instance.log.exists():
            with self.instance.log.open("rb") as last, self._all_logs.open("ab") as kept:
                shutil.copyfileobj(last, kept)

    def strike(self) -> Strike | None:
        """Returns the last fail point at which the last process died or stopped; None without one."""
        for line in reversed(self.instance.log.read_text(encoding="utf-8", errors="replace").splitlines()):
            if _STRUCK in line:
                detail = json.loads(line)
                return Strike(detail["failpoint"], datetime.fromisoformat(detail["timestamp"]).timestamp())
        return None

    def unexpected(self) -> Iterator[str]:
        """Yields the unexpected log lines of all runs. The instance must be stopped."""
        for line in self._all_logs.read_text(encoding="utf-8", errors="replace").splitlines():
            if any(f'"{detail}"' in line for detail in UNEXPECTED_EVENTS):
                yield f"{self.name}: {line}"

    def stores(self) -> list[Path]:
        """Returns the store directories of the tasks that answer."""
        status = self.status()
        assert status is not None, f"{self.name} does not report its tasks"
        return [self.state_dir / task["task"] for task in status["tasks"] if task["state"] in ("RUNNING", "TAILING")]

    def process(self) -> psutil.Process | None:
        """Returns the process of the service, a child of its guard; None if it has ended."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a process may end during the loop, or be a zombie
                serves = process.cmdline()[1:] == ["-m", "balance_service", "serve"]
                if serves and process.environ().get("BALANCE_HTTP_PORT") == str(self.port):
                    return process
        return None

    def is_stopped(self) -> bool:
        """Whether the process exists and is stopped by a signal."""
        process = self.process()
        with suppress(psutil.NoSuchProcess):
            return process is not None and process.status() == psutil.STATUS_STOPPED
        return False

    def signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its JVM, as a pause of the machine would."""
        process = self.process()
        if process is not None:
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)

    def status(self) -> dict[str, Any] | None:
        """Returns the response of /api/status; None without one."""
        try:
            known: dict[str, Any] = _http.get(f"{self.instance.url}/api/status").json()
        except (httpx.HTTPError, ValueError):
            return None
        return known

    def metrics(self) -> str:
        return _http.get(f"{self.instance.url}/metrics").text


class Cluster:
    """Brokers, registry and instances while the context is open; the topic exists and is empty.

    With three brokers, each topic has three replicas, and a record is acknowledged that two of them have.
    """

    def __init__(
        self,
        data_dir: Path,
        partitions: int,
        standbys: int,
        seed: int,
        brokers: int = 1,
        checkout: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        checkout: what the instances run, as of `LocalInstance`.
        settings: more than those that every run has.
        """
        name = uuid.uuid4().hex[:8]
        self.topic = f"balance-{name}"
        self.application_id = f"chaos-{name}"
        self.partitions = partitions
        self.standbys = standbys
        self._seed = seed
        self._checkout = checkout
        self._settings = settings or {}
        behind_front = [(free_port(), free_port()) for _ in range(brokers)]
        self.stack = LocalStack(data_dir, brokers=brokers, proxied=behind_front)
        self._fronts = [front for _, front in behind_front]
        self.proxy = SilentProxy({front: behind for behind, front in behind_front})
        self.members: list[Member] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            opening.enter_context(self.stack)
            opening.enter_context(self.proxy)
            config = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
            admin = AdminClient({"bootstrap.servers": self.stack.bootstrap_servers, "log_level": 0})
            replicas = len(self.stack.brokers)
            config["min.insync.replicas"] = str(in_sync_replicas(replicas))
            wanted = NewTopic(self.topic, num_partitions=self.partitions, replication_factor=replicas, config=config)
            admin.create_topics([wanted])[self.topic].result(20)
            through_proxy = {"BALANCE_BOOTSTRAP_SERVERS": ",".join(f"{HOST}:{front}" for front in self._fronts)}
            for number in range(INSTANCES):
                self.members.append(self.member(number, through_proxy if number == 0 else {}))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            self.stop_instances()

    def member(self, number: int, settings: Mapping[str, str]) -> Member:
        """Returns an instance with its own port and state directory, not started."""
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
            **self._settings,
            **settings,
        }
        instance = LocalInstance(number + 1, self.stack, environment=environment, checkout=self._checkout)
        return Member(instance, self.stack, _FEW_RECORDS, is_next_small=(number + self._seed) % 2 == 0)

    def stop_instances(self) -> None:
        """Stops all instances in parallel, in an orderly way."""
        for member in self.members:
            member.signal_all(signal.SIGCONT)
        running = [process for member in self.members if (process := member.process()) is not None]
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for member in self.members:
            member.stop()
            member.keep_log()


def urls_of(members: Iterable[Member]) -> list[str]:
    """Returns the URLs of the members whose processes exist."""
    return [member.instance.url for member in members if member.running]


def active_positions(members: Iterable[Member], stage: str | None = None) -> dict[int, int]:
    """Returns partition → position of its running owner, as the instances report.

    Args:
        stage: None for the generations that serve.
    """
    positions: dict[int, int] = {}
    for task in serving_tasks(members) if stage is None else tasks_of(members):
        is_owners = task["role"].upper() == "ACTIVE" and task["state"] == "RUNNING"
        if is_owners and stage in (None, stage_in(task["task"])):
            partition = int(task["partition"])
            positions[partition] = max(positions.get(partition, -1), int(task["position"]))
    return positions


def stood_by(members: Iterable[Member]) -> set[int]:
    """Returns the partitions for which one of the members reports a tailing standby that answers."""
    return {int(task["partition"]) for task in serving_tasks(members) if task["state"] == "TAILING"}


def wait_until_applied(members: Sequence[Member], recount: Recount, seconds: float, stage: str | None = None) -> None:
    """Waits until every event so far is applied, except those that commands add during the wait.

    Args:
        stage: as of `active_positions`.
    """
    deadline = time.monotonic() + seconds
    recount.read_on()
    while True:
        positions = active_positions(members, stage)
        if all(positions.get(p, -1) >= count.end for p, count in enumerate(recount.partitions)):
            return
        assert time.monotonic() < deadline, f"not caught up: {positions}; {[m.status() for m in members]}"
        time.sleep(0.5)


def tasks_of(members: Iterable[Member]) -> Iterator[dict[str, Any]]:
    """Yields all tasks that the members report."""
    for member in members:
        yield from (member.status() or {}).get("tasks", ())


def serving_tasks(members: Iterable[Member]) -> Iterator[dict[str, Any]]:
    """Yields the tasks of the generations that serve, as each member knows them."""
    for member in members:
        status = member.status() or {}
        serving = {model["name"] for model in status.get("models", ()) if model["status"] == "serving"}
        yield from (task for task in status.get("tasks", ()) if stage_in(task["task"]) in serving)


def stage_of(model: str, generation: int) -> str:
    """Returns the name of the last stage of a generation."""
    return model if generation == 1 else f"{model}.g{generation}"


def stage_in(task: str) -> str:
    """Returns the stage in the name of a task or of its store."""
    return task.rpartition("_")[0]


_http = httpx.Client(timeout=_STATUS_SECONDS, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
