"""The commands `balance-service topics …`."""

from __future__ import annotations

import click

from balance_service.devtools.progress import progress_bar
from balance_service.observability.logs import quiet_logging
from balance_service.settings import load_settings


@click.group()
def topics() -> None:
    """Topics of the service."""


@topics.command("create")
def topics_create() -> None:
    """Create every topic that is missing, and check those that are there."""
    from balance_service.cli.models import hosted_models, with_shipped
    from balance_service.kafka.topic_specs import prepare_topics
    from balance_service.kafka.topics import Topics
    from balance_service.model.placing import hosted_stages, stages_of_retries

    settings = load_settings(create_topics=True)
    quiet_logging()
    models = hosted_models(settings)
    stages = [*hosted_stages(models, settings), *stages_of_retries(with_shipped(models), settings)]
    for topic in prepare_topics(Topics(settings), settings, stages).values():
        click.echo(f"topic {topic.name} with {topic.partitions} partitions, and the internal topics, are there")


@topics.command("copy")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option(
    "--partitions",
    type=click.IntRange(1, 10_000),
    help="Partitions of TO; by default as many as it has, or as FROM has where TO is missing.",
)
def topics_copy(source: str, target: str, partitions: int | None) -> None:
    """Copy every event of topic FROM to topic TO, then compare the two.

    The way out when FROM's partition count was changed: each key's events come to lie on one partition of TO, in
    order. Set BALANCE_TOPIC to TO afterwards, and BALANCE_APPLICATION_ID to a new name. Interrupted, run it again: it
    goes on from where it was.
    """
    from balance_service.devtools.topic_copy.comparison import compare
    from balance_service.devtools.topic_copy.copy import copy_topic

    settings = load_settings()
    quiet_logging()
    with progress_bar("copying", None) as (bar, task):
        copied = copy_topic(
            settings, source, target, partitions, lambda at, of: bar.update(task, completed=at, total=of)
        )
    click.echo(
        f"copied {copied.records} records to {copied.target.partitions} partitions, "
        f"{copied.records / max(copied.seconds, 1e-9):,.0f} a second"
    )
    with progress_bar("comparing", None) as (bar, task):
        both = compare(settings, copied, lambda at, of: bar.update(task, completed=at, total=of))
    width = max(len(source), len(target))
    click.echo(f"{source:{width}}  {both.source}\n{target:{width}}  {both.target}")
    both.check(source, target)
    click.echo(f"the same; '{target}' can take the place of '{source}'")
