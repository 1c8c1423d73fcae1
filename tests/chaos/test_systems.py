"""Models on several topics, rebuilt, killed between any two steps and stalled: all emitted records equal a recount.

`make chaos` plays this after the balances. Of `CHAOS_SEED`, `CHAOS_MINUTES` and `CHAOS_FAULTS` it uses the faults that
kill at a step or restart the broker.
"""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from balance_service.devtools.local.stack import LocalInstance, LocalStack
from tests.chaos.audit import compacted, digest, read_committed, states
from tests.chaos.checks import PROGRESS_SECONDS, STRIKE_SECONDS, Violation
from tests.chaos.cluster import Member, stage_in, stage_of, tasks_of, urls_of
from tests.chaos.plan import BROKERS, Offers, plan_from_environment
from tests.chaos.rebuilder import Rebuilder, check_nothing_left, history_of
from tests.chaos.report import Journal, unstolen_time
from tests.chaos.systems import COMPACTED, KEPT, MODELS, PARTITIONS, TRANSFORMED, Hops, SystemWorkload
from tests.support.commands import run
from tests.support.kafka import create_topic
from tests.support.service import SESSION_TIMEOUT_SECONDS, on
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.chaos.plan import Plan

_SOURCES = {
    "rewards-by-customerCardNo": "pos",
    "purchases": "pos",
    "leaderboard-by-player_id": "score-events",
    "item-sales-by-storeId-item": "pos",
    KEPT: KEPT,
}
_INNER = {
    "rewards": "rewards-by-customerCardNo",
    "leaderboard-by-product_id": "leaderboard-by-player_id",
    "leaderboard": "leaderboard-by-product_id",
    "item-sales": "item-sales-by-storeId-item",
}
# A commit has at most one state for each of six cards.
_FEW_RECORDS = 2
_MINUTES = float(os.environ.get("CHAOS_MINUTES") or 0)
_LOOK_SECONDS = 0.1
# Sometimes longer than the session timeout, so that others have taken over when the instance returns.
_DOWN_SECONDS = SESSION_TIMEOUT_SECONDS + 2
_STALL_SECONDS = SESSION_TIMEOUT_SECONDS + 1
_CATCH_UP_SECONDS = 240.0
_UNDISTURBED_SECONDS = 8.0
_KILL_AT = "kill-at-"
_REBUILT = ("rewards", "leaderboard")
# Instances load a model from here.
_ROOT = Path(__file__).parents[2]


@pytest.mark.shows("rebuild", "outputs-once", "joined", "whole-range", "spread")
@pytest.mark.timeout(2_400 + 90 * _MINUTES)
def test_outputs_joins_and_answers_equal_a_recount_under_kills(tmp_path: Path) -> None:
    plan = plan_from_environment()
    print(f"\nCHAOS_SEED={plan.seed} replays this run", flush=True)
    with ExitStack() as resources:
        play = _Systems(plan, tmp_path, resources)
        violations = play.play()
    assert not violations, f"{len(violations)} violations; CHAOS_SEED={plan.seed}"


class _Systems:
    """One run from the first record to the last check."""

    def __init__(self, plan: Plan, folder: Path, resources: ExitStack) -> None:
        self._plan = plan
        self._folder = folder
        self._journal = Journal()
        self._chooser = random.Random(plan.seed)
        self._rounds = 0
        self._stack = resources.enter_context(LocalStack(folder / "stack", brokers=BROKERS))
        self._application_id = f"systems-{uuid.uuid4().hex[:8]}"
        self._settings = on(
            self._stack,
            {
                "BALANCE_APPLICATION_ID": self._application_id,
                "BALANCE_MODELS": ",".join(
                    (*MODELS, "tests.chaos.item_sales:ItemSales", "tests.chaos.kept_rows:KeptRows")
                ),
                "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "BALANCE_PARTITIONS": str(PARTITIONS),
                # Scores of players without a row are retried continuously.
                "BALANCE_RETRY_EVERY": "2",
                "BALANCE_SESSION_TIMEOUT_MS": str(int(SESSION_TIMEOUT_SECONDS * 1000)),
            },
        )
        # A long run has three instances.
        self._members = [
            Member(
                LocalInstance(number + 1, self._stack, environment=self._settings),
                self._stack,
                _FEW_RECORDS,
                is_next_small=(number + plan.seed) % 2 == 0,
            )
            for number in range(3 if _MINUTES else 2)
        ]
        create_topic(self._stack, KEPT, COMPACTED, PARTITIONS)
        # Spark analyses a transform.
        created = run(self._settings, "topics", "create", seconds=180)
        assert created.code == 0, created
        self._workload = resources.enter_context(SystemWorkload(self._stack, plan.seed, keeps_rows=True))
        for member in self._members:
            resources.callback(member.stop)
        self._rebuilders = {model: Rebuilder(model, partial(urls_of, self._members), plan.seed) for model in _REBUILT}
        for rebuilder in self._rebuilders.values():
            resources.callback(rebuilder.stop)

    def play(self) -> list[Violation]:
        """Plays the whole run; returns the violations."""
        began, violations = time.monotonic(), list[Violation]()
        for number, each in enumerate(self._plan.rounds, start=1):
            faults = [fault for lane in each.chunks for chunk in lane for fault in chunk if fault.startswith(_KILL_AT)]
            round_began = time.monotonic()
            self._play_round(faults, restarts_broker=bool(each.broker_faults))
            violations += self._told(self._checked())
            longest = time.monotonic() - round_began
            if violations or time.monotonic() - began + longest > self._plan.seconds:
                self._journal.say(f"{number} of {len(self._plan.rounds)} rounds were played")
                break
        if not violations:
            violations += self._told(self._rebuilt())
        return violations

    def _play_round(self, faults: Sequence[str], *, restarts_broker: bool) -> None:
        """Kills instances at one fail point after another; at the end all run and have applied everything."""
        self._rounds += 1
        points = [fault.removeprefix(_KILL_AT) for fault in faults]
        offers = Offers(self._folder / f"offers-{self._rounds}", points, self._chooser)
        for member in self._members:
            if member.running:
                member.stop()
        offers.offer()
        for member in self._members:
            member.launch(offers.specification(), in_parts=offers.in_parts)
        self._workload.start()
        for rebuilder in self._rebuilders.values():
            rebuilder.start()
        stalls = True
        while offers.left:
            self._wait_for_death(offers)
            for member in self._members:
                if not member.running:
                    self._follow(member, offers)
            if stalls:
                stalls = False
                self._stall(self._chooser.choice(self._members))
            if restarts_broker and len(offers.left) <= len(points) // 2:
                restarts_broker = False
                broker = self._chooser.choice(self._stack.brokers)
                self._journal.fault("restart-broker", detail=broker.name)
                broker.kill()
                time.sleep(self._chooser.uniform(0, 2))
                broker.start()
        for member in self._members:
            member.wait_ready()
        time.sleep(_UNDISTURBED_SECONDS)
        for rebuilder in self._rebuilders.values():
            rebuilder.stop()
        self._workload.stop()
        self._journal.say(f"{self._workload.sent} purchases and as many scores; catching up")
        for rebuilder in self._rebuilders.values():
            rebuilder.settle(_CATCH_UP_SECONDS)
        eventually(self._is_caught_up, lambda: f"not caught up: {list(tasks_of(self._members))}", _CATCH_UP_SECONDS)

    def _wait_for_death(self, offers: Offers) -> None:
        """Waits until an instance has died. Fails after several times the promised recovery time."""
        began = unstolen_time()
        while all(member.running for member in self._members):
            self._workload.check()
            assert unstolen_time() - began < STRIKE_SECONDS, (
                f"{offers.left[0]} was not reached within {STRIKE_SECONDS:.0f} s, with a load of {os.getloadavg()}: "
                f"{list(tasks_of(self._members))}"
            )
            time.sleep(_LOOK_SECONDS)

    def _follow(self, member: Member, offers: Offers) -> None:
        """Records how an instance died, leaves it down for a while, and starts it with the next point offered."""
        strike = member.strike()
        if strike is None:
            self._journal.record_unexpected(f"{member.name} ended unexpectedly")
        else:
            detail = f"{offers.taken(strike):.1f} s after it was offered"
            self._journal.fault(f"{_KILL_AT}{strike.point}", member.name, detail=detail)
        member.kill()
        time.sleep(self._chooser.uniform(0, _DOWN_SECONDS))
        offers.offer()
        member.launch(offers.specification(), in_parts=offers.in_parts)

    def _stall(self, member: Member) -> None:
        """Stops an instance for so long that others take over, and lets it go on."""
        self._journal.fault("stall", member.name)
        member.signal_all(signal.SIGSTOP)
        time.sleep(_STALL_SECONDS)
        member.signal_all(signal.SIGCONT)

    def _is_caught_up(self) -> bool:
        """Whether every stage, of all generations, has reached the end of its source, earlier stages first."""
        tasks = {task["task"]: task["position"] for task in tasks_of(self._members) if task["state"] == "RUNNING"}
        for stage, source in (*_SOURCES.items(), *((s, f"{self._application_id}-{of}") for s, of in _INNER.items())):
            records = read_committed(self._stack.bootstrap_servers, source, PARTITIONS)
            for partition, of_it in enumerate(records):
                for generation in self._live(stage) if stage in _REBUILT else (1,):
                    if of_it and tasks.get(f"{stage_of(stage, generation)}_{partition}", -1) <= of_it[-1].offset:
                        return False
        return True

    def _live(self, model: str) -> Iterable[int]:
        return history_of(self._stack, self._application_id, model).live

    def _checked(self) -> Iterator[Violation]:
        self._journal.say("recounting")
        hops = Hops(self._stack, self._application_id)
        yield from (Violation("crash", detail) for detail in self._journal.take_unexpected())
        yield from hops.violations((*MODELS, TRANSFORMED))
        yield from self._spread_checked()
        yield from self._generations_checked()
        points, leaderboard, item_sales = hops.points(), hops.leaderboard(), hops.item_sales()
        for member in self._members:
            with httpx.Client(base_url=member.instance.url, timeout=30) as http:
                for card, expected in points.items():
                    answer = http.get("/api/customers.getRewards", params={"customerCardNo": card})
                    if answer.text != f'{{"points":{expected:.4f}}}':
                        yield Violation("wrong", f"{member.name} answers {answer.text} of {card}, not {expected}")
                for (store, item), (lines, revenue) in item_sales.items():
                    answer = http.get("/api/models/item-sales/keys", params={"storeId": store, "item": item})
                    if f'"value":{{"lines":{lines},"revenue":{revenue:.2f}}}' not in answer.text:
                        sold = (lines, revenue)
                        yield Violation("wrong", f"{member.name} answers {answer.text} of {item}, not {sold}")
                for key, row in self._workload.kept.items():
                    answer = http.get(f"/api/models/{KEPT}/keys/{key}")
                    should_be = (404, "") if row is None else (200, f'{{"key":"{key}","value":{row}}}')
                    if (answer.status_code, answer.text if row else "") != should_be:
                        yield Violation("wrong", f"{member.name} answers {answer.text} of {key}, not {row}")
                answers = {
                    "/leaderboard": leaderboard,
                    f"/api/models/{KEPT}/count": {"count": len([*filter(None, self._workload.kept.values())])},
                    "/leaderboard/count": {"count": len(leaderboard)},
                    "/api/models/rewards/count": {"count": len(points)},
                    "/api/models/item-sales/count": {"count": len(item_sales)},
                }
                for path, should in answers.items():
                    if (detail := http.get(path).json()) != should:
                        yield Violation("wrong", f"{member.name} answers {detail} to {path}, not {should}")

    def _spread_checked(self) -> Iterator[Violation]:
        """Checks that each partition of each stage has one owner, and that instances own as many, or one more."""
        deadline = time.monotonic() + PROGRESS_SECONDS
        while (uneven := self._uneven()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        yield from (Violation("uneven", detail) for detail in uneven)

    def _uneven(self) -> list[str]:
        owned = [[task["task"] for task in tasks_of([member]) if task["role"] == "active"] for member in self._members]
        found = []
        names = (*_SOURCES, *_INNER)
        live = [stage_of(name, n) for name in names for n in (self._live(name) if name in _REBUILT else (1,))]
        for stage in sorted({*map(stage_in, chain(*owned)), *live}):
            of_stage = [[task for task in tasks if stage_in(task) == stage] for tasks in owned]
            counts = sorted(map(len, of_stage))
            if sorted(chain(*of_stage)) != [f"{stage}_{p}" for p in range(PARTITIONS)] or counts[-1] - counts[0] > 1:
                found.append(f"{stage} is owned as {of_stage}")
        return found

    def _generations_checked(self) -> Iterator[Violation]:
        """Checks that two generations have the same states byte for byte, and that nothing is left of others."""
        for model, rebuilder in self._rebuilders.items():
            history = history_of(self._stack, self._application_id, model)
            self._journal.say(f"{model}: {dict(history.actions)}, by {dict(rebuilder.requests)}")
            yield from history.violations
            yield from rebuilder.take_violations()
            states = {number: self._states(stage_of(model, number)) for number in sorted(history.live)}
            if any(digests != states[history.serving] for digests in states.values()):
                yield Violation("digest", f"generations of {model} have the states {states}")
            yield from check_nothing_left(self._stack, self._application_id, model, self._members, PROGRESS_SECONDS)

    def _rebuilt(self) -> Iterator[Violation]:
        """Checks that a rebuild without an instance yields the same states byte for byte and emits nothing."""
        self._journal.say("rebuilding")
        for rebuilder in self._rebuilders.values():
            rebuilder.leave_one(_CATCH_UP_SECONDS)
        for member in self._members:
            member.stop()
            member.keep_log()
            yield from (Violation("crash", detail) for detail in member.unexpected())
        hops = Hops(self._stack, self._application_id)
        before, sent = self._serving_states(), hops.sent()
        for model in _REBUILT:
            done = run(
                self._settings | {"BALANCE_STATE_DIR": str(self._folder / "rebuilt")},
                "rebuild",
                "--offline",
                model,
                seconds=300,
            )
            assert done.code == 0, done
        if (after := self._serving_states()) != before:
            yield Violation("digest", f"after a rebuild the states of {_REBUILT} are {after}, not {before}")
        if hops.sent() != sent:
            yield Violation("doubled", f"after rebuilds the topics have {hops.sent()}, not {sent}")

    def _serving_states(self) -> list[list[str]]:
        """Returns the states of each rebuilt model's generation that serves, as `_states`."""
        serving = {model: history_of(self._stack, self._application_id, model).serving for model in _REBUILT}
        return [self._states(stage_of(model, number)) for model, number in serving.items()]

    def _states(self, stage: str) -> list[str]:
        """Returns a digest of each partition's states."""
        changelog = f"{self._application_id}-{stage}-changelog"
        logs = read_committed(self._stack.bootstrap_servers, changelog, PARTITIONS)
        return [digest(states(compacted(records))) for records in logs]

    def _told(self, found: Iterator[Violation]) -> list[Violation]:
        violations = list(found)
        for violation in violations:
            self._journal.say(f"VIOLATION ({violation.kind}): {violation.detail}")
        return violations
