"""One instance: the composition root, and its life from start to stop.

The event loop's thread runs HTTP; the engine starts and stops on a helper thread and has threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from balance_service.avro.schemas import load_schema
from balance_service.cluster.directory import Directory, PublishedTask
from balance_service.cluster.standbys import StandbyChooser
from balance_service.collectors import EngineCollector, InstanceCollector
from balance_service.commands.publisher import FundsAddedPublisher
from balance_service.engine import Engine
from balance_service.errors import BalanceServiceError, ConfigurationError, FatalError
from balance_service.http.app import Handlers
from balance_service.http.commands import Commands
from balance_service.http.front import Front
from balance_service.http.operations import Operations
from balance_service.http.queries import Queries
from balance_service.http.routing import Routing
from balance_service.interpreter import exit_at_the_latest_in, favour_short_work
from balance_service.kafka.clients import producer_config, reader_config
from balance_service.metrics import Metrics
from balance_service.read_models.balance import Balance
from balance_service.state.records import Role
from balance_service.state.task_state import TaskState
from balance_service.tracing import start_tracing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.errors import StoreCorruptedError
    from balance_service.http.proxy import Proxy
    from balance_service.settings import Settings
    from balance_service.state.records import TaskSnapshot

log = structlog.get_logger(__name__)

_STOP_SECONDS = 9.0
_STOP_TRACING_SECONDS = 1.0


class Instance:
    """One running process of the service."""

    def __init__(self, settings: Settings) -> None:
        """Take the port.

        Raises:
            ConfigurationError: the port is in use, nobody can reach the advertised address, or a file that HTTP's
                security rests on cannot be used.
        """
        _check_resolves(settings.application_server)
        self._settings = settings
        self._read_model = Balance()
        self._metrics = Metrics()
        self._metrics.registry.register(InstanceCollector(self, settings))
        self._tracing = start_tracing(settings)
        self._stopping = asyncio.Event()
        self._gave_up = threading.Event()
        self._waits_for = ""
        self._handlers = Handlers(
            Operations(self, authorises=settings.authorises_clients, limits_rate=settings.rate_limit is not None)
        )
        self._front = Front(settings, self._handlers, tracing=self._tracing, on_refused=self._metrics.refused.inc)
        self._engine: Engine | None = None
        self._directory: Directory | None = None
        self._publisher: FundsAddedPublisher | None = None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop within ten seconds.

        Raises:
            ConfigurationError: broker, registry or state directory are not usable as configured.
            FatalError: a thread failed, so that the instance could not go on.
        """
        loop = asyncio.get_running_loop()
        failures: list[BaseException] = []

        def thread_failed(failure: threading.ExceptHookArgs) -> None:
            log.critical(
                "a thread failed; stopping", thread=getattr(failure.thread, "name", ""), exc_info=failure.exc_value
            )
            failures.append(failure.exc_value or failure.exc_type())
            loop.call_soon_threadsafe(self._stopping.set)

        # None of our threads ends by itself: an instance without one of them would be half alive.
        threading.excepthook = thread_failed
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        proxy = await self._front.open()
        starting = asyncio.ensure_future(asyncio.to_thread(self._start_engine))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                self._open_for_queries(starting.result(), proxy)
                await stopping
        finally:
            log.info("stopping")
            self._gave_up.set()
            exit_at_the_latest_in(_STOP_SECONDS)
            await self._stop(starting)
            # What is still being answered may be waiting for a peer.
            await self._front.close()
            await asyncio.to_thread(self._tracing.stop, _STOP_TRACING_SECONDS)
            log.info("stopped")
        if failures:
            raise FatalError(f"the instance could not go on: {failures[0]}")

    def unready(self) -> Sequence[str]:
        """Why this instance should get no queries now."""
        engine = self._engine
        if self._stopping.is_set():
            return ["this instance is stopping"]
        if engine is None:
            return ["this instance is starting" + (f": {self._waits_for}" if self._waits_for else "")]
        reasons = [] if engine.membership.joined.is_set() else ["this instance has not joined its group yet"]
        reasons += [problem for problem in (engine.membership.problem, self._directory_problem()) if problem]
        reasons += [
            f"{task.task_id} is {task.state}" + (f": {task.reason}" if task.reason else "")
            for task in engine.tasks.snapshots()
            if task.state != TaskState.RUNNING.value and (task.role is Role.ACTIVE or task.reason)
        ]
        if engine.stream.problem:
            reasons.append(f"the stream does not go on: {engine.stream.problem}")
        if engine.membership.partitions and not engine.membership.lease.holds:
            reasons.append("the group has not confirmed this instance lately")
        return reasons

    def status(self) -> Mapping[str, Any]:
        """This instance's view of itself and of the others."""
        engine, directory = self._engine, self._directory
        base = {"applicationServer": self._settings.application_server, "ready": not self.unready()}
        if engine is None or directory is None:
            return base | {"partitions": None, "tasks": [], "applicationServers": []}
        return base | {
            "partitions": engine.source.partitions,
            "leaseHolds": engine.membership.lease.holds,
            "tasks": [
                {
                    "task": str(t.task_id),
                    "readModel": t.task_id.read_model,
                    "partition": t.task_id.partition,
                    "role": t.role.value.lower(),
                    "state": t.state,
                    "epoch": t.epoch,
                    "position": t.position,
                    "lag": engine.watermarks.lag(t.task_id.partition, t.position),
                    "reason": t.reason,
                    "restored": t.restored,
                    "toRestore": t.to_restore,
                    "secondsLeft": t.seconds_left,
                    "storeBytes": t.sizes.store_bytes,
                }
                for t in engine.tasks.snapshots()
            ],
            "applicationServers": directory.status(),
        }

    def metrics(self) -> bytes:
        """Metrics in Prometheus' text format."""
        return self._metrics.text()

    def _start_engine(self) -> Engine:
        engine = Engine(
            self._settings,
            self._read_model,
            self._metrics,
            self._task_changed,
            self._gave_up,
            self._tracing,
            self._wait,
        )
        settings = self._settings
        codec = engine.codec(settings.application_servers_topic, load_schema("ApplicationServer"))
        self._publisher = engine.until_up(
            partial(
                FundsAddedPublisher,
                producer_config(settings),
                engine.registry,
                settings.topic,
                settings.read_timeout_seconds,
                self._tracing,
            )
        )
        self._directory = Directory(
            reader_config(settings),
            producer_config(settings),
            settings.application_servers_topic,
            settings.application_server,
            codec,
            lambda: [_published(t) for t in engine.tasks.snapshots()],
            lambda: engine.tasks.stand_by(standbys.partitions()),
        )
        standbys = StandbyChooser(
            self._directory.table,
            self._read_model.name,
            engine.source.partitions,
            settings.application_server,
            settings.num_standby_replicas,
        )
        EngineCollector(engine, self._directory.table).register(self._metrics.registry)
        self._directory.start()
        engine.start()
        favour_short_work()
        return engine

    def _open_for_queries(self, engine: Engine, proxy: Proxy) -> None:
        directory, publisher = self._directory, self._publisher
        if directory is None or publisher is None:
            raise FatalError("the engine started without directory or publisher")
        self._engine = engine
        routing = Routing(
            self._read_model.name,
            engine.source.partitions,
            self._settings.application_server,
            engine.tasks,
            engine.membership,
            engine.watermarks,
            directory.table,
        )
        decode = engine.state_codec.decode
        self._handlers.queries = Queries(
            routing,
            proxy,
            self._settings.application_server,
            lambda frame: self._read_model.view(decode(frame)),
            self._damaged,
            self._settings.read_timeout_seconds,
            self._metrics,
        )
        self._handlers.commands = Commands(publisher, self._metrics)
        log.info("started", application_server=self._settings.application_server)

    def _damaged(self, partition: int, error: StoreCorruptedError) -> None:
        task = None if self._engine is None else self._engine.tasks.task(partition)
        if self._engine is not None and task is not None:
            self._engine.tasks.failed(task, error)

    def _wait(self, reason: str) -> None:
        self._waits_for = reason

    def _directory_problem(self) -> str:
        return "" if self._directory is None else self._directory.problem

    def _task_changed(self) -> None:
        if self._directory is not None:
            self._directory.publish_soon()

    async def _stop(self, starting: asyncio.Future[Engine]) -> None:
        with contextlib.suppress(BalanceServiceError):
            engine = await starting
            await asyncio.to_thread(engine.stop)
        if self._directory is not None:
            await asyncio.to_thread(self._directory.stop, 2.0)
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)


def _published(task: TaskSnapshot) -> PublishedTask:
    task_id = task.task_id
    return PublishedTask(task_id.read_model, task_id.partition, task.role.value, task.state, task.epoch, task.position)


def _check_resolves(application_server: str) -> None:
    host, _, port = application_server.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(
            f"BALANCE_APPLICATION_SERVER {application_server} does not resolve ({error.strerror}); "
            "name a host that peers can reach"
        ) from None
