"""Generates the tables of README.md and docs/performance.md from the last full run: `python -m bench.tables`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from bench.figures import NAMES, Key
from bench.plan import CUSTOMERS, EVENTS, LONG_EVENTS, read_case, replay_case
from bench.report import rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.report import Document, Row

LATEST = Path(__file__).with_name("results") / "latest.json"
_ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- made by `python -m bench.tables` -->", "<!-- until here -->"


def _key(measure: str, case: str, name: str) -> Key:
    return Key(measure, case, NAMES[name])


SHORT = [
    *(
        _key("replay", replay_case(LONG_EVENTS, CUSTOMERS[0]), name)
        for name in ("rate", "rate_with_start", "cpu_with_start", "memory")
    ),
    *(_key("replay", replay_case(EVENTS, customers), "rate") for customers in CUSTOMERS),
    _key("postgresql", replay_case(EVENTS, CUSTOMERS[0]), "rate"),
    _key("rewards", "100,000 cards", "rate_with_start"),
    _key("scaling", "2 instances", "of_one"),
    _key("start", "clean, jars present", "ready"),
    _key("restore", "1,000,000 keys", "keys"),
    *(_key("freshness", case, name) for case in ("1,000 events/s", "50,000 events/s") for name in ("p50", "p99")),
    *(_key("reads", read_case("local", 16, rate), "requests") for rate in (0, 20_000)),
    _key("idle", "one instance", "idle"),
]
"""The figures in README.md: some of each kind, including figures that miss their goals."""


_OF_SWEEP = {NAMES[name] for name in ("rate", "rate_with_start", "cpu_with_start", "memory", "cpu_event", "requests")}
"""The figures of each setting in the tables; the JSON has all."""


_UNSHOWN = {NAMES[name] for name in ("second_half", "evenness")}
"""Rates of parts of a replay, which are not shown: the progress of this service is known only at commits."""


def short(told: Document) -> str:
    """The table of README.md."""
    by_key = {Key(row.measure, row.case, row.figure): row for row in rows(told)}
    return _table(by_key[key] for key in SHORT if key in by_key)


def whole(told: Document) -> str:
    """The tables of docs/performance.md, one for each measure."""
    machine = told["machine"]
    by_measure: dict[str, list[Row]] = {}
    for row in rows(told):
        if row.figure in _UNSHOWN or (row.measure == "sweep" and row.figure not in _OF_SWEEP):
            continue
        by_measure.setdefault(row.measure, []).append(row)
    return "\n\n".join(
        [
            f"Measured at commit `{told['commit']}` on {told['date'][:10]}: {machine['cores']} cores "
            f"({machine['processor']}), {machine['memory']}, {machine['system']}, {machine['Java']}. Broker and load "
            "generator run on the same cores. All values, sizes, settings and versions: "
            "[bench/results/latest.json](../bench/results/latest.json).",
            "![The same as bars](../bench/results/latest.png)",
            "\n".join(f"- {note}" for note in told["notes"]),
            *(f"### {measure}\n\n{_table(some)}" for measure, some in by_measure.items()),
        ]
    )


def _table(some: Iterable[Row]) -> str:
    lines = [
        "| figure | balance_service | peer | ratio | n | goal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in some:
        theirs = f"{row.theirs} ({row.peer})" if row.theirs else ""
        goal = f"**{row.goal}**" if row.met is False else row.goal
        what = f"{row.measure}, {row.case}: {row.figure}"
        lines.append(f"| {what} | {row.ours} | {theirs} | {row.ratio} | {row.repetitions} | {goal} |")
    return "\n".join(lines)


MADE = {_ROOT / "README.md": short, _ROOT / "docs/performance.md": whole}
"""File → the function that generates the part between its markers."""


def between_markers(text: str) -> str:
    """The part of a file between the markers."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def part_of(path: Path) -> str:
    """The generated part of a file."""
    told: Document = json.loads(LATEST.read_text(encoding="utf-8"))
    return MADE[path](told)


def update() -> None:
    """Update the generated part of each file."""
    for path in MADE:
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        path.write_text(f"{before}{BEGIN}\n\n{part_of(path)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    update()
