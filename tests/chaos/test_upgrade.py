"""Instances of the release before are replaced by this one, and back, one by one and under load.

Generations are built and switched, dead letters are retried, and streams are open. Both versions fold, answer
and send for a while, so each reads what the other one writes: directory, changelogs, stores, and topics of generations.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pytest

from bench.watch import gaps_of
from tests.chaos.audit import Audit
from tests.chaos.checks import (
    PROGRESS_SECONDS,
    SHARE,
    Violation,
    check_answers,
    check_promises,
    check_staleness,
    check_told,
)
from tests.chaos.clients import Commands, Readers
from tests.chaos.cluster import IDEMPOTENCY_WINDOW_SECONDS, Cluster, stage_of, urls_of, wait_until_applied
from tests.chaos.listeners import Listeners
from tests.chaos.rebuilder import Rebuilder, check_nothing_left, history_of
from tests.chaos.recount import Recount
from tests.chaos.report import Journal
from tests.chaos.systems import Hops, SystemWorkload
from tests.chaos.workload import Customers, Frames, Workload
from tests.support.former import FORMER_RELEASE, checked_out
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.chaos.clients import Answer
    from tests.chaos.cluster import Member

_PARTITIONS = 4
_SEED = 5
# Nine restarts of instances with three models each, and the generations that are built, leave two processors little.
_RATE, _READS = 40.0, 60.0
_BETWEEN_REBUILDS = (3.0, 10.0)
_MODELS = ("balance", "rewards", "leaderboard")
_REBUILT = ("balance", "rewards")
_SECONDS = 240.0
_AT_REST_SECONDS = 4.0
_READY_SECONDS = 400.0
_REMOVED_SECONDS = 5 * SHARE
"""How long a partition is without an owner after an orderly removal, as promised."""


class _Restart(NamedTuple):
    """An instance that was stopped and started, and the times until it was ready again."""

    phase: str
    began: float
    ended: float


@pytest.mark.timeout(3_600)
def test_instances_are_upgraded_and_rolled_back_one_by_one_under_load(tmp_path: Path) -> None:
    former = checked_out(tmp_path / "former")
    with ExitStack() as resources:
        run = _Run(tmp_path / "stack", former, resources)
        found = run.play()
    assert not found, found[:10]


class _Run:
    """One run from the first event to the last check."""

    def __init__(self, folder: Path, former: Path, resources: ExitStack) -> None:
        self._journal = Journal()
        self._former = former
        self._resources = resources
        # Most of what ten starts of three models take is the JVM's second compiler, which pays after minutes.
        settings = {
            "BALANCE_MODELS": ",".join(_MODELS),
            "BALANCE_PARTITIONS": "2",
            "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
        }
        self._cluster = resources.enter_context(
            Cluster(folder, _PARTITIONS, 1, _SEED, checkout=former, settings=settings)
        )
        # A rebuild that another version begins tries an event again that had overflowed, and may apply it.
        self._customers = Customers(200, 25, whales=0)
        stack, topic = self._cluster.stack, self._cluster.topic
        frames = Frames(stack.schema_registry_url, topic)
        self._workload = Workload(stack.bootstrap_servers, topic, _PARTITIONS, frames, self._customers, _SEED)
        self._recount = Recount(
            stack.bootstrap_servers,
            stack.schema_registry_url,
            topic,
            _PARTITIONS,
            self._customers.homes,
            round(IDEMPOTENCY_WINDOW_SECONDS * 1000),
        )
        self._answers: list[Answer] = []

    def play(self) -> list[Violation]:
        """Plays the whole run; returns the violations."""
        members, enter = self._cluster.members, self._resources.enter_context
        self._workload.seed_customers()
        self._workload.burst(2_000)
        self._journal.say(f"starting three instances of {FORMER_RELEASE[:8]}")
        for member in members:
            _started(member)
        wait_until_applied(members, self._recount, _SECONDS)
        systems = enter(SystemWorkload(self._cluster.stack, _SEED))
        addresses = [(member.host, member.port) for member in members]
        readers = enter(Readers(addresses, self._customers, self._workload.acked, _SEED, _READS))
        commands = enter(Commands(addresses, self._customers, _SEED))
        listeners = enter(Listeners(addresses, self._customers, _SEED))
        rebuilders = [
            Rebuilder(model, partial(urls_of, members), _SEED, pause_seconds=_BETWEEN_REBUILDS) for model in _REBUILT
        ]
        self._workload.start(_RATE)
        systems.start()
        for rebuilder in rebuilders:
            self._resources.callback(rebuilder.stop)
            rebuilder.start()
        restarts = [
            *self._restarted("the same version", self._former),
            *self._restarted("upgrade", None),
            *self._restarted("back", self._former),
        ]
        for rebuilder in rebuilders:
            rebuilder.stop()
        self._answers, acks = readers.take(), list(self._workload.acks)
        self._workload.stop()
        systems.stop()
        commands.stop()
        for rebuilder in rebuilders:
            rebuilder.settle(2 * _SECONDS)
        wait_until_applied(members, self._recount, _SECONDS)
        self._journal.say(f"recounting; requests: {[dict(rebuilder.requests) for rebuilder in rebuilders]}")
        told = listeners.take()
        found = [
            *check_answers(self._answers, self._recount),
            *check_staleness(self._answers, acks),
            *check_promises(commands.promises, self._recount),
            *check_told(told, self._recount),
            *listeners.take_violations(),
            *(Violation("status", refusal) for refusal in commands.take_refusals()),
            *(one for rebuilder in rebuilders for one in rebuilder.take_violations()),
            *self._generations(),
            *self._outputs(),
            *self._gaps(restarts),
        ]
        self._cluster.stop_instances()
        found += [Violation("crash", line) for member in members for line in member.unexpected()]
        assert len(commands.promises) > 10
        assert told, "no listener received a change"
        return found

    def _restarted(self, phase: str, checkout: Path | None) -> Iterator[_Restart]:
        """Restarts one instance after the other with a version."""
        for member in self._cluster.members:
            time.sleep(_AT_REST_SECONDS)
            self._journal.fault("stop", member.name, detail=phase)
            began = time.monotonic()
            member.stop()
            member.change_version(checkout)
            _started(member)
            self._journal.say(f"{member.name} is ready after {time.monotonic() - began:.1f} s")
            time.sleep(_AT_REST_SECONDS)
            yield _Restart(phase, began, time.monotonic())

    def _gaps(self, restarts: Sequence[_Restart]) -> Iterator[Violation]:
        """Checks that no partition has no owner for longer than at a restart of the same version.

        Restarts of one version differ among themselves, and what is promised of an orderly removal may be used up.
        """
        longest: dict[str, float] = {}
        for restart in restarts:
            for partition in range(_PARTITIONS):
                looks = sorted(
                    (one.received, one.position)
                    for one in self._answers
                    if one.speaks and one.role == "active" and one.partition == partition
                )
                gap = gaps_of([look for look in looks if look[0] <= restart.ended], restart.began, restart.ended)
                longest[restart.phase] = max(longest.get(restart.phase, 0.0), gap.silence)
        self._journal.say(f"longest times without an owner: { {name: round(s, 2) for name, s in longest.items()} }")
        bound = max(longest["the same version"], _REMOVED_SECONDS)
        for phase, seconds in longest.items():
            if seconds > bound:
                yield Violation("silent", f"{phase}: a partition had no owner for {seconds:.1f} s, not {bound:.1f}")

    def _generations(self) -> Iterator[Violation]:
        stack, application_id = self._cluster.stack, self._cluster.application_id
        for model in _REBUILT:
            history = history_of(stack, application_id, model)
            self._journal.say(f"{model}: {dict(history.actions)}")
            yield from history.violations
            yield from check_nothing_left(stack, application_id, model, self._cluster.members, PROGRESS_SECONDS)
        for generation in history_of(stack, application_id, "balance").live:
            stage = stage_of("balance", generation)
            wait_until_applied(self._cluster.members, self._recount, _SECONDS, stage)
            audit = Audit(
                stack.bootstrap_servers,
                stack.schema_registry_url,
                self._cluster.topic,
                application_id,
                _PARTITIONS,
                stage,
            )
            yield from audit.balances(self._recount)
            yield from audit.markers(self._recount)
            yield from audit.positions(self._recount)
            if generation == history_of(stack, application_id, "balance").serving:
                yield from audit.dead_letters(self._recount)

    def _outputs(self) -> Iterator[Violation]:
        stack, application_id = self._cluster.stack, self._cluster.application_id

        def violations() -> list[Violation]:
            return list(Hops(stack, application_id).violations(("rewards", "leaderboard")))

        try:
            eventually(lambda: not violations(), "the outputs equal the recount", _SECONDS)
        except AssertionError:
            yield from violations()


def _started(member: Member) -> None:
    member.launch()
    eventually(lambda: member.instance.is_ready() or not member.running, f"{member.name} is ready", _READY_SECONDS)
    member.instance.require_running()
