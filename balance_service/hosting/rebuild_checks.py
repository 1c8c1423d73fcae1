"""Checks before a generation is built, and before it serves: has it all events, room on the disk, and its tasks?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from balance_service.bulk.accepting import Wanted, made_here
from balance_service.engine.database import has_room_for, room_bytes
from balance_service.engine.inheritance import last_positions
from balance_service.engine.opening import rekeyed_was_cut
from balance_service.engine.records import Role
from balance_service.engine.task import TaskState
from balance_service.errors import BalanceServiceError, ConfigurationError, InvalidInputError, RetriableError
from balance_service.kafka.topic_specs import losses

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from balance_service.cluster.directory import ServerTable
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import Position, TaskSnapshot
    from balance_service.hosting.engine import Engine
    from balance_service.model.generations import Declaration, Generations, Load
    from balance_service.model.stage import Stage

log = structlog.get_logger(__name__)

CAUGHT_UP_RECORDS = 10_000
"""How many records a task of a generation may be behind the serving one that it is compared with, or replaces."""
_MOST_TOLD = 3


class StepWaitsError(RetriableError):
    """A step of a rebuild waits for another one, of a task or of another instance, as it should."""


class RebuildChecks:
    """The checks of an instance's read models, from its directory, its topics and the disk."""

    def __init__(self, engine: Engine, servers: ServerTable) -> None:
        self._engine = engine
        self._servers = servers
        self._versions = engine.versions

    def any_hosted(self, model: str) -> HostedStage:
        """Returns a generation of a read model that is hosted here. All have one source."""
        return next(tasks.hosted for tasks in self._engine.models.values() if tasks.hosted.stage.owner == model)

    def partitions(self, model: str) -> range:
        return range(self.any_hosted(model).source.partitions)

    def check_known(self, now: Generations) -> None:
        """Checks that all instances can fold the generation that serves. Raises InvalidInputError."""
        if problem := self.lacks_class(now, now.serving):
            raise InvalidInputError(problem)

    def check_switch(self, now: Generations, to: int, *, anyway: bool) -> str:
        """Checks that a generation can serve, and has all that the serving one has.

        The one that serves may be halted or gone: a switch is the way out then.

        Args:
            now: before the switch.
            anyway: whether it may serve all the same, if it is only folded everywhere.

        Returns:
            What is lost by the switch; empty if nothing is.

        Raises:
            InvalidInputError: an instance cannot fold it; or, unless `anyway`, it is not fit to serve. The message
                names what would be lost.
            RetriableError: the broker does not respond, or no instance is known here yet.
        """
        if not self._servers.running():
            raise RetriableError("this instance has not heard of any other yet, nor of itself: try again")
        if problem := self.lacks_class(now, to):
            raise InvalidInputError(problem)
        if now.load_of(to) is not None and not self.is_loaded(now, to):
            raise InvalidInputError(f"generation {to} is being loaded from files, and has a part of its states: wait")
        lost = [*filter(None, [self._uncompared(now, to), self.events_lacking(now, to)]), *self.unfit(now, to)]
        if not lost:
            return ""
        told = "; ".join(lost[:_MOST_TOLD]) + (f"; and {more} more" if (more := len(lost) - _MOST_TOLD) > 0 else "")
        if not anyway:
            raise InvalidInputError(f"{told}. With `anyway` (`--anyway`), generation {to} serves all the same")
        log.warning("a generation serves although it is not fit to", model=now.model, generation=to, lost=told)
        return told

    @staticmethod
    def _uncompared(now: Generations, number: int) -> str:
        is_built = now.building is not None and now.building.generation == number
        if not is_built or now.comparison is not None:
            return ""
        return f"generation {number} has not been compared with {now.serving} yet"

    def events_lacking(self, now: Generations, number: int) -> str:
        """Returns which events a generation lacks that the serving one was built of; empty if it has all.

        Raises RetriableError.
        """
        hosted = self.any_hosted(now.model)
        source, partitions = hosted.source.name, range(hosted.source.partitions)
        if hosted.stage.reads_rekeyed:
            # No task folds what is left of such a topic: it halts.
            return ""
        ours, theirs = now.declarations[number], now.declarations[now.serving]
        if now.building is not None and now.building.generation == number and now.comparison is None:
            ours = ours.cut_to(self._engine.topics.offsets(source, partitions, earliest=True))
        for partition in partitions:
            begins, all_begin = ours.begins_at(partition), theirs.begins_at(partition)
            if begins > all_begin:
                return (
                    f"generation {number} begins at offset {begins} of {source}-{partition}, and {now.serving} at "
                    f"{all_begin}: what only the events before say is in {now.serving} alone, and is deleted with it"
                )
        return ""

    def unfit(self, now: Generations, number: int) -> Iterator[str]:
        """Yields why a generation cannot serve as the serving one does, and what would be lost. Raises RetriableError.

        What it lacks of the source's end is not counted: a silent one does not go beyond the one that sends.
        """
        stage, serving = (self._versions.stage(now.model, one) for one in (number, now.serving))
        partitions = self.partitions(now.model)
        # A task of the serving one may be restoring, or halted.
        stood_at = self._last_positions(serving, partitions)
        for partition in partitions:
            task_name, owner = f"{stage.name}_{partition}", self._owner(stage.name, partition)
            if owner is None:
                yield f"no instance runs {task_name}, so that queries for its keys would get 503"
                continue
            address, task = owner
            if task.state != TaskState.RUNNING.value:
                why = f": {task.reason}" if task.reason else ""
                is_answering = task.state == TaskState.WAITING.value
                what = "its answers would stand still" if is_answering else "queries for its keys would get 503"
                yield f"{task_name} is {task.state} at {address}{why}; {what}"
                continue
            before = stood_at.get(partition)
            lag = 0 if before is None else before.offset - task.position
            if lag > CAUGHT_UP_RECORDS:
                yield f"{task_name} is {lag} records behind generation {now.serving}, and its answers would be"
        yield from self._missing_standbys(stage.name, partitions)
        yield from self._foreign_changelog(now, stage, partitions)

    def _owner(self, stage: str, partition: int) -> tuple[str, TaskSnapshot] | None:
        """Returns the task of a partition's owner, and its address; one that has not opened yet counts."""
        found = [
            (server.address, task)
            for server in self._servers.running()
            for task in server.tasks
            if (task.stage, task.partition, task.role) == (stage, partition, Role.ACTIVE)
        ]
        return max(found, key=lambda owner: owner[1].epoch, default=None)

    def _foreign_changelog(self, now: Generations, stage: Stage, partitions: Collection[int]) -> Iterator[str]:
        """Yields that a changelog is not the one that its tasks wrote. An idle task does not notice that."""
        changelog, found = self._engine.topics.find_patiently(stage.changelog), self._last_positions(stage, partitions)
        for partition in partitions:
            position = found.get(partition)
            if changelog is None or position is None or position.changelog_topic_id not in ("", changelog.topic_id):
                # One that is kept is the only way back.
                remedy = "" if stage.generation == now.kept else ": drop the generation, and build another one"
                yield (
                    f"the changelog '{stage.changelog}' was deleted or recreated, so that {stage.name}_{partition} "
                    f"would be folded again{remedy}"
                )
                return

    def _last_positions(self, stage: Stage, partitions: Collection[int]) -> Mapping[int, Position]:
        """Returns where a generation stands according to its changelog, hosted here or not. Raises RetriableError."""
        topics = self._engine.topics
        if topics.find_patiently(stage.changelog) is None:
            return {}
        return last_positions(
            self._engine.settings,
            topics,
            self.any_hosted(stage.owner).processor.position_codec,
            stage.changelog,
            partitions,
        )

    def buildable(self, model: str) -> Declaration:
        """Returns the newest version here as a generation would be built of it now. It has room on the disk here.

        With BALANCE_ALLOW_FINITE_RETENTION, it may be built of the events that are left.

        Raises InvalidInputError: it would lack events, or room. Or as `Topics`.
        """
        engine, hosted = self._engine, self.any_hosted(model)
        stage, source = hosted.stage, hosted.source
        if lost := losses(engine.topics, engine.settings, stage, with_changelog=False):
            raise InvalidInputError(f"a new generation of '{model}' would be built from what is left: {lost[0]}")
        starts = engine.topics.offsets(source.name, range(source.partitions), earliest=True)
        for partition, start in starts.items():
            if start > 0 and stage.reads_rekeyed:
                raise InvalidInputError(rekeyed_was_cut(source.name, partition, start))
            if start > 0 and not engine.settings.allow_finite_retention:
                raise InvalidInputError(
                    f"a new generation of '{model}' would be built from what is left: the first {start} offsets of "
                    f"{source.name}-{partition} are gone; copy all events to a new topic and start again with it, or "
                    "set BALANCE_ALLOW_FINITE_RETENTION=true to build from what is left"
                )
        serving = self._engine.models[self._versions.stage(model, self._engine.generations.of(model).serving).name]
        needed, path = sum(task.sizes.store_bytes for task in serving.snapshots()), engine.settings.state_dir
        if not has_room_for(path, needed):
            raise InvalidInputError(
                f"a new generation of '{model}' may take as much of the disk of {path} here as the one that serves, "
                f"{needed >> 20} MiB, and {room_bytes(path) >> 20} MiB are left; 512 MiB must stay free: make room"
            )
        return self._versions.declaration(model).beginning_at(starts)

    def check_files(self, model: str, files: str) -> str:
        """Returns why this instance does not see the folder of the next generation; empty if it does."""
        from balance_service.bulk.folder import Folder

        number = self._engine.generations.of(model).newest + 1
        try:
            Folder.of(files, self._engine.settings.application_id, model, number).check_found()
        except BalanceServiceError as error:
            return str(error)
        return ""

    def loadable(self, model: str, load: Load, declaration: Declaration) -> Declaration:
        """Returns the declaration of a generation that is loaded from files, once its manifest is verified.

        Raises:
            InvalidInputError: the files are missing, altered or others, or do not fit, or this instance cannot read
                their place; the message names what.
            RetriableError: the file system or the broker does not respond, or the serving generation has not come as
                far as the files.
        """
        from balance_service.bulk.folder import Folder

        engine, hosted = self._engine, self.any_hosted(model)
        stage = self._versions.stage(model, load.generation)
        wanted = Wanted(
            stage=stage,
            declaration=declaration,
            source_topic_id=hosted.source.topic_id,
            partitioner=hosted.partitioner,
            partitions=hosted.source.partitions,
            made_with=made_here(engine.settings),
        )
        folder = Folder.of(load.files, engine.settings.application_id, model, load.generation)
        try:
            manifest = wanted.read(folder, load.digest)
        except ConfigurationError as error:
            # This instance cannot read the place that the request names.
            raise InvalidInputError(str(error)) from error
        serving = self._versions.stage(model, engine.generations.of(model).serving)
        stands = self._last_positions(serving, self.partitions(model))
        for one in manifest.partitions:
            at = stands[one.partition].offset if one.partition in stands else 0
            if at < one.position:
                # What lies above would never be sent.
                raise RetriableError(
                    f"the files reach to {one.position} of {stage.source}-{one.partition}, and generation "
                    f"{serving.generation}, which serves, is at {at}: try again once it is there"
                )
        return declaration.beginning_at({one.partition: one.begins for one in manifest.partitions})

    def is_loaded(self, now: Generations, number: int) -> bool:
        """Whether a live generation has all files that it is loaded from: only then do its tasks own partitions."""
        stage = self._versions.stage(now.model, number).name
        return all(self._servers.claims(stage, partition) for partition in self.partitions(now.model))

    def lacks_class(self, now: Generations, generation: int | None) -> str:
        """Returns which instances cannot fold a generation; empty if all can."""
        if generation is None:
            return ""
        version = now.declarations[generation].version
        if not (lacking := self._servers.lacking(now.model, version)):
            return ""
        return (
            f"generation {generation} cannot serve: {', '.join(lacking)} without version {version} of '{now.model}', "
            "so that some partitions may not be folded; upgrade these instances, or name its class in BALANCE_MODELS"
        )

    def _missing_standbys(self, stage: str, partitions: Iterable[int]) -> Iterator[str]:
        """Yields which partitions have fewer standbys than the instances allow."""
        hosting = [server for server in self._servers.running() if server.hosts(stage)]
        wanted = min(self._engine.settings.num_standby_replicas, max(0, len(hosting) - 1))
        states = frozenset({TaskState.TAILING.value})
        for partition in partitions:
            if len(self._servers.standbys(stage, partition, states)) < wanted:
                yield (
                    f"{stage}_{partition} does not have its standbys yet: if its instance ended, queries for its keys "
                    "would get 503 until it is restored"
                )
