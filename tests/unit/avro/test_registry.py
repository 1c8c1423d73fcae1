"""The schemas of writers as the registry, or something in its place, answers for them."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from balance_service.avro.registry import SchemaRegistry
from balance_service.errors import RetriableError

if TYPE_CHECKING:
    from collections.abc import Iterator

Answers = dict[str, tuple[int, bytes]]
"""Path → status and body. Tests change it while the server runs."""

UNKNOWN_SCHEMA = (404, b'{"error_code": 40403, "message": "Schema not found"}')
UNKNOWN_SUBJECT = (404, b'{"error_code": 40401, "message": "Subject not found"}')
UNKNOWN_VERSION = (404, b'{"error_code": 40402, "message": "Version not found"}')
SOURCE = {"type": "record", "name": "Source", "namespace": "com.acme", "fields": [{"name": "app", "type": "string"}]}
ID = "/schemas/ids/1"


@contextmanager
def answering(answers: Answers) -> Iterator[SchemaRegistry]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path.partition("?")[0], (500, b"{}"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with closing(SchemaRegistry(f"http://127.0.0.1:{server.server_port}")) as registry:
                yield registry
        finally:
            server.shutdown()
            thread.join()


def schema(kind: Any, *references: tuple[str, int], **more: Any) -> tuple[int, bytes]:
    """The registry's answer for a schema that refers to some versions of subjects."""
    referred = [{"name": subject, "subject": subject, "version": version} for subject, version in references]
    return 200, json.dumps({"schema": json.dumps(kind), "references": referred, **more}).encode()


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": field, "type": kind} for field, kind in fields.items()]}


def version(subject: str, number: int) -> str:
    return f"/subjects/{subject}/versions/{number}"


def read(answers: Answers) -> Any:
    """The text of schema 1, parsed; None if the registry does not know it."""
    with answering(answers) as registry:
        found = registry.writer_schema(1)
    return None if found is None else json.loads(found.text)


def test_a_schema_without_references_is_as_registered() -> None:
    event = record("a.Event", id="string", at={"type": "long", "logicalType": "timestamp-millis"})

    assert read({ID: schema(event)}) == event


def test_references_of_references_are_part_of_the_schema() -> None:
    answers = {
        ID: schema(record("a.Event", order="a.Order", source="com.acme.Source"), ("orders", 3), ("sources", 1)),
        version("orders", 3): schema(record("a.Order", source="com.acme.Source"), ("sources", 1)),
        version("sources", 1): schema(SOURCE),
    }

    fields = {field["name"]: field["type"] for field in read(answers)["fields"]}

    assert fields["order"]["fields"] == [{"name": "source", "type": SOURCE}]
    assert fields["source"] == "com.acme.Source"


def test_schemas_that_refer_to_each_other_are_resolved() -> None:
    answers = {
        ID: schema(record("a.Person", home=["null", "a.Home"]), ("homes", 1)),
        version("homes", 1): schema(record("a.Home", owner="a.Person"), ("people", 1)),
        version("people", 1): schema(record("a.Person", home=["null", "a.Home"]), ("homes", 1)),
    }

    home = read(answers)["fields"][0]["type"][1]

    assert home["fields"] == [{"name": "owner", "type": "a.Person"}]


def test_a_union_of_references_has_their_records() -> None:
    answers = {ID: schema(["com.acme.Source"], ("sources", 1)), version("sources", 1): schema(SOURCE)}

    with answering(answers) as registry:
        found = registry.writer_schema(1)

    assert found is not None
    assert found.records == ("com.acme.Source",)


@pytest.mark.parametrize("missing", [UNKNOWN_SUBJECT, UNKNOWN_VERSION])
def test_a_schema_is_unknown_while_the_registry_lacks_one_that_it_refers_to(missing: tuple[int, bytes]) -> None:
    answers = {ID: schema(record("a.Event", source="com.acme.Source"), ("sources", 1))}

    with answering(answers) as registry, capture_logs() as logs:
        answers[version("sources", 1)] = missing
        assert registry.writer_schema(1) is None
        answers[version("sources", 1)] = schema(SOURCE)
        assert registry.writer_schema(1) is not None

    assert [(line["subject"], line["version"]) for line in logs] == [("sources", 1)]


def test_a_reference_that_the_registry_does_not_answer_for_is_retried() -> None:
    answers = {ID: schema(record("a.Event", source="com.acme.Source"), ("sources", 1))}

    with pytest.raises(RetriableError, match="rejects the request"):
        read(answers)


def test_an_unknown_id_has_no_schema() -> None:
    assert read({ID: UNKNOWN_SCHEMA}) is None


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((404, b"<html>not here</html>"), "rejects the request"),
        ((200, b""), "without what was asked for"),
        ((200, b"{}"), "without what was asked for"),
        ((200, b'{"schema": null}'), "without what was asked for"),
        ((200, b'{"schema": ""}'), "without what was asked for"),
        ((200, b'{"schema": {"type": "string"}}'), "without what was asked for"),
        ((200, b"[]"), "without what was asked for"),
        ((200, b'"string"'), "without what was asked for"),
        ((200, b"<html>Please log in</html>"), "not with JSON ('<html>Please log in</html>')"),
        ((200, b"\xff"), "without what was asked for"),
        ((200, b'{"schema": "<html>"}'), "not with JSON ('<html>')"),
    ],
)
def test_an_answer_without_a_schema_is_no_verdict(answer: tuple[int, bytes], says: str) -> None:
    answers = {ID: answer}

    with answering(answers) as registry:
        with pytest.raises(RetriableError) as raised:
            registry.writer_schema(1)
        answers[ID] = schema("long")
        found = registry.writer_schema(1)

    assert says in str(raised.value)
    assert found is not None
    assert found.text == '"long"'


@pytest.mark.parametrize("answer", [(200, b""), (200, b"{}"), (200, b"<html>")])
def test_a_reference_without_a_schema_is_no_verdict(answer: tuple[int, bytes]) -> None:
    answers = {ID: schema(record("a.Event", source="com.acme.Source"), ("sources", 1))}
    answers[version("sources", 1)] = answer

    with answering(answers) as registry:
        with pytest.raises(RetriableError):
            registry.writer_schema(1)
        answers[version("sources", 1)] = schema(SOURCE)
        assert registry.writer_schema(1) is not None


GUID = "89791762-2336-4186-9674-299b90a802e2"
BY_GUID, IDS, TYPES = f"/schemas/guids/{GUID}", f"/schemas/guids/{GUID}/ids", (200, b'["AVRO"]')
"""The answers of Confluent's registry from version 8, and of Redpanda's from 26.3."""


def id_of(answers: Answers) -> int | None:
    with answering(answers) as registry:
        return registry.id_of(GUID)


def test_the_id_of_a_guid_is_the_one_under_which_the_registry_has_that_schema() -> None:
    ids = b'[{"context": ".other", "id": 2}, {"context": ".third", "id": 3}, {"context": ".", "id": 1}]'
    answers = {BY_GUID: schema(SOURCE, guid=GUID), IDS: (200, ids), ID: schema(SOURCE)}
    answers |= {"/schemas/ids/2": schema("long"), "/schemas/ids/3": UNKNOWN_SCHEMA}

    assert id_of(answers) == 1


def test_a_guid_of_another_context_only_is_unknown() -> None:
    ids = b'[{"context": ".other", "id": 1}]'

    assert id_of({BY_GUID: schema(SOURCE, guid=GUID), IDS: (200, ids), ID: schema("long")}) is None


@pytest.mark.parametrize("unknown", [UNKNOWN_SCHEMA, (404, b"")], ids=["unknown", "no GUIDs"])
def test_a_guid_is_unknown_if_the_registry_says_so_or_has_none(unknown: tuple[int, bytes]) -> None:
    assert id_of({BY_GUID: unknown, "/schemas/types": TYPES}) is None


def test_a_guid_is_not_unknown_if_something_else_answers_in_the_registrys_place() -> None:
    with pytest.raises(RetriableError):
        id_of({BY_GUID: (404, b""), "/schemas/types": (404, b"")})


def test_a_known_guid_needs_no_registry() -> None:
    answers = {BY_GUID: schema(SOURCE, guid=GUID), IDS: (200, b'[{"context": ".", "id": 1}]'), ID: schema(SOURCE)}

    with answering(answers) as registry:
        registry.id_of(GUID)
        answers.clear()
        assert registry.id_of(GUID) == 1


def test_a_schema_of_another_format_holds_no_records() -> None:
    proto = json.dumps({"schema": 'syntax = "proto3";', "schemaType": "PROTOBUF"}).encode()

    with answering({ID: (200, proto)}) as registry:
        found = registry.writer_schema(1)

    assert found is not None
    assert found.records == ()


def test_a_schema_that_a_start_lists_is_not_asked_for_again() -> None:
    event = record("a.Event", source="com.acme.Source")
    answers: Answers = {
        "/subjects/events-value/versions": (404, b'{"error_code": 40401}'),
        "/subjects/events-a.Event/versions": (200, b"[1, 2]"),
        version("events-a.Event", 1): schema("long", id=7),
        version("events-a.Event", 2): schema(event, ("sources", 1), id=9),
        version("sources", 1): schema(SOURCE),
    }

    with answering(answers) as registry:
        assert registry.schema_ids("events", ["a.Event"]) == [7, 9]
        found = registry.writer_schema(9)

    assert found is not None
    assert json.loads(found.text)["fields"][0]["type"] == SOURCE


def test_the_records_of_a_union_are_those_of_the_topic() -> None:
    source = record("com.acme.Source", app="string")
    union = [source, record("a.Event", origin="com.acme.Source"), "null"]
    answers: Answers = {
        "/subjects": (200, b'["events-value"]'),
        "/subjects/events-value/versions/latest": schema(union),
    }

    with answering(answers) as registry:
        found = registry.records_of("events")

    assert found.keys() == {"Source", "Event"}
    assert [field["type"]["name"] for field in found["Event"]["fields"]] == ["Source"]


def test_the_newest_schema_of_a_record_is_not_missing_while_something_else_answers() -> None:
    answers: Answers = {"/subjects": (200, b'["orders-value"]')}
    answers["/subjects/orders-value/versions/latest"] = (200, b"{}")

    with answering(answers) as registry, pytest.raises(RetriableError, match="without what was asked for"):
        registry.newest("orders", "Order")
