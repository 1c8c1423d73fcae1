"""The command line: `balance-service …`. Commands for people; `--json` for programs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from balance_service.errors import BalanceServiceError, ConfigurationError, InvalidInputError
from balance_service.observability.logs import configure_logging, quiet_logging
from balance_service.process.failpoints import arm
from balance_service.process.open_files import raise_limit
from balance_service.process.package import __version__

if TYPE_CHECKING:
    from balance_service.hosting.rebuild import Rebuilt
    from balance_service.settings import Settings

_FAILED, _CONFIGURATION = 1, 2
_MAX_PORT = 65_535
_PRIVATE_UMASK = 0o077
_PORT = click.IntRange(0, _MAX_PORT)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


_ELSEWHERE = {
    "dead-letters": "dead_letters:dead_letters",
    "get-balance": "asking:get_balance",
    "init": "init:init",
    "produce": "records:produce",
    "schemas": "schemas:schemas",
    "status": "asking:status",
    "tail": "records:tail",
    "topics": "topics:topics",
    "try": "try_model:try_model",
}
"""Commands by name, as `module:command` of this package."""


class _Commands(click.Group):
    """Imports a command's module on first use: importing all of them takes longer than `try` runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, name = _ELSEWHERE[cmd_name].partition(":")
        command: click.Command = getattr(import_module(f"balance_service.cli.{module}"), name)
        return command


def load_settings(**overrides: Any) -> Settings:
    """Load the settings; only commands that use settings import them."""
    from balance_service.settings import load_settings as load

    return load(**overrides)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
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
    from balance_service.engine.state_directory import StateDirectory
    from balance_service.spark.jvm import launch_jvm

    _write_for_this_user_alone()
    directory = StateDirectory(settings.state_dir, settings.application_id)
    with closing(directory):
        # It comes up while the rest is imported, which is slow.
        launch_jvm(settings, directory.scratch)
        from balance_service.application import Application
        from balance_service.cli.models import hosted_models, with_shipped
        from balance_service.read_models.add_funds import ADD_FUNDS

        hosted = hosted_models(settings)
        known = with_shipped(hosted)

        async def run() -> None:
            await Application(settings, hosted, known=known, commands=[ADD_FUNDS], state_directory=directory).serve()

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
    run_local(
        instances, kafka_port, registry_port, http_port, data_dir, known=known_models, sample_events=sample_events
    )


@cli.command()
def demo() -> None:
    """Play the whole story on a stack of its own; exits non-zero if any step is not as it should be."""
    from balance_service.devtools.local.demo import play

    play()


@cli.command("add-funds")
@click.argument("customer")
@click.argument("amount")
@click.option("--idempotency-key", help="Of several events of a customer with the same key, one is applied.")
@as_json
def add_funds(customer: str, amount: str, *, idempotency_key: str | None, as_json: bool) -> None:
    """Append one FundsAdded event straight to the topic."""
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.http.parameters import idempotency_key_of
    from balance_service.kafka.clients import producer_config
    from balance_service.model.keys import checked_key
    from balance_service.read_models.add_funds import amount_of
    from balance_service.read_models.funds_publisher import FundsAddedPublisher

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


@cli.command()
@click.option("--events", required=True, type=click.IntRange(1), help="How many events.")
@click.option("--customers", required=True, type=click.IntRange(1), help="Of how many customers.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Events per second; as fast as possible.")
def load(events: int, customers: int, rate: float | None) -> None:
    """Append many random FundsAdded events."""
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.devtools.load import produce_load
    from balance_service.devtools.progress import progress_bar
    from balance_service.kafka.clients import producer_config
    from balance_service.kafka.topic_specs import prepare_topics
    from balance_service.kafka.topics import Topics
    from balance_service.model.placing import stages_of
    from balance_service.read_models.shipped import SHIPPED

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
    from balance_service.cli.models import chosen_models
    from balance_service.model.drawing import flowchart
    from balance_service.model.placing import stages_of

    settings = load_settings()
    for known in chosen_models(settings, [model]):
        click.echo(flowchart(known, stages_of(known, settings)))


@cli.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
def rebuild(models: tuple[str, ...]) -> None:
    """Drop read models and replay their topics; all of BALANCE_MODELS unless some are named.

    Only while no instance runs.
    """
    from balance_service.cli.models import chosen_models
    from balance_service.devtools.progress import progress_bar
    from balance_service.hosting.rebuild import rebuild as run_rebuild

    settings = load_settings()
    configure_logging("WARNING")
    raise_limit()
    _write_for_this_user_alone()
    for model in chosen_models(settings, models or settings.models):
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
