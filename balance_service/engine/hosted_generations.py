"""The generations of a read model in this instance. One serves.

Which one, the topic of generations says. It sends the outputs of a partition once its task has taken them over, and the
one that served before does until then: see `engine.inheritance`. All tasks of a partition are in one instance, because
one membership owns the partition for all generations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.store import StoreView
    from balance_service.model.generations import Declaration, Generations, Load
    from balance_service.model.stage import Stage


class GenerationTask(Protocol):
    """The task of a partition in one generation."""

    @property
    def sends(self) -> bool:
        """Whether the task sends the outputs of its events, or did until it halted."""

    @property
    def last_view(self) -> StoreView | None:
        """The view after the last commit, even of a halted task; None without an open store."""

    def follow(self, decided: Mapping[int, Letter], /) -> None:
        """Has the task follow another generation: see `HostedGenerations.follow`."""


class GenerationTasks(Protocol):
    """The tasks of one generation."""

    def task(self, partition: int, /) -> GenerationTask | None:
        """Returns the task of a partition; None if it is not here."""


class HostedGenerations:
    """The tasks of the last stage of one read model, by generation. Any thread may call it."""

    def __init__(self, now: Callable[[], Generations], newest: Callable[[], Generations] | None = None) -> None:
        """Args:
        now: returns the model's generations as this instance knows them.
        newest: reads their topic to its end; raises RetriableError if that fails.
        """
        self._now = now
        self._newest = newest or now
        self._generations: dict[int, GenerationTasks] = {}
        self._new: int | None = None

    def add(self, generation: int, tasks: GenerationTasks) -> None:
        self._generations = {**self._generations, generation: tasks}

    def remove(self, generation: int) -> None:
        self._generations = {number: tasks for number, tasks in self._generations.items() if number != generation}

    def serves_since(self, stage: Stage, *, newest: bool = False) -> int | None:
        """Returns the number of the state of the generations since which one serves; None if another one serves.

        Args:
            newest: whether to read the topic to its end.

        Raises:
            RetriableError: the topic cannot be read.
        """
        now = self._newest() if newest else self._now()
        return now.serving_since if now.serving == stage.generation else None

    def others(self, stage: Stage) -> list[Stage]:
        """Returns the other generations that have a changelog, hosted here or not."""
        return [stage.of_generation(number) for number in self._now().writable if number != stage.generation]

    def begin(self, stage: Stage) -> None:
        """Notes that this process has begun a generation, so that no task has sent anything for it before."""
        self._new = stage.generation

    def is_new(self, stage: Stage) -> bool:
        """Whether this process has begun a generation: see `begin`."""
        return self._new == stage.generation

    def follow(self, stage: Stage, partition: int, decided: Mapping[int, Letter]) -> None:
        """Has the other generations follow a decision about dead letters, or retry those that were applied.

        Returns at once.

        Args:
            decided: the dead letters after it.
        """
        for tasks in self._others(stage) if decided else ():
            if (task := tasks.task(partition)) is not None:
                task.follow(decided)

    def sender(self, stage: Stage, partition: int) -> StoreView | None:
        """Returns the view of the task that sends the outputs in place of a silent one; None if there is none here."""
        tasks = (tasks.task(partition) for tasks in self._others(stage))
        return next((task.last_view for task in tasks if task is not None and task.sends), None)

    def last_view(self, stage: Stage, partition: int) -> StoreView | None:
        """Returns the last view of the task of a generation; None if it is not open here."""
        tasks = self._generations.get(stage.generation)
        task = None if tasks is None else tasks.task(partition)
        return None if task is None else task.last_view

    def have_same_code(self, one: Stage, other: Stage) -> bool:
        """Whether two generations are folded by one version of the model with one declaration."""
        declared = self._now().declarations
        return declared.get(one.generation) == declared.get(other.generation)

    def serves(self, stage: Stage) -> bool:
        """Whether a generation serves. An earlier stage always does."""
        return self._now().serving == stage.generation

    def builds(self, stage: Stage) -> bool:
        """Whether a generation is being built, and has not caught up with the one that serves."""
        now = self._now()
        is_it = now.building is not None and now.building.generation == stage.generation
        return is_it and now.comparison is None

    def load_of(self, stage: Stage) -> Load | None:
        """Returns what a generation is loaded from; None if it is folded from the beginning, or is loaded."""
        return self._now().load_of(stage.generation)

    def declaration(self, stage: Stage) -> Declaration:
        """Returns what folds a live generation."""
        return self._now().declarations[stage.generation]

    def max_rate(self, stage: Stage) -> int | None:
        """Returns how many events a second the tasks of a generation that is built apply together at most."""
        building = self._now().building
        return None if building is None or building.generation != stage.generation else building.max_rate

    def _others(self, stage: Stage) -> list[GenerationTasks]:
        return [tasks for number, tasks in sorted(self._generations.items()) if number != stage.generation]
