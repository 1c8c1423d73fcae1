"""Composes what answers the requests of a started instance, except those about its own health and status."""

from __future__ import annotations

import asyncio
from functools import cache, partial
from typing import TYPE_CHECKING

from balance_service import api
from balance_service.hosting.history import History
from balance_service.http.answer import unavailable
from balance_service.http.dead_letters import DeadLetters
from balance_service.http.files import PeerFiles
from balance_service.http.generations import GenerationRequests
from balance_service.http.instances import Instances
from balance_service.http.model_queries import ModelAnswers, ModelQueries, description_of
from balance_service.http.peers.trust import Peer
from balance_service.http.queries import Queries
from balance_service.http.routing import Routing
from balance_service.http.scatter import Scatter
from balance_service.http.scheduling import FairScheduler
from balance_service.http.stage_dead_letters import DeadLetterScan, SourceRecords, StageDeadLetters
from balance_service.http.streams.changes import Changes
from balance_service.http.streams.feed import Pace
from balance_service.http.streams.link import Links, PeerStreams
from balance_service.http.streams.part import Reader
from balance_service.http.table_queries import TableQueries, TablesHere
from balance_service.kafka.log_reader import records_left_at
from balance_service.model.flow import flow_of
from balance_service.model.placing import stages_of
from balance_service.model.stage import model_and_generation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from balance_service.cluster.directory import PublishedModel
    from balance_service.engine.tasks import Tasks
    from balance_service.hosting.instance import Instance
    from balance_service.http.app import HttpServer
    from balance_service.http.peers.proxy import Proxy
    from balance_service.kafka.partitioner import Partitioning
    from balance_service.model.keys import KeyType
    from balance_service.model.read_model import ReadModel
    from balance_service.observability.metrics import Metrics
    from balance_service.settings import Settings


class Answering:
    """The handlers that need the engine. For the event loop's thread."""

    def __init__(
        self,
        instance: Instance,
        proxy: Proxy,
        metrics: Metrics,
        settings: Settings,
        known: Sequence[ReadModel],
        http: HttpServer,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._instance = instance
        self._proxy = proxy
        self._metrics = metrics
        self._settings = settings
        self._known = {model.name: model for model in known}
        self._http = http
        self._answers_here: dict[str, ModelAnswers] = {}
        self._letters_here: dict[str, StageDeadLetters] = {}
        self._links = Links(proxy, settings.application_server)
        self._pace = Pace()
        self._scans = FairScheduler("scan")
        # Operators look for faults with these: they have threads of their own, which no client's scan can occupy.
        self._letters_scans = FairScheduler("scan-letters")
        # Each of these waits for the broker.
        self._records = FairScheduler("scan-records", threads=2)

    def handlers(self) -> Iterator[object]:
        """Makes the handlers."""
        self.refresh()
        models, rebuilds = self._models(), self._instance.rebuilds
        yield models
        yield TableQueries(self._tables_here().answers())
        yield PeerStreams(models.open_part, self._http.trust, self._http.streams.shares)
        yield DeadLetters(self._letters_here)
        yield GenerationRequests(rebuilds, rebuilds.checks, self._instance.engine.generations)
        yield PeerFiles(self._hosting_peers, self._proxy, self._settings.application_server)
        yield self._instances()
        yield from self._instance.commands

    def refresh(self) -> None:
        """Follows the generations that the engine hosts, and which of them serve."""
        engine = self._instance.engine
        # Another thread may add and remove generations at any time.
        models = engine.models
        for name in self._answers_here.keys() - models.keys():
            del self._answers_here[name]
        for name in models.keys() - self._answers_here.keys():
            tasks = models[name]
            self._answers_here[name] = self._answers(self._routing(tasks), tasks.hosted.key_type)
        for tasks in engine.serving_stages:
            here = self._letters_here.get(tasks.hosted.stage.identity)
            if here is None or here.scatter.routing.read_model != tasks.name:
                self._letters_here[tasks.hosted.stage.identity] = self._letters(tasks)

    def _models(self) -> ModelQueries:
        names = {model_and_generation(name)[0] for name in self._answers_here}
        models = (self._known[name] for name in names if name in self._known)
        flows = {model.name: flow_of(model, stages_of(model, self._settings)) for model in models}
        generations = self._instance.engine.generations
        return ModelQueries(
            self._known,
            self._answers_here,
            self._elsewhere,
            cache(self._of_peers),
            flows,
            self._http.streams,
            generations.serving,
            lambda model: generations.of(model).live,
        )

    def _hosting_peers(self, model: str) -> list[Peer]:
        running = self._instance.directory.table.running()
        return [
            Peer(one.address, one.incarnation)
            for one in running
            if one.address != self._settings.application_server and one.hosts_any(model)
        ]

    def _instances(self) -> Instances:
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

    def _tables_here(self) -> TablesHere:
        engine = self._instance.engine
        return TablesHere(
            # A stage that joins passes records on, so it has one generation.
            stages=[*engine.stages.values()],
            tables=engine.tables,
            servers=self._instance.directory.table,
            watermarks=engine.table_watermarks,
            address=self._settings.application_server,
            queries=partial(self._queries, is_of_table=True),
        )

    def _letters(self, tasks: Tasks) -> StageDeadLetters:
        hosted = tasks.hosted
        scan = DeadLetterScan(
            stage=hosted.stage.identity,
            read_model=hosted.stage.owner,
            key_type=hosted.key_type,
            letters=hosted.processor.letters,
        )
        records = SourceRecords(
            records=partial(records_left_at, self._settings, hosted.topics, hosted.source.name),
            registry=self._instance.engine.schemas,
            scheduler=self._records,
            timeout_seconds=self._settings.read_timeout_seconds,
        )
        routing = self._routing(tasks)
        # No letter changes while the task is halted.
        routing.answers_when_halted = True
        scatter = self._scatter(routing, "/api", None, self._letters_scans)
        return StageDeadLetters(scan=scan, scatter=scatter, records=records, decide=tasks.decide)

    def _elsewhere(self) -> Mapping[str, PublishedModel]:
        """Returns the read models that instances host, or hosted lately, by name."""
        directory = self._instance.directory
        if not directory.is_read:
            raise unavailable("this instance has not read the directory of instances yet")
        return directory.table.models()

    def _of_peers(self, name: str, partitioning: Partitioning, key_type: KeyType) -> ModelAnswers:
        routing = Routing(
            read_model=name,
            partitioning=partitioning,
            address=self._settings.application_server,
            servers=self._instance.directory.table,
        )
        return self._answers(routing, key_type)

    def _routing(self, tasks: Tasks) -> Routing:
        hosted = tasks.hosted
        return Routing(
            read_model=hosted.name,
            partitioning=hosted.partitioning,
            address=self._settings.application_server,
            servers=self._instance.directory.table,
            task=tasks.task,
            left=tasks.left,
            view=hosted.view,
            number=hosted.number,
            on_damage=tasks.damaged,
            lease=hosted.lease,
            watermarks=hosted.watermarks,
            answers_when_halted=hosted.answers_when_halted,
        )

    def _answers(self, routing: Routing, key_type: KeyType) -> ModelAnswers:
        model, generation = model_and_generation(routing.read_model)
        queries = self._queries(routing)
        reader = Reader(
            generation=generation,
            routing=routing,
            key_type=key_type,
            scheduler=self._scans,
            on_coalesced=self._metrics.coalesced.inc,
        )
        scatter = self._scatter(routing, f"{api.MODELS}/{model}", generation, self._scans)
        changes = Changes(reader, self._links, self._pace)
        return ModelAnswers(queries, scatter, changes, description_of(model, self._known))

    def _queries(self, routing: Routing, *, is_of_table: bool = False) -> Queries:
        return Queries(
            routing=routing,
            proxy=self._proxy,
            timeout_seconds=self._settings.read_timeout_seconds,
            metrics=self._metrics,
            is_of_table=is_of_table,
        )

    def _scatter(self, routing: Routing, path: str, generation: int | None, scheduler: FairScheduler) -> Scatter:
        return Scatter(
            routing=routing,
            proxy=self._proxy,
            path=path,
            generation=generation,
            timeout_seconds=self._settings.read_timeout_seconds,
            scheduler=scheduler,
        )
