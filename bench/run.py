"""One run: broker and registry up, every measure in turn, the sides one after the other; progress on stderr."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
from confluent_kafka import KafkaException
from rich.console import Console

from balance_service.errors import BalanceServiceError
from balance_service.tools.progress import progress_bar
from bench.freshness import measure_freshness
from bench.invoices import generate_invoices
from bench.leaderboard import measure_leaderboard
from bench.load import generate
from bench.moves import measure_moves
from bench.reads import measure_local_reads, measure_proxied_reads
from bench.replay import Replay, record, replay
from bench.restore import measure_restore
from bench.rewards import measure_rewards
from bench.sides import OurSide, TheirSide

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from balance_service.tools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.plan import Plan
    from bench.sides import Side

_CACHE_BYTES = 128 << 20


class Run:
    """What is measured on one stack, beside Kafka Streams or an earlier checkout.

    Kafka Streams is tried with its record cache on and off; the better one counts.
    """

    def __init__(self, stack: LocalStack, plan: Plan, figures: Figures, before: Path | None = None) -> None:
        self._stack = stack
        self._plan = plan
        self._figures = figures
        self._before = before
        self._began = time.monotonic()
        self._console = Console(stderr=True)
        self._loads: dict[int, Load] = {}
        self._topics = 0
        self._ours = OurSide(stack)
        self._variants: Sequence[Side] = (
            [OurSide(stack, before)] if before else [TheirSide(stack, cache_bytes=c) for c in (_CACHE_BYTES, 0)]
        )
        self._theirs = self._variants[0]
        self._measures = {
            "replay": self._replays,
            "scaling": self._scaling,
            "restore": self._restores,
            "freshness": self._freshness,
            "reads": self._reads,
            "moves": self._moves,
            "rewards": self._rewards,
            "leaderboard": self._leaderboard,
        }

    @property
    def sides(self) -> tuple[Side, Side]:
        """As they are compared at last."""
        return self._ours, self._theirs

    def measure(self, measures: Iterable[str]) -> list[str]:
        """Take these measures; returns a sentence for each that failed, because a side does not get on or is wrong."""
        failures = []
        for measure in measures:
            try:
                self._measures[measure]()
            except (BalanceServiceError, KafkaException, httpx.HTTPError, OSError) as error:
                failures.append(f"{measure}: {error}")
                self._say(f"failed: {failures[-1]}")
        return failures

    def _replays(self) -> None:
        for customers, repetitions in zip(self._plan.customers, self._plan.replays, strict=True):
            case = f"{customers:,} customers"
            self._first_replays(customers, case, repetitions)
            for repetition in range(2, repetitions + 1):
                for side in self._in_turn(repetition):
                    record(self._figures, side.name, case, self._replay(side, customers, f"{repetition}/{repetitions}"))

    def _in_turn(self, repetition: int) -> Sequence[Side]:
        """Both sides, each first every other time: it may find the machine in another state than the second does."""
        return self.sides if repetition % 2 else self.sides[::-1]

    def _first_replays(self, customers: int, case: str, repetitions: int) -> None:
        record(self._figures, self._ours.name, case, self._replay(self._ours, customers, f"1/{repetitions}"))
        tried = [(self._replay(side, customers, f"1/{repetitions}"), side) for side in self._variants]
        best, side = max(tried, key=lambda t: t[0].rate)
        record(self._figures, side.name, case, best)
        if len(tried) > 1:
            rates = ", ".join(f"{run.rate:,.0f} events/s with {variant.variant}" for run, variant in tried)
            self._figures.notes.append(f"replay, {case}: {side.name} does {rates}; the better counts")
        if customers == self._plan.customers[0]:
            self._theirs = side

    def _scaling(self) -> None:
        customers = self._plan.customers[0]
        case = f"2 instances, {customers:,} customers"
        for side in self.sides:
            run = self._replay(side, customers, "two instances", instances=2)
            self._figures.add(side.name, "scaling", case, rate=run.rate, rate_with_start=run.rate_with_start)

    def _restores(self) -> None:
        load = self._new_load(0, self._plan.keys, each_once=True)
        for repetition in range(1, self._plan.restores + 1):
            for side in self._in_turn(repetition):
                self._say(f"{side.name}: restore of {load.events:,} keys, {repetition}/{self._plan.restores}")
                measure_restore(self._stack, side, load, self._figures)

    def _freshness(self) -> None:
        plan = self._plan
        rates = ", ".join(f"{rate:,}" for rate in plan.rates)
        for repetition in range(1, plan.repetitions + 1):
            for side in self._in_turn(repetition):
                # The measurement adds events, so each side gets its own topic, filled with the same load.
                load = self._new_load(plan.small_events, plan.customers[0])
                self._say(f"{side.name}: freshness, idle and at {rates} events/s, {repetition}/{plan.repetitions}")
                measure_freshness(self._stack, side, load, plan, self._figures)

    def _reads(self) -> None:
        plan = self._plan
        for repetition in range(1, plan.repetitions + 1):
            for side in self._in_turn(repetition):
                load = self._new_load(plan.small_events, plan.customers[0])
                self._say(f"{side.name}: local reads, {repetition}/{plan.repetitions}")
                measure_local_reads(
                    self._stack, side, load, plan.connections, plan.read_rates, plan.read_seconds, self._figures
                )
        if plan.proxied:
            load = self._new_load(plan.small_events, plan.customers[0])
            for side in self.sides:
                self._say(f"{side.name}: proxied reads")
                measure_proxied_reads(self._stack, side, load, plan.connections, plan.read_seconds, self._figures)

    def _moves(self) -> None:
        load = self._new_load(self._plan.small_events, self._plan.customers[0])
        for side in self.sides:
            self._say(f"{side.name}: an instance joins, leaves, is killed")
            measure_moves(self._stack, side, load, self._figures)

    def _rewards(self) -> None:
        if self._before is not None:
            raise BalanceServiceError("an earlier checkout may not have it; leave out --before")
        plan = self._plan
        with progress_bar(f"{self._elapsed} generating, {plan.cards:,} cards", plan.invoices) as (bar, task):
            load = generate_invoices(self._stack, plan.invoices, plan.cards, lambda more: bar.advance(task, more))
        self._say("rewards: both sides in turn")
        measure_rewards(self._stack, load, plan.rewards, self._figures)

    def _leaderboard(self) -> None:
        plan = self._plan
        self._say(f"leaderboard: a table of {plan.players:,} rows, then {plan.scores:,} scores/s")
        measure_leaderboard(self._stack, plan.players, plan.scores, plan.probes, self._figures)

    def _replay(self, side: Side, customers: int, which: str, instances: int = 1) -> Replay:
        load = self._loads.get(customers) or self._new_load(self._plan.events, customers)
        self._loads[customers] = load
        variant = f" ({side.variant})" if side.variant else ""
        with progress_bar(f"{self._elapsed} {side.name}{variant}: {customers:,} customers, {which}", load.events) as (
            bar,
            task,
        ):
            return replay(self._stack, side, load, lambda seen: bar.update(task, completed=seen), instances)

    def _new_load(self, events: int, customers: int, *, each_once: bool = False) -> Load:
        self._topics += 1
        topic = f"bench-{self._topics}"
        total = customers if each_once else events
        with progress_bar(f"{self._elapsed} generating, {customers:,} customers", total) as (bar, task):
            return generate(
                self._stack, topic, events, customers, lambda more: bar.advance(task, more), each_once=each_once
            )

    @property
    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        return f"{minutes:02}:{seconds:02}"

    def _say(self, what: str) -> None:
        self._console.print(f"{self._elapsed} {what}", highlight=False)
