"""Runs two instances for hours, and checks that what they take levels off; `make soak`.

`SOAK_HOURS` (1) is the time under load. Five read models, of Avro and of JSON, with folds of their own, joins, outputs
and a `transform`, are fed, queried, followed by streams, and rebuilt one after another; the certificate is renewed, and
one of the instances is restarted, again and again. The other one is sampled: what Python and the JVM use without the
heap, compiled code and RocksDB's buffers, these three, all resident memory, files, threads, table files of the stores,
and the topics that are compacted. At the end, states and outputs equal a recount. A JDK is needed, for its `jcmd`.

`SOAK_LEAK=1` plants a leak, which must be found: the command then ends with 0 if it is. `SOAK_FOLDER` (`bench/results`)
gets `soak.svg` and `soak.txt`.
"""

from __future__ import annotations

import os
import shutil
import ssl
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from balance_service.devtools.local.processes import HOST, free_port
from balance_service.devtools.local.stack import LocalInstance, LocalStack
from tests.chaos.cluster import UNEXPECTED_EVENTS
from tests.chaos.mutants import mutated
from tests.chaos.mutations import QUIET, Mutation
from tests.chaos.report import Journal
from tests.chaos.systems import Hops, SystemWorkload
from tests.soak.load import (
    IDEMPOTENCY_WINDOW_SECONDS,
    VISITS,
    Clients,
    Rebuilding,
    Visiting,
    Work,
    differing,
    waited,
)
from tests.soak.plot import plot
from tests.soak.sampling import TRACKING, Meter
from tests.support.commands import run
from tests.support.credentials import Authority
from tests.support.kafka import admin
from tests.support.recount import recount

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PROJECT = Path(__file__).parents[2]
_HOURS = float(os.environ.get("SOAK_HOURS") or 1)
_WINDOWS, _WARM_UP_WINDOWS, _REBUILD_WINDOWS, _RESTART_WINDOWS, _RENEW_WINDOWS = 24, 8, 2, 3, 4
_WINDOW_HOURS = _HOURS / _WINDOWS
_SEED = 11
_PARTITIONS = 2
_MISTAKES = 0.01
_CAUGHT_UP_SECONDS = 120.0
# So that a changelog is compacted within the run, and has dropped the tombstones of its first minutes. The service asks
# that they are kept for ten.
_COMPACTED_SOON = {
    "min.compaction.lag.ms": "30000",
    "segment.ms": "30000",
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": "600000",
}
LEAK = Mutation(
    "an instance keeps four kilobytes of each query",
    "balance_service/http/queries.py",
    "        began = time.perf_counter()\n        partition = self.routing.partition_of(key)\n        try:\n"
    "            copy = self.routing.copy(partition)\n",
    "        began = time.perf_counter()\n        globals().setdefault('kept', []).append(bytearray(b'x' * 4096))\n"
    "        partition = self.routing.partition_of(key)\n        try:\n"
    "            copy = self.routing.copy(partition)\n",
    QUIET,
    ("memory of Python",),
)


def main() -> int:
    """Returns the exit code: 0 if everything levels off and is exact, or if the planted leak is found."""
    leaks = bool(os.environ.get("SOAK_LEAK"))
    folder = Path(os.environ.get("SOAK_FOLDER") or _PROJECT / "bench" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="balance-soak-") as data, ExitStack() as resources:
        soak = _Soak(Path(data), resources, _leaking(Path(data)) if leaks else None)
        wrong = soak.play()
        verdicts = soak.meter.verdicts(_WINDOW_HOURS, _WARM_UP_WINDOWS * _WINDOW_HOURS)
    lines = [f"{_HOURS:g} hours, {soak.told}", *(verdict.line() for verdict in verdicts), *wrong]
    print(*lines, sep="\n", flush=True)
    if leaks:
        found = [verdict.name for verdict in verdicts if not verdict.levels_off]
        print(f"the planted leak is {'found' if set(LEAK.kinds) <= set(found) else 'NOT FOUND'}: {found}")
        return 0 if set(LEAK.kinds) <= set(found) else 1
    (folder / "soak.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "soak.svg").write_text(plot(soak.meter.series, verdicts), encoding="utf-8")
    return 1 if wrong or not all(verdict.levels_off for verdict in verdicts) else 0


def _leaking(folder: Path) -> Path:
    """Returns a copy of this checkout with a leak."""
    copy = folder / "leaking"
    copy.mkdir()
    for name in ("balance_service", "schemas", "samples", "deploy", "docs", "tests"):
        shutil.copytree(_PROJECT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / LEAK.file).write_text(mutated(LEAK, copy / LEAK.file), encoding="utf-8")
    (copy / ".venv").symlink_to(sys.prefix)
    return copy


class _Soak:
    """One run from the first event to the last check."""

    def __init__(self, folder: Path, resources: ExitStack, checkout: Path | None) -> None:
        self._resources = resources
        self._journal = Journal()
        self._stack = resources.enter_context(LocalStack(folder / "stack"))
        (folder / "certificates").mkdir()
        self._authority = Authority(folder / "certificates")
        self._tls = ssl.create_default_context(cafile=str(self._authority.certificate))
        certificate, key = self._authority.issue("instance")
        self._application_id = f"soak-{uuid.uuid4().hex[:8]}"
        self._settings = {
            **self._stack.addresses,
            "BALANCE_APPLICATION_ID": self._application_id,
            "BALANCE_MODELS": "balance,rewards,leaderboard,tests.chaos.item_sales:ItemSales,tests.soak.visits:Visits",
            "PYTHONPATH": os.pathsep.join(map(str, (checkout or _PROJECT, _PROJECT))),
            "BALANCE_PARTITIONS": str(_PARTITIONS),
            # As in the image, whose memory is bounded.
            "MALLOC_ARENA_MAX": "2",
            "JAVA_TOOL_OPTIONS": TRACKING,
            "BALANCE_IDEMPOTENCY_WINDOW": str(IDEMPOTENCY_WINDOW_SECONDS),
            "BALANCE_NUM_STANDBY_REPLICAS": "1",
            "BALANCE_TLS_CERTIFICATE": str(certificate),
            "BALANCE_TLS_KEY": str(key),
            "BALANCE_TLS_CA": str(self._authority.certificate),
        }
        visits = NewTopic(VISITS, _PARTITIONS, 1, config={"retention.ms": "-1"})
        admin(self._stack).create_topics([visits])[VISITS].result(20)
        created = run(self._settings, "topics", "create", seconds=300)
        assert created.code == 0, created
        self._instances = []
        for number in (1, 2):
            health = {"BALANCE_HEALTH_PORT": str(free_port())}
            instance = LocalInstance(number, self._stack, environment=self._settings | health, checkout=checkout)
            resources.callback(instance.stop)
            self._instances.append(instance)
        self._urls = [f"https://{HOST}:{instance.port}" for instance in self._instances]
        self._compacted: set[str] = set()
        self._work = Work()
        self.told = ""

    def play(self) -> list[str]:
        """Plays the whole run; returns what is wrong, apart from what does not level off."""
        self._journal.say("starting the instances")
        for instance in self._instances:
            instance.launch()
        for instance in self._instances:
            instance.wait_ready()
        enter = self._resources.enter_context
        systems = enter(SystemWorkload(self._stack, _SEED, _MISTAKES))
        work = self._work
        clients = Clients(self._urls, self._tls, work, _SEED)
        self._resources.callback(clients.close)
        visiting = Visiting(self._stack, work, _SEED)
        window = _WINDOW_HOURS * 3600
        Rebuilding(self._urls, work, _REBUILD_WINDOWS * window)
        work.repeat("restarts", self._restart, _RESTART_WINDOWS * window)
        work.repeat("renewed certificates", self._renew, _RENEW_WINDOWS * window)
        work.repeat("configurations", self._compact_soon, 10.0)
        self.meter = Meter(self._stack, self._instances[0], self._urls[0], self._tls)
        with self.meter, work:
            systems.start()
            ends = time.monotonic() + _HOURS * 3600
            while time.monotonic() < ends:
                time.sleep(min(60.0, max(0.0, ends - time.monotonic())))
                work.check()
                systems.check()
                self._journal.say(f"{systems.sent} invoices and scores; {dict(work.done)}")
            systems.stop()
            visiting.flush()
        self.told = ", ".join(f"{count} {name}" for name, count in sorted(work.done.items()))
        self.told += f", {systems.sent} invoices and as many scores"
        return list(self._wrong(clients, visiting))

    def _wrong(self, clients: Clients, visiting: Visiting) -> Iterator[str]:
        self._journal.say("recounting")
        visits = visiting.recounted()
        funds = recount(self._stack.bootstrap_servers, self._stack.schema_registry_url, "balance")
        balances = {customer: {"amount": amount} for customer, amount in funds.items()}
        expected: Mapping[str, Mapping[str, object]] = {"balance": balances, VISITS: visits}
        for model, values in expected.items():
            if not waited(lambda m=model, v=values: clients.values(m) == v, _CAUGHT_UP_SECONDS):  # type: ignore[misc]
                yield f"WRONG {model}: {differing(clients.values(model), values)[:3]}"
        hops = Hops(self._stack, self._application_id)
        cards = {card: {"points": points.quantize(Decimal("0.0001"))} for card, points in hops.points().items()}
        if not waited(lambda: clients.values("rewards") == cards, _CAUGHT_UP_SECONDS):
            yield f"WRONG rewards: {differing(clients.values('rewards'), cards)[:3]}"
        yield from (f"WRONG {one.detail}" for one in hops.violations(("rewards", "leaderboard", "item-sales")))
        idle = [
            name for name in ("changes", "rebuilds", "restarts", "renewed certificates") if not self._work.done[name]
        ]
        yield from (f"WRONG no {name} within the run" for name in idle)
        if silent := self._work.done["silent streams"]:
            yield f"WRONG {silent} times, a change stream sent nothing, not even a sign of life"
        for instance in self._instances:
            for line in instance.log.read_text(encoding="utf-8", errors="replace").splitlines():
                if any(f'"{event}"' in line for event in UNEXPECTED_EVENTS):
                    yield f"WRONG {instance.name}: {line}"

    def _restart(self) -> None:
        """Restarts the instance whose memory is not watched."""
        other = self._instances[1]
        other.stop()
        other.start()

    def _renew(self) -> None:
        self._authority.issue("instance")

    def _compact_soon(self) -> None:
        """Has the broker compact the changelogs, also those of new generations, within the run."""
        topics = admin(self._stack).list_topics(timeout=10).topics
        of_ours = {name for name in topics if name.startswith(f"{self._application_id}-")}
        new = {name for name in of_ours if name.endswith("-changelog")} - self._compacted
        for name in new:
            entries = [
                ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
                for setting, value in _COMPACTED_SOON.items()
            ]
            wanted = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
            for done in admin(self._stack).incremental_alter_configs([wanted]).values():
                done.result(20)
        self._compacted = self._compacted & of_ours | new


if __name__ == "__main__":
    sys.exit(main())
