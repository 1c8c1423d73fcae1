"""The plot: the figures that one compares, as bars of both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.figures import NAMES, Key
from bench.sides import OURS, THEIRS

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.figures import Figures

_COLORS = {OURS: "#1b6ca8", THEIRS: "#c9c4b8"}
_COLUMNS = 3
_PANEL_INCHES = (4.6, 3.1)
# Title, measure, name, and whether the values span orders of magnitude.
_PANELS = (
    ("replay, events/s from open stores to the end", "replay", "rate", False),
    ("replay, CPU-seconds per million events", "replay", "cpu_with_start", False),
    ("replay, peak memory of an instance, MB", "replay", "memory", False),
    ("restore, keys/s", "restore", "keys", False),
    ("freshness, p50, ms", "freshness", "p50", True),
    ("freshness, p99, ms", "freshness", "p99", True),
    ("reads, requests/s", "reads", "requests", False),
    ("reads, p99, ms", "reads", "p99", True),
    ("longest silence of a partition, ms", "moves", "silence", True),
)


def draw(path: Path, figures: Figures) -> None:
    """Write the plot as PNG; only what was measured is on it."""
    mpl.use("agg")
    panels = [
        (title, keys, logarithmic)
        for title, measure, name, logarithmic in _PANELS
        if (keys := [k for k in figures.measured() if (k.measure, k.name) == (measure, NAMES[name])])
    ]
    if not panels:
        return
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(_PANEL_INCHES[0] * _COLUMNS, _PANEL_INCHES[1] * rows), layout="constrained")
    for number, (title, keys, logarithmic) in enumerate(panels):
        axes = figure.add_subplot(rows, _COLUMNS, number + 1)
        _bars(axes, figures, keys)
        axes.set_title(title, fontsize=10, loc="left")
        if logarithmic:
            axes.set_xscale("log")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def _bars(axes: Axes, figures: Figures, keys: list[Key]) -> None:
    for offset, side in ((-0.2, OURS), (0.2, THEIRS)):
        values = [figures.median(key, side) or 0.0 for key in keys]
        places = [n + offset for n in range(len(keys))]
        bars = axes.barh(places, values, height=0.38, color=_COLORS[side], label=side)
        axes.bar_label(bars, [_short(v) for v in values], padding=2, fontsize=7)
    axes.set_yticks(range(len(keys)), [key.case for key in keys], fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _short(value: float) -> str:
    if not value:
        return "none"
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
