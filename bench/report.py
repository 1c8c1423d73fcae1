"""The report of a run: one JSON document, from which the tables are generated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.goals import goal_of
from bench.sides import OURS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bench.figures import Figures, Key
    from bench.plan import Plan

Document = dict[str, Any]
_EXACT_BELOW = 100
_COLORS = {True: "green", False: "red"}
_MET = {True: "met", False: "missed"}


def document(
    figures: Figures, plan: Plan, date: str, machine: Mapping[str, str], settings: Mapping[str, Mapping[str, str]]
) -> Document:
    """All values, medians and ratios, with machine and versions; `commit` is that of this checkout."""
    return {
        "commit": settings[OURS]["commit"],
        "date": date,
        "machine": machine,
        "plan": asdict(plan),
        "settings": settings,
        "notes": figures.notes,
        "figures": [_figure(figures, key) for key in figures.measured()],
    }


def write_json(path: Path, told: Document) -> None:
    """Write a document as JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _figure(figures: Figures, key: Key) -> Document:
    peer = figures.peer_of(key)
    goal = goal_of(key, figures.peer)
    sides = {
        side: {"median": figures.median(key, side), "values": figures.values(key, side)}
        for side in (OURS, peer)
        if figures.values(key, side)
    }
    return {
        "measure": key.measure,
        "case": key.case,
        "figure": key.name,
        "peer": peer,
        "sides": sides,
        "ratio": figures.ratio(key),
        "ratios": figures.ratios(key),
        **({} if goal is None else {"goal": str(goal), "met": goal.is_met(figures, key)}),
    }


@dataclass(frozen=True, slots=True)
class Row:
    """A figure as text."""

    measure: str
    case: str
    figure: str
    peer: str
    """Its name."""
    ours: str
    theirs: str
    ratio: str
    repetitions: str
    goal: str
    met: bool | None


def rows(told: Document) -> list[Row]:
    """Rows for all figures of a document; medians and ratios of repetitions with minimum and maximum."""
    return [_row(figure) for figure in told["figures"]]


def _row(figure: Document) -> Row:
    counts = [len(side["values"]) for side in figure["sides"].values()]
    met: bool | None = figure.get("met")
    told = "not measured" if met is None else _MET[met]
    if met is False and figure["goal"].endswith("× in each"):
        told += f", {_number(min(figure['ratios']))} to {_number(max(figure['ratios']))}"
    return Row(
        measure=figure["measure"],
        case=figure["case"],
        figure=figure["figure"],
        peer=figure["peer"],
        ours=_side(figure, OURS),
        theirs=_side(figure, figure["peer"]),
        ratio="" if figure["ratio"] is None else _spread(figure["ratio"], figure["ratios"], "×"),
        repetitions=" / ".join(map(str, counts if len(set(counts)) > 1 else counts[:1])),
        goal=f"{figure['goal']}: {told}" if "goal" in figure else "",
        met=met,
    )


def _side(figure: Document, name: str) -> str:
    side = figure["sides"].get(name)
    return _spread(side["median"], side["values"]) if side else ""


def _spread(median: float, values: list[float], unit: str = "") -> str:
    if len(values) == 1:
        return _number(median) + unit
    return f"{_number(median)}{unit} ({_number(min(values))} to {_number(max(values))})"


def _number(value: float) -> str:
    return f"{value:,.2f}" if abs(value) < _EXACT_BELOW else f"{value:,.0f}"


def table(told: Document) -> Table:
    """The table of all figures, for the terminal."""
    shown = Table("measured", "case", "figure", "peer", title="medians, with least and most", title_justify="left")
    for column in (OURS, "peer's", "ratio", "n", "goal"):
        shown.add_column(column, justify="right")
    before: Row | None = None
    for row in rows(told):
        begins = before is None or (row.measure, row.case) != (before.measure, before.case)
        if before is not None and row.measure != before.measure:
            shown.add_section()
        goal = row.goal if row.met is None else f"[{_COLORS[row.met]}]{row.goal}[/]"
        first = (row.measure, row.case) if begins else ("", "")
        shown.add_row(
            *first, row.figure, row.peer if row.theirs else "", row.ours, row.theirs, row.ratio, row.repetitions, goal
        )
        before = row
    return shown
