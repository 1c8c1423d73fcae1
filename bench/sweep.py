"""The sweep: tries settings of Kafka Streams, and selects the best one for each figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.figures import NAMES, Figures
from bench.sides import THEIRS
from bench.streams import CACHE_BYTES, TheirSide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.devtools.local.stack import LocalStack
    from bench.plan import Plan
    from bench.sides import Side

# A single run does not prove a smaller difference, and each setting adds a run to each repetition.
_ALIKE = 0.03


@dataclass(frozen=True, slots=True)
class Tried:
    """A setting and its figures."""

    side: Side
    figures: Figures

    def value(self, name: str, case: str) -> float:
        """The value of a figure of a case."""
        (key,) = [k for k in self.figures.measured() if k.name == NAMES[name] and k.case == case]
        return self.figures.values(key, self.side.name)[-1]


def settings_of(
    stack: LocalStack, plan: Plan, program: str = "BalanceStreams", more: Mapping[str, str] | None = None
) -> list[Side]:
    """Every commit interval of the plan, with the record cache on and off."""
    return [
        TheirSide(stack, cache_bytes=cache, commit_interval_ms=interval, program=program, more=more)
        for interval in plan.commit_intervals_ms
        for cache in (CACHE_BYTES, 0)
    ]


def try_all(sides: Sequence[Side], figures: Figures, measure: Callable[[Side, Figures], None]) -> list[Tried]:
    """Measure each setting once; adds the results to the figures of the sweep if there are several settings."""
    tried = []
    for side in sides:
        seen = Figures()
        measure(side, seen)
        tried.append(Tried(side, seen))
        if len(sides) > 1:
            figures.take(seen, NAMES, "sweep", side.variant)
    return tried


def best(tried: Sequence[Tried], name: str, case: str, *, least: bool = False) -> Tried:
    """The setting with the greatest, or the least, value."""
    return (min if least else max)(tried, key=lambda t: t.value(name, case))


def least_unless_alike(tried: Sequence[Tried], than: Tried, name: str, case: str) -> Tried:
    """The setting with the least value, or `than` if its value is hardly greater."""
    least = best(tried, name, case, least=True)
    return than if than.value(name, case) <= least.value(name, case) * (1 + _ALIKE) else least


def told(case: str, figure: str, counts: Tried) -> str:
    """A sentence for the report."""
    return f"{case}: of {THEIRS}, {counts.side.variant} counts for {figure}"
