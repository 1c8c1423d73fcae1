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
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self

import structlog

from balance_service import api
from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.cluster.directory import Directory, PublishedModel, ServerTable
from balance_service.cluster.signatures import RecordSignatures
from balance_service.cluster.standbys import StandbyChooser
from balance_service.engine.state_directory import StateDirectory
from balance_service.errors import BalanceServiceError, ConfigurationError, FatalError
from balance_service.hosting.causes import starting, unknown_settings
from balance_service.hosting.collectors import EngineCollector, InstanceCollector
from balance_service.hosting.details import details_of
from balance_service.hosting.engine import Engine, Patience
from balance_service.hosting.history import History
from balance_service.hosting.instance import Instance, Since, forget_left, noted_now
from balance_service.hosting.online_rebuilds import Rebuilds
from balance_service.http.answer import unavailable
from balance_service.http.app import HttpServer
from balance_service.http.dead_letters import DeadLetters
from balance_service.http.generations import GenerationRequests
from balance_service.http.handlers import CommandContext, Handlers
from balance_service.http.instances import InstanceDetails, Instances
from balance_service.http.model_queries import ModelAnswers, ModelQueries, description_of
from balance_service.http.operations import Operations
from balance_service.http.peers.trust import Peer
from balance_service.http.queries import Queries
from balance_service.http.routing import Routing
from balance_service.http.scatter import Scatter
from balance_service.http.scheduling import FairScheduler
from balance_service.http.stage_dead_letters import DeadLetterScan, SourceRecords, StageDeadLetters
from balance_service.http.streams.changes import Changes
from balance_service.http.streams.event_stream import Streams
from balance_service.http.streams.feed import Pace
from balance_service.http.streams.link import Links, PeerStreams
from balance_service.http.streams.part import Reader
from balance_service.kafka.clients import producer_config, reader_config
from balance_service.kafka.lease import Lease
from balance_service.kafka.log_reader import records_left_at
from balance_service.kafka.topics import Watermarks
from balance_service.model.binding import bound
from balance_service.model.flow import flow_of
from balance_service.model.generations import Switch
from balance_service.model.json_view import exact_json
from balance_service.model.placing import hosted_stages, newest, stages_of, stages_of_retries
from balance_service.model.stage import model_and_generation
from balance_service.observability.metrics import Metrics
from balance_service.observability.tracing import start_tracing
from balance_service.process.runtime import exit_within, favour_short_work, now_ms, thread_failures
from balance_service.settings import unknown_variables
from balance_service.settings.network import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.tasks import Tasks
    from balance_service.errors import StoreCorruptedError
    from balance_service.http.handlers import Command
    from balance_service.http.peers.proxy import Proxy
    from balance_service.http.routing import ReadableTask
    from balance_service.kafka.partitioner import Partitioning
    from balance_service.model.keys import KeyType
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
        self._models = bound(models, settings)
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
        self._handlers = Handlers(Operations(self), Streams(settings.max_streams))
        self._http = HttpServer(
            settings, self._handlers, self._known, commands, tracer=self._tracer, on_refused=self._metrics.refused.inc
        )
        self._state_directory = state_directory or StateDirectory(settings.state_dir, settings.application_id)
        self._started = asyncio.Event()
        self._unknown_settings = unknown_variables(os.environ)
        for name in self._unknown_settings:
            log.warning("an environment variable has the prefix of settings, and is none: it is ignored", variable=name)
        self._instance: Instance | None = None
        self._queries: _Queries | None = None

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
        return len(self._handlers.streams)

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
        settings, patience = self._settings, Patience(self._gave_up, self._on_wait)
        engine = Engine(
            settings,
            self._state_directory,
            [*hosted_stages(self._models, settings), *stages_of_retries(self._known, settings)],
            self._models,
            self._metrics,
            patience,
            on_change=self._on_task_change,
            tracer=self._tracer,
        )
        # Before its tasks open their stores.
        loop.call_soon_threadsafe(self._http.limit_connections, engine.open_files.connections)
        table = ServerTable()
        rebuilds = Rebuilds(engine, table, Switch.ALWAYS if settings.switch == "auto" else Switch.NEVER)
        noted = Since()
        directory = self._directory(engine, patience, table, rebuilds, noted)
        context = CommandContext(
            settings=settings, registry=engine.registry, metrics=engine.metrics, tracer=self._tracer
        )
        commands = {
            command.route.name: patience.until_up(partial(command.handler, context)) for command in self._commands
        }
        EngineCollector(engine, table).register(self._metrics.registry)
        instance = Instance(engine=engine, directory=directory, rebuilds=rebuilds, commands=commands, noted=noted)
        instance.start()
        favour_short_work()
        return instance

    def _directory(
        self, engine: Engine, patience: Patience, table: ServerTable, rebuilds: Rebuilds, noted: Since
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
            codec=patience.until_up(partial(AvroCodec, engine.registry, subject_of(topic, schema), schema)),
            signatures=RecordSignatures(trust.secret, topic),
            models=lambda: [
                PublishedModel(
                    name,
                    tasks.hosted.partitioning.partitions,
                    tasks.hosted.partitioning.partitioner,
                    tasks.hosted.key_type.is_number,
                    engine.versions.of(owner),
                    rebuilds.problems.get(owner, ""),
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
        queries = _Queries(instance, proxy, self._metrics, self._settings, self._known, self._handlers.streams)
        self._queries = queries
        models = self._handlers.models = queries.of_models()
        self._handlers.peers = PeerStreams(models.open_part, self._http.trust, self._handlers.streams.shares)
        self._handlers.dead_letters = queries.of_dead_letters()
        self._handlers.instances = queries.of_instances()
        self._handlers.generations = GenerationRequests(
            instance.rebuilds.status,
            instance.engine.generations.newest,
            instance.rebuilds.checks.buildable,
            instance.rebuilds.checks.check_switch,
            instance.engine.generations.write,
            instance.rebuilds.differences,
        )
        self._handlers.commands = instance.commands
        self._started.set()
        log.info("started", application_server=self._settings.application_server, models=list(instance.engine.models))

    def _on_wait(self, reason: str) -> None:
        if reason and not self._waits_for:
            self._waits_since_ms = now_ms()
        self._waits_for = reason

    def _on_task_change(self) -> None:
        if self._instance is not None:
            self._instance.directory.publish_soon()
        if self._queries is not None:
            # A task may still close after the loop has.
            with contextlib.suppress(RuntimeError):
                self._queries.loop.call_soon_threadsafe(self._queries.refresh)


class _Queries:
    """Composes what answers queries and dead letters for a started instance. For the event loop's thread."""

    def __init__(
        self,
        instance: Instance,
        proxy: Proxy,
        metrics: Metrics,
        settings: Settings,
        known: Sequence[ReadModel],
        streams: Streams,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._instance = instance
        self._proxy = proxy
        self._metrics = metrics
        self._settings = settings
        self._known = {model.name: model for model in known}
        self._streams = streams
        self._answers_here: dict[str, ModelAnswers] = {}
        self._letters_here: dict[str, StageDeadLetters] = {}
        self._links = Links(proxy, settings.application_server)
        self._pace = Pace()
        self._scans = FairScheduler("scan")
        # Operators look for faults with these: they have threads of their own, which no client's scan can occupy.
        self._letters_scans = FairScheduler("scan-letters")
        # Each of these waits for the broker.
        self._records = FairScheduler("scan-records", threads=2)

    def of_models(self) -> ModelQueries:
        self.refresh()
        names = {model_and_generation(name)[0] for name in self._answers_here}
        models = (self._known[name] for name in names if name in self._known)
        flows = {model.name: flow_of(model, stages_of(model, self._settings)) for model in models}
        return ModelQueries(
            self._known,
            self._answers_here,
            self._elsewhere,
            cache(self._of_peers),
            flows,
            self._streams,
            self._instance.engine.generations.serving,
            lambda model: self._instance.engine.generations.of(model).live,
        )

    def of_dead_letters(self) -> DeadLetters:
        return DeadLetters(self._letters_here)

    def of_instances(self) -> Instances:
        def peer(address: str) -> Peer | None:
            servers = self._instance.directory.table.servers()
            return next((Peer(one.address, one.incarnation) for one in servers if one.address == address), None)

        return Instances(
            peer=peer,
            proxy=self._proxy,
            address=self._settings.application_server,
            history=History(self._instance.engine).last,
            timeout_seconds=self._settings.read_timeout_seconds,
        )

    def refresh(self) -> None:
        """Follows the generations that the engine hosts, and which of them serve."""
        engine = self._instance.engine
        # Another thread may add and remove generations at any time.
        models = engine.models
        for name in self._answers_here.keys() - models.keys():
            del self._answers_here[name]
        for name in models.keys() - self._answers_here.keys():
            self._answers_here[name] = self._hosted(models[name])
        for tasks in engine.serving_stages:
            here = self._letters_here.get(tasks.hosted.stage.identity)
            if here is None or here.scatter.routing.read_model != tasks.name:
                self._letters_here[tasks.hosted.stage.identity] = self._letters(tasks)

    def _letters(self, tasks: Tasks) -> StageDeadLetters:
        hosted = tasks.hosted
        # No letter changes while the task is halted.
        routing = self._routing(
            hosted.name, hosted.partitioning, hosted.watermarks, tasks, hosted, answers_when_halted=True
        )
        scan = DeadLetterScan(
            stage=hosted.stage.identity,
            read_model=hosted.stage.owner,
            key_type=hosted.key_type,
            letters=hosted.processor.letters,
        )
        records = SourceRecords(
            records=partial(records_left_at, self._settings, hosted.topics, hosted.source.name),
            registry=self._instance.engine.registry,
            scheduler=self._records,
            timeout_seconds=self._settings.read_timeout_seconds,
        )
        scatter = self._scatter(routing, "/api", None, tasks, hosted, self._letters_scans)
        return StageDeadLetters(scan=scan, scatter=scatter, records=records, decide=tasks.decide)

    def _elsewhere(self) -> dict[str, PublishedModel]:
        """Returns the read models that the directory names, by name."""
        directory = self._instance.directory
        if not directory.is_read:
            raise unavailable("this instance has not read the directory of instances yet")
        found: dict[str, PublishedModel] = {}
        # Suspect peers count: that none answers now does not mean that there is no such read model.
        for server in directory.table.servers():
            for model in server.models:
                known = found.setdefault(model.name, model)
                if known.partitions < model.partitions:
                    found[model.name] = model
        return found

    def _hosted(self, tasks: Tasks) -> ModelAnswers:
        hosted = tasks.hosted
        return self._answers(hosted.name, hosted.partitioning, hosted.key_type, hosted.watermarks, tasks, hosted)

    def _of_peers(self, name: str, partitioning: Partitioning, key_type: KeyType) -> ModelAnswers:
        nothing = _NotHosted()
        return self._answers(name, partitioning, key_type, Watermarks(dict), nothing, nothing)

    def _answers(
        self,
        name: str,
        partitioning: Partitioning,
        key_type: KeyType,
        watermarks: Watermarks,
        tasks: Tasks | _NotHosted,
        stage: HostedStage | _NotHosted,
    ) -> ModelAnswers:
        routing = self._routing(
            name, partitioning, watermarks, tasks, stage, answers_when_halted=stage.answers_when_halted
        )
        queries = Queries(
            read_model=name,
            routing=routing,
            proxy=self._proxy,
            address=self._settings.application_server,
            view=stage.view,
            on_damage=tasks.damaged,
            timeout_seconds=self._settings.read_timeout_seconds,
            metrics=self._metrics,
        )
        model, generation = model_and_generation(name)
        scatter = self._scatter(routing, f"{api.MODELS}/{model}", generation, tasks, stage, self._scans)
        reader = Reader(
            generation=generation,
            routing=routing,
            view=stage.view,
            key_type=key_type,
            scheduler=self._scans,
            on_damage=tasks.damaged,
            on_coalesced=self._metrics.coalesced.inc,
        )
        changes = Changes(reader, self._links, self._pace)
        return ModelAnswers(queries, scatter, changes, description_of(model, self._known))

    def _routing(
        self,
        name: str,
        partitioning: Partitioning,
        watermarks: Watermarks,
        tasks: Tasks | _NotHosted,
        stage: HostedStage | _NotHosted,
        *,
        answers_when_halted: bool,
    ) -> Routing:
        return Routing(
            read_model=name,
            partitioning=partitioning,
            address=self._settings.application_server,
            task=tasks.task,
            left=tasks.left,
            lease=stage.lease,
            watermarks=watermarks,
            servers=self._instance.directory.table,
            answers_when_halted=answers_when_halted,
        )

    def _scatter(
        self,
        routing: Routing,
        path: str,
        generation: int | None,
        tasks: Tasks | _NotHosted,
        stage: HostedStage | _NotHosted,
        scheduler: FairScheduler,
    ) -> Scatter:
        return Scatter(
            routing=routing,
            proxy=self._proxy,
            address=self._settings.application_server,
            path=path,
            generation=generation,
            view=stage.view,
            number=stage.number,
            render=exact_json,
            on_damage=tasks.damaged,
            timeout_seconds=self._settings.read_timeout_seconds,
            scheduler=scheduler,
        )


class _NotHosted:
    """The tasks and states of a read model that only peers host: there are none here."""

    lease = Lease(0)
    """Never confirmed."""
    answers_when_halted = False

    def task(self, _partition: int) -> ReadableTask | None:
        return None

    def left(self, _partition: int) -> ReadableTask | None:
        return None

    def view(self, _frame: bytes) -> Any:
        raise NotImplementedError

    def number(self, _name: str) -> Callable[[bytes], Any]:
        raise NotImplementedError

    def damaged(self, _partition: int, _read: object, _error: StoreCorruptedError) -> None:
        raise NotImplementedError


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
