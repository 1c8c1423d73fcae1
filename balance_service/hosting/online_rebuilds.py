"""Rebuilds read models while they answer: does what the topic of generations says, on a thread of its own.

Each instance hosts the generations that are live, compares a caught-up one with the serving one for each partition that
it owns, and has the outputs sent by the generation that serves. The owner of partition 0 also does what is done once:
it adds the comparisons up, drops a generation that was kept for its time, and deletes what a dropped one leaves.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import structlog

from balance_service import api
from balance_service.engine.comparison import MOST_DIFFERENCES, compare
from balance_service.engine.records import Role
from balance_service.engine.task import ANSWERING, TaskState
from balance_service.errors import BalanceServiceError, RetriableError
from balance_service.hosting.dropped_changelogs import DroppedChangelogs
from balance_service.hosting.loaded_files import LoadedFiles
from balance_service.hosting.rebuild_checks import CAUGHT_UP_RECORDS, RebuildChecks, StepWaitsError
from balance_service.http.generations import Difference, Generation, ModelGenerations
from balance_service.model.generations import Comparison
from balance_service.process.failpoints import failpoint
from balance_service.process.runtime import PeriodicThread, iso_time

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from balance_service.cluster.directory import ServerTable
    from balance_service.engine.records import Compared
    from balance_service.engine.task import Task
    from balance_service.engine.tasks import Tasks
    from balance_service.hosting.engine import Engine
    from balance_service.model.generations import Building, Generations, GenerationStatus, Switch
    from balance_service.model.stage import Stage

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.25
# So that queries and folding get most of the processor.
_PAUSE_SECONDS = 0.002
_SLICE_SECONDS = 0.1
_SPREAD_SECONDS = 0.5
_CHECK_AGAIN_SECONDS = 5.0


class Rebuilds(PeriodicThread):
    """The rebuilds of the read models that this instance hosts."""

    def __init__(self, engine: Engine, servers: ServerTable, switch: Switch) -> None:
        """Args:
        switch: when a generation serves that is built because its version is here.
        """
        super().__init__("rebuilds", 0.0, self._round)
        self._engine = engine
        self._versions = engine.versions
        self._log = engine.generations
        self._servers = servers
        self.checks = RebuildChecks(engine, servers)
        self._dropped_changelogs = DroppedChangelogs(engine, servers)
        self._loaded_files = LoadedFiles(engine, self.checks)
        self._switch_of_upgrade = switch
        self._comparing: dict[tuple[Task, Task], Generator[None, None, Compared]] = {}
        """Comparisons that have begun, by the tasks of the serving generation and of the one that is built."""
        self._served: dict[str, tuple[int, float]] = {}
        """Which generation serves, and since when this instance knows it, by the model's name."""
        self._unbuildable: dict[str, tuple[float, BalanceServiceError]] = {}
        """When a generation of a new version could not be built, and why, by the model's name."""
        self.problems: Mapping[str, str] = {}
        """Why a step of a read model's rebuild fails here now, by the model's name. For the directory."""

    def status(self, model: str) -> ModelGenerations | None:
        """Returns the generations of a read model; None if the model is not hosted here, or keeps no states."""
        if model not in self._versions.with_states:
            return None
        now = self._log.of(model)
        building = now.building
        other = now.kept if building is None else building.generation
        return ModelGenerations.showing(
            now,
            generations=[self._generation(now, number) for number in now.live],
            switch=None if building is None else building.switch.value,
            # Without a broker, this instance hears none, not even itself.
            problem=self._servers.problem(model)
            or self.problems.get(model, "")
            or self.checks.lacks_class(now, other)
            or self._stopped(now, other, TaskState.HALTED, TaskState.WAITING)
            # Why it does not serve by itself.
            or (now.reason if now.action == "compare" else ""),
        )

    def status_of(self, stage: Stage) -> GenerationStatus:
        """Returns what the generation of a read model's last stage is for: see `Generation.status`."""
        return self._log.of(stage.owner).status_of(stage.generation)

    def since_of(self, stage: Stage) -> str | None:
        """Returns the time of the last step of a read model's generations; None if there was none."""
        ms = int(1000 * self._log.of(stage.owner).at.timestamp())
        return iso_time(ms) if ms else None

    def _generation(self, now: Generations, number: int) -> Generation:
        stage = self._versions.stage(now.model, number)
        hosted = self.checks.any_hosted(now.model)
        partitions = range(hosted.source.partitions)
        claims = {p: claims[0][1] for p in partitions if (claims := self._servers.claims(stage.name, p))}
        answering = {state.value for state in ANSWERING}
        positions = {p: task.position for p, task in claims.items() if task.state in answering}
        lags = [hosted.watermarks.lag(p, position) for p, position in positions.items()]
        return Generation(
            generation=number,
            version=now.declarations[number].version,
            declaration_changed=self._versions.has_changed(now.model, number),
            decoder_rules=now.declarations[number].decoder_rules,
            read_otherwise=self._engine.read_otherwise(stage),
            status=now.status_of(number),
            partitions=len(partitions),
            halted=self._stopped(now, number, TaskState.HALTED),
            loaded=None if now.load_of(number) is None else self._loaded(stage.name, partitions),
            running=sum(task.state == TaskState.RUNNING.value for task in claims.values()),
            position=sum(positions.values()),
            lag=sum(lag for lag in lags if lag is not None)
            if len(positions) == len(partitions) and None not in lags
            else None,
        )

    def _loaded(self, stage: str, partitions: range) -> float:
        """Returns which share of its files a generation has loaded; each partition counts alike."""
        here = {partition: 1.0 for partition in partitions if self._servers.claims(stage, partition)}
        for server in self._servers.running():
            for task in server.tasks:
                if task.stage == stage and task.role is Role.ACTIVE and task.to_restore:
                    here.setdefault(task.partition, min(1.0, task.restored / task.to_restore))
        return round(sum(here.values()) / max(1, len(partitions)), 4)

    def differences(self, model: str) -> Sequence[Difference] | None:
        """Returns the first differences that were found here, at most 20; None as `status`."""
        if model not in self._versions.with_states:
            return None
        building = self._log.of(model).building
        if building is None:
            return []
        tasks = self._tasks(model, building.generation)
        if tasks is None or (folds := tasks.hosted.folds) is None:
            return []
        found = [
            Difference(key=folds.key_type.text(key), serving=serving, building=other)
            for task in tasks.all()
            if task.compared is not None
            for key, serving, other in task.compared.differences
        ]
        return found[:MOST_DIFFERENCES]

    def _round(self) -> None:
        self._log.wait(0 if self._comparing else _LOOK_SECONDS)
        for model in self._versions.with_states:
            if self._stopping.is_set():
                return
            failure = self._failure_of(model, partial(self.step, self._log.of(model)))
            if failure is None:
                self.problems = {name: why for name, why in self.problems.items() if name != model}
                continue
            if self.problems.get(model) != str(failure):
                tell = log.info if isinstance(failure, StepWaitsError) else log.warning
                tell("a rebuild waits", model=model, reason=str(failure))
            self.problems = {**self.problems, model: str(failure)}

    def step(self, generations: Generations) -> None:
        """Raises BalanceServiceError: a step fails, and is tried again."""
        model = generations.model
        self._host_live(generations)
        if self._served_since(model)[0] != generations.serving:
            self._served[model] = generations.serving, time.monotonic()
            self._engine.on_change()
        serving = self._engine.models[self._versions.stage(model, generations.serving).name]
        # A partition that cannot take a step must not keep the others from theirs.
        steps = [*self._switches(generations, serving)]
        building = None if generations.building is None else self._tasks(model, generations.building.generation)
        if building is not None and generations.building is not None:
            owned = self._owned(building)
            near = _near(generations.building.max_rate, len(owned))
            steps += [
                partial(self._compare, partition, serving, building, task, near)
                for partition, task in owned.items()
                if task.compared is None
            ]
        if self._is_responsible(serving):
            steps.append(partial(self._do_once, generations))
            steps.append(partial(self._loaded_files.delete, generations))
        steps.append(partial(self._upgrade, generations))
        failures = [failure for step in steps if (failure := self._failure_of(model, step)) is not None]
        if failures:
            raise min(failures, key=lambda failure: isinstance(failure, StepWaitsError))

    def _upgrade(self, generations: Generations) -> None:
        """Begins to build a generation of the version here, if it is higher than any before."""
        version = self._versions.declaration(generations.model).version
        if version <= generations.newest_version:
            return
        if (building := generations.building) is not None:
            raise RetriableError(
                f"version {version} of '{generations.model}' is built once generation {building.generation}, which is "
                "being built, is dropped, or serves and the former one is dropped"
            )
        if generations.kept is not None:
            raise RetriableError(
                f"version {version} of '{generations.model}' is built once generation {generations.kept}, "
                "which is kept after a switch, is dropped"
            )
        at, failure = self._unbuildable.get(generations.model, (float("-inf"), None))
        if failure is not None and time.monotonic() - at < _CHECK_AGAIN_SECONDS:
            raise failure
        try:
            declaration = self.checks.buildable(generations.model)
        except BalanceServiceError as error:
            self._unbuildable[generations.model] = time.monotonic(), error
            raise
        log.info("a generation of a new version is built", model=generations.model, version=version)
        self._log.write(
            generations.model, lambda now: now.upgraded(declaration, self._switch_of_upgrade, api.KEEP_OLD_SECONDS)
        )

    def _host_live(self, generations: Generations) -> None:
        live = {stage.name: stage for stage in self._versions.live(generations.model)}
        here = {name for name, tasks in self._engine.models.items() if tasks.hosted.stage.owner == generations.model}
        dropped = here - live.keys()
        # A comparison keeps its stores open, and files that a full disk would do without. No step goes on with it while
        # the one that is built waits.
        self._comparing = {
            tasks: comparing
            for tasks, comparing in self._comparing.items()
            if all(task.view is not None and task.task_id.stage not in dropped for task in tasks)
            and tasks[1].state is TaskState.RUNNING
        }
        # First, because the next one may need their open files.
        for name in dropped:
            if not self._engine.remove_stage(name):
                raise RetriableError(f"the tasks of {name} have not closed yet")
            log.info("a generation is dropped", stage=name)
        for name in live.keys() - here:
            self._engine.add_stage(live[name])
            failpoint("generation-hosted")
            log.info("a generation is hosted", stage=name)

    def _served_since(self, model: str) -> tuple[int, float]:
        return self._served.get(model, (1, float("-inf")))

    def _tasks(self, model: str, generation: int) -> Tasks | None:
        """Returns the tasks of a generation here; None if this instance leaves it alone."""
        return self._engine.models.get(self._versions.stage(model, generation).name)

    def _stopped(self, now: Generations, generation: int | None, *states: TaskState) -> str:
        """Returns why the task of a partition of a generation is in one of some states; empty if none is."""
        if generation is None:
            return ""
        stage, stopped = self._versions.stage(now.model, generation).name, {state.value for state in states}
        told = (
            f"{task.stage}_{task.partition} is {task.state} at {server.address}: {task.reason}"
            for server in self._servers.running()
            for task in server.tasks
            if task.stage == stage and task.state in stopped
        )
        return next(told, "")

    def _switches(self, generations: Generations, serving: Tasks) -> Iterator[Callable[[], None]]:
        """Yields what has the serving generation send the outputs of each partition that is owned here.

        The other one does not answer for a moment then. An instance that has not heard of the switch still asks it.
        """
        if time.monotonic() - self._served_since(generations.model)[1] < _SPREAD_SECONDS:
            return
        for partition, task in self._owned(serving).items():
            if task.sends_since < generations.serving_since:
                yield partial(self._switch, serving, task)
                continue
            for number in generations.live:
                tasks = None if number == generations.serving else self._tasks(generations.model, number)
                other = None if tasks is None else tasks.task(partition)
                if tasks is not None and other is not None and other.sends:
                    # It is fenced. Opened again, it is silent.
                    tasks.failed(other, RetriableError("another generation serves"))

    @staticmethod
    def _switch(serving: Tasks, task: Task) -> None:
        try:
            task.inherit()
        finally:
            if task.view is None:
                serving.failed(task, RetriableError("it is unknown which generation serves"))

    def _compare(self, partition: int, serving: Tasks, building: Tasks, task: Task, near: int) -> None:
        """Compares a partition for a while, so that other steps have their turn too.

        Args:
            near: how many records the task may be behind for that.
        """
        before = serving.answering().get(partition)
        if before is None or before.role is not Role.ACTIVE:
            raise StepWaitsError(f"{serving.name}_{partition}, which serves, does not answer yet")
        comparing = self._comparing.pop((before, task), None)
        if comparing is None:
            if before.position - task.position > near:
                return
            comparing = compare(serving, building, (before, task))
        until = time.monotonic() + _SLICE_SECONDS
        try:
            while time.monotonic() < until and not self._stopping.wait(_PAUSE_SECONDS):
                next(comparing)
        except StopIteration as end:
            failpoint("compared")
            task.compared = found = end.value
            log.info("generations compared", task=str(task.task_id), position=found.position, **found.counts.record())
        else:
            self._comparing[before, task] = comparing

    def _is_responsible(self, serving: Tasks) -> bool:
        task = serving.task(0)
        return task is not None and task.role is Role.ACTIVE and serving.hosted.lease.holds

    def _do_once(self, generations: Generations) -> None:
        model, building, until = generations.model, generations.building, generations.kept_until
        if not generations.is_settled:
            self._check_sending(generations)
            self._log.write(model, lambda now: now.settled() if now.number == generations.number else now)
        elif building is not None and generations.comparison is None:
            self._add_up(generations, building)
        elif generations.kept is not None and until is not None and datetime.now(UTC) > until:
            kept = generations.kept
            self._log.write(model, lambda now: now.dropped(kept, "", "kept for its time"))
        else:
            self._dropped_changelogs.delete(generations, self.checks.any_hosted(model))

    def _add_up(self, generations: Generations, building: Building) -> None:
        stage = self._versions.stage(generations.model, building.generation).name
        partitions = self.checks.partitions(generations.model)
        found = [self._comparison(stage, partition) for partition in partitions]
        if None in found:
            return
        if unfit := next(self.checks.unfit(generations, building.generation), ""):
            raise StepWaitsError(unfit)
        cut = self.checks.events_lacking(generations, building.generation)
        total = sum((one for one in found if one is not None), Comparison())
        # Its tasks may have opened after more was deleted than had been when it was begun.
        source = self.checks.any_hosted(generations.model).source
        starts = self._engine.topics.offsets(source.name, range(source.partitions), earliest=True)

        def compared(now: Generations) -> Generations:
            after = now.compared(building.generation, total, starts, why_not=cut)
            if after.serving != now.serving:
                self.checks.check_known(after)
            return after

        # Before the other writers are fenced: a switch may be refused for long.
        compared(generations)
        self._log.write(generations.model, compared)
        if not total.is_equal:
            log.warning("the generation that is built differs", stage=stage, **total.record())

    def _check_sending(self, generations: Generations) -> None:
        """Checks that the serving generation has taken over all partitions. Raises StepWaitsError.

        Its changelog says so: a task that has inherited may wait, or be halted, since.
        """
        stage = self._versions.stage(generations.model, generations.serving)
        for partition in self.checks.partitions(generations.model):
            claims = self._servers.claims(stage.name, partition)
            if not claims or claims[0][1].sends_as_of < generations.serving_since:
                raise StepWaitsError(f"{stage.name}_{partition}, which serves, has not taken over yet")

    def _comparison(self, stage: str, partition: int) -> Comparison | None:
        claims = self._servers.claims(stage, partition)
        return claims[0][1].comparison if claims else None

    @staticmethod
    def _owned(tasks: Tasks) -> dict[int, Task]:
        return {
            partition: task
            for partition, task in tasks.answering().items()
            if task.role is Role.ACTIVE and task.state is TaskState.RUNNING
        }

    def _failure_of(self, model: str, step: Callable[[], None]) -> BalanceServiceError | None:
        """Returns the error of a step without its frames.

        The caller's list of errors and the frame that raises one refer to each other. The views of a comparison would
        stay until a garbage collection, and no task can open a store again before its views have ended.
        """
        try:
            step()
        except BalanceServiceError as error:
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except Exception as error:  # a model's own view may raise anything
            why = f"a step failed with {type(error).__name__}; the log of the instance has it"
            if self.problems.get(model) != why:
                log.exception("a step of a rebuild failed", model=model)
            return RetriableError(why)
        return None


def _near(max_rate: int | None, tasks: int) -> int:
    """Returns how many records a task may be behind that is compared: it must apply them within seconds.

    Args:
        max_rate: events a second that all tasks here apply together at most; None without such a bound.
        tasks: how many they are.
    """
    return CAUGHT_UP_RECORDS if max_rate is None else min(CAUGHT_UP_RECORDS, max(1, max_rate // max(1, tasks)))
