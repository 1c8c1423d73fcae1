"""A run on a local stack: takes the measures one after another, and prints progress on stderr."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import psycopg
from confluent_kafka import KafkaException
from rich.console import Console

from balance_service.devtools.progress import progress_bar
from balance_service.errors import BalanceServiceError, ConfigurationError
from bench.figures import NAMES, Figures
from bench.first_event import measure_first_event
from bench.freshness import measure_freshness
from bench.generations import measure_building, measure_comparison, measure_rebuilds, measure_switches
from bench.invoice_replays import measure_both
from bench.invoices import generate_invoices
from bench.leaderboard import measure_leaderboard
from bench.listeners import cost_case, delay_case, measure_cost, measure_delay
from bench.load import PARTITIONS
from bench.loads import Loads
from bench.moves import measure_moves, measure_moves_of_many
from bench.plan import GENERATIONS, read_case, replay_case, tried
from bench.postgresql import Server
from bench.purchases import measure_purchases
from bench.quix import QuixSide
from bench.reads import measure_local_reads, measure_proxied_reads
from bench.replay import Replay, replay
from bench.restore import measure_restore
from bench.rewards import measure_rewards
from bench.schema_ids import ids_case, measure_schema_ids
from bench.sides import AVRO, OurSide
from bench.sweep import best, least_unless_alike, settings_of, told, try_all
from bench.tasks import MODELS, measure_tasks
from bench.upserts import UpsertsSide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from bench.invoices import Invoices
    from bench.load import Load
    from bench.plan import Plan
    from bench.sides import Side

_SCALED_PARTITIONS = 6
_OF_CPU = ("cpu", "cpu_with_start")


class Run:
    """A run on one stack, in comparison with Kafka Streams or an earlier checkout."""

    def __init__(self, stack: LocalStack, plan: Plan, figures: Figures, before: Path | None = None) -> None:
        self._stack = stack
        self._plan = plan
        self._figures = figures
        self._before = before
        self._began = time.monotonic()
        self._console = Console(stderr=True)
        self._loads = Loads(stack)
        self._of_tills: Invoices | None = None
        self._keep: Callable[[], None] = lambda: None
        self._ours = OurSide(stack)
        self._variants: Sequence[Side] = [OurSide(stack, before)] if before else settings_of(stack, plan)
        # The setting for measures without trials: the fastest at the first size.
        self._theirs = self._variants[0]
        self.settings = {side.name: dict(side.settings) for side in (self._ours, self._theirs)}
        """Side → its settings."""
        self._measures = {
            "replay": self._replays,
            "scaling": self._scaling,
            "restore": self._restores,
            "freshness": self._freshness,
            "reads": self._reads,
            "committed": self._committed,
            "moves": self._moves,
            "tasks": self._tasks,
            "ids": self._schema_ids,
            "first": self._first_event,
            "listeners": self._listeners,
            "rewards": self._rewards,
            "purchases": self._purchases,
            "own": self._own_folds,
            "leaderboard": self._leaderboard,
            "postgresql": self._postgresql,
            "quix": self._quix,
            "json": self._json,
            GENERATIONS: self._generations,
        }

    def measure(self, measures: Iterable[str], keep: Callable[[], None] = lambda: None) -> list[str]:
        """Take these measures; returns a sentence for each that failed.

        Args:
            keep: called after each measure, and after each case of those that take long.
        """
        failures = []
        self._keep = keep
        for measure in measures:
            try:
                self._measures[measure]()
            except (BalanceServiceError, KafkaException, httpx.HTTPError, psycopg.Error, OSError) as error:
                failures.append(f"{measure}: {error}")
                self._figures.notes.append(f"failed: {failures[-1]}")
                self._say(self._figures.notes[-1])
            keep()
        return failures

    def _replays(self) -> None:
        for customers in self._plan.customers:
            self._replays_of(customers)
            self._keep()
        if events := self._plan.long_events:
            customers = self._plan.customers[0]
            for side in (self._ours, self._theirs):
                run = self._replay(side, events, customers, "once")
                self._figures.add(side.name, "replay", replay_case(events, customers), **run.figures())

    def _replays_of(self, customers: int) -> None:
        """The first repetition tries all settings of Kafka Streams; the best for rates and for CPU are repeated."""
        events, times = self._plan.events, self._plan.repetitions
        case = replay_case(events, customers)
        repetition = 1

        def measure(side: Side, to: Figures) -> None:
            run = self._replay(side, events, customers, f"{repetition}/{times}")
            to.add(side.name, "replay", case, **run.figures())
            to.add(side.name, "start", "clean, jars present", ready=run.running - run.started)

        measure(self._ours, self._figures)
        settings = try_all(self._variants, self._figures, measure)
        fast = best(settings, "rate", case)
        cheap = least_unless_alike(settings, fast, "cpu_with_start", case)
        rest = [name for name in NAMES if name not in _OF_CPU]
        counting = [(fast, NAMES)] if cheap is fast else [(fast, rest), (cheap, _OF_CPU)]
        for setting, names in counting:
            self._figures.take(setting.figures, names)
        if len(settings) > 1:
            self._figures.notes += [
                told(f"replay, {case}", "rates and memory", fast),
                told(f"replay, {case}", "CPU", cheap),
            ]
        if customers == self._plan.customers[0]:
            self._theirs = fast.side
        turns = [(self._ours, NAMES), *((setting.side, names) for setting, names in counting)]
        for repetition in range(2, times + 1):
            for side, names in turns if repetition % 2 else reversed(turns):
                seen = Figures()
                measure(side, seen)
                self._figures.take(seen, names)

    def _in_turn(self, repetition: int, theirs: Side | None = None, ours: Side | None = None) -> Sequence[Side]:
        """Both sides, in alternating order, because the first may find the machine in another state."""
        sides = (ours or self._ours, theirs or self._theirs)
        return sides if repetition % 2 else sides[::-1]

    def _own_sides(self, repetition: int, models: Sequence[str] = MODELS[:1]) -> Sequence[Side]:
        """This service, or both checkouts in alternating order, with these models."""
        sides = [OurSide(self._stack, checkout, models) for checkout in dict.fromkeys((None, self._before))]
        return sides if repetition % 2 else sides[::-1]

    def _scaling(self) -> None:
        """Only this service, or both checkouts."""
        plan = self._plan
        load = self._loads.new(plan.scaled_events, plan.customers[0], partitions=_SCALED_PARTITIONS)
        for repetition in range(1, plan.repetitions + 1):
            for side in self._in_turn(repetition) if self._before else (self._ours,):
                rates: dict[int, float] = {}
                for instances in (1, 2, 3) if repetition % 2 else (3, 2, 1):
                    what = f"by {_instances(instances)}, {repetition}/{plan.repetitions}"
                    run = self._replay_load(side, load, what, instances)
                    rates[instances] = run.rate
                    self._add_rates(side, "scaling", _instances(instances), run)
                    self._figures.add(side.name, "scaling", _instances(instances), second_half=run.second_half)
                for instances in (2, 3):
                    of_one = rates[instances] / rates[1]
                    self._figures.add(side.name, "scaling", _instances(instances), of_one=of_one)

    def _restores(self) -> None:
        plan = self._plan
        load = self._loads.new(0, plan.keys, each_once=True)
        for repetition in range(1, plan.repetitions + 1):
            for side in self._in_turn(repetition):
                self._say(f"{side.name}: restore of {load.events:,} keys, {repetition}/{plan.repetitions}")
                measure_restore(self._stack, side, load, self._figures)

    def _freshness(self) -> None:
        plan = self._plan

        def measure(side: Side, to: Figures, sizes: Plan) -> None:
            # The measurement adds events, so each side has its own topic with the same load.
            load = self._loads.new(plan.small_events, plan.customers[0])
            rates = ", ".join(f"{rate:,}" for rate in sizes.rates)
            self._say(f"{_named(side)}: freshness at {rates} events/s")
            measure_freshness(self._stack, side, load, sizes, to)

        case = f"{plan.tried_rate:,} events/s"
        theirs = self._counting(measure, "freshness and idle", "cpu_event", case, least=True)
        for repetition in range(1, plan.repetitions + 1):
            for side in self._in_turn(repetition, theirs):
                measure(side, self._figures, plan)

    def _reads(self) -> None:
        plan = self._plan

        def measure(side: Side, to: Figures, sizes: Plan) -> None:
            load = self._loads.new(plan.small_events, plan.customers[0])
            self._say(f"{_named(side)}: local reads")
            measure_local_reads(self._stack, side, load, sizes, to)

        case = read_case("local", plan.connections[0], plan.read_rates[-1])
        theirs = self._counting(measure, "reads", "requests", case)
        for repetition in range(1, plan.repetitions + 1):
            for side in self._in_turn(repetition, theirs):
                measure(side, self._figures, plan)
                if repetition <= plan.proxied:
                    load = self._loads.new(plan.small_events, plan.customers[0])
                    self._say(f"{side.name}: proxied reads")
                    measure_proxied_reads(self._stack, side, load, plan, self._figures)

    def _committed(self) -> None:
        """Kafka Streams with transactional stores, which answers with committed state alone, as this service does."""
        if self._before is not None:
            raise BalanceServiceError("this compares with Kafka Streams; leave out --before")
        plan, customers = self._plan, self._plan.customers[0]

        def variants(intervals: Sequence[int]) -> Sequence[Side]:
            sizes = replace(plan, commit_intervals_ms=tuple(intervals))
            return settings_of(self._stack, sizes, more={"committed": "true"})

        def replayed(side: Side) -> Mapping[str, float | None]:
            return self._replay(side, plan.events, customers, "committed state").figures()

        def measure(side: Side, to: Figures, sizes: Plan) -> None:
            load = self._loads.new(plan.small_events, customers)
            self._say(f"{_named(side)}: freshness of committed state")
            measure_freshness(self._stack, side, load, replace(sizes, idle_seconds=0.0), to, "committed")

        case, theirs = replay_case(plan.events, customers), variants(plan.commit_intervals_ms)
        measure_both("committed", case, plan.rewards, self._figures, self._ours, theirs, replayed)
        self._keep()
        case, theirs = f"{plan.tried_rate:,} events/s", variants(plan.committed_intervals_ms)
        counts = self._counting(measure, "committed, freshness", "p50", case, least=True, variants=theirs)
        for repetition in range(1, plan.rewards + 1):
            for side in self._in_turn(repetition, counts):
                measure(side, self._figures, plan)

    def _moves(self) -> None:
        plan = self._plan
        load = self._loads.new(plan.small_events, plan.customers[0])
        for side in self._in_turn(1):
            self._say(f"{side.name}: an instance joins, leaves, is killed")
            measure_moves(self._stack, side, load, self._figures)
        models, partitions = plan.tasks[-2]
        tasks = models * partitions
        for side in self._own_sides(1, MODELS[:models]):
            load = self._loads.new(plan.waiting_events, plan.waiting_events // 2, partitions=partitions)
            self._say(f"{side.name}: an instance joins, {tasks} tasks")
            measure_moves_of_many(self._stack, side, load, tasks, self._figures)

    def _tasks(self) -> None:
        plan = self._plan
        for repetition, (models, partitions) in enumerate(plan.tasks, start=1):
            load = self._loads.kept(plan.waiting_events, plan.waiting_events // 2, partitions)
            tasks = models * partitions
            for side in self._own_sides(repetition, MODELS[:models]):
                self._say(f"{side.name}: {tasks} tasks")
                measure_tasks(self._stack, side, load, tasks, plan.idle_seconds, self._figures)
                self._keep()

    def _schema_ids(self) -> None:
        plan = self._plan
        for side in self._own_sides(1):
            few = 0.0
            for ids in plan.schema_ids:
                load = self._loads.new(plan.waiting_events, plan.waiting_events // 2)
                self._say(f"{side.name}: {ids_case(ids)}")
                restart = measure_schema_ids(self._stack, side, load, ids, self._figures)
                few = few or restart
                self._figures.add(side.name, "ids", ids_case(ids), of_few=restart / few)
                self._keep()

    def _first_event(self) -> None:
        plan = self._plan
        for start in range(1, plan.starts + 1):
            for side in self._own_sides(start):
                self._say(f"{side.name}: the first event, {start}/{plan.starts}")
                measure_first_event(self._stack, side, self._loads.new(0, plan.small_events), self._figures)
                self._keep()

    def _listeners(self) -> None:
        """Only this service: an earlier checkout may have no streams."""
        plan, side = self._plan, OurSide(self._stack)
        few, many = plan.listeners
        self._say(f"{side.name}: {delay_case(few)}")
        measure_delay(self._stack, side, self._loads.new(plan.small_events, few), few, plan, self._figures)
        self._keep()
        # Long enough to open the streams in its first half.
        load = self._loads.kept(plan.long_events or plan.events, plan.customers[0])
        with progress_bar(f"{self._elapsed} {side.name}: {cost_case(many)}", load.events) as (bar, task):
            measure_cost(self._stack, side, load, many, self._figures, lambda seen: bar.update(task, completed=seen))

    def _rewards(self) -> None:
        load = self._invoices()
        self._say("rewards: both sides in turn")
        measure_rewards(self._stack, load, self._plan, self._figures, "rewards", "rewards")

    def _purchases(self) -> None:
        load = self._invoices()
        self._say("purchases: both sides in turn")
        measure_purchases(self._stack, load, self._plan, self._figures)

    def _own_folds(self) -> None:
        """The models of `replay` and `rewards`, with folds in Python on our side too."""
        plan, ours = self._plan, OurSide(self._stack, models=["bench.own_folds:Balance"])
        load = self._invoices()
        self._say("own folds: rewards, both sides in turn")
        measure_rewards(self._stack, load, plan, self._figures, "own", "bench.own_folds:Rewards")
        self._keep()
        events, customers = plan.events, plan.customers[0]
        for repetition in range(1, plan.rewards + 1):
            for side in self._in_turn(repetition, ours=ours):
                run = self._replay(side, events, customers, f"{repetition}/{plan.rewards}")
                self._figures.add(side.name, "own", replay_case(events, customers), **run.figures())

    def _invoices(self) -> Invoices:
        if self._before is not None:
            raise BalanceServiceError("an earlier checkout may not have it; leave out --before")
        if self._of_tills is None:
            plan = self._plan
            with progress_bar(f"{self._elapsed} generating, {plan.cards:,} cards", plan.invoices) as (bar, task):
                self._of_tills = generate_invoices(
                    self._stack, plan.invoices, plan.cards, lambda more: bar.advance(task, more)
                )
        return self._of_tills

    def _leaderboard(self) -> None:
        plan = self._plan
        self._say(f"leaderboard: a table of {plan.players:,} rows, then {plan.scores:,} scores/s")
        measure_leaderboard(self._stack, plan.players, plan.scores, plan.probes, self._figures)

    def _generations(self) -> None:
        if self._before is not None:
            raise BalanceServiceError("an earlier checkout may not have them; leave out --before")
        plan = self._plan
        load = self._loads.new(plan.events, plan.customers[0])
        self._say(f"generations: rebuilds of {load.events:,} events, online and offline in turn")
        measure_rebuilds(self._stack, load, plan, self._figures)
        self._keep()
        self._say(f"generations: freshness at {plan.tried_rate:,} events/s, with and without a rebuild in turn")
        measure_building(self._stack, load, plan, self._figures)
        self._keep()
        load = self._loads.new(0, plan.keys, each_once=True)
        self._say(f"generations: comparisons of {load.events:,} keys")
        measure_comparison(self._stack, load, plan, self._figures)
        self._keep()
        for instances in plan.switched:
            load = self._loads.new(plan.small_events, plan.customers[0], partitions=2 * instances)
            self._say(f"generations: switches of {instances} instances")
            measure_switches(self._stack, load, instances, plan, self._figures)
            self._keep()

    def _postgresql(self) -> None:
        plan = self._plan
        with ExitStack() as cleanup:
            try:
                server = cleanup.enter_context(Server())
            except ConfigurationError as error:
                self._figures.notes.append(f"postgresql was skipped: {error}")
                return
            theirs = UpsertsSide(self._stack, server)
            self.settings[theirs.name] = dict(theirs.settings)
            events, customers = plan.events, plan.customers[0]
            for repetition in range(1, plan.repetitions + 1):
                for side in self._in_turn(repetition, theirs):
                    instances = 1 if side is self._ours else PARTITIONS
                    run = self._replay(side, events, customers, f"{repetition}/{plan.repetitions}", instances)
                    self._add_rates(side, "postgresql", replay_case(events, customers), run)

    def _quix(self) -> None:
        plan = self._plan
        try:
            side = QuixSide(self._stack)
        except ConfigurationError as error:
            self._figures.notes.append(f"quix was skipped: {error}")
            return
        self.settings[side.name] = dict(side.settings)
        events, customers = plan.quix_events, plan.customers[0]
        for repetition in range(1, plan.repetitions + 1):
            run = self._replay(side, events, customers, f"{repetition}/{plan.repetitions}", PARTITIONS, spread=True)
            self._add_rates(side, "quix", replay_case(events, customers), run)

    def _json(self) -> None:
        """The same events as documents and as Avro, in turn."""
        plan, avro = self._plan, OurSide(self._stack, name=AVRO)
        ours = OurSide(self._stack, models=["bench.json_balance:JsonBalance"])
        events, customers = plan.events, plan.customers[0]
        for repetition in range(1, plan.repetitions + 1):
            for side in self._in_turn(repetition, avro, ours):
                load = self._loads.kept(events, customers, is_json=side is ours)
                run = self._replay_load(side, load, f"{repetition}/{plan.repetitions}", 1)
                self._figures.add(side.name, "json", replay_case(events, customers), **run.figures())

    def _add_rates(self, side: Side, measure: str, case: str, run: Replay) -> None:
        self._figures.add(side.name, measure, case, rate=run.rate, rate_with_start=run.rate_with_start)

    def _counting(
        self,
        measure: Callable[[Side, Figures, Plan], None],
        what: str,
        name: str,
        case: str,
        *,
        least: bool = False,
        variants: Sequence[Side] = (),
    ) -> Side:
        """The setting of Kafka Streams with the best value of this figure, by short trials."""
        variants = variants or self._variants
        if len(variants) == 1:
            return variants[0]
        sizes = tried(self._plan)
        settings = try_all(variants, self._figures, lambda side, to: measure(side, to, sizes))
        counts = best(settings, name, case, least=least)
        self._figures.notes.append(told(what, "all figures", counts))
        return counts.side

    def _replay(
        self, side: Side, events: int, customers: int, which: str, instances: int = 1, *, spread: bool = False
    ) -> Replay:
        load = self._loads.kept(events, customers)
        return self._replay_load(side, load, which, instances, spread=spread)

    def _replay_load(self, side: Side, load: Load, which: str, instances: int, *, spread: bool = False) -> Replay:
        what = f"{self._elapsed} {_named(side)}: {load.customers:,} customers, {which}"
        with progress_bar(what, load.events) as (bar, task):
            return replay(
                self._stack, side, load, lambda seen: bar.update(task, completed=seen), instances, spread=spread
            )

    @property
    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        return f"{minutes:02}:{seconds:02}"

    def _say(self, what: str) -> None:
        self._console.print(f"{self._elapsed} {what}", highlight=False)


def _named(side: Side) -> str:
    return f"{side.name} ({side.variant})" if side.variant else side.name


def _instances(number: int) -> str:
    return f"{number} instance{'s' if number > 1 else ''}"
