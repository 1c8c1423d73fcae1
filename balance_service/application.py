"""An instance of an application: the one place where it is put together, and its life from start to stop.

The event loop's thread runs HTTP; the engine starts and stops on a helper thread and has threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import structlog

from balance_service.engine.store.directory import StateDirectory
from balance_service.errors import BalanceServiceError, ConfigurationError, FatalError
from balance_service.hosting.answering import Answering
from balance_service.hosting.collectors import EngineCollector, InstanceCollector
from balance_service.hosting.engine import Engine, Patience
from balance_service.hosting.running import Running
from balance_service.http.handlers import Handlers
from balance_service.http.operations import Operations
from balance_service.http.wiring import Front
from balance_service.model.binding import bound
from balance_service.model.placing import hosted_stages, stages_of_retries
from balance_service.observability.metrics import Metrics
from balance_service.observability.tracing import start_tracing
from balance_service.process.runtime import exit_within, favour_short_work, thread_failures
from balance_service.settings.address import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.http.commands import Command
    from balance_service.http.peers.proxy import Proxy
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

STOP_SECONDS = 9.0
_STOP_TRACING_SECONDS = 1.0


class Application:
    """One instance: `await Application(settings, models).serve()`, or `async with` in a program of one's own.

    A process has one at a time, for Spark has one JVM in it.
    """

    def __init__(
        self,
        settings: Settings,
        models: Sequence[ReadModel | type[ReadModel]],
        *,
        known: Sequence[ReadModel] = (),
        commands: Sequence[Command] = (),
        state_directory: StateDirectory | None = None,
    ) -> None:
        """Take the port and the state directory.

        Args:
            models: that it hosts.
            known: others that peers may host, so that it answers for them by asking there.
            commands: requests that append events.
            state_directory: closed in the end; by default the one that the settings name.

        Raises:
            ConfigurationError: a model cannot be as it is declared, the port is in use, nobody can reach the advertised
                address, or a file that HTTP's security rests on cannot be used.
            RetriableError: the registry is asked for a schema, and does not answer.
        """
        _check_resolves(settings.application_server)
        self._settings = settings
        hosted = bound(models, settings)
        self._models = hosted
        self._commands = commands
        self._known = [*hosted, *(other for other in known if other.name not in {model.name for model in hosted})]
        self._stages = [*hosted_stages(hosted, settings), *stages_of_retries(self._known, settings)]
        self._metrics = Metrics()
        self._metrics.registry.register(InstanceCollector(self, settings))
        self._tracer, self._stop_tracing = start_tracing(settings)
        self._stopping = asyncio.Event()
        self._gave_up = threading.Event()
        self._waits_for = ""
        self._handlers = Handlers(Operations(self))
        self._front = Front(
            settings, self._handlers, self._known, commands, tracer=self._tracer, on_refused=self._metrics.refused.inc
        )
        self._state_directory = state_directory or StateDirectory(settings.state_dir, settings.application_id)
        self._started = asyncio.Event()
        self._running: Running | None = None

    @property
    def port(self) -> int:
        """Where HTTP is answered."""
        return self._front.port

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop within ten seconds; the process ends then, whatever hangs.

        Raises:
            ConfigurationError: broker, registry or state directory are not usable as configured.
            FatalError: a thread failed, so that the instance could not go on.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self._live(partial(exit_within, STOP_SECONDS))

    def stop(self) -> None:
        """Begin to stop; returns at once."""
        self._stopping.set()

    async def __aenter__(self) -> Self:
        """Start, and wait until the instance folds and answers. Raises as `serve`."""
        self._life = asyncio.create_task(self._live(lambda: None))
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait({self._life, started}, return_when=asyncio.FIRST_COMPLETED)
        if self._life.done():
            started.cancel()
            await self._life
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop. Raises FatalError: a thread failed meanwhile."""
        self.stop()
        await self._life

    async def _live(self, on_stopping: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        with closing(self._state_directory), thread_failures(lambda: loop.call_soon_threadsafe(self.stop)) as failures:
            await self._run(loop, on_stopping)
        if failures:
            raise FatalError(f"the instance could not go on: {failures[0]}")

    async def _run(self, loop: asyncio.AbstractEventLoop, on_stopping: Callable[[], None]) -> None:
        proxy = await self._front.open()
        starting = asyncio.ensure_future(asyncio.to_thread(self._start, loop))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                self._open_for_queries(starting.result(), proxy)
                await stopping
        finally:
            log.info("stopping")
            self._gave_up.set()
            on_stopping()
            await self._stop(starting)
            # What is still being answered may be waiting for a peer.
            await self._front.close()
            await asyncio.to_thread(self._stop_tracing, _STOP_TRACING_SECONDS)
            log.info("stopped")

    def unready(self) -> Sequence[str]:
        """Why this instance should get no queries now."""
        if self._stopping.is_set():
            return ["this instance is stopping"]
        if self._running is None:
            return ["this instance is starting" + (f": {self._waits_for}" if self._waits_for else "")]
        return self._running.unready()

    def problems(self) -> Sequence[str]:
        """What is wrong with what it hosts."""
        return [] if self._running is None else self._running.problems()

    def status(self) -> Mapping[str, Any]:
        """This instance's view of itself and of the others."""
        reasons = self.unready()
        base = {
            "applicationServer": self._settings.application_server,
            "ready": not reasons,
            "reasons": list(reasons),
        }
        if self._running is not None:
            return base | self._running.status()
        return base | {
            "partitions": None,
            "models": [],
            "tasks": [],
            "tables": [],
            "unhosted": [],
            "problems": [],
            "applicationServers": [],
        }

    def stale_files(self) -> Mapping[str, bool]:
        """Which files that HTTP's security rests on are not usable now, by what they hold."""
        return self._front.stale_files

    def metrics(self) -> bytes:
        """Metrics in Prometheus' text format."""
        return self._metrics.text()

    def _start(self, loop: asyncio.AbstractEventLoop) -> Running:
        settings, patience = self._settings, Patience(self._gave_up, self._wait)
        engine = Engine(
            settings,
            self._state_directory,
            self._stages,
            self._models,
            self._metrics,
            patience,
            on_change=self._task_changed,
            tracer=self._tracer,
        )
        # Before its tasks open.
        loop.call_soon_threadsafe(self._front.bound, engine.open_files.connections)
        running = Running.of(engine, settings, patience, self._front.trust, self._tracer, self._commands)
        EngineCollector(engine, running.directory.table).register(self._metrics.registry)
        running.start()
        favour_short_work()
        return running

    def _open_for_queries(self, running: Running, proxy: Proxy) -> None:
        self._running = running
        settings = self._settings
        answering = Answering(running, proxy, self._metrics, settings, self._known)
        self._handlers.models = answering.queries()
        self._handlers.dead_letters = answering.dead_letters()
        self._handlers.commands = running.commands
        self._started.set()
        log.info("started", application_server=settings.application_server, models=list(running.engine.models))

    def _wait(self, reason: str) -> None:
        self._waits_for = reason

    def _task_changed(self) -> None:
        if self._running is not None:
            self._running.directory.publish_soon()

    async def _stop(self, starting: asyncio.Future[Running]) -> None:
        with contextlib.suppress(BalanceServiceError):
            running = await starting
            await asyncio.to_thread(running.stop)


def _check_resolves(application_server: str) -> None:
    address = address_of(application_server)
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(
            f"BALANCE_APPLICATION_SERVER {application_server} does not resolve ({error.strerror}); "
            "name a host that peers can reach"
        ) from None
