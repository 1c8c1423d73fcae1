"""The commands `balance-service schemas …`."""

from __future__ import annotations

import click

from balance_service.observability.logs import quiet_logging
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
    from balance_service.avro.schemas import load_schema, subject_of
    from balance_service.model.catalogue import hosted_stages

    settings = load_settings()
    quiet_logging()
    written = {
        settings.application_servers_topic: [load_schema("ApplicationServer")],
        settings.dead_letter_decisions_topic: [load_schema("DeadLetterDecision")],
    }
    for stage in hosted_stages(settings):
        model, names = stage.read_model, stage.names
        if stage.leg.is_first:
            written.setdefault(names.source, []).extend(stage.leg.event_schemas.values())
        for join in stage.leg.joins:
            written.setdefault(join.table.topic, []).append(join.table.schema)
        if stage.leg.makes is not None:
            written[names.rekeyed] = [load_schema(stage.leg.makes)]
        written[names.changelog] = [load_schema("Position"), load_schema("Letter")]
        if model is not None and stage.leg.by is None:
            if model.has_states():
                written[names.changelog] += [model.state_schema, load_schema("IdempotencyMarker")]
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
