"""The commands `rebuild`, `generations`, `switch` and `drop`, which build a read model again and choose what serves."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from balance_service.api import KEEP_OLD_SECONDS
from balance_service.cli.client import as_json, at_url, client_of
from balance_service.cli.waiting import servers_of, telling
from balance_service.client import ClientError, InvalidCallError
from balance_service.errors import BalanceServiceError
from balance_service.model.json_view import exact_json
from balance_service.observability.logs import configure_logging
from balance_service.process.open_files import raise_limit
from balance_service.process.runtime import keep_files_private
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.cli.batch import BatchRebuild
    from balance_service.client import Client
    from balance_service.hosting.offline_rebuild import Rebuilt
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings

_LOOK_SECONDS = 0.5
_MOST_LISTED = 5
_CONFLICT = 409
_REASON = click.option("--reason", required=True, metavar="R", help="Kept with the request, for later readers.")


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--offline", is_flag=True, help="Fold a new generation that serves at once; no instance may run.")
@click.option(
    "--switch",
    type=click.Choice(["when-equal", "always", "never"]),
    help="When the new generation serves once it has caught up; by default when-equal, or, if its version is another "
    "one, never.",
)
@click.option(
    "--keep-old",
    type=click.IntRange(0),
    default=KEEP_OLD_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long to keep the old generation after the switch.",
)
@click.option("--max-rate", type=click.IntRange(1), metavar="EVENTS", help="Events per second and instance, at most.")
@click.option(
    "--master", metavar="M", help="Fold on Spark: local[N], spark://HOST:PORT, k8s://URL or yarn; with --files."
)
@click.option(
    "--files", metavar="PLACE", help="An absolute path, or a URI such as s3://bucket/rebuilds, that all share."
)
@click.option("--spark-conf", "spark_conf", multiple=True, metavar="K=V", help="A setting of Spark; repeatable.")
@click.option("--keep-files", is_flag=True, help="Leave the files when they are loaded.")
@click.option("--reason", default="rebuild", show_default=True, metavar="R", help="Kept with the request.")
@click.option("--detach", is_flag=True, help="Return once the rebuild has begun.")
@at_url
@as_json
def rebuild(
    models: tuple[str, ...],
    switch: str | None,
    keep_old: int,
    max_rate: int | None,
    master: str | None,
    files: str | None,
    spark_conf: tuple[str, ...],
    reason: str,
    url: str | None,
    *,
    offline: bool,
    keep_files: bool,
    detach: bool,
    as_json: bool,
) -> None:
    """Replay the topics of read models, while the instances answer; compare with the old states, and switch.

    Ctrl-C does not stop the rebuild. With --offline, BALANCE_MODELS is the default for MODEL.

    With --master, a job of Spark folds the events of one MODEL on a cluster, into files that the instances load. Ctrl-C
    ends the job.
    """
    batch = _batch(master, files, spark_conf, keep_files=keep_files)
    if batch is not None and (offline or len(models) != 1):
        raise click.UsageError("--master rebuilds one MODEL, and not --offline")
    if offline:
        _rebuild_offline(models)
        return
    if not models:
        raise click.UsageError("name the read models to rebuild")
    with client_of(url, changes=True) as client:
        given: dict[str, Any] = {"switch": switch and switch.replace("-", "_"), "keep_old_seconds": keep_old}
        given |= {"max_rate": max_rate, "reason": reason}
        for n, model in enumerate(models):
            try:
                if batch is None:
                    client.rebuild(model, **given)
                else:
                    batch.run(client, model, given)
            except ClientError as error:
                if n:
                    click.echo(
                        f"before this error, rebuilds of {', '.join(models[:n])} have begun, and go on", err=True
                    )
                if isinstance(error, InvalidCallError) and error.status == _CONFLICT:
                    way_out = ""
                    with suppress(ClientError):
                        way_out = _way_out(client.generations(model))
                    raise BalanceServiceError("; ".join(filter(None, [str(error), way_out]))) from error
                raise
        for model in () if detach else models:
            try:
                _follow(client, model, quiet=as_json)
            except KeyboardInterrupt:
                click.echo(
                    f"\nThe rebuild of {model} goes on: `balance-service generations {model}` shows it, and "
                    f"`balance-service drop {model} --generation N --reason R` cancels it."
                )
                sys.exit(0)
            except ClientError:
                click.echo(f"The rebuild of {model} goes on; `balance-service generations {model}` shows it", err=True)
                raise
        found = [client.generations(model) for model in models]
        _show(found, as_json=as_json)
    if any(one["switch"] == "when_equal" and _differs(one) for one in found):
        raise BalanceServiceError("the states differ, so the new generation does not serve")
    if held := [one["reason"] for one in found if one["action"] == "compare" and one["reason"]]:
        raise BalanceServiceError(f"the new generation does not serve by itself: {held[0]}")


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@at_url
@as_json
def generations(models: tuple[str, ...], url: str | None, *, as_json: bool) -> None:
    """Print the generations of read models; by default, of all that the instance hosts."""
    with client_of(url) as client:
        names = models or _with_states(client)
        if not names and not as_json:
            click.echo("This instance hosts no read model that keeps states.")
        _show([client.generations(name) for name in names], as_json=as_json)


@click.command()
@click.argument("model")
@click.option("--to", type=click.IntRange(1), metavar="N", help="The generation; by default the only other one.")
@click.option("--anyway", is_flag=True, help="Switch although something is lost by it, which a refusal names.")
@_REASON
@at_url
@as_json
def switch(model: str, to: int | None, reason: str, url: str | None, *, anyway: bool, as_json: bool) -> None:
    """Have another generation of a read model serve: a new one that has caught up, or the one that is kept."""
    with client_of(url, changes=True) as client:
        switched = client.switch(model, to=to, anyway=anyway, reason=reason)
        _show([switched], as_json=as_json)
        if switched["reason"] != reason and not as_json:
            click.echo(f"  {switched['reason']}")


@click.command()
@click.argument("model")
@click.option("--generation", type=click.IntRange(1), metavar="N", help="Not the one that serves.")
@click.option("--reason", metavar="R", help="Kept with the request, for later readers; required with --generation.")
@click.option("--all", "everything", is_flag=True, help="Ask the brokers, not an instance.")
@click.option("--yes", is_flag=True, help="With --all, do not ask.")
@at_url
@as_json
def drop(
    model: str,
    generation: int | None,
    reason: str | None,
    url: str | None,
    *,
    everything: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete a generation of a read model; cancels its rebuild.

    With --all, delete what a MODEL has left that no instance hosts any more: changelogs, topics between its stages,
    their subjects and open transactions.
    """
    if everything:
        if generation is not None or url is not None or as_json:
            raise click.UsageError("--all asks the brokers: give no --generation, --url or --json with it")
        _remove(model, yes=yes)
        return
    if generation is None or reason is None:
        raise click.UsageError("give --generation N and --reason R, or --all for a model that no instance hosts")
    with client_of(url, changes=True) as client:
        _show([client.drop(model, generation=generation, reason=reason)], as_json=as_json)


def _remove(model: str, *, yes: bool) -> None:
    from balance_service.hosting.removal import Removal

    configure_logging("WARNING")
    settings = load_settings()
    with telling(servers_of(settings)):
        removal = Removal(settings, model)
    for topic in removal.topics:
        click.echo(topic)
    if not yes:
        click.confirm("Delete these topics? Only a replay of the source brings their records back", abort=True)
    with telling(servers_of(settings)):
        removal.run()
    click.echo(f"{len(removal.topics)} topics of {model} are deleted")


def _way_out(found: dict[str, Any]) -> str:
    """Returns how to drop the generation that prevents the build of another one; empty if there is none."""
    for generation in found["generations"]:
        if generation["status"] != "serving":
            number, is_kept = generation["generation"], generation["status"] == "kept"
            lost = ", and no switch leads back to it then" if is_kept else ""
            return f"`balance-service drop {found['model']} --generation {number} --reason R` drops it now{lost}"
    return ""


def _differs(found: dict[str, Any]) -> bool:
    counts = found["comparison"]
    return counts is not None and any(count for name, count in counts.items() if name != "equal")


def _rules_that_differ(found: dict[str, Any]) -> str:
    """Returns which rules of the decoder the generations differ by; empty if none reads other values."""
    rules = sorted({generation["decoderRules"] for generation in found["generations"]})
    schemas = sorted({schema for generation in found["generations"] for schema in generation["readOtherwise"]})
    if len(rules) == 1 or not schemas:
        return ""
    return (
        f"they began under rules {' and '.join(map(str, rules))} of the decoder, which read other values of events "
        f"under schema {_listed(schemas)}"
    )


def _with_states(client: Client) -> Sequence[str]:
    """Returns the read models that the instance hosts and that keep states. It answers once it has started."""
    keyed = {one["name"] for one in client.models() if one["key"]}
    return [name for name in dict.fromkeys(one["model"] for one in client.status()["models"]) if name in keyed]


def _follow(client: Client, model: str, *, quiet: bool) -> None:
    """Shows the progress of a rebuild until the new generation serves, waits for an operator, or is gone."""
    from balance_service.devtools.progress import progress_bar

    with progress_bar(f"rebuilding {model}", None) as (bar, task):
        while True:
            now = client.generations(model)
            building = [one for one in now["generations"] if one["status"] == "building"]
            if not building:
                return
            (one,) = building
            doing = "rebuilding"
            # An instance of an earlier version does not say so.
            if halted := one.get("halted"):
                raise BalanceServiceError(
                    f"generation {one['generation']} of {model} cannot be built: {halted}; remove the reason and "
                    f"restart that instance, or cancel the rebuild with `balance-service drop {model} --generation "
                    f"{one['generation']} --reason R`"
                )
            loaded = one.get("loaded")
            if loaded is not None and loaded < 1:
                doing = "loading"
                bar.update(task, completed=round(100 * loaded), total=100)
            elif not quiet and one["lag"] is not None:
                bar.update(task, completed=one["position"], total=one["position"] + one["lag"])
            why = f": {now['problem']}" if now["problem"] else ""
            bar.update(task, description=f"{doing} {model}{why}")
            time.sleep(_LOOK_SECONDS)


def _show(found: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for one in found:
            click.echo(exact_json(one))
        return
    for one in found:
        for generation in one["generations"]:
            lag = "unknown" if generation["lag"] is None else generation["lag"]
            click.echo(
                f"{one['model']} {generation['generation']}  {generation['status']:<8}  "
                f"version {generation['version']}  "
                f"{generation['running']} of {generation['partitions']} partitions run  "
                f"position {generation['position']}  lag {lag}"
            )
            if halted := generation.get("halted"):
                click.echo(f"  {halted}")
            if generation["declarationChanged"]:
                click.echo(
                    "  its class is declared in another way since: rebuild it, or give the class a higher version"
                )
            if generation["readOtherwise"]:
                click.echo(
                    f"  it began under rules {generation['decoderRules']} of the decoder, and newer rules read other "
                    f"values of events under schema {_listed(generation['readOtherwise'])}: `balance-service rebuild "
                    f"{one['model']}` reads all by the newest"
                )
        if one["comparison"] is not None:
            counts = one["comparison"]
            click.echo(
                f"  keys: {counts['equal']} equal, {counts['different']} different, "
                f"{counts['onlyServing']} only in the old, {counts['onlyBuilding']} only in the new"
            )
            if _differs(one) and (rules := _rules_that_differ(one)):
                click.echo(f"  a reason of differences: {rules}")
        if any(generation["status"] == "ready" for generation in one["generations"]):
            click.echo(f"  `balance-service switch {one['model']} --reason R` has the new one serve")
        if one["keptUntil"] is not None:
            click.echo(f"  the kept generation is dropped at {one['keptUntil']}, and no rebuild can begin before")
            click.echo(f"  {_way_out(one)}")
        if one["problem"] and one["problem"] not in [generation.get("halted") for generation in one["generations"]]:
            click.echo(f"  {one['problem']}")


def _batch(
    master: str | None, files: str | None, spark_conf: Sequence[str], *, keep_files: bool
) -> BatchRebuild | None:
    """Returns what the options say of a batch job; None if there is none. Raises click.UsageError."""
    if master is None or files is None:
        if master is not None or files is not None or spark_conf or keep_files:
            raise click.UsageError("--master and --files belong together, and --spark-conf and --keep-files to both")
        return None
    from balance_service.cli.batch import BatchRebuild

    if wrong := [one for one in spark_conf if not one.partition("=")[1]]:
        raise click.UsageError(f"--spark-conf {wrong[0]}: give it as NAME=VALUE")
    conf = {name: value for name, _, value in (one.partition("=") for one in spark_conf)}
    return BatchRebuild(master, files, conf, keeps_files=keep_files)


def _rebuild_offline(models: tuple[str, ...]) -> None:
    from balance_service.cli.models import chosen_models

    settings = load_settings()
    configure_logging("WARNING")
    raise_limit()
    keep_files_private()
    with telling(servers_of(settings)):
        chosen = chosen_models(settings, models or settings.models)
    for model in chosen:
        if not models and not model.has_states():
            click.echo(f"{model.name} keeps no states: there is nothing to rebuild")
            continue
        click.echo(_summary(model.name, _rebuilt(settings, model)))


def _rebuilt(settings: Settings, model: ReadModel) -> Rebuilt:
    from balance_service.devtools.progress import progress_bar
    from balance_service.hosting.offline_rebuild import rebuild as run_rebuild

    # The bar is there from the start, also while Spark starts.
    with progress_bar(f"replaying {model.name}", None) as (bar, task):
        return run_rebuild(settings, model, lambda at, of: bar.update(task, completed=at, total=of))


def _summary(model: str, rebuilt: Rebuilt) -> str:
    done = rebuilt.done
    records = done.applied + done.ignored + done.duplicates + done.dead_lettered
    return (
        f"{model} rebuilt: {done.applied} events applied, {done.ignored} records of other types ignored, "
        f"{done.duplicates} duplicates skipped, {done.dead_lettered} dead-lettered, "
        f"{records / max(rebuilt.seconds, 1e-9):,.0f} records/s"
    )


def _listed(schema_ids: Sequence[int]) -> str:
    """Returns a few ids in words."""
    shown = ", ".join(map(str, schema_ids[:_MOST_LISTED]))
    more = len(schema_ids) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown
