"""The report: one table on the terminal, and all of it as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.goals import goal_of
from bench.sides import OURS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bench.figures import Figures, Key

_MET = {True: "[green]met[/]", False: "[red]not met[/]", None: ""}
_EXACT_BELOW = 100


def table(figures: Figures) -> Table:
    """Medians of both sides, their ratio, and the goals."""
    shown = Table("measured", "case", "figure", title="medians", title_justify="left")
    for column in (OURS, figures.peer, "ratio", "goal", ""):
        shown.add_column(column, justify="right")
    before: Key | None = None
    for key in sorted_keys(figures):
        begins = before is None or (key.measure, key.case) != (before.measure, before.case)
        if before is not None and key.measure != before.measure:
            shown.add_section()
        goal, ratio = goal_of(key, figures.peer), figures.ratio(key)
        shown.add_row(
            key.measure if begins else "",
            key.case if begins else "",
            key.name,
            _number(figures.median(key, OURS)),
            _number(figures.median(key, figures.peer)),
            "" if ratio is None else f"{ratio:.2f}×",
            "" if goal is None else str(goal),
            "" if goal is None else _MET[goal.is_met(figures, key)],
        )
        before = key
    return shown


def sorted_keys(figures: Figures) -> list[Key]:
    """The figures, those of one measure and case together, in the order of the first of them."""
    keys = figures.measured()
    measures = list(dict.fromkeys(key.measure for key in keys))
    cases = list(dict.fromkeys((key.measure, key.case) for key in keys))
    return sorted(keys, key=lambda key: (measures.index(key.measure), cases.index((key.measure, key.case))))


def write_json(
    path: Path, figures: Figures, date: str, machine: Mapping[str, str], settings: Mapping[str, Mapping[str, str]]
) -> None:
    """All values, medians and ratios, with what they were taken on."""
    document = {
        "date": date,
        "machine": machine,
        "settings": settings,
        "figures": [_figure(figures, key) for key in sorted_keys(figures)],
        "notes": figures.notes,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _figure(figures: Figures, key: Key) -> dict[str, Any]:
    goal = goal_of(key, figures.peer)
    sides = {
        side: {"median": figures.median(key, side), "values": figures.values(key, side)}
        for side in (OURS, figures.peer)
        if figures.values(key, side)
    }
    return {
        "measure": key.measure,
        "case": key.case,
        "figure": key.name,
        **sides,
        "ratio": figures.ratio(key),
        **({} if goal is None else {"goal": str(goal), "met": goal.is_met(figures, key)}),
    }


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if abs(value) < _EXACT_BELOW else f"{value:,.0f}"
