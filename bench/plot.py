"""The plot of the main figures, as bars of both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.figures import NAMES, Key
from bench.sides import OURS

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.figures import Figures

_OUR_COLOR, _PEER_COLOR = "#1b6ca8", "#c9c4b8"
_COLUMNS = 3
_ROUND_FROM = 100
_PANEL_INCHES = (4.6, 3.1)
# Title, measure, name.
_PANELS = (
    ("replay, events/s", "replay", "rate"),
    ("replay, CPU-s per million events", "replay", "cpu_with_start"),
    ("replay, peak memory, MB", "replay", "memory"),
    ("restore, keys/s", "restore", "keys"),
    ("freshness, p50, ms", "freshness", "p50"),
    ("freshness, p99, ms", "freshness", "p99"),
    ("reads, requests/s", "reads", "requests"),
    ("reads, p99, ms", "reads", "p99"),
    ("longest silence of a partition, ms", "moves", "silence"),
)


def draw(path: Path, figures: Figures) -> None:
    """Write the plot as PNG, with the measured figures only."""
    mpl.use("agg")
    panels = [
        (title, keys)
        for title, measure, name in _PANELS
        if (keys := [k for k in figures.measured() if (k.measure, k.name) == (measure, NAMES[name])])
    ]
    if not panels:
        return
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(_PANEL_INCHES[0] * _COLUMNS, _PANEL_INCHES[1] * rows), layout="constrained")
    for number, (title, keys) in enumerate(panels):
        axes = figure.add_subplot(rows, _COLUMNS, number + 1)
        _bars(axes, figures, keys)
        axes.set_title(title, fontsize=10, loc="left")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def _bars(axes: Axes, figures: Figures, keys: list[Key]) -> None:
    for offset, side, color in ((-0.2, OURS, _OUR_COLOR), (0.2, figures.peer, _PEER_COLOR)):
        values = [figures.median(key, side) or 0.0 for key in keys]
        places = [n + offset for n in range(len(keys))]
        bars = axes.barh(places, values, height=0.38, color=color, label=side)
        axes.bar_label(bars, [_short(v) for v in values], padding=2, fontsize=7)
    axes.set_yticks(range(len(keys)), [key.case for key in keys], fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    # The numbers stand at the bars.
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _short(value: float) -> str:
    if not value:
        return "none"
    return f"{value:,.0f}" if value >= _ROUND_FROM else f"{value:.3g}"
