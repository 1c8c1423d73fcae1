"""One instance: the composition root, and its life from start to stop.

The event loop's thread runs HTTP; the engine starts and stops on a helper thread and has threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import structlog

from balance_service.errors import BalanceServiceError, ConfigurationError, FatalError
from balance_service.hosting.answering import Answering
from balance_service.hosting.collectors import EngineCollector, InstanceCollector
from balance_service.hosting.engine import Engine, Patience
from balance_service.hosting.running import Running
from balance_service.http.commands import Commands
from balance_service.http.handlers import Handlers
from balance_service.http.operations import Operations
from balance_service.http.wiring import Front
from balance_service.model.catalogue import hosted_stages
from balance_service.observability.metrics import Metrics
from balance_service.observability.tracing import start_tracing
from balance_service.process.interpreter import exit_at_the_latest_in, favour_short_work
from balance_service.process.thread_failures import noting_failures
from balance_service.settings.address import address_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.http.peers.proxy import Proxy
    from balance_service.settings import Settings
    from balance_service.state.store.directory import StateDirectory

log = structlog.get_logger(__name__)

STOP_SECONDS = 9.0
_STOP_TRACING_SECONDS = 1.0


class Instance:
    """One running process of the service."""

    def __init__(self, settings: Settings, state_directory: StateDirectory) -> None:
        """Take the port.

        Raises:
            ConfigurationError: the port is in use, nobody can reach the advertised address, or a file that HTTP's
                security rests on cannot be used.
        """
        _check_resolves(settings.application_server)
        self._settings = settings
        self._state_directory = state_directory
        self._stages = hosted_stages(settings)
        self._metrics = Metrics()
        self._metrics.registry.register(InstanceCollector(self, settings))
        self._tracer, self._stop_tracing = start_tracing(settings)
        self._stopping = asyncio.Event()
        self._gave_up = threading.Event()
        self._waits_for = ""
        self._handlers = Handlers(Operations(self))
        self._front = Front(settings, self._handlers, tracer=self._tracer, on_refused=self._metrics.refused.inc)
        self._running: Running | None = None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop within ten seconds.

        Raises:
            ConfigurationError: broker, registry or state directory are not usable as configured.
            FatalError: a thread failed, so that the instance could not go on.
        """
        loop = asyncio.get_running_loop()
        with noting_failures(lambda: loop.call_soon_threadsafe(self._stopping.set)) as failures:
            await self._run(loop)
        if failures:
            raise FatalError(f"the instance could not go on: {failures[0]}")

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
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
            exit_at_the_latest_in(STOP_SECONDS)
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
            self._metrics,
            patience,
            on_change=self._task_changed,
            tracer=self._tracer,
        )
        # Before its tasks open.
        loop.call_soon_threadsafe(self._front.bound, engine.open_files.connections)
        running = Running.of(engine, settings, patience, self._front.trust, self._tracer)
        EngineCollector(engine, running.directory.table).register(self._metrics.registry)
        running.start()
        favour_short_work()
        return running

    def _open_for_queries(self, running: Running, proxy: Proxy) -> None:
        self._running = running
        settings = self._settings
        answering = Answering(running, proxy, self._metrics, settings)
        self._handlers.models = answering.queries()
        self._handlers.dead_letters = answering.dead_letters()
        self._handlers.commands = Commands(running.publisher, self._metrics)
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
