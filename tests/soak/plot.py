"""A plot of all measures of a soak as SVG, one panel for each."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.soak.slopes import Verdict

_WIDTH, _HEIGHT, _COLUMNS = 380, 150, 2
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 30, 10, 22
_MOST_POINTS = 240
_LINE, _GROWS = "#1b6ca8", "#b3261e"


def plot(series: Mapping[str, Sequence[tuple[float, float]]], verdicts: Sequence[Verdict]) -> str:
    """Returns the plot.

    Args:
        series: by name of a verdict, hour and value of each sample.
    """
    rows = -(-len(verdicts) // _COLUMNS)
    width, height = _WIDTH * _COLUMNS, _HEIGHT * rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11" fill="#222"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for number, verdict in enumerate(verdicts):
        x, y = number % _COLUMNS * _WIDTH, number // _COLUMNS * _HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_panel(series[verdict.name], verdict)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(samples: Sequence[tuple[float, float]], verdict: Verdict) -> str:
    step = max(1, len(samples) // _MOST_POINTS)
    shown = samples[::step]
    last, top = shown[-1][0] or 1.0, max(value for _, value in shown) * 1.1 or 1.0
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    points = " ".join(f"{_LEFT + at / last * wide:.1f},{_TOP + high - value / top * high:.1f}" for at, value in shown)
    color = _LINE if verdict.levels_off else _GROWS
    title = f"{verdict.name}, {verdict.unit}: {verdict.slope.middle:+.2f} an hour"
    return (
        f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>'
        f'<path d="M{_LEFT} {_TOP}V{_TOP + high}H{_LEFT + wide}" fill="none" stroke="#999"/>'
        f'<text x="{_LEFT - 4}" y="{_TOP + 8}" text-anchor="end">{top:,.0f}</text>'
        f'<text x="{_LEFT - 4}" y="{_TOP + high}" text-anchor="end">0</text>'
        f'<text x="{_LEFT + wide}" y="{_HEIGHT - 6}" text-anchor="end">{last:.2f} h</text>'
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
    )
