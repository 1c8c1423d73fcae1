"""Plots of the main figures as SVG: a bar for this service and one for the peer, of each case of a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

from bench.figures import NAMES
from bench.sides import OURS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.report import Document

_COLORS = ("#1b6ca8", "#b9a77f")
_WIDTH, _LABELS, _BARS = 760, 250, 410
_TITLE, _CASE, _BAR = 34, 32, 12
_ROUND_FROM = 100


class Panel(NamedTuple):
    """A figure in all its cases."""

    title: str
    measure: str
    name: str
    """As in `NAMES`."""


REPLAY = (
    Panel("Replay: events/s", "replay", "rate"),
    Panel("Replay: CPU-seconds per million events, start included (less is better)", "replay", "cpu_with_start"),
    Panel("Replay: peak memory, MB (less is better)", "replay", "memory"),
)
FRESHNESS = (
    Panel("Freshness, p50, ms (less is better)", "freshness", "p50"),
    Panel("Freshness, p99, ms (less is better)", "freshness", "p99"),
)
READS = (Panel("Reads: requests/s", "reads", "requests"), Panel("Reads: p99, ms (less is better)", "reads", "p99"))
ALL = (
    *REPLAY,
    *FRESHNESS,
    *READS,
    Panel("Restore: keys/s", "restore", "keys"),
    Panel("Longest silence of a partition, ms (less is better)", "moves", "silence"),
)


def plot(told: Document, panels: Sequence[Panel] = ALL) -> str:
    """The panels whose figures were measured, one below the other; medians, each panel with its own scale."""
    shown = [(panel.title, cases) for panel in panels if (cases := list(_cases(told, panel)))]
    peers = {peer for _, cases in shown for *_, peer in cases}
    parts, y = list(_legend([OURS, *sorted(peers)][:2])), 30
    for title, cases in shown:
        parts.append(f'<text x="8" y="{y + 22}" font-weight="bold">{escape(title)}</text>')
        y += _TITLE
        largest = max(value for _, values, _ in cases for value in values)
        for case, values, _ in cases:
            parts.append(f'<text x="{_LABELS - 8}" y="{y + _BAR + 4}" text-anchor="end">{escape(case)}</text>')
            for number, value in enumerate(values):
                top, length = y + number * _BAR, round(value / largest * _BARS, 1)
                parts.append(
                    f'<rect x="{_LABELS}" y="{top}" width="{length}" height="{_BAR - 1}" fill="{_COLORS[number]}"/>'
                    f'<text x="{_LABELS + length + 4}" y="{top + _BAR - 2}">{_short(value)}</text>'
                )
            y += _CASE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" font-family="sans-serif" '
        'font-size="12" fill="#222">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def _cases(told: Document, panel: Panel) -> Iterator[tuple[str, tuple[float, ...], str]]:
    """Case, medians of both sides, and the peer; without the cases that the peer was not measured in."""
    for figure in told["figures"]:
        if (figure["measure"], figure["figure"]) == (panel.measure, NAMES[panel.name]):
            medians = tuple(side["median"] for side in figure["sides"].values())
            # The names of the other cases take more than a line.
            if len(medians) == len(_COLORS) and len(figure["case"]) < _LABELS // 6:
                yield figure["case"], medians, figure["peer"]


def _legend(names: Sequence[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        x = 8 + number * 160
        yield f'<rect x="{x}" y="12" width="12" height="12" fill="{_COLORS[number]}"/>'
        yield f'<text x="{x + 18}" y="22">{escape(name)}</text>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= _ROUND_FROM else f"{value:.3g}"
