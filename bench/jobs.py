"""`python -m bench.jobs`: what a rebuild by a batch job of Spark on this machine costs, and how that grows.

- `pairs`: a fold of one's own, by `rebuild --master local[N]` and by the online rebuild, in alternating order.
- `growth`: jobs over more and more events, and over more partitions of the same events.

An instance loads the files. A command ends once its generation was compared.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import click

from balance_service.devtools.local.stack import LocalStack
from balance_service.observability.logs import configure_logging
from bench.cluster import Cluster
from bench.generations import Generations
from bench.loads import Loads
from bench.sides import OurInstance, OurSide

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODEL, _OWN_FOLD = "balance", "bench.own_folds:Balance"
_CUSTOMERS = 100_000
_PARTITIONS = 4
# A little below the records of a split, as no partition has just its share of the events.
_SPLIT = 95_000


class Spent(NamedTuple):
    """What a rebuild took.

    Attributes:
        seconds: until it was compared with the serving generation.
        busy: seconds that the tasks ran, one after the other, in Spark and in its Python workers.
        shuffled: the bytes that the tasks wrote for others.
        longest: seconds of the longest task.
        tasks: how many there were.
    """

    seconds: float
    busy: float = 0.0
    shuffled: int = 0
    longest: float = 0.0
    tasks: int = 0


class _Rebuilding:
    """An instance that has applied a load, and rebuilds it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        (instance,) = (one for one in cluster.instances if isinstance(one, OurInstance))
        self._cluster, self._instance, self._folder = cluster, instance, folder
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        cluster.wait_ready(instance)
        cluster.check_balances()

    def online(self) -> Spent:
        return self._spent()

    def by_job(self, cores: int) -> Spent:
        events = Path(tempfile.mkdtemp(dir=self._folder))
        conf = {"enabled": "true", "compress": "false", "rolling.enabled": "false", "dir": events.as_uri()}
        given = [part for name, value in conf.items() for part in ("--spark-conf", f"spark.eventLog.{name}={value}")]
        spent = self._spent("--master", f"local[{cores}]", "--files", str(self._folder / "files"), *given)
        (log,) = events.iterdir()
        lines = log.read_text().splitlines()
        tasks = [one for line in lines if (one := json.loads(line))["Event"] == "SparkListenerTaskEnd"]
        return spent._replace(
            busy=sum(one["Task Metrics"]["Executor Run Time"] for one in tasks) / 1000,
            shuffled=sum(one["Task Metrics"]["Shuffle Write Metrics"]["Shuffle Bytes Written"] for one in tasks),
            longest=max(one["Task Info"]["Finish Time"] - one["Task Info"]["Launch Time"] for one in tasks) / 1000,
            tasks=len(tasks),
        )

    def _spent(self, *options: str) -> Spent:
        began = time.monotonic()
        self._instance.run("rebuild", _MODEL, "--switch", "never", *options)
        spent = Spent(time.monotonic() - began)
        with Generations(self._cluster) as generations:
            generations.wait_compared()
            generations.drop(generations.newest)
        return spent


@contextmanager
def _rebuilding(events: int, partitions: int, model: str) -> Iterator[_Rebuilding]:
    with tempfile.TemporaryDirectory() as folder, LocalStack(Path(folder) / "stack") as stack:
        load = Loads(stack).kept(events, _CUSTOMERS, partitions)
        with Cluster(stack, OurSide(stack, models=[model]), load, "jobs") as cluster:
            yield _Rebuilding(cluster, Path(folder))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measures rebuilds by batch jobs of Spark on this machine."""
    configure_logging("ERROR")


@main.command()
@click.option("--events", default=1_000_000, show_default=True)
@click.option("--cores", default=2, show_default=True)
@click.option("--repetitions", default=3, show_default=True)
def pairs(events: int, cores: int, repetitions: int) -> None:
    """A fold of one's own: the rate of a job against that of the online rebuild."""
    ratios = []
    with _rebuilding(events, _PARTITIONS, _OWN_FOLD) as rebuilding:
        for repetition in range(repetitions):
            if repetition % 2:
                job, online = rebuilding.by_job(cores), rebuilding.online()
            else:
                online, job = rebuilding.online(), rebuilding.by_job(cores)
            ratios.append(online.seconds / job.seconds)
            click.echo(f"job {job.seconds:.1f} s, online {online.seconds:.1f} s: {ratios[-1]:.2f} times the rate")
    click.echo(f"median of {repetitions}: {median(ratios):.2f} times the rate of the online rebuild")


@main.command()
@click.option("--splits", default="1,2,4,8", show_default=True, help="Of 95,000 events, in each of 4 partitions.")
@click.option("--partitions", default="2,16,64", show_default=True, help="Of a million events.")
@click.option("--model", default=_OWN_FOLD, show_default=True)
def growth(splits: str, partitions: str, model: str) -> None:
    """What a job on local[2] takes by the number of events, and by that of partitions."""
    click.echo("| partitions | events | s | tasks, s | longest task, s | shuffle, bytes an event | tasks |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- |")
    cases = [(_PARTITIONS, _PARTITIONS * _SPLIT * int(one)) for one in splits.split(",") if one]
    cases += [(int(one), 1_000_000) for one in partitions.split(",") if one]
    for of, events in cases:
        with _rebuilding(events, of, model) as rebuilding:
            spent = rebuilding.by_job(2)
        click.echo(
            f"| {of} | {events:,} | {spent.seconds:.1f} | {spent.busy:.1f} | {spent.longest:.1f} "
            f"| {spent.shuffled / events:.1f} | {spent.tasks} |"
        )


if __name__ == "__main__":
    main()
