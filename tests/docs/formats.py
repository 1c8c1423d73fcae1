"""The formats that others rely on, one line for each fact: `python -m tests.docs.formats` writes `tests/data/formats`.

Clients rely on HTTP, dashboards on metrics, deployments on settings; and in a rolling upgrade, instances of the release
before rely on the topics and records that those of this one write. A line that is added is an extension; one that is
removed or changed breaks somebody.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from balance_service.engine import dead_letters, idempotency, records
from balance_service.http.openapi import document
from balance_service.kafka import signing
from balance_service.settings.settings import Settings, variable_of
from tests.docs import metrics, settings, topics
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_ROOT = Path(__file__).parents[2]
FOLDER = _ROOT / "tests" / "data" / "formats"
_RECORDS = (
    "ApplicationServer",
    "DeadLetterDecision",
    "FundsAdded",
    "Generations",
    "IdempotencyMarker",
    "Letter",
    "Position",
)
"""The records of the service itself; those of models belong to the models."""
_WORDS = ("description", "summary", "example", "examples", "title")


def http() -> Iterator[str]:
    """Routes with their parameters, bodies and answers, and the schemas of bodies, from the OpenAPI document."""
    described = document(ROUTES)
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            route = f"{method.upper()} {path}"
            for parameter in operation.get("parameters", ()):
                must = " required" if parameter.get("required") else ""
                yield f"{route} {parameter['in']} {parameter['name']}{must}: {_kind(parameter['schema'])}"
            for media, content in operation.get("requestBody", {}).get("content", {}).items():
                yield f"{route} body {media}: {_kind(content['schema'])}"
            for status, response in operation["responses"].items():
                for name, header in response.get("headers", {}).items():
                    yield f"{route} {status} header {name}: {_kind(header['schema'])}"
                for media, content in (response.get("content") or {"nothing": {}}).items():
                    yield f"{route} {status} {media}: {_kind(content.get('schema', {}))}"
    for name, schema in described["components"]["schemas"].items():
        yield from _schema(name, schema)


def of_topics() -> Iterator[str]:
    """Topics with their configurations and keys, and headers of records."""
    for topic, configuration, key, value, *_ in topics.rows():
        yield f"{topic} {configuration}; key: {key}; value: {value}"
    for of, header, value in topics.headers():
        yield f"header of {of} {header}: {value}"


def of_records() -> Iterator[str]:
    """The fields of the service's own records, the reserved keys of changelogs, and how records are signed."""
    for name in _RECORDS:
        schema = json.loads((_ROOT / "schemas" / f"{name}.avsc").read_text(encoding="utf-8"))
        yield from _avro(f"{schema['namespace']}.{schema['name']}", schema)
    for module in (records, dead_letters, idempotency):
        for constant, value in vars(module).items():
            if isinstance(value, bytes) and value[1:] and value.startswith(records.RESERVED_PREFIX):
                yield f"reserved key {module.__name__.rpartition('.')[2]}.{constant.strip('_')}: {value!r}"
    yield f"signature of a control record in header {signing.HEADER!r}, for the purpose {signing._PURPOSE!r}"


def of_settings() -> Iterator[str]:
    """Settings with their values and defaults."""
    for name, field in Settings.model_fields.items():
        yield f"{variable_of(name)}: {settings.values(field)}, default {settings.default(field)}"


def of_metrics() -> Iterator[str]:
    """Metrics with their kinds and labels."""
    for name, metric in metrics.described().items():
        yield f"{name}: {metric.kind} {' '.join(metric.labels)}".strip()


LISTINGS: Mapping[str, Callable[[], Iterator[str]]] = {
    "http": http,
    "topics": of_topics,
    "records": of_records,
    "settings": of_settings,
    "metrics": of_metrics,
}


def listing(name: str) -> list[str]:
    """Returns the lines of a listing as the product has them now."""
    return sorted(set(LISTINGS[name]()))


def kept(name: str) -> list[str]:
    """Returns the committed lines of a listing."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def _kind(schema: Mapping[str, Any]) -> str:
    """Returns a schema without the words for people."""
    return json.dumps(_bare(schema), sort_keys=True)


def _bare(schema: Any) -> Any:
    match schema:
        case {"$ref": str(reference)}:
            return reference.rpartition("/")[2]
        case dict():
            return {name: _bare(value) for name, value in schema.items() if name not in _WORDS}
        case list():
            return [_bare(value) for value in schema]
        case _:
            return schema


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each property, or one for a schema without properties."""
    properties = schema.get("properties")
    if not properties:
        yield f"schema {name}: {_kind(schema)}"
        return
    for field, kind in properties.items():
        must = " required" if field in schema.get("required", ()) else ""
        yield f"schema {name}.{field}{must}: {_kind(kind)}"


def _avro(path: str, schema: Any) -> Iterator[str]:
    """Yields a line for each field of a record and of the records in it."""
    for position, field in enumerate(schema["fields"]):
        default = f" = {json.dumps(field['default'])}" if "default" in field else ""
        yield f"record {path} {position:02} {field['name']}: {_of_avro(field['type'])}{default}"
        yield from (line for inner in _inner(field["type"]) for line in _avro(f"{path}.{inner['name']}", inner))


def _of_avro(kind: Any) -> str:
    match kind:
        case {"type": "record", "name": str(name)}:
            return name
        case {"type": "array", "items": items}:
            return f"array of {_of_avro(items)}"
        case {"type": "map", "values": values}:
            return f"map of {_of_avro(values)}"
        case list():
            return " or ".join(map(_of_avro, kind))
        case dict():
            return json.dumps({name: value for name, value in kind.items() if name != "doc"}, sort_keys=True)
        case _:
            return str(kind)


def _inner(kind: Any) -> Iterator[Any]:
    match kind:
        case {"type": "record"}:
            yield kind
        case {"items": inner} | {"values": inner}:
            yield from _inner(inner)
        case list():
            yield from (one for branch in kind for one in _inner(branch))


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in LISTINGS:
        file, text = FOLDER / f"{name}.txt", "\n".join(listing(name)) + "\n"
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file.relative_to(_ROOT)}")


if __name__ == "__main__":
    write()
