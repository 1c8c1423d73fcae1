"""What answers queries for the read models of an instance, and for those that only its peers host."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from balance_service.http.answer import unavailable
from balance_service.http.dead_letters import DeadLetters, StageLetters
from balance_service.http.letter_records import LetterRecords
from balance_service.http.letter_scan import LetterScan
from balance_service.http.model_queries import PATH, ModelAnswers, ModelQueries, description_of
from balance_service.http.queries import Queries
from balance_service.http.routing import Routing
from balance_service.http.scatter import Scatter
from balance_service.http.turns import Turns
from balance_service.kafka.log_reader import records_left_at
from balance_service.kafka.watermarks import Watermarks
from balance_service.model.json_view import exact_json
from balance_service.model.keys import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from balance_service.errors import StoreCorruptedError
    from balance_service.hosting.hosted_stage import HostedStage
    from balance_service.hosting.running import Running
    from balance_service.http.peers.proxy import Proxy
    from balance_service.http.routing import Readable, ReadableTasks
    from balance_service.model.read_model import ReadModel
    from balance_service.observability.metrics import Metrics
    from balance_service.settings import Settings


class Answering:
    """Makes what answers. For the event loop's thread."""

    def __init__(
        self, running: Running, proxy: Proxy, metrics: Metrics, settings: Settings, models: Iterable[ReadModel]
    ) -> None:
        """Args:
        models: that there is something to tell of, hosted here or not.
        """
        self._known = {model.name: model for model in models}
        self._running = running
        self._proxy = proxy
        self._metrics = metrics
        self._settings = settings
        self._scans = Turns("scan")
        # Operators find out with them what is wrong: whatever clients ask, they have threads and places of their own.
        self._letters_scans = Turns("scan-letters")
        # Those that read records wait for the broker.
        self._records = Turns("scan-records", threads=2)

    def queries(self) -> ModelQueries:
        """What answers for every read model."""
        hosted = {name: self._of_hosted(model) for name, model in self._running.engine.models.items()}
        return ModelQueries(self._known, hosted, self._elsewhere, cache(self._of_peers))

    def dead_letters(self) -> DeadLetters:
        """What answers for the dead letters of every stage here."""
        return DeadLetters({name: self._letters(stage) for name, stage in self._running.engine.stages.items()})

    def _letters(self, stage: HostedStage) -> StageLetters:
        routing = self._routing(stage.name, stage.source.partitions, stage.watermarks, stage.tasks)
        scan = LetterScan(
            stage=stage.name,
            read_model=stage.stage.owner,
            key_type=TEXT if stage.folds is None else stage.folds.key_type,
            letters=stage.work.letters,
        )
        records = LetterRecords(
            records=partial(records_left_at, self._settings, self._running.engine.topics, stage.source.name),
            turns=self._records,
            timeout_seconds=self._settings.read_timeout_seconds,
        )
        scatter = self._scatter(routing, "/api", stage, self._letters_scans)
        return StageLetters(scan=scan, scatter=scatter, records=records, decide=stage.decide)

    def _elsewhere(self) -> dict[str, int]:
        if not self._running.directory.is_read:
            raise unavailable("this instance has not read the directory of instances yet")
        # Silent peers too: that nobody answers now does not mean that there is no such read model.
        partitions: dict[str, int] = {}
        for server in self._running.directory.table.servers():
            for model in server.models:
                partitions[model.name] = max(model.partitions, partitions.get(model.name, 0))
        return partitions

    def _of_hosted(self, model: HostedStage) -> ModelAnswers:
        return self._answers(model.name, model.source.partitions, model.watermarks, model.tasks, model)

    def _of_peers(self, name: str, partitions: int) -> ModelAnswers:
        nothing = _Nothing()
        return self._answers(name, partitions, Watermarks(dict), nothing, nothing)

    def _answers(
        self,
        name: str,
        partitions: int,
        watermarks: Watermarks,
        tasks: ReadableTasks,
        model: HostedStage | _Nothing,
    ) -> ModelAnswers:
        routing = self._routing(name, partitions, watermarks, tasks)
        queries = Queries(
            read_model=name,
            routing=routing,
            proxy=self._proxy,
            address=self._settings.application_server,
            view=model.view,
            on_damage=model.damaged,
            timeout_seconds=self._settings.read_timeout_seconds,
            metrics=self._metrics,
        )
        return ModelAnswers(
            queries, self._scatter(routing, f"{PATH}/{name}", model, self._scans), description_of(name, self._known)
        )

    def _routing(self, stage: str, partitions: int, watermarks: Watermarks, tasks: ReadableTasks) -> Routing:
        return Routing(
            read_model=stage,
            partitions=partitions,
            address=self._settings.application_server,
            tasks=tasks,
            membership=self._running.engine.membership,
            watermarks=watermarks,
            servers=self._running.directory.table,
        )

    def _scatter(self, routing: Routing, path: str, model: HostedStage | _Nothing, turns: Turns) -> Scatter:
        return Scatter(
            routing=routing,
            proxy=self._proxy,
            address=self._settings.application_server,
            path=path,
            view=model.view,
            number=model.number,
            render=exact_json,
            on_damage=model.damaged,
            timeout_seconds=self._settings.read_timeout_seconds,
            turns=turns,
        )


class _Nothing:
    """What an instance has of a read model that it does not host."""

    def task(self, _partition: int) -> Readable | None:
        """None: there is no task here."""
        return None

    def view(self, _frame: bytes) -> Any:
        """Never called: there is no state here."""
        raise NotImplementedError

    def number(self, _name: str) -> Callable[[bytes], Any]:
        """As `view`."""
        return self.view

    def damaged(self, _partition: int, _read: Readable, _error: StoreCorruptedError) -> None:
        """Never called: there is no store here."""
        raise NotImplementedError
