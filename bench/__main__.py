"""`python -m bench`: compares this service with other systems or an earlier checkout. Needs the extra `bench`."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console

from balance_service.devtools.local.stack import LocalStack
from bench.figures import NAMES, Figures, Key
from bench.load import PRODUCER
from bench.machine import facts
from bench.plan import FULL, GENERATIONS, MEASURES, PAIRS, QUICK, SMOKE, replay_case
from bench.plot import plot
from bench.reads import generator
from bench.report import Document, document, table, write_json
from bench.run import Run
from bench.sides import BEFORE, OURS, THEIRS
from bench.tables import LATEST, REBUILDS, update

_RESULTS = Path(__file__).with_name("results")
_KNOWN = (*MEASURES, GENERATIONS)
_LEAST_RATIO = 1.5
_FILE_COLUMNS = 200


def _chosen(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    chosen = tuple(filter(None, (value or "").split(",")))
    if unknown := sorted(set(chosen) - set(_KNOWN)):
        raise click.BadParameter(f"{', '.join(unknown)}; choose from {', '.join(_KNOWN)}, separated by commas")
    return chosen


def _checkout(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    if value and not (value / ".venv/bin/python").exists():
        raise click.BadParameter(f"{value} has no .venv/bin/python: run `make setup` there first")
    return value


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--quick", "size", flag_value="quick", help="Under five minutes; fails if replay is not 1.5 times as fast."
)
@click.option(
    "--smoke", "size", flag_value="smoke", help="Tiny loads, to test the benchmark; the figures are meaningless."
)
@click.option("--only", callback=_chosen, metavar="MEASURE,…", help=f"Take only these measures: {', '.join(_KNOWN)}.")
@click.option(
    "--before",
    type=click.Path(path_type=Path, resolve_path=True),
    callback=_checkout,
    metavar="FOLDER",
    help="Compare with an earlier checkout instead of Kafka Streams; run `make setup` there first.",
)
@click.option("--data-dir", type=click.Path(path_type=Path), help="Folder of Kafka and the stores. Default: a new one.")
def main(size: str | None, only: tuple[str, ...], before: Path | None, data_dir: Path | None) -> None:
    """Measure this service and Kafka Streams on one broker, and print and store the figures.

    BALANCE_* variables apply to both checkouts of this service. Figures are stored during the run in
    bench/results/<date>-partial.json. A full run is stored as latest.json, from which the tables of README.md and
    bench/RESULTS.md and the plots of docs/performance.md are made; one with --before as <date>-before.json and .svg.
    A full run has no `generations`: one of these alone is stored as generations.json, for the table of
    docs/performance.md.
    """
    plan = {None: PAIRS if before else FULL, "quick": QUICK, "smoke": SMOKE}[size]
    figures = Figures(BEFORE if before else THEIRS)
    date = datetime.now(UTC)
    stem = f"{date:%Y-%m-%d-%H%M}" + ("-before" if before else "")
    kept = _RESULTS / f"{stem}-partial.json"
    machine = facts(("kafka",) if before else ("kafka", "bench"))
    given = {"producer of the load": {k: str(v) for k, v in PRODUCER.items()}, "reads": {"by": generator()}}

    def told() -> Document:
        return document(figures, plan, date.isoformat(timespec="seconds"), machine, run.settings | given)

    with ExitStack() as cleanup:
        folder = data_dir or Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="balance-bench-")))
        stack = cleanup.enter_context(LocalStack(folder))
        run = Run(stack, plan, figures, before)
        failures = run.measure(only or plan.measures, lambda: write_json(kept, told()))
    if not (size or only):
        kept = kept.rename(_RESULTS / f"{stem}.json" if before else LATEST)
        if before:
            kept.with_suffix(".svg").write_text(plot(told()), encoding="utf-8")
        else:
            update()
    elif size is None and only == (GENERATIONS,) and not failures:
        kept = kept.rename(REBUILDS)
        update()
    console = Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)
    console.print(table(told()))
    for note in figures.notes:
        console.print(f"  {note}", highlight=False)
    console.print(f"  stored in bench/results/{kept.name}", highlight=False)
    if size == "quick" and not before:
        failures += _too_slow(figures)
    for failure in failures:
        click.echo(f"failed: {failure}", err=True)
    sys.exit(bool(failures))


def _too_slow(figures: Figures) -> list[str]:
    key = Key("replay", replay_case(QUICK.events, QUICK.customers[0]), NAMES["rate"])
    ratio = figures.ratio(key)
    if ratio is None or ratio >= _LEAST_RATIO:
        return []
    ours, theirs = figures.median(key, OURS) or 0, figures.median(key, THEIRS) or 0
    return [
        f"replay is only {ratio:.2f} times as fast as Kafka Streams ({ours:,.0f} against {theirs:,.0f} events/s); "
        f"it should be at least {_LEAST_RATIO:g} times"
    ]


if __name__ == "__main__":
    main()
