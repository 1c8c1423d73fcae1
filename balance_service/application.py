"""An instance of an application: its composition, and its life from start to stop.

HTTP runs on the event loop's thread. The engine starts and stops on a helper thread and has threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import structlog

from balance_service.avro.schemas import load_schema
from balance_service.cluster.directory import Directory, PublishedModel, ServerTable, key_columns
from balance_service.cluster.signatures import RecordSignatures
from balance_service.cluster.standbys import StandbyChooser
from balance_service.engine.state_directory import StateDirectory
from balance_service.errors import BalanceServiceError, ConfigurationError, FatalError
from balance_service.hosting.answering import Answering
from balance_service.hosting.causes import starting, unknown_settings
from balance_service.hosting.collectors import EngineCollector, InstanceCollector
from balance_service.hosting.details import details_of
from balance_service.hosting.engine import Engine, StartupRetries
from balance_service.hosting.instance import Instance, Since, forget_left, noted_now
from balance_service.hosting.online_rebuilds import Rebuilds
from balance_service.http.app import HttpServer
from balance_service.http.commands import CommandContext
from balance_service.kafka.clients import producer_config, reader_config
from balance_service.model.binding import bind_models, require_registry
from balance_service.model.generations import Switch
from balance_service.model.placing import hosted_stages, newest, stages_of_retries
from balance_service.observability.metrics import Metrics
from balance_service.observability.tracing import start_tracing
from balance_service.process.runtime import exit_within, favour_short_work, now_ms, thread_failures
from balance_service.settings import unknown_variables
from balance_service.settings.network import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.engine.tasks import Tasks
    from balance_service.http.commands import Command
    from balance_service.http.instance_details import InstanceDetails
    from balance_service.http.peers.proxy import Proxy
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

STOP_SECONDS = 9.0
_STOP_TRACING_SECONDS = 1.0


class Application:
    """One instance: `await Application(settings, models).serve()`, or `async with` inside another program.

    A process can run one at a time, because it has one Spark JVM.
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
        """Binds the models to their schemas and takes the port and the state directory.

        Args:
            models: the read models that this instance hosts; of one name, several versions.
            known: other read models, which peers may host; queries for them are passed to those peers.
            commands: the requests that append events.
            state_directory: closed when the instance stops; by default the one that the settings name.

        Raises:
            ConfigurationError: a model is not valid, the port is in use, the advertised address does not resolve, or a
                file of tokens, keys or certificates is not usable.
            RetriableError: the registry is needed for a schema and does not respond.
        """
        _check_resolves(settings.application_server)
        self._settings = settings
        self._models = bind_models(models, settings)
        require_registry(self._models, settings)
        self._commands = commands
        hosted = {model.name for model in self._models}
        self._known = [*newest(self._models), *(other for other in known if other.name not in hosted)]
        self._metrics = Metrics()
        self._metrics.registry.register(InstanceCollector(self, settings))
        self._tracer, self._stop_tracing = start_tracing(settings)
        self._stopping = asyncio.Event()
        self._gave_up = threading.Event()
        self._waits_for = ""
        self._began_ms = self._waits_since_ms = now_ms()
        self._http = HttpServer(
            settings, self, self._known, commands, tracer=self._tracer, on_refused=self._metrics.refused.inc
        )
        self._state_directory = state_directory or StateDirectory(settings.state_dir, settings.application_id)
        self._started = asyncio.Event()
        self._unknown_settings = unknown_variables(os.environ)
        for name in self._unknown_settings:
            log.warning("an environment variable has the prefix of settings, and is none: it is ignored", variable=name)
        self._instance: Instance | None = None
        self._answering: Answering | None = None

    @property
    def port(self) -> int:
        """The port that HTTP listens on."""
        return self._http.port

    async def serve(self) -> None:
        """Serves until SIGTERM or SIGINT, then stops. The process ends within ten seconds of the signal in any case.

        Raises:
            ConfigurationError: broker, registry or state directory are not usable as configured.
            FatalError: a thread failed, so the instance could not continue.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self._live(partial(exit_within, STOP_SECONDS))

    def stop(self) -> None:
        """Starts to stop. Returns at once."""
        self._stopping.set()

    async def __aenter__(self) -> Self:
        """Starts the instance; returns when it folds and answers. Raises as `serve`."""
        self._life = asyncio.create_task(self._live(lambda: None))
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait({self._life, started}, return_when=asyncio.FIRST_COMPLETED)
        if self._life.done():
            started.cancel()
            await self._life
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops the instance. Raises FatalError if a thread has failed."""
        self.stop()
        await self._life

    def unready(self) -> Sequence[str]:
        """Returns why this instance should get no queries now; empty if it should."""
        if self._stopping.is_set():
            return ["this instance is stopping"]
        if self._instance is None:
            return ["this instance is starting" + (f": {self._waits_for}" if self._waits_for else "")]
        return self._instance.unready()

    def problems(self) -> Sequence[str]:
        """Returns what is wrong with the read models hosted here."""
        return [] if self._instance is None else self._instance.problems()

    def status(self) -> Mapping[str, Any]:
        """Returns this instance's view of itself and of the others, as JSON."""
        reasons = self.unready()
        base = {
            "applicationServer": self._settings.application_server,
            "ready": not reasons,
            "reasons": list(reasons),
            "unknownSettings": self._unknown_settings,
        }
        misspelt = [*unknown_settings(self._unknown_settings)]
        if self._instance is not None:
            status = base | self._instance.status()
            return status | {"causes": [cause.shown() for cause in (*self._instance.causes(status), *misspelt)]}
        begins = starting(self._waits_for, self._waits_since_ms if self._waits_for else self._began_ms)
        return base | {
            "causes": [cause.shown() for cause in (begins, *misspelt)],
            "partitions": None,
            "models": [],
            "tasks": [],
            "tables": [],
            "unhosted": [],
            "problems": [],
            "endsAgeSeconds": None,
            "applicationServers": [],
        }

    def details(self) -> InstanceDetails:
        """Returns what this instance tells about its process, its settings and its log."""
        engine = None if self._instance is None else self._instance.engine
        return details_of(self._settings, self._began_ms, engine)

    @property
    def open_streams(self) -> int:
        """The number of streams of events that are open."""
        return len(self._http.streams)

    def stale_files(self) -> Mapping[str, bool]:
        """Returns, for each kind of security file, whether it is unusable now, so that its former content applies."""
        return self._http.stale_files

    def metrics(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        return self._metrics.text()

    async def _live(self, on_stopping: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        with closing(self._state_directory), thread_failures(lambda: loop.call_soon_threadsafe(self.stop)) as failures:
            await self._run(loop, on_stopping)
        if failures:
            raise FatalError(f"the instance could not go on: {failures[0]}")

    async def _run(self, loop: asyncio.AbstractEventLoop, on_stopping: Callable[[], None]) -> None:
        proxy = await self._http.open()
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
            with contextlib.suppress(BalanceServiceError):
                instance = await starting
                await asyncio.to_thread(instance.stop)
            # Requests under way may still wait for a peer.
            await self._http.close()
            await asyncio.to_thread(self._stop_tracing, _STOP_TRACING_SECONDS)
            log.info("stopped")

    def _start(self, loop: asyncio.AbstractEventLoop) -> Instance:
        settings, retries = self._settings, StartupRetries(self._gave_up, self._on_wait)
        engine = Engine(
            settings,
            self._state_directory,
            [*hosted_stages(self._models, settings), *stages_of_retries(self._known, settings)],
            self._models,
            self._metrics,
            retries,
            on_change=self._on_task_change,
            tracer=self._tracer,
        )
        # Before its tasks open their stores.
        loop.call_soon_threadsafe(self._http.limit_connections, engine.open_files.connections)
        table = ServerTable()
        rebuilds = Rebuilds(engine, table, Switch.ALWAYS if settings.switch == "auto" else Switch.NEVER)
        noted = Since()
        directory = self._directory(engine, retries, table, rebuilds, noted)
        context = CommandContext(
            settings=settings, registry=engine.registry, metrics=engine.metrics, tracer=self._tracer
        )
        commands = [retries.until_up(partial(command.handler, context)) for command in self._commands]
        EngineCollector(engine, table).register(self._metrics.registry)
        instance = Instance(engine=engine, directory=directory, rebuilds=rebuilds, commands=commands, noted=noted)
        instance.start()
        favour_short_work()
        return instance

    def _directory(
        self, engine: Engine, retries: StartupRetries, table: ServerTable, rebuilds: Rebuilds, noted: Since
    ) -> Directory:
        settings, trust = self._settings, self._http.trust
        topic, schema = settings.application_servers_topic, load_schema("ApplicationServer")
        # A stage without states has nothing but its position to keep a copy of.
        choosers: dict[str, StandbyChooser] = {}

        def look() -> None:
            noted.note(noted_now(engine.stages, table, settings.application_server))
            forget_left(engine.stages, table, settings.application_server)
            for name, tasks in engine.models.items():
                if tasks.hosted.folds is not None:
                    chooser = choosers.setdefault(name, _standby_chooser(table, tasks, settings))
                    tasks.stand_by(chooser.partitions())

        return Directory(
            consumer_config=reader_config(settings),
            producer_config=producer_config(settings),
            topic=topic,
            address=settings.application_server,
            incarnation=trust.incarnation,
            codec=retries.until_up(partial(engine.schemas.codec, topic, schema)),
            signatures=RecordSignatures(trust.secret, topic),
            texts=partial(engine.schemas.records, topic),
            models=lambda: [
                PublishedModel(
                    name,
                    tasks.hosted.partitioning.partitions,
                    tasks.hosted.partitioning.partitioner,
                    tasks.hosted.key_type.is_number,
                    engine.versions.of(owner),
                    rebuilds.problems.get(owner, ""),
                    key_columns(tasks.hosted.key_type),
                    "" if tasks.hosted.stage.own_key is None else tasks.hosted.stage.own_key.key_format,
                )
                for name, tasks in engine.models.items()
                for owner in [tasks.hosted.stage.owner]
            ],
            tasks=lambda: [task for tasks in engine.stages.values() for task in tasks.snapshots()],
            table=table,
            on_round=look,
            on_refused=engine.metrics.directory_record_refused,
        )

    def _open_for_queries(self, instance: Instance, proxy: Proxy) -> None:
        self._instance = instance
        self._answering = Answering(instance, proxy, self._metrics, self._settings, self._known, self._http)
        self._http.handlers.add(*self._answering.handlers())
        self._started.set()
        log.info("started", application_server=self._settings.application_server, models=list(instance.engine.models))

    def _on_wait(self, reason: str) -> None:
        if reason and not self._waits_for:
            self._waits_since_ms = now_ms()
        self._waits_for = reason

    def _on_task_change(self) -> None:
        if self._instance is not None:
            self._instance.directory.publish_soon()
        if self._answering is not None:
            # A task may still close after the loop has.
            with contextlib.suppress(RuntimeError):
                self._answering.loop.call_soon_threadsafe(self._answering.refresh)


def _standby_chooser(table: ServerTable, tasks: Tasks, settings: Settings) -> StandbyChooser:
    return StandbyChooser(
        table=table,
        read_model=tasks.name,
        partitions=tasks.hosted.source.partitions,
        address=settings.application_server,
        replicas=settings.num_standby_replicas,
    )


def _check_resolves(application_server: str) -> None:
    address = address_of(application_server)
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(
            f"BALANCE_APPLICATION_SERVER {application_server} does not resolve ({error.strerror}); "
            "name a host that peers can reach"
        ) from None
