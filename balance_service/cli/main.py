"""The command line: `balance-service …`. Commands for people; `--json` for programs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from balance_service import __version__
from balance_service.cli.client import ask, at_url
from balance_service.cli.dead_letters import dead_letters
from balance_service.cli.records import produce, tail
from balance_service.cli.schemas import schemas
from balance_service.cli.topics import topics
from balance_service.devtools.progress import progress_bar
from balance_service.errors import BalanceServiceError, ConfigurationError, InvalidInputError
from balance_service.observability.logs import configure_logging, quiet_logging
from balance_service.process.failpoints import arm
from balance_service.process.open_files import raise_limit
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from balance_service.hosting.rebuild import Rebuilt

_FAILED, _CONFIGURATION = 1, 2
_MAX_PORT = 65_535
_PRIVATE_UMASK = 0o077
_PORT = click.IntRange(0, _MAX_PORT)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Balances folded from a Kafka topic, answered over HTTP by any instance.

    Settings come from BALANCE_* environment variables; `serve --print-config` shows them.
    """


@cli.command()
@click.option("--print-config", is_flag=True, help="Print every setting, secrets hidden, and exit.")
def serve(*, print_config: bool) -> None:
    """Run one instance until SIGTERM or Ctrl-C."""
    settings = load_settings()
    if print_config:
        for name, value in settings.printable().items():
            click.echo(f"{name}={value}")
        return
    configure_logging(settings.log_level)
    arm(settings.failpoints)
    # The JVM inherits the limit.
    raise_limit()
    from balance_service.events.spark.jvm import launch_jvm
    from balance_service.state.store.directory import StateDirectory

    _write_for_this_user_alone()
    directory = StateDirectory(settings.state_dir, settings.application_id)
    with closing(directory):
        # It comes up while the rest is imported, which is slow.
        launch_jvm(settings, directory.scratch)
        from balance_service.application import Application
        from balance_service.cli.models import hosted_models, known_models

        hosted, known = hosted_models(settings), known_models(settings)

        async def run() -> None:
            await Application(settings, hosted, known=known, state_directory=directory).serve()

        asyncio.run(run())


@cli.command()
@click.option("--instances", default=2, show_default=True, type=click.IntRange(0, 16), help="How many to run.")
@click.option("--kafka-port", default=9092, show_default=True, type=_PORT, help="Broker's port; 0 picks a free one.")
@click.option(
    "--registry-port", default=8081, show_default=True, type=_PORT, help="Registry's port; 0 picks a free one."
)
@click.option(
    "--http-port", default=5051, show_default=True, type=_PORT, help="First instance's port; 0 picks free ones."
)
@click.option(
    "--data-dir",
    default="local-data",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where all is kept.",
)
@click.option("--sample-events", is_flag=True, help="Feed each read model, and print what to try.")
def local(
    *,
    instances: int,
    kafka_port: int,
    registry_port: int,
    http_port: int,
    data_dir: Path,
    sample_events: bool,
) -> None:
    """Run broker, registry and instances here, as children, until Ctrl-C."""
    from balance_service.cli.models import known_models
    from balance_service.devtools.local.run import run_local

    if http_port and http_port + instances - 1 > _MAX_PORT:
        most = _MAX_PORT + 1 - instances
        raise click.UsageError(
            f"--http-port {http_port} leaves no ports for {instances} instances; give {most} at most"
        )
    models = known_models(load_settings()) if sample_events else []
    run_local(instances, kafka_port, registry_port, http_port, data_dir, sample_models=models)


@cli.command()
def demo() -> None:
    """Play the whole story on a stack of its own; exits non-zero if any step is not as it should be."""
    from balance_service.devtools.local.demo import play

    play()


cli.add_command(dead_letters)
cli.add_command(schemas)
cli.add_command(topics)
cli.add_command(produce)
cli.add_command(tail)


@cli.command("add-funds")
@click.argument("customer")
@click.argument("amount")
@click.option("--idempotency-key", help="Of several events of a customer with the same key, one is applied.")
@as_json
def add_funds(customer: str, amount: str, *, idempotency_key: str | None, as_json: bool) -> None:
    """Append one FundsAdded event straight to the topic."""
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.commands.add_funds import amount_of, idempotency_key_of
    from balance_service.commands.publisher import FundsAddedPublisher
    from balance_service.kafka.clients import producer_config
    from balance_service.model.keys import checked_key

    settings = load_settings()
    quiet_logging()
    customer_id, funds = checked_key(customer, "customerId"), amount_of(amount)
    once = None if idempotency_key is None else idempotency_key_of(idempotency_key)
    publisher = FundsAddedPublisher(
        producer_config(settings),
        SchemaRegistry.from_settings(settings),
        settings.topic,
        settings.read_timeout_seconds,
    )
    try:
        partition, offset = publisher.publish_and_wait(customer_id, funds, once)
    finally:
        publisher.close()
    position = f"{partition}:{offset + 1}"
    click.echo(json.dumps({"position": position}) if as_json else f"added {funds}; visible from position {position} on")


@cli.command("get-balance")
@click.argument("customer")
@click.option("--min-position", help="Wait until this position (P:O, as add-funds prints it) is applied.")
@click.option("--max-lag", type=click.IntRange(0), help="Take a standby's answer, at most so many records behind.")
@at_url
@as_json
def get_balance(
    customer: str, min_position: str | None, max_lag: int | None, url: str | None, *, as_json: bool
) -> None:
    """Ask the instance at BALANCE_APPLICATION_SERVER for a balance."""
    parameters = {"customerId": customer} | ({"minPosition": min_position} if min_position else {})
    parameters |= {"maxLag": str(max_lag)} if max_lag is not None else {}
    answer = ask(load_settings(), url, "/api/customers.getBalance", parameters, names=["amount"])
    if as_json:
        click.echo(answer.text)
    else:
        where = answer.headers.get("Balance-Application-Server", "?")
        click.echo(f"{json.loads(answer.text, parse_float=str)['amount']}  (from {where})")


@cli.command()
@at_url
@as_json
def status(url: str | None, *, as_json: bool) -> None:
    """Show what the instance at BALANCE_APPLICATION_SERVER knows of all instances."""
    names = ["applicationServer", "ready", "reasons", "applicationServers"]
    answer = ask(load_settings(), url, "/api/status", {}, names=names)
    if as_json:
        click.echo(answer.text)
        return
    known = answer.json()
    click.echo(f"{known['applicationServer']} is {'ready' if known['ready'] else 'not ready'}")
    for reason in known["reasons"]:
        click.echo(f"  {reason}")
    for server in known["applicationServers"]:
        marks = "".join(f" ({mark})" for mark in ("suspect", "shared") if server[mark])
        click.echo(f"  {server['applicationServer']}{marks}")
        for task in server["tasks"]:
            click.echo(
                f"    {task['task']}  {task['role']} {task['state']}  "
                f"epoch {task['epoch']}  position {task['position']}"
            )


@cli.command()
@click.option("--events", required=True, type=click.IntRange(1), help="How many events.")
@click.option("--customers", required=True, type=click.IntRange(1), help="Of how many customers.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Events per second; as fast as possible.")
def load(events: int, customers: int, rate: float | None) -> None:
    """Append many random FundsAdded events."""
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.devtools.load import produce_load
    from balance_service.kafka.clients import producer_config
    from balance_service.kafka.topic_setup import prepare_topics
    from balance_service.kafka.topics import Topics
    from balance_service.model.placing import stages_of
    from balance_service.read_models import SHIPPED

    settings = load_settings()
    quiet_logging()
    prepare_topics(Topics(settings), settings, stages_of(SHIPPED["balance"](), settings))
    with progress_bar("producing", events) as (bar, task):
        total = produce_load(
            producer_config(settings),
            SchemaRegistry.from_settings(settings),
            settings.topic,
            events,
            customers,
            rate,
            lambda n: bar.advance(task, n),
        )
        seconds = bar.tasks[task].elapsed or 0.0
    click.echo(f"{events} events of {total} in all acknowledged, {events / max(seconds, 1e-9):,.0f} a second")


@cli.command()
@click.argument("model")
def flow(model: str) -> None:
    """Draw the way of a read model's events, as Mermaid text."""
    from balance_service.cli.models import hosted_models
    from balance_service.model.drawing import flowchart
    from balance_service.model.placing import stages_of

    settings = load_settings(models=(model,))
    (known,) = hosted_models(settings)
    click.echo(flowchart(known, stages_of(known, settings)))


@cli.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
def rebuild(models: tuple[str, ...]) -> None:
    """Drop read models and replay their topics; all of BALANCE_MODELS unless some are named.

    Only while no instance runs.
    """
    from balance_service.cli.models import hosted_models
    from balance_service.hosting.rebuild import rebuild as run_rebuild

    settings = load_settings(**({"models": models} if models else {}))
    configure_logging("WARNING")
    raise_limit()
    _write_for_this_user_alone()
    for model in hosted_models(settings):
        if not models and not model.has_states():
            click.echo(f"{model.name} keeps no states: there is nothing to rebuild")
            continue
        with progress_bar(f"replaying {model.name}", None) as (bar, task):
            rebuilt = run_rebuild(settings, model, lambda at, of: bar.update(task, completed=at, total=of))
        click.echo(_told(model.name, rebuilt))


def _write_for_this_user_alone() -> None:
    """For commands that write a state directory; the JVM inherits it."""
    os.umask(_PRIVATE_UMASK)


def _told(model: str, rebuilt: Rebuilt) -> str:
    done = rebuilt.done
    records = done.applied + done.ignored + done.duplicates + done.dead_lettered
    return (
        f"{model} rebuilt: {done.applied} events applied, {done.ignored} records of other types ignored, "
        f"{done.duplicates} duplicates passed over, {done.dead_lettered} dead-lettered, "
        f"{records / max(rebuilt.seconds, 1e-9):,.0f} records a second"
    )


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong configuration or usage."""
    try:
        cli()
    except InvalidInputError as error:
        click.UsageError(str(error)).show()
        sys.exit(_CONFIGURATION)
    except ConfigurationError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(_CONFIGURATION)
    except BalanceServiceError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(_FAILED)
