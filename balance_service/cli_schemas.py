"""The commands `balance-service schemas …`."""

from __future__ import annotations

import click

from balance_service.logs import quiet_logging
from balance_service.settings import load_settings


@click.group()
def schemas() -> None:
    """Schemas of what the service reads and writes."""


@schemas.command("register")
def schemas_register() -> None:
    """Register every schema that the registry lacks.

    Instances do so themselves as they start, if they may; this is for whoever prepares a registry for them.
    """
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import full_name, load_schema
    from balance_service.read_models.balance import Balance

    settings = load_settings()
    quiet_logging()
    read_model = Balance()
    written = {
        settings.topic: [*read_model.event_schemas.values()],
        settings.changelog_topic: [read_model.state_schema, load_schema("Position"), load_schema("IdempotencyMarker")],
        settings.application_servers_topic: [load_schema("ApplicationServer")],
    }
    registry = SchemaRegistry.from_settings(settings)
    try:
        for topic, records in written.items():
            for schema in records:
                subject = f"{topic}-{full_name(schema)}"
                click.echo(f"{subject}: schema id {registry.register(subject, schema)}")
    finally:
        registry.close()
