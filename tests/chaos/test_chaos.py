"""Correctness while instances, broker and stores are killed, paused, disconnected and damaged, and during rebuilds.

`make chaos` plays a short round, `make chaos CHAOS_MINUTES=30` a long run; `CHAOS_SEED` reproduces a run. With
`CHAOS_BROKERS=3`, three brokers have every record, and their leaders and coordinators are killed in turn.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.chaos.audit import Audit, check_counters, stable_ends
from tests.chaos.checks import (
    PROGRESS_SECONDS,
    Violation,
    check_answers,
    check_movement,
    check_promises,
    check_served,
    check_staleness,
    check_starts,
    check_successions,
    check_told,
    check_undisturbed,
    successions,
)
from tests.chaos.clients import Commands, Enquiry, Readers, redrive_all
from tests.chaos.cluster import (
    IDEMPOTENCY_WINDOW_SECONDS,
    INSTANCES,
    Cluster,
    active_positions,
    stage_in,
    stage_of,
    tasks_of,
    urls_of,
    wait_until_applied,
)
from tests.chaos.faults import Chaos
from tests.chaos.listeners import Listeners
from tests.chaos.plan import BROKERS, plan_from_environment
from tests.chaos.rebuilder import Rebuilder, check_nothing_left, history_of
from tests.chaos.recount import Recount
from tests.chaos.report import Journal, Report, unstolen_time
from tests.chaos.workload import HEALING, Customers, Frames, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.chaos.clients import Answer
    from tests.chaos.plan import Plan, Round

_MINUTES = float(os.environ.get("CHAOS_MINUTES") or 0)
_TIMEOUT_SECONDS = 1_500 + 90 * _MINUTES
_CATCH_UP_SECONDS = 120.0
_REBUILD_SECONDS = 240.0
_MODEL = "balance"
_UNDISTURBED_SECONDS = 4.0


@pytest.mark.shows(
    "exactly-once",
    "exact",
    "dead-letter",
    "deterministic",
    "equal-copies",
    "retried-once",
    "position",
    "owner",
    "max-lag",
    "min-position",
    "404",
    "listener",
    "accepted",
    "idempotency-key",
    "takeover",
    "ready",
    "resume",
    "rebuild",
    "damaged-store",
    "broker-outage",
)
@pytest.mark.timeout(_TIMEOUT_SECONDS)
def test_no_event_is_lost_doubled_or_answered_wrongly_under_kills_pauses_and_damage(tmp_path: Path) -> None:
    plan = plan_from_environment()
    print(f"\nCHAOS_SEED={plan.seed} replays this run", flush=True)
    run = _Run(plan, tmp_path)
    with run.resources:
        run.play()
    print(run.report.table(), flush=True)
    assert not run.report.violations, f"{len(run.report.violations)} violations; CHAOS_SEED={plan.seed}"


class _Run:
    """One run from the first event to the last check."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._journal = Journal()
        self.report = Report(plan, self._journal)
        self.resources = ExitStack()
        self._stages: list[str] = []
        """The generations at the end, the one that serves first."""

    def play(self) -> None:
        """Plays the whole run; violations are in the report."""
        plan, say, enter = self._plan, self._journal.say, self.resources.enter_context
        say(f"starting {BROKERS} {'broker' if BROKERS == 1 else 'brokers'} and the registry")
        self._cluster = cluster = enter(
            Cluster(self._folder / "stack", plan.partitions, plan.standbys, plan.seed, BROKERS)
        )
        stack = cluster.stack
        self._frames = frames = Frames(stack.schema_registry_url, cluster.topic)
        self._customers = Customers(plan.early_customers, plan.early_customers // 8)
        self._workload = Workload(
            stack.bootstrap_servers, cluster.topic, plan.partitions, frames, self._customers, plan.seed
        )
        self._workload.seed_customers()
        self._workload.burst(plan.head_start)
        say(f"{self._workload.sent} records in {plan.partitions} partitions; starting {INSTANCES} instances")
        for member in cluster.members:
            member.launch()
        for member in cluster.members:
            member.wait_ready()
        say("all instances are ready")
        self._recount = Recount(
            stack.bootstrap_servers,
            stack.schema_registry_url,
            cluster.topic,
            plan.partitions,
            self._customers.homes,
            round(IDEMPOTENCY_WINDOW_SECONDS * 1000),
        )
        self._catch_up()
        say("all events so far are applied")
        addresses = [(member.host, member.port) for member in cluster.members]
        self._readers = enter(
            Readers(addresses, self._customers, self._workload.acked, plan.seed, plan.reads_per_second)
        )
        self._commands = enter(Commands(addresses, self._customers, plan.seed))
        self._listeners = enter(Listeners(addresses, self._customers, plan.seed))
        self._rebuilder = Rebuilder(_MODEL, partial(urls_of, cluster.members), plan.seed, HEALING.decode())
        self._chaos = Chaos(cluster, self._readers, self._journal, plan.seed)
        self._play_rounds()
        if self._is_over:
            return
        self._settle()
        self._compare_stores()
        if not self._is_over:
            self._compare_with_fresh_fold()

    @property
    def _is_over(self) -> bool:
        return self._plan.stops_early and bool(self.report.violations)

    def _play_rounds(self) -> None:
        """Plays as many rounds as the time allows, at least one."""
        rounds, began, longest = self._plan.rounds, time.monotonic(), 0.0
        for number, each in enumerate(rounds, start=1):
            round_began = time.monotonic()
            if number > 1 and round_began - began + longest > self._plan.seconds:
                self._journal.say(f"{number - 1} of {len(rounds)} rounds were played within the time")
                return
            self._journal.say(f"round {number} of {len(rounds)}")
            self._play_round(each)
            if self._is_over:
                return
            longest = max(longest, time.monotonic() - round_began)

    def _play_round(self, plan: Round) -> None:
        began, started = len(self._journal.entries), len(self._journal.starts)
        self._frames.expect_late()
        self._workload.sends_late = True
        self._workload.start(self._plan.rate)
        try:
            windows = [self._undisturbed()]
            # Present dead letters heal during the faults, later ones after the faults.
            self._frames.register_late()
            self._frames.expect_late()
            with self._rebuilder:
                self._chaos.play(plan)
            self._rebuilder.wait_built(_REBUILD_SECONDS)
            self._frames.register_late()
            self._check_progress()
            time.sleep(_UNDISTURBED_SECONDS)
        finally:
            self._workload.stop()
        self._journal.say(f"{self._workload.sent} records appended; catching up")
        self._catch_up()
        self._journal.say("redriving dead letters that can heal")
        self.report.add_violations(redrive_all(self._cluster.members, PROGRESS_SECONDS))
        silent = list(self._enquiry())
        windows.append(self._undisturbed())
        # Taken before the recount reads the topic, because commands continue.
        answers, promises = self._readers.take(), list(self._commands.promises)
        self._recount.read_on()
        self._journal.say(f"checking {len(answers)} answers")
        found = list(successions(answers, self._journal.entries[began:]))
        self.report.add_violations(self._served_when_answered(answers))
        self.report.add_answers(answers)
        self.report.add_successions(found)
        self.report.add_violations(check_successions(found))
        self.report.add_violations(check_starts(self._journal.starts[started:], self._journal.outages))
        self.report.add_violations(check_undisturbed(answers, windows))
        self.report.add_violations(check_movement(answers, self._workload.acks, self._journal.outages))
        self.report.add_violations(check_answers(answers, self._recount))
        told = self._listeners.take()
        self._journal.say(f"checking {len(told)} events of listeners")
        self.report.add_violations(check_told(told, self._recount))
        self.report.add_violations(self._listeners.take_violations())
        self.report.add_violations(check_staleness(answers, self._workload.acks))
        self.report.add_violations(check_promises(promises, self._recount))
        self.report.add_violations(Violation("status", detail) for detail in self._commands.take_refusals())
        self.report.add_violations(self._rebuilder.take_violations())
        self.report.add_violations(Violation("crash", detail) for detail in self._journal.take_unexpected())
        self.report.add_violations(silent)
        if not told:
            self.report.add_violations([Violation("listener", "no listener received a change in this round")])
        assert not self._readers.failures, self._readers.failures
        assert not self._listeners.failures, self._listeners.failures

    def _served_when_answered(self, answers: Sequence[Answer]) -> Iterator[Violation]:
        served = history_of(self._cluster.stack, self._cluster.application_id, _MODEL).served
        return check_served(answers, served)

    def _undisturbed(self) -> tuple[float, float]:
        """Waits for some seconds without faults; returns their start and end."""
        began = time.monotonic()
        time.sleep(_UNDISTURBED_SECONDS)
        return began, time.monotonic()

    def _settle(self) -> None:
        """Stops commands, and waits until two generations have applied everything."""
        self._commands.stop()
        cluster = self._cluster
        self._rebuilder.settle(2 * _REBUILD_SECONDS)
        self._recount.read_on()
        history = history_of(cluster.stack, cluster.application_id, _MODEL)
        self._stages = [stage_of(_MODEL, number) for number in sorted(history.live, key=history.serving.__ne__)]
        for stage in self._stages:
            self._catch_up(stage)
        self.report.add_violations(
            check_nothing_left(cluster.stack, cluster.application_id, _MODEL, cluster.members, PROGRESS_SECONDS)
        )
        self.report.add_violations(self._rebuilder.take_violations())
        self.report.add_violations(history.violations)
        self.report.requests = self._rebuilder.requests
        self.report.generations = history.actions
        self.report.add_violations(check_promises(self._commands.promises, self._recount))
        self.report.add_violations(self._listeners.end_right(self._recount, PROGRESS_SECONDS))

    def _enquiry(self) -> Iterator[Violation]:
        self._journal.say("querying all instances")
        ends = [count.end for count in self._recount.partitions]
        addresses = [(member.host, member.port) for member in self._cluster.members]
        with closing(Enquiry(addresses, self._readers, self._customers, ends, PROGRESS_SECONDS)) as enquiry:
            yield from enquiry.all_instances_answer(random.Random(self._plan.seed))
            if self._plan.standbys:
                yield from enquiry.standbys_answer()
        if not self._commands.take_accepted():
            yield Violation("silent", "no command was accepted in this round")

    def _check_progress(self) -> None:
        """Checks that every partition moves within the session timeout and 10 s after all faults.

        Assumes one processor per instance and one for the broker; time stolen by other machines does not count.
        """
        healed, members = unstolen_time(), self._cluster.members
        seen_first: dict[int, int] = {}
        stuck = set(range(self._plan.partitions))
        while stuck:
            for partition, position in active_positions(members).items():
                if position > seen_first.setdefault(partition, position):
                    stuck.discard(partition)
            after = unstolen_time() - healed
            if stuck and after > PROGRESS_SECONDS:
                # Records beyond an open transaction of a producer cannot be read.
                ends = stable_ends(self._cluster.stack.bootstrap_servers, self._cluster.topic, self._plan.partitions)
                stuck = {partition for partition in stuck if ends[partition] > seen_first.get(partition, -1)}
            if stuck and after > PROGRESS_SECONDS:
                detail = f"partitions {sorted(stuck)} stand still {after:.0f} s after healing"
                self.report.add_violations([Violation("stuck", detail)])
                return
            time.sleep(0.1)
        self.report.progress.append(unstolen_time() - healed)
        self._journal.say(f"every partition continues, {self.report.progress[-1]:.1f} s after healing")

    def _catch_up(self, stage: str | None = None) -> None:
        """Waits as `wait_until_applied`."""
        wait_until_applied(self._cluster.members, self._recount, _CATCH_UP_SECONDS, stage)

    def _compare_stores(self) -> None:
        """Compares changelog, dead letters and stores with the recount, with everything stopped."""
        self._wait_for_standbys()
        self._readers.__exit__()
        answers = self._readers.take()
        self.report.add_violations(self._served_when_answered(answers))
        self.report.add_answers(answers)
        self.report.add_violations(check_answers(answers, self._recount))
        told = self._listeners.take()
        self._journal.say(f"checking {len(told)} events of listeners")
        self.report.add_violations(check_told(told, self._recount))
        self.report.add_violations(self._listeners.take_violations())
        self.report.add_violations(check_staleness(answers, self._workload.acks))
        self._journal.say("stopping the instances")
        stores = [path for member in self._cluster.members for path in member.stores()]
        for member in self._cluster.members:
            self._chaos.check_alive(member)
        self.report.add_violations(Violation("crash", detail) for detail in self._journal.take_unexpected())
        self._cluster.stop_instances()
        for member in self._cluster.members:
            self.report.add_violations(Violation("crash", detail) for detail in member.unexpected())
        self._audits = [self._read_audit(self._cluster.application_id, stage) for stage in self._stages]
        self._journal.say(f"comparing changelogs of {self._stages}, dead letters and stores with the recount")
        for audit in self._audits:
            self.report.add_violations(audit.balances(self._recount))
            self.report.add_violations(audit.markers(self._recount))
            self.report.add_violations(audit.positions(self._recount))
            self.report.add_violations(audit.stores(stores, 1 + self._plan.standbys))
        serving, *others = self._audits
        self.report.add_violations(serving.dead_letters(self._recount))
        if not all(serving.sends()) or any(any(other.sends()) for other in others):
            detail = {audit.stage: audit.sends() for audit in self._audits}
            self.report.add_violations([Violation("generation", f"not only {serving.stage} sends outputs: {detail}")])
        self.report.records = self._recount.totals()
        self.report.commands = self._commands.statuses
        self.report.silences = sum(self._readers.silences.values())

    def _wait_for_standbys(self) -> None:
        """Waits until each partition has the expected number of copies at its end; their contents are checked later."""
        deadline = time.monotonic() + PROGRESS_SECONDS
        ends = [count.end for count in self._recount.partitions]
        while time.monotonic() < deadline:
            tasks = [*tasks_of(self._cluster.members)]
            caught_up = [(stage_in(t["task"]), t["partition"]) for t in tasks if t["position"] >= ends[t["partition"]]]
            places = [(stage, p) for stage in self._stages for p in range(self._plan.partitions)]
            if all(caught_up.count(place) >= 1 + self._plan.standbys for place in places):
                return
            time.sleep(0.2)

    def _compare_with_fresh_fold(self) -> None:
        """Checks that another application that folds the source from its start gets the same result."""
        fresh_id = f"{self._cluster.application_id}-fresh"
        fresh = self._cluster.member(
            INSTANCES, {"BALANCE_APPLICATION_ID": fresh_id, "BALANCE_NUM_STANDBY_REPLICAS": "0"}
        )
        self._journal.say("folding the source from its start")
        fresh.launch()
        try:
            fresh.wait_ready()
            wait_until_applied([fresh], self._recount, _CATCH_UP_SECONDS)
            metrics = fresh.metrics()
        finally:
            fresh.stop()
        rebuilt = self._read_audit(fresh_id, _MODEL)
        self.report.add_violations(check_counters(metrics, self._recount))
        self.report.add_violations(rebuilt.balances(self._recount))
        self.report.add_violations(rebuilt.dead_letters(self._recount))
        for audit in self._audits:
            self.report.add_violations(audit.same_states(rebuilt, self._recount.window_ms))

    def _read_audit(self, application_id: str, stage: str) -> Audit:
        stack = self._cluster.stack
        return Audit(
            stack.bootstrap_servers,
            stack.schema_registry_url,
            self._cluster.topic,
            application_id,
            self._plan.partitions,
            stage,
        )
