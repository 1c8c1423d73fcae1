"""The commands `balance-service schemas …`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from balance_service.observability.logs import quiet_logging
from balance_service.settings import load_settings


@click.group()
def schemas() -> None:
    """Schemas of what the service reads and writes."""


@schemas.command("register")
def schemas_register() -> None:
    """Register every schema that the registry lacks, except those of topics that others write.

    Instances do so themselves as they start, if they may; this is for whoever prepares a registry for them.
    """
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import is_shipped, load_schema, subject_of
    from balance_service.cli.models import hosted_models, with_shipped
    from balance_service.model.placing import hosted_stages, stages_of_retries

    settings = load_settings()
    quiet_logging()
    written = {
        settings.application_servers_topic: [load_schema("ApplicationServer")],
        settings.dead_letter_decisions_topic: [load_schema("DeadLetterDecision")],
    }
    models = {model.name: model for model in hosted_models(settings)}
    retries = stages_of_retries(with_shipped(models.values()), settings)
    for stage in (*hosted_stages(models.values(), settings), *retries):
        model = models.get(stage.owner)
        if not stage.reads_rekeyed:
            written.setdefault(stage.source, []).extend(filter(is_shipped, stage.schemas.values()))
        for join in stage.joins:
            written.setdefault(join.table.topic, []).extend(filter(is_shipped, [stage.rows[join.table.record]]))
        if stage.makes is not None:
            written[stage.rekeyed] = [stage.makes]
        written[stage.changelog] = [load_schema("Position"), load_schema("Letter")]
        if model is not None and not stage.passes_on:
            if model.has_states():
                written[stage.changelog] += [model.state_schema, load_schema("IdempotencyMarker")]
            for topic, schema in model.sent_schemas():
                written.setdefault(topic, []).append(schema)
    registry = SchemaRegistry.from_settings(settings)
    try:
        for topic, records in written.items():
            for schema in records:
                subject = subject_of(topic, schema)
                click.echo(f"{subject}: schema id {registry.register(subject, schema)}")
    finally:
        registry.close()


@schemas.command("pull")
@click.argument("topic")
@click.option(
    "--to",
    "folder",
    default="schemas",
    show_default=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder that the files are written to.",
)
def schemas_pull(topic: str, folder: Path) -> None:
    """Write the newest schemas that the registry has for TOPIC to files, a record each.

    A file that holds another schema is left as it is: nothing is written then, and the exit code is 2.
    """
    from contextlib import closing

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.errors import ConfigurationError

    settings = load_settings()
    quiet_logging()
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        found = registry.records_of(topic)
    if not found:
        raise ConfigurationError(
            f"the schema registry at {registry.url} has no record under the subjects "
            f"{topic}-NAMESPACE.NAME or {topic}-value; correct TOPIC, or BALANCE_SCHEMA_REGISTRY_URL"
        )
    texts = {folder / f"{name}.avsc": json.dumps(schema, indent=2) + "\n" for name, schema in found.items()}
    for file, text in texts.items():
        if file.exists() and not _holds(file, text):
            raise ConfigurationError(f"{file} holds another schema; move it away, or pull to another folder by --to")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
        click.echo(f"wrote {file}")


def _holds(file: Path, text: str) -> bool:
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")) == json.loads(text))
    except ValueError:
        return False
