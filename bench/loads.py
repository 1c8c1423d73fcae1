"""The topics of a run. Topics that are only read are filled once and shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.devtools.progress import progress_bar
from bench.load import PARTITIONS, generate

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack
    from bench.load import Load


class Loads:
    """Creates loads on one stack."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._kept: dict[tuple[int, int, int, bool], Load] = {}
        self._topics = 0

    def kept(self, events: int, customers: int, partitions: int = PARTITIONS, *, is_json: bool = False) -> Load:
        """A shared load, to which no events are added."""
        size = events, customers, partitions, is_json
        if size not in self._kept:
            self._kept[size] = self.new(events, customers, partitions=partitions, is_json=is_json)
        return self._kept[size]

    def new(
        self,
        events: int,
        customers: int,
        *,
        each_once: bool = False,
        partitions: int = PARTITIONS,
        is_json: bool = False,
    ) -> Load:
        """A new load; with `each_once`, one event for each customer; with `is_json`, as documents."""
        self._topics += 1
        topic = f"bench-{self._topics}"
        total = customers if each_once else events
        with progress_bar(f"generating, {customers:,} customers", total) as (bar, task):
            return generate(
                self._stack,
                topic,
                events,
                customers,
                lambda more: bar.advance(task, more),
                each_once=each_once,
                partitions=partitions,
                is_json=is_json,
            )
