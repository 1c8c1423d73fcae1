"""The command `balance-service`, and its commands that run instances."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from balance_service.errors import BalanceServiceError, ConfigurationError, InvalidInputError, UnreadableRecordError
from balance_service.observability.logs import configure_logging, quiet_logging
from balance_service.process.failpoints import arm
from balance_service.process.open_files import raise_limit
from balance_service.process.package import __version__, remedy_for
from balance_service.process.runtime import keep_files_private, share_one_allocator

if TYPE_CHECKING:
    from balance_service.settings import Settings

_FAILURE, _WRONG_USAGE = 1, 2
_MAX_PORT = 65_535
_PORT = click.IntRange(0, _MAX_PORT)
_DATA_DIR = click.option(
    "--data-dir",
    default="local-data",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Directory of all data.",
)

_LAZY = {
    "add-funds": "kafka:add_funds",
    "dead-letters": "dead_letters:dead_letters",
    "drop": "generations:drop",
    "generations": "generations:generations",
    "get-balance": "client:get_balance",
    "init": "init:init",
    "load": "kafka:load",
    "pack-environment": "pack:pack_environment",
    "produce": "kafka:produce",
    "rebuild": "generations:rebuild",
    "schemas": "kafka:schemas",
    "status": "client:status",
    "switch": "generations:switch",
    "tail": "kafka:tail",
    "topics": "kafka:topics",
    "try": "try_model:try_model",
}
"""Commands that are imported at first use, as `module:command`: importing all takes longer than `try` runs."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_LAZY})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _LAZY:
            return super().get_command(ctx, cmd_name)
        module, _, name = _LAZY[cmd_name].partition(":")
        command: click.Command = getattr(import_module(f"balance_service.cli.{module}"), name)
        return command


class _ModelsOrCommand(click.Group):
    """A group whose own arguments are read models, unless the first one names a command."""

    allow_interspersed_args = True

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        command = self.commands.get(args[0]) if args else None
        if command is None:
            return super().make_context(info_name, args, parent, **extra)
        return command.make_context(f"{info_name} {command.name}", args[1:], parent, **extra)


def load_settings(**overrides: Any) -> Settings:
    # Imported by the commands that use settings: the import takes long.
    from balance_service.settings import load_settings as load

    return load(**overrides)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Serve state that is folded from Kafka topics over HTTP.

    Settings are BALANCE_* environment variables; `serve --print-config` prints them.
    """


@cli.command()
@click.option("--print-config", is_flag=True, help="Print all settings, without secrets, and exit.")
def serve(*, print_config: bool) -> None:
    """Run one instance until SIGTERM or Ctrl-C."""
    settings = load_settings()
    if print_config:
        for name, value in settings.printable().items():
            click.echo(f"{name}={value}")
        return
    configure_logging(settings.log_level)
    arm(os.environ.get("BALANCE_FAILPOINTS", ""))
    # The JVM inherits the limit.
    raise_limit()
    from balance_service.engine.state_directory import StateDirectory
    from balance_service.spark.jvm import launch_jvm

    keep_files_private()
    share_one_allocator()
    directory = StateDirectory(settings.state_dir, settings.application_id)
    with closing(directory):
        # The JVM starts while the other modules are imported, which is slow.
        launch_jvm(settings, directory.scratch)
        from balance_service.application import Application
        from balance_service.cli.models import hosted_models, with_shipped
        from balance_service.read_models.add_funds import ADD_FUNDS

        hosted = hosted_models(settings)
        known = with_shipped(hosted)
        # Its events are Avro.
        commands = [] if settings.schema_registry_url is None else [ADD_FUNDS]

        async def run() -> None:
            await Application(settings, hosted, known=known, commands=commands, state_directory=directory).serve()

        asyncio.run(run())


@cli.group(cls=_ModelsOrCommand, invoke_without_command=True, subcommand_metavar="")
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--instances", default=2, show_default=True, type=click.IntRange(0, 16), help="Number of instances.")
@click.option("--brokers", default="1", show_default=True, type=click.Choice(["1", "3"]), help="Number of brokers.")
@click.option(
    "--kafka-port",
    default=9092,
    show_default=True,
    type=_PORT,
    help="Port of the first broker; 0: free ones.",
)
@click.option(
    "--registry-port", default=8081, show_default=True, type=_PORT, help="Port of the registry; 0: a free one."
)
@click.option(
    "--http-port", default=5051, show_default=True, type=_PORT, help="Port of the first instance; 0: free ones."
)
@_DATA_DIR
@click.option("--sample-events", is_flag=True, help="Append events for each read model, and print commands to try.")
def local(
    *,
    models: tuple[str, ...],
    instances: int,
    brokers: str,
    kafka_port: int,
    registry_port: int,
    http_port: int,
    data_dir: Path,
    sample_events: bool,
) -> None:
    """Run a Kafka broker, a schema registry and instances of MODEL on this machine until Ctrl-C.

    BALANCE_MODELS is the default for MODEL. Without an Avro topic, there is no registry.
    """
    from balance_service.cli.models import check_models, hosted_models
    from balance_service.devtools.local.run import run_local
    from balance_service.devtools.local.stack import REGISTRY
    from balance_service.model.binding import avro_topics

    if models[:1] == ("restart",):
        raise click.UsageError("options follow the command: write `local restart N --data-dir PATH`")
    if models:
        # The instances inherit it.
        os.environ["BALANCE_MODELS"] = ",".join(models)
    if http_port and http_port + instances - 1 > _MAX_PORT:
        most = _MAX_PORT + 1 - instances
        raise click.UsageError(f"--http-port {http_port} leaves no ports for {instances} instances; use {most} at most")
    # Instances would find the mistake half a minute later, in a log.
    declared = check_models(load_settings())
    run_local(
        instances,
        kafka_port,
        # An application that has begun with a registry needs it permanently.
        registry_port if any(map(avro_topics, declared)) or (data_dir / REGISTRY).exists() else None,
        http_port,
        data_dir,
        brokers=int(brokers),
        hosted=hosted_models,
        sample_events=sample_events,
    )


@local.command()
@click.argument("number", metavar="N", type=click.IntRange(1))
@_DATA_DIR
def restart(number: int, data_dir: Path) -> None:
    """Start instance N of a running `local` again, from another terminal, and wait until it is ready.

    One that runs is stopped before.
    """
    from balance_service.devtools.local.run import restart as start_again

    start_again(data_dir, number)


@cli.command()
def demo() -> None:
    """Run a scripted demonstration on a temporary stack; the exit code is 1 if a step fails."""
    from balance_service.devtools.local.demo import play

    play()


@cli.command()
@click.argument("model")
def flow(model: str) -> None:
    """Print a flowchart of a read model, as Mermaid text."""
    from balance_service.cli.models import chosen_models
    from balance_service.model.flow import flow_of, mermaid
    from balance_service.model.placing import stages_of

    settings = load_settings()
    for known in chosen_models(settings, [model]):
        click.echo(mermaid(flow_of(known, stages_of(known, settings))))


@cli.command()
@click.argument("model")
def explain(model: str) -> None:
    """Print Spark's plan of the `transform` of a read model, the columns that it reads, and its re-key."""
    from balance_service.cli.models import chosen_models
    from balance_service.model.placing import stages_of

    settings = load_settings()
    quiet_logging()
    for known in chosen_models(settings, [model]):
        transforming = [stage for stage in stages_of(known, settings) if stage.transform is not None]
        if not transforming:
            raise ConfigurationError(f"the read model '{known.name}' has no `transform`; see `balance-service flow`")
        for stage in transforming:
            click.echo(stage.explained())


def main() -> None:
    """Entry point. Exit codes: 0 success, 1 failure, 2 wrong configuration or usage."""
    try:
        cli()
    except BalanceServiceError as error:
        click.ClickException(str(error)).show()
        # A start ends by the last one if it is given another registry than before.
        is_wrong = isinstance(error, ConfigurationError | InvalidInputError | UnreadableRecordError)
        sys.exit(_WRONG_USAGE if is_wrong else _FAILURE)
    except ModuleNotFoundError as error:
        if not (remedy := remedy_for(error)):
            raise
        click.ClickException(f"this command needs {error.name}, which is not installed: {remedy}").show()
        sys.exit(_WRONG_USAGE)
