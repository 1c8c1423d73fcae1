"""The reference of topics and records. Names, configurations and headers are the product's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.avro.codec import SCHEMA_HEADER
from balance_service.engine.changelog_writer import Envelope
from balance_service.engine.outputs import ORIGIN_HEADER, SENDER_HEADER, sender_of
from balance_service.engine.records import DeadLetter
from balance_service.engine.stateless import ATTEMPT_HEADER
from balance_service.kafka import topic_specs as specs
from balance_service.kafka.messages import IDEMPOTENCY_HEADER, TRACEPARENT_HEADER
from balance_service.kafka.topics import Topic
from balance_service.model.record_keys import KEY_FORMAT_HEADER
from balance_service.model.stage import Stage
from balance_service.model.stream import Join, Table
from balance_service.settings import load_settings
from tests.docs.markdown import joined, section, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.kafka.topic_specs import TopicSpec

_HEAD = """\
# Topics and records

`APPLICATION` is `BALANCE_APPLICATION_ID`. A stage has the name of its read model; in generation N > 1, it is
`MODEL.gN`; a stage that passes records on to the next one is called `MODEL-by-COLUMN`, of two columns `MODEL-by-A-B`;
those of `sources`, `MODEL-by-COLUMN-from-SOURCE`, write one topic. The service creates missing topics with the
configuration in the table,
those with records of a source also with its bounds of timestamps and `CreateTime`, and does not change existing ones.
It refuses to start if a source, a table, a re-keyed
topic, a changelog, or the topic of decisions or of generations may lose records; for the first three,
[`BALANCE_ALLOW_FINITE_RETENTION`](settings.md#the-service) accepts that.

"""
_RETENTION = f"""\
*forever*: {", ".join(f"`{name}={value}`" for name, value in specs.FOREVER.items())}. `max.message.bytes` of topics that
take records of a source is the source's, at least 1 MiB, and 64 KiB more where the service adds headers. An output that
another model joins, and none folds, is created compacted by an instance that hosts the joining model; so is a source
that all its models declare as [compacted](../how-to/change-data-capture.md#a-compacted-topic).

A source that the service creates has `BALANCE_PARTITIONS` partitions. Other topics have as many as their source,
except: decisions, generations and application servers have one; a re-keyed topic that the next stage joins with a
table has the table's; that of `sources`, at first, the most; a `Global` table may have any number; retries have the
most of `BALANCE_RETRY_TOPICS`.

"""
_RECORDS = """\
A value is a frame: `0x00`, the schema id in 4 bytes, big-endian, and the Avro body (Confluent's wire format). The
subject of a schema is `TOPIC-FULL.NAME.OF.RECORD`; a schema that a model took from the registry is recorded under
`APPLICATION-MODEL-vVERSION-RECORD`, with `-from-SOURCE` if the model has `sources`.
[`schemas`](../../schemas) has the service's own records.

An application that [began without a registry](../how-to/json.md#without-a-registry) writes its own records in Avro's
single-object encoding: `C3 01`, a fingerprint of the schema in 8 bytes, little-endian, and the body. The value of the
key `FF`, `schema/` and the fingerprint in 16 hexadecimal digits, most significant first, in the same partition, is the
schema's text. The fingerprint is CRC-64-AVRO of the Parsing Canonical Form whose types keep their `logicalType`,
`precision` and `scale`, in this order behind the other attributes.

A key is text in UTF-8, or a number in 8 bytes, big-endian, with the sign bit inverted; a composite key its columns in
turn, a text with `00 02` for NUL and `00 01` at its end. Keys of changelogs that begin with `0xFF` hold the partition's
position, idempotency keys, dead letters and texts of schemas. In a `RECORD_KEY`, a number or bytes follow `00`. Before
a join, a key is as in the table.

"""
_MEANINGS = {
    "dead-letter-cause": "the [cause](../runbook.md#by-cause)",
    "dead-letter-read-model": "the stage",
    "dead-letter-timestamp": "in ms",
    "dead-letter-detail": "a sentence about this record, if any",
    "dead-letter-value-bytes": "its size, if the value is left out because the record is too large",
    "dead-letter-key-bytes": "its size, if the key is left out too",
}
"""Of headers whose names do not say it all."""


def page() -> str:
    columns = ("topic", "configuration", "key", "value", "written by", "read by")
    return joined(
        [
            _HEAD,
            section("Topics", table(columns, rows()), _RETENTION),
            section("Records", _RECORDS),
            section("Headers", table(("of", "header", "value"), headers())),
        ]
    )


def rows() -> Sequence[Sequence[str]]:
    settings = load_settings(application_id="APPLICATION", topic="SOURCE")
    stage = Stage(name="STAGE", owner="MODEL", source="SOURCE", application_id=settings.application_id)
    passing = Stage(
        name="MODEL-by-COLUMN", owner="MODEL", source="SOURCE", application_id=settings.application_id, by=("COLUMN",)
    )
    last = Stage(
        name="MODEL", owner="MODEL", source=passing.rekeyed, application_id=settings.application_id, reads_rekeyed=True
    )
    source = specs.source_spec(settings, "SOURCE")
    config = {**source.config, specs.MAX_MESSAGE_BYTES: str(specs.BATCH_BYTES)}
    topic = Topic("SOURCE", "", source.partitions)
    letters = specs.dead_letters_spec(stage.dead_letters, 1, [config])
    rows = [
        (
            source,
            "the model's `key`; any before a re-key",
            "events; other records are ignored and counted",
            "producers",
            "instances",
        ),
        (
            specs.table_spec(settings, Table("TABLE", "Row"), 1),
            "what is looked up, as text",
            "rows; none deletes the row",
            "producers",
            "instances",
        ),
        (
            specs.changelog_spec(stage.changelog, 1),
            "the state's, or the service's own",
            "`state`, `Position`, `IdempotencyMarker`, `Letter`; none deletes",
            "the partition's owner, in transactions",
            "new owners, standbys",
        ),
        (
            specs.rekeyed_spec(settings, passing, topic, config, None),
            "the column's value",
            "the source's; after joins, the joined record",
            "the stage's owner, in transactions",
            "the next stage",
        ),
        (
            specs.output_spec(settings, "OUTPUT", 1, "SOURCE", config),
            "the state's, or the source record's",
            "the emitted record, or the source's",
            "the model's owners, in transactions",
            "consumers",
        ),
        (
            letters,
            "the source record's",
            "the source record's; none if it is too large",
            "owners, in transactions",
            "operators",
        ),
        (specs.dead_letters_spec(last.dead_letters, 1, [config]), "as above, of re-keyed topics", "", "", ""),
        (
            specs.decisions_spec(settings),
            "`STAGE/PARTITION:OFFSET`",
            "`DeadLetterDecision`",
            "owners, in transactions",
            "owners, `rebuild`",
        ),
        (
            specs.generations_spec(settings),
            "the read model",
            "`Generations`: what serves, is built or kept; who asked for it and why",
            "instances, in transactions",
            "instances",
        ),
        (
            specs.retries_spec(settings, 1, {"SOURCE": config}),
            "the record's",
            "the record's",
            "owners of `BALANCE_RETRY_TOPICS`",
            "their applications",
        ),
        (
            specs.directory_spec(settings),
            "`host:port`",
            "`ApplicationServer`; none at shutdown",
            "instances",
            "instances",
        ),
    ]
    return [(f"`{spec.name}`", _config(spec), *cells) for spec, *cells in rows]


def _config(spec: TopicSpec) -> str:
    shown = {
        name: value
        for name, value in spec.config.items()
        if not name.startswith(("max.", "message.timestamp.b", "message.timestamp.a"))
    }
    forever = [name for name, value in specs.FOREVER.items() if shown.get(name) == value]
    texts = ["*forever*"] if len(forever) == len(specs.FOREVER) else []
    texts += [f"`{name}={value}`" for name, value in shown.items() if not texts or name not in forever]
    return ", ".join(texts)


def headers() -> Sequence[Sequence[str]]:
    rows = [
        ("events", f"`{IDEMPOTENCY_HEADER}`", "names an event: of several with one value, the first counts"),
        ("events", f"`{TRACEPARENT_HEADER}`", "the W3C trace that the commit joins"),
        ("events", f"`{SCHEMA_HEADER}`", "the schema's id or GUID; the value then has no frame"),
        ("sent records", f"`{ORIGIN_HEADER}`", "`TOPIC:PARTITION:OFFSET` of the record that they were made of"),
        ("sent records", f"`{SENDER_HEADER}`", f"`{sender_of('APPLICATION-STAGE', 'SOURCE-TOPIC-ID')}`"),
        ("sent records", f"`{KEY_FORMAT_HEADER}`", "such as `long`"),
        ("retries", f"`{ATTEMPT_HEADER}`", "how often the record was sent for another attempt"),
        ("joined records", f"`{_version_header()}`", "`PARTITION:OFFSET` of the row of `Row` that was joined"),
    ]
    envelope = Envelope("", "", 0, "", largest_bytes=0)
    _, _, headers = envelope.of(DeadLetter(0, 0, b"key", b"value", "cause", "detail"))
    obvious = ", ".join(f"`{name}`" for name, _ in headers if name not in _MEANINGS)
    described = [("dead letters", f"`{name}`", _MEANINGS[name]) for name, _ in headers if name in _MEANINGS]
    return [*rows, *described, ("dead letters", obvious, "of the record")]


def _version_header() -> str:
    return Join(table=Table("TABLE", "Row"), on="column", take={}, missing="drop").version_header
