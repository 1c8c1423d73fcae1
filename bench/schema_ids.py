"""Schema ids: an event under a new id, and a restart, when few and many ids are known. Measures this service only.

Each id is a version of the event's schema with another optional field, as from a producer that registers its schema
with each release. While new ids arrive, events under an old one continue, and are watched; see `watch`.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from bench.cluster import Cluster
from bench.load import arriving
from bench.probes import Prober
from bench.watch import Watch

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.sides import Side

_HEADER_BYTES = 5
_ASK_EVERY_SECONDS = 0.01
_EVENTS_A_SECOND = 50
_SETTLE_SECONDS = 5.0
# New ids that are measured; fewer if they take so long.
_NEW_IDS = 5
_ENOUGH_SECONDS = 30.0


def ids_case(ids: int) -> str:
    """The case of this number of known ids."""
    return f"{ids} schema id{'s' if ids > 1 else ''} known"


def measure_schema_ids(stack: LocalStack, side: Side, load: Load, ids: int, figures: Figures) -> float:
    """Returns the seconds from a restart until the first event is visible.

    Args:
        load: registered under one id, and of this measurement alone.
        ids: known in all before the instance starts.

    Raises:
        BalanceServiceError: the instance makes no progress.
    """
    releases = _Releases(stack, load)
    for _ in range(ids - 1):
        releases.next()
    watched = {p: load.numbers_of(p, 1)[0] for p in load.ends}
    with Cluster(stack, side, load, "ids") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_ready(instance)
        cluster.wait_committed()
        with Prober(stack, load, instance) as prober:
            prober.take(len(load.ends))
            with (
                arriving(stack, load, _EVENTS_A_SECOND * len(watched), list(watched.values())),
                Watch([instance], {p: load.customers_of(p, 1) for p in watched}, _ASK_EVERY_SECONDS) as watch,
            ):
                time.sleep(_SETTLE_SECONDS)
                began, taken = time.monotonic(), list[float]()
                while len(taken) < _NEW_IDS and time.monotonic() - began < _ENOUGH_SECONDS:
                    taken.append(prober.once(len(taken) % len(load.ends), releases.next()))
                stall = max(gaps.stall for gaps in watch.gaps(began, time.monotonic()).values())
            # No event waits for the restart.
            prober.take(len(load.ends))
            cluster.end(instance)
            started = cluster.launch(instance)
            ready = cluster.wait_ready(instance)
            prober.once()
            first = time.monotonic() - started
    figures.add(
        side.name,
        "ids",
        ids_case(ids),
        new_id=statistics.median(taken),
        stall=1000 * stall,
        restart=ready - started,
        first_event=first,
    )
    return first


class _Releases:
    """Registers versions of the event's schema, one for each release of a producer."""

    def __init__(self, stack: LocalStack, load: Load) -> None:
        self._registry = SchemaRegistry(stack.schema_registry_url)
        self._shipped = load_schema("FundsAdded")
        self._subject = subject_of(load.topic, self._shipped)
        self._count = 0

    def next(self) -> Released:
        """Register another version."""
        self._count += 1
        field = {"name": f"release{self._count}", "type": ["null", "string"], "default": None}
        schema = {**self._shipped, "fields": [*self._shipped["fields"], field]}
        return Released(b"\0" + self._registry.register(self._subject, schema).to_bytes(4, "big"))


class Released:
    """A frame under the shipped schema → the same event under another version."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def __call__(self, frame: bytes) -> bytes:
        # The added field is null, the first branch of its union.
        return self._header + frame[_HEADER_BYTES:] + b"\0"
