"""Commands on topics and schemas: they connect to Kafka and the schema registry, not to an instance."""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from balance_service.cli.models import hosted_models, models_of_topic, with_shipped
from balance_service.cli.waiting import servers_of, telling
from balance_service.errors import ConfigurationError
from balance_service.model.record_keys import KEY_FORMATS
from balance_service.observability.logs import quiet_logging
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.model.read_model import ReadModel
    from balance_service.model.record_keys import KeyFormat
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings

_HAS_ALL = "the newest schema of its topic has all fields of the dataclass"


@click.command("add-funds")
@click.argument("customer")
@click.argument("amount")
@click.option("--idempotency-key", help="Of several events of a customer with the same key, only one is applied.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def add_funds(customer: str, amount: str, *, idempotency_key: str | None, as_json: bool) -> None:
    """Append one FundsAdded event to the topic."""
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.kafka.clients import producer_config
    from balance_service.model.keys import checked_key
    from balance_service.read_models.add_funds import FundsAddedPublisher, amount_of, idempotency_key_of

    settings = load_settings()
    quiet_logging()
    customer_id, funds = checked_key(customer, "customerId"), amount_of(amount)
    once = None if idempotency_key is None else idempotency_key_of(idempotency_key)
    with telling(servers_of(settings)):
        # Its constructor registers the schema.
        publisher = FundsAddedPublisher(
            producer_config(settings, settings.partitioner),
            SchemaRegistry.from_settings(settings),
            settings.topic,
            settings.read_timeout_seconds,
        )
        with closing(publisher):
            partition, offset = publisher.publish_and_wait(customer_id, funds, once)
    position = f"{partition}:{offset + 1}"
    click.echo(json.dumps({"position": position}) if as_json else f"added {funds}; visible from position {position} on")


@click.command()
@click.option("--events", required=True, type=click.IntRange(1), help="Number of events.")
@click.option("--customers", required=True, type=click.IntRange(1), help="Number of customers.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="Events per second. Default: as fast as possible."
)
def load(events: int, customers: int, rate: float | None) -> None:
    """Append many random FundsAdded events."""
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.devtools.produce import produce_load
    from balance_service.devtools.progress import progress_bar
    from balance_service.kafka.clients import producer_config
    from balance_service.kafka.topic_specs import prepare_topics
    from balance_service.kafka.topics import Topics
    from balance_service.model.placing import stages_of
    from balance_service.read_models import SHIPPED

    settings = load_settings()
    quiet_logging()
    with telling(servers_of(settings)):
        prepare_topics(Topics(settings), settings, stages_of(SHIPPED["balance"](), settings))
    with telling(servers_of(settings)) as answered, progress_bar("producing", events) as (bar, task):

        def show(queued: int) -> None:
            answered()
            bar.advance(task, queued)

        total = produce_load(
            producer_config(settings, settings.partitioner),
            SchemaRegistry.from_settings(settings),
            settings.topic,
            events,
            customers,
            rate,
            show,
        )
        seconds = bar.tasks[task].elapsed or 0.0
    click.echo(f"{events} events of {total} in total acknowledged, {events / max(seconds, 1e-9):,.0f} events/s")


@click.command()
@click.argument("topic")
@click.option("--key-separator", metavar="S", help="Separates key and JSON, such as '|'. Default: lines have no key.")
@click.option("--record", metavar="NAME", help="The record of the lines, if the topic has several.")
@click.option(
    "--format",
    "topic_format",
    type=click.Choice(["avro", "json"]),
    help="Of the topic. Needed for JSON that no read model reads: documents are sent unchanged.",
)
def produce(topic: str, key_separator: str | None, record: str | None, topic_format: str | None) -> None:
    """Append a record to TOPIC for each line of standard input: `[key S] JSON`.

    A read model declares the records of the topic and their format. Decimals are numbers or strings, times ISO 8601,
    bytes base64. `null` after a key is a tombstone, if the topic takes tombstones. Blank lines are skipped. The command
    stops at the first line that is not such a record: the records before it are sent.
    """
    from balance_service.devtools.produce import produce as produce_lines

    settings = load_settings()
    quiet_logging()
    if key_separator == "":
        raise click.UsageError("--key-separator must not be empty; omit it if lines have no key")
    with telling(servers_of(settings)) as answered:
        models = models_of_topic(settings, topic)
        lines = _after(answered, sys.stdin.buffer)
        sent = produce_lines(
            settings, models, topic, lines, record=record, key_separator=key_separator, topic_format=topic_format
        )
    click.echo(f"{sent} {'record' if sent == 1 else 'records'} acknowledged")


def _after(answered: Callable[[], None], lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields lines that are read once the servers have answered."""
    answered()
    yield from lines


@click.command()
@click.argument("topic")
@click.option("--from-beginning", is_flag=True, help="Also print the records that the topic already contains.")
@click.option(
    "--key-format",
    type=click.Choice(KEY_FORMATS),
    default="string",
    show_default=True,
    help="The serializer of TOPIC's keys: numbers are shown as digits, bytes as hexadecimal digits.",
)
@click.option("--limit", metavar="N", type=click.IntRange(1), help="Exit after N records.")
def tail(topic: str, *, from_beginning: bool, key_format: KeyFormat, limit: int | None) -> None:
    """Print TOPIC's newly committed records, one JSON object per line, until Ctrl-C.

    Each has partition, offset, timestamp, key, headers, the record's name and its value with all digits. Content that
    is not text, or cannot be decoded, is base64 under a name that ends with `Base64`.
    """
    from balance_service.devtools.tail import tail as tail_records

    settings, stopping = load_settings(), threading.Event()
    quiet_logging()
    # KeyboardInterrupt is lost if it is raised in a callback of a client.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    records = tail_records(settings, topic, stopping, from_beginning=from_beginning, key_format=key_format)
    with telling(f"records of topic '{topic}' from {servers_of(settings)}") as answered, closing(records) as lines:
        for line in islice(lines, limit):
            answered()
            click.echo(line)


@click.group()
def topics() -> None:
    """Create and copy topics."""


@topics.command("create")
def topics_create() -> None:
    """Create the topics that are missing, and check the others."""
    from balance_service.kafka.topic_specs import prepare_topics
    from balance_service.kafka.topics import Topics
    from balance_service.model.placing import hosted_stages, stages_of_retries

    settings = load_settings(create_topics=True)
    quiet_logging()
    with telling(servers_of(settings)):
        models = hosted_models(settings)
        stages = [*hosted_stages(models, settings), *stages_of_retries(with_shipped(models), settings)]
        prepared = prepare_topics(Topics(settings), settings, stages)
    for topic in prepared.values():
        click.echo(f"topic {topic.name} with {topic.partitions} partitions, and its internal topics, exist")


@topics.command("checkpoint")
@click.option(
    "--leave-out-unknown", is_flag=True, help="Records that no known secret has signed never count, with any secret."
)
def topics_checkpoint(*, leave_out_unknown: bool) -> None:
    """Vouch for the present records about generations, and for the decisions about dead letters.

    Use this after a change of BALANCE_PEER_SECRET, while BALANCE_PEER_SECRETS_FORMER has the former one. It may be left
    out from then on.
    """
    from balance_service.kafka.signing import vouch
    from balance_service.kafka.topics import Topics

    settings = load_settings()
    quiet_logging()
    if settings.peer_secret is None:
        raise ConfigurationError("a checkpoint is signed: set BALANCE_PEER_SECRET as the instances have it")
    for name in (settings.generations_topic, settings.dead_letter_decisions_topic):
        with telling(servers_of(settings)):
            count = vouch(settings, Topics(settings), name, leaves_out_unknown=leave_out_unknown)
        click.echo(f"{count} records of topic {name} count permanently")


@topics.command("copy")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option(
    "--partitions",
    type=click.IntRange(1, 10_000),
    help="Partitions of TO. Default: as many as it has, or as FROM has if TO does not exist.",
)
@click.option(
    "--partitioner",
    type=click.Choice(["murmur2", "crc32", "fnv1a"]),
    help="The function that assigns keys to partitions of TO. Default: the one that BALANCE_PARTITIONER or the read "
    "models declare for FROM, otherwise murmur2.",
)
def topics_copy(source: str, target: str, partitions: int | None, partitioner: Partitioner | None) -> None:
    """Copy all events of topic FROM to topic TO, then compare the two.

    Use this after FROM's partition count was changed, or to move FROM to another partitioner: in TO, all events of a
    key are on one partition, in order. Afterwards set BALANCE_TOPIC to TO, BALANCE_PARTITIONER to its partitioner, and
    BALANCE_APPLICATION_ID to a new name. An interrupted copy continues when the command is run again.
    """
    from balance_service.devtools.progress import progress_bar
    from balance_service.devtools.topic_comparison import compare
    from balance_service.devtools.topic_copy import copy_topic
    from balance_service.model.loading import load_models
    from balance_service.model.placing import written_by
    from balance_service.read_models import SHIPPED

    settings = load_settings()
    quiet_logging()
    models = [*load_models(settings.models, SHIPPED), *SHIPPED.values()]
    by = partitioner or written_by(source, models, settings)
    with telling(servers_of(settings)) as answered, progress_bar("copying", None) as (bar, task):

        def show(at: int, of: int) -> None:
            answered()
            bar.update(task, completed=at, total=of)

        copied = copy_topic(settings, source, target, partitions, show, by)
    click.echo(
        f"copied {copied.records} records to {copied.target.partitions} partitions by {by}, "
        f"{copied.records / max(copied.seconds, 1e-9):,.0f} records/s"
    )
    with progress_bar("comparing", None) as (bar, task):
        both = compare(settings, copied, lambda at, of: bar.update(task, completed=at, total=of))
    width = max(len(source), len(target))
    click.echo(f"{source:{width}}  {both.source}\n{target:{width}}  {both.target}")
    both.check(source, target)
    click.echo(f"identical; '{target}' can replace '{source}'")


@click.group()
def schemas() -> None:
    """Register and pull schemas, and write dataclasses of them."""


@schemas.command("register")
def schemas_register() -> None:
    """Register the schemas of all topics that the service writes, and of events that dataclasses declare.

    Instances do the former at start, if they are authorized to; use this command if they are not. An event's schema is
    registered if the newest one of its topic lacks fields of it, and with all fields of that one. Other schemas of
    topics that other applications write are not registered, except those that are shipped.
    """
    from balance_service.avro.named_types import contracted
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import subject_of
    from balance_service.model.binding import require_registry, with_producers_fields

    settings = load_settings()
    quiet_logging()
    with closing(SchemaRegistry.from_settings(settings)) as registry, telling(_named(registry)):
        models = hosted_models(settings)
        if not registry.is_set:
            require_registry(models, settings)
            click.echo("no topic of BALANCE_MODELS has Avro: there is nothing to register")
            return
        for subject, schema in _written_schemas(settings, models).items():
            click.echo(f"{subject}: schema id {registry.register(subject, schema)}")
        for topic, schema in _declared_events(settings, models):
            subject, (whole, is_new) = subject_of(topic, schema), with_producers_fields(registry, topic, schema)
            newest = f"schema id {registry.register(subject, contracted(whole))}" if is_new else _HAS_ALL
            click.echo(f"{subject}: {newest}")


def _named(registry: SchemaRegistry) -> str:
    return f"the schema registry at {registry.url}"


def _declared_events(settings: Settings, hosted: list[ReadModel]) -> list[tuple[str, Schema]]:
    """Topic and schema of each event and row that a dataclass declares."""
    from balance_service.model.events import DeclaredRecord
    from balance_service.model.placing import hosted_stages, read_by_all

    found: dict[tuple[str, str], Schema] = {}
    for stage in hosted_stages(hosted, settings):
        read = [(stage.source, record, stage.schemas[record]) for record in stage.schemas]
        read = read if stage.format == "avro" and not stage.reads_rekeyed else []
        tables = [join.table for join in stage.joins if join.table.format == "avro"]
        read += [(settings.topic_of(table.topic), table.record, stage.rows[table.record]) for table in tables]
        for topic, record, schema in read:
            if isinstance(record, DeclaredRecord):
                found[topic, record] = read_by_all(topic, found.get((topic, record)), schema)
    return [(topic, schema) for (topic, _), schema in found.items()]


def _written_schemas(settings: Settings, hosted: list[ReadModel]) -> dict[str, Schema]:
    """Subject → schema of each record that the service writes, or that is shipped for its producers."""
    from balance_service.avro.named_types import contracted
    from balance_service.avro.schemas import is_shipped, load_schema, subject_of
    from balance_service.model.placing import hosted_stages, newest, stages_of_retries

    written = [
        (settings.application_servers_topic, load_schema("ApplicationServer")),
        (settings.dead_letter_decisions_topic, load_schema("DeadLetterDecision")),
        (settings.generations_topic, load_schema("Generations")),
    ]
    models = {model.name: model for model in newest(hosted)}
    for stage in (*hosted_stages(hosted, settings), *stages_of_retries(with_shipped(hosted), settings)):
        model = models.get(stage.owner)
        if stage.format == "avro" and not stage.reads_rekeyed:
            written += [(stage.source, schema) for schema in stage.schemas.values() if is_shipped(schema)]
        tables = [join.table for join in stage.joins if join.table.format == "avro"]
        rows = [(table.topic, stage.rows[table.record]) for table in tables]
        written += [(topic, schema) for topic, schema in rows if is_shipped(schema)]
        if stage.makes is not None:
            written.append((stage.rekeyed, stage.makes))
        written += [(stage.changelog, load_schema(name)) for name in ("Position", "Letter")]
        if model is not None and not stage.passes_on:
            if model.has_states():
                written.append((stage.changelog, model.state_schema))
                written.append((stage.changelog, load_schema("IdempotencyMarker")))
            written += model.sent_schemas()
    return {subject_of(topic, schema): contracted(schema) for topic, schema in written}


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
    """Write the latest schemas of TOPIC in the registry to files, one per record.

    If a file contains another schema, nothing is written, and the exit code is 2.
    """
    from balance_service.avro.registry import SchemaRegistry

    settings = load_settings()
    quiet_logging()
    with closing(SchemaRegistry.from_settings(settings)) as registry, telling(_named(registry)):
        found = _records_of(registry, topic)
    texts = {folder / f"{name}.avsc": json.dumps(schema, indent=2) + "\n" for name, schema in found.items()}
    for file, text in texts.items():
        if file.exists() and not _same_json(file, text):
            raise ConfigurationError(
                f"{file} contains another schema; move it away, or choose another folder with --to"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
        click.echo(f"wrote {file}")


def _records_of(registry: SchemaRegistry, topic: str) -> dict[str, Schema]:
    if not (found := registry.records_of(topic)):
        raise ConfigurationError(
            f"the schema registry at {registry.url} has no record under the subjects "
            f"{topic}-NAMESPACE.NAME or {topic}-value; correct TOPIC, or BALANCE_SCHEMA_REGISTRY_URL"
        )
    return found


@schemas.command("types")
@click.argument("given", metavar="[TOPIC|FILE]...", nargs=-1)
def schemas_types(given: tuple[str, ...]) -> None:
    """Print a Python module with a dataclass for each record of TOPIC in the registry, or of FILE, an `.avsc` file.

    Without either, for each record in the registry, except those of this application's own topics. Fields and records
    that no dataclass can have are left out, with a comment and a line on standard error.
    """
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.devtools.dataclasses_of import dataclasses_of
    from balance_service.model.binding import subjects_of_others
    from balance_service.model.schemas import read_schema

    files = [Path(one) for one in given if one.endswith(".avsc")]
    found = [read_schema(file, file.stem) for file in files]
    if len(files) < len(given) or not given:
        settings = load_settings()
        quiet_logging()
        with closing(SchemaRegistry.from_settings(settings)) as registry, telling(_named(registry)):
            for topic in (one for one in given if not one.endswith(".avsc")):
                found += _records_of(registry, topic).values()
            if not given:
                found = registry.all_records(partial(subjects_of_others, settings=settings))
    if not found:
        raise ConfigurationError(f"the schema registry at {registry.url} has no record of another application")
    written = dataclasses_of(found)
    for sentence in written.left_out:
        click.echo(f"left out: {sentence}", err=True)
    click.echo(written.text, nl=False)


def _same_json(file: Path, text: str) -> bool:
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")) == json.loads(text))
    except ValueError:
        return False
