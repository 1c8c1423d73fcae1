"""Generates tables and plots of the documents from the last full run: `python -m bench.tables`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from bench.figures import NAMES, Key
from bench.plan import CUSTOMERS, EVENTS, read_case, replay_case
from bench.plot import FRESHNESS, READS, REPLAY, plot
from bench.report import rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.report import Document, Row

LATEST = Path(__file__).with_name("results") / "latest.json"
REBUILDS = LATEST.with_name("generations.json")
"""The last run of `generations`."""
_ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- made by `python -m bench.tables` -->", "<!-- until here -->"


def _key(measure: str, case: str, name: str) -> Key:
    return Key(measure, case, NAMES[name])


SHORT = [
    _key("replay", replay_case(EVENTS, CUSTOMERS[0]), "rate"),
    _key("postgresql", replay_case(EVENTS, CUSTOMERS[0]), "rate"),
    _key("restore", "1,000,000 keys", "keys"),
    _key("reads", read_case("local", 16, 0), "requests"),
    _key("freshness", "1,000 events/s", "p50"),
]
"""The figures in README.md. Peers win some of them."""

_LABELS = {"postgresql": "replay, against consumers into PostgreSQL"}


_UNSHOWN = [NAMES[name] for name in ("second_half", "evenness", "memory_growth", "cpu")]
_UNSHOWN_OF = {"reads": [NAMES["p50"]], "scaling": [NAMES["rate_with_start"]], "quix": [NAMES["rate"]]}
"""By measure. The JSON has all figures. Quix Streams' clock cannot begin at open stores."""


def short(told: Document) -> str:
    """The table of README.md."""
    by_key = {Key(row.measure, row.case, row.figure): row for row in rows(told)}
    return _table(by_key[key] for key in SHORT if key in by_key)


def whole(told: Document) -> str:
    """The tables of bench/RESULTS.md, one for each measure."""
    machine = told["machine"]
    by_measure: dict[str, list[Row]] = {}
    for row in rows(told):
        if row.measure != "sweep" and row.figure not in (*_UNSHOWN, *_UNSHOWN_OF.get(row.measure, ())):
            by_measure.setdefault(row.measure, []).append(row)
    return "\n\n".join(
        [
            f"Measured at commit `{told['commit']}` on {told['date'][:10]}: {machine['cores']} cores "
            f"({machine['processor']}), {machine['memory']}, {machine['system']}, {machine['Java']}. Broker and load "
            "generator run on the same cores.",
            *(f"## {measure}\n\n{_medians(some)}" for measure, some in by_measure.items()),
        ]
    )


def _medians(some: list[Row]) -> str:
    """A table without the spread of both sides."""
    peers = {row.peer for row in some if row.theirs}
    peer = next(iter(peers)) if len(peers) == 1 else "peer"
    lines = [f"| figure | balance_service | {peer} | ratio | n | goal |", "|---|---|---|---|---|---|"]
    for row in some:
        ours, theirs = row.ours.partition(" ")[0], row.theirs.partition(" ")[0]
        if theirs and len(peers) > 1:
            theirs += f" ({row.peer})"
        goal = f"**{row.goal}**" if row.met is False else row.goal
        lines.append(f"| {row.case}: {row.figure} | {ours} | {theirs} | {row.ratio} | {row.repetitions} | {goal} |")
    return "\n".join(lines)


def _table(some: Iterable[Row]) -> str:
    lines = [
        "| figure | balance_service | peer | ratio | n | goal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in some:
        theirs = f"{row.theirs} ({row.peer})" if row.theirs else ""
        goal = f"**{row.goal}**" if row.met is False else row.goal
        what = f"{_LABELS.get(row.measure, row.measure)}, {row.case}: {row.figure}"
        lines.append(f"| {what} | {row.ours} | {theirs} | {row.ratio} | {row.repetitions} | {goal} |")
    return "\n".join(lines)


MADE = {
    _ROOT / "README.md": (LATEST, short),
    _ROOT / "bench/RESULTS.md": (LATEST, whole),
}
"""File → the run, and the function that generates the part between its markers."""

_IMAGES = _ROOT / "docs/images"
PLOTS = {
    _IMAGES / "performance-replay.svg": REPLAY,
    _IMAGES / "performance-freshness.svg": FRESHNESS,
    _IMAGES / "performance-reads.svg": READS,
}
"""File → what it shows."""


def between_markers(text: str) -> str:
    """The part of a file between the markers."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def part_of(path: Path) -> str:
    """The generated part of a file."""
    run, table = MADE[path]
    return table(_told(run))


def plot_of(path: Path) -> str:
    """The content of a plot's file."""
    return plot(latest(), PLOTS[path])


def latest() -> Document:
    """The last full run."""
    return _told(LATEST)


def _told(run: Path) -> Document:
    told: Document = json.loads(run.read_text(encoding="utf-8"))
    return told


def update() -> None:
    """Update the generated part of each file, and the plots."""
    for path in MADE:
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        path.write_text(f"{before}{BEGIN}\n\n{part_of(path)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    for path in PLOTS:
        path.write_text(plot_of(path), encoding="utf-8")


if __name__ == "__main__":
    update()
