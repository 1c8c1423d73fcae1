"""Plays the faults of a round: one thread (lane) per instance, and the brokers' faults in the calling thread.

At most two instances are disturbed at a time: a lane holds its permit from its first fault until its instance is ready
again, so one of the three always serves.
"""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from tests.chaos.brokers import GROUPS, TRANSACTIONS, coordinator_of, leader_of
from tests.chaos.checks import STRIKE_SECONDS
from tests.chaos.cluster import SESSION_TIMEOUT_SECONDS, stood_by
from tests.chaos.plan import OPENING_POINTS, PARTS_POINT, SWITCH_POINT
from tests.chaos.report import unstolen_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from balance_service.devtools.local.broker import Broker
    from tests.chaos.clients import Readers
    from tests.chaos.cluster import Cluster, Member
    from tests.chaos.plan import Round
    from tests.chaos.report import Journal

_FLIPS = 24
_FOOTER_BYTES = 64
_IN_USE_SECONDS = 5.0


def delete_store(state_dir: Path, chooser: random.Random) -> str | None:
    """Deletes one store; returns its name, or None if there is none."""
    stores = _in_use(state_dir)
    if not stores:
        return None
    store = chooser.choice(stores)
    shutil.rmtree(store)
    return store.name


def damage_store(state_dir: Path, chooser: random.Random) -> str | None:
    """Flips bytes in a table file, or truncates a write-ahead log; returns a description, or None without a file."""
    stores = _in_use(state_dir)
    tables = [path for store in stores for path in store.glob("*.sst") if path.stat().st_size > 200]
    if tables and chooser.random() < 0.7:
        table = chooser.choice(sorted(tables))
        _flip(table, chooser)
        return f"{_FLIPS} bytes flipped in {table.parent.name}/{table.name}"
    logs = [path for store in stores for path in store.glob("*.log") if path.stat().st_size > 10]
    if not logs:
        return None
    log = chooser.choice(sorted(logs))
    size = log.stat().st_size
    with log.open("r+b") as file:
        file.truncate(chooser.randint(size // 4, size - 1))
    return f"{log.parent.name}/{log.name} truncated"


def _in_use(state_dir: Path) -> list[Path]:
    """Returns the most recently written store directories: those of departed tasks are unused."""
    written = {
        store: max((path.stat().st_mtime for path in store.iterdir()), default=0.0)
        for store in sorted(state_dir.glob("balance*_*"))
        if store.is_dir()
    }
    latest = max(written.values(), default=0.0)
    return [store for store, at in written.items() if at > latest - _IN_USE_SECONDS]


def _flip(table: Path, chooser: random.Random) -> None:
    content = bytearray(table.read_bytes())
    for _ in range(_FLIPS):
        content[chooser.randrange(max(1, len(content) - _FOOTER_BYTES))] ^= chooser.randint(1, 255)
    table.write_bytes(content)


_DISTURBED_AT_A_TIME = 2
_START_ATTEMPTS = 4
_ATTEMPTS = 4
_SUCCESSION_SECONDS = 25.0
_SILENCE_SECONDS = 9.0
_SWITCH_SECONDS = 90.0
_BROKER_AWAY_SECONDS = 70.0
_LOST_SECONDS = (5.0, 15.0)
_TURNS = (4, 9)


class Chaos:
    """The state that all lanes share."""

    def __init__(self, cluster: Cluster, readers: Readers, journal: Journal, seed: int) -> None:
        self.cluster = cluster
        self.readers = readers
        self.journal = journal
        self.seed = seed
        self.turns = threading.Semaphore(_DISTURBED_AT_A_TIME)
        self.over = threading.Event()
        """Set when a run is aborted: no lane starts another fault."""
        self._store_faults: list[str] = []
        self._lock = threading.Lock()
        self._rounds = 0

    def play(self, plan: Round) -> None:
        """Plays a round to its end. Afterwards all instances and the broker are up.

        Raises:
            AssertionError: an instance did not start again, or a fail point was never reached.
        """
        self._rounds += 1
        self._store_faults = list(plan.store_faults)
        lanes = [
            _Lane(self, member, chunks, random.Random(f"{self.seed}-{self._rounds}-{member.name}"))
            for member, chunks in zip(self.cluster.members, plan.chunks, strict=True)
        ]
        try:
            for lane in lanes:
                lane.start()
            self._play_broker(plan.broker_faults, lanes)
            for lane in lanes:
                lane.join()
        except BaseException:
            self.over.set()
            raise
        if self._store_faults:
            # The instances had too few faults, or no table file to damage yet.
            lanes.append(_Lane(self, self.cluster.members[-1], [("kill",)] * 5, random.Random(self.seed)))
            lanes[-1].run()
        if problems := [lane.problem for lane in lanes if lane.problem]:
            raise AssertionError("; ".join(problems))
        assert not self._store_faults, f"not played: {self._store_faults}"
        for member in self.cluster.members:
            self.check_alive(member)

    def check_alive(self, member: Member) -> None:
        """Records the end of a member that was not ended on purpose."""
        if member.should_run and not member.running:
            member.should_run = False
            self.journal.record_unexpected(f"{member.name} ended unexpectedly")

    def spoil_store(self, member: Member, chooser: random.Random) -> None:
        """Plays the next store fault on a stopped instance, if it has a suitable store."""
        with self._lock:
            fault = self._store_faults.pop(0) if self._store_faults else None
        if fault is None:
            return
        spoil = delete_store if fault == "delete-store" else damage_store
        done = spoil(member.state_dir, chooser)
        if done is None:
            with self._lock:
                self._store_faults.append(fault)
        else:
            self.journal.fault(fault, member.name, detail=done)

    def _play_broker(self, faults: Sequence[str], lanes: Sequence[threading.Thread]) -> None:
        chooser = random.Random(f"{self.seed}-{self._rounds}-broker")
        for fault in faults:
            pause_until = time.monotonic() + chooser.uniform(10, 30)
            while time.monotonic() < pause_until and any(lane.is_alive() for lane in lanes):
                time.sleep(0.2)
            began = time.monotonic()
            killed = self._brokers_to_kill(fault, chooser)
            seconds = {"kill-broker-long": _BROKER_AWAY_SECONDS, "lose-isr": chooser.uniform(*_LOST_SECONDS)}.get(
                fault, chooser.uniform(0, 2)
            )
            self.journal.fault(fault, detail=f"{', '.join(broker.name for broker in killed)} for {seconds:.0f} s")
            # Kills instead of stopping: a single-replica broker that shuts down during a commit may drop the
            # transaction marker (seen with 4.3.0), which leaves the transaction open forever.
            for broker in killed:
                broker.kill()
            time.sleep(seconds)
            for broker in killed:
                broker.launch()
            for broker in killed:
                broker.wait_ready()
            self.journal.outages.append((began, time.monotonic()))
            self.journal.say("all brokers are up again")

    def _brokers_to_kill(self, fault: str, chooser: random.Random) -> Sequence[Broker]:
        """Returns the brokers of a fault; two of three leave neither an in-sync replica nor a quorum to the third."""
        cluster, stack = self.cluster, self.cluster.stack
        partition = chooser.randrange(cluster.partitions)
        if fault == "kill-leader":
            return [leader_of(stack, cluster.topic, partition)]
        if fault == "kill-coordinator":
            group, task = cluster.application_id, f"{cluster.application_id}-balance-{partition}"
            where = chooser.choice(((GROUPS, group), (GROUPS, f"{group}/{cluster.topic}"), (TRANSACTIONS, task)))
            return [coordinator_of(stack, *where)]
        return chooser.sample(stack.brokers, 2 if fault == "lose-isr" else 1)


class _Lane(threading.Thread):
    """The faults of one instance, in order."""

    def __init__(self, chaos: Chaos, member: Member, chunks: Sequence[Sequence[str]], chooser: random.Random) -> None:
        super().__init__(name=f"lane-{member.name}", daemon=True)
        self._chaos = chaos
        self._journal = chaos.journal
        self._member = member
        self._chunks = chunks
        self._chooser = chooser
        self.problem = ""

    def run(self) -> None:
        """Plays all chunks; sets `problem` on failure."""
        try:
            for chunk in self._chunks:
                with self._chaos.turns:
                    for fault in chunk:
                        if self._chaos.over.is_set():
                            return
                        self._play(fault)
                    self._up()
                time.sleep(self._chooser.uniform(0, 2))
        except Exception as error:
            self.problem = f"{self._member.name}: {error!r}"
            self._journal.say(f"FAILED: {self.problem}")

    def _play(self, fault: str) -> None:
        if fault.startswith("kill-at-"):
            self._kill_at(fault)
        elif fault.startswith("pause-at-"):
            self._pause_at(fault)
        else:
            plays: dict[str, Callable[[], None]] = {
                "kill": self._kill,
                "pause": self._pause,
                "remove": self._remove,
                "silence": self._silence,
            }
            self._up()
            time.sleep(self._chooser.uniform(0.2, 2.5))
            plays[fault]()

    def _kill(self) -> None:
        others = stood_by(member for member in self._chaos.cluster.members if member is not self._member)
        owned = self._owned()
        self._member.kill()
        self._journal.fault("kill", self._member.name, owned, stood_by=others)
        self._chaos.spoil_store(self._member, self._chooser)

    def _remove(self) -> None:
        owned, began = self._owned(), time.monotonic()
        self._member.stop()
        # During the shutdown another instance may already own its partitions and answer for them.
        self._journal.fault("remove", self._member.name, owned, at=began)
        time.sleep(self._chooser.uniform(0, 3))

    def _kill_at(self, fault: str) -> None:
        point = fault.removeprefix("kill-at-")
        for _ in range(_ATTEMPTS):
            launched = self._launch_armed(point, "kill")
            # Each instance owns at least one partition, and each partition has work for every point but that of a
            # switch: that needs every partition compared at once, which the kills of other instances may prevent.
            seconds = _SWITCH_SECONDS if point == SWITCH_POINT else STRIKE_SECONDS
            if not self._waited(lambda: not self._member.running, seconds):
                assert point == SWITCH_POINT, f"{point} was not reached"
                self._journal.say(f"no generation was switched for {seconds:.0f} s at {self._member.name}")
                self._kill()
                return
            if (strike := self._member.strike()) is not None:
                self._member.kill()
                self._journal.fault(fault, self._member.name, detail=f"{strike.at - launched:.1f} s after its start")
                self._chaos.spoil_store(self._member, self._chooser)
                return
            self._chaos.check_alive(self._member)
        raise AssertionError(f"the instance ended before it reached {point}")

    def _pause_at(self, fault: str) -> None:
        point = fault.removeprefix("pause-at-")
        for _ in range(_ATTEMPTS):
            self._launch_armed(point, "stop")
            self._waited(lambda: self._member.is_stopped() or not self._member.running, STRIKE_SECONDS)
            if self._member.is_stopped() and self._outlast(fault):
                return
        raise AssertionError(f"no instance took over during the stop at {point}")

    def _pause(self) -> None:
        for _ in range(_ATTEMPTS):
            # A ready instance has joined; its assignment may come shortly after.
            self._waited(lambda: bool(self._owned()), _SUCCESSION_SECONDS)
            if self._outlast("pause"):
                return
        raise AssertionError("no instance took over during the pause")

    def _outlast(self, fault: str) -> bool:
        """Pauses an owner, queues queries in its sockets, resumes it; returns whether another took over."""
        owned = self._owned()
        ahead = self._chaos.readers.connect_ahead(self._member.host, self._member.port, owned)
        self._member.signal_all(signal.SIGSTOP)
        try:
            began = time.monotonic()
            time.sleep(SESSION_TIMEOUT_SECONDS + 1)
            self._waited(lambda: not self._owned(), _SUCCESSION_SECONDS)
            succeeded = owned - self._owned()
            ahead.send(succeeded)
        finally:
            self._member.signal_all(signal.SIGCONT)
        self._journal.say(f"{self._member.name} resumes; others own {sorted(succeeded)}")
        if succeeded:
            self._journal.fault(fault, self._member.name, owned, at=began)
        ahead.collect()
        return bool(succeeded)

    def _silence(self) -> None:
        struck = self._chaos.cluster.proxy.silence(_SILENCE_SECONDS, STRIKE_SECONDS)
        assert struck, "no transaction was committed through the proxy"
        self._journal.fault("silence", self._member.name, detail=f"for {_SILENCE_SECONDS:.0f} s after a commit request")

    def _launch_armed(self, point: str, action: str) -> float:
        """Starts the instance with a fail point; returns the Unix time."""
        self._chaos.check_alive(self._member)
        if self._member.running:
            # Its partitions move, so it is a disturbance, though an orderly one.
            self._journal.fault("stop", self._member.name, detail="to arm a fail point")
            self._member.stop()
        # Opening a task also commits, but no events; and readers must have seen an instance as owner before its pause.
        turn = 1 if point in (*OPENING_POINTS, SWITCH_POINT) else self._chooser.randint(*_TURNS)
        launched = time.time()
        self._member.launch(f"{point}={action}@{turn}", in_parts=point == PARTS_POINT)
        return launched

    def _up(self) -> None:
        """Waits until the instance is ready; starts it if necessary."""
        for _ in range(_START_ATTEMPTS):
            self._chaos.check_alive(self._member)
            launched_at = None
            if not self._member.running:
                launched_at = time.monotonic()
                self._member.launch()
            try:
                self._member.wait_ready()
            except ConfigurationError as error:
                if self._member.running:
                    raise
                self._journal.say(str(error)[-600:])
            else:
                if launched_at is not None:
                    self._journal.started(self._member.name, launched_at)
                return
        raise AssertionError("the instance does not start")

    def _owned(self) -> set[int]:
        return self._chaos.readers.owned_by(self._member.address)

    @staticmethod
    def _waited(condition: Callable[[], bool], seconds: float) -> bool:
        deadline = unstolen_time() + seconds
        while not condition():
            if unstolen_time() > deadline:
                return False
            time.sleep(0.1)
        return True
