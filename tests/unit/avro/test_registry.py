"""The schemas of writers as the registry, or something in its place, answers for them."""

from __future__ import annotations

import asyncio
import json
import time
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from balance_service.avro.registry import SchemaRegistry, ask_together
from balance_service.errors import MustAskError, RetriableError
from tests.support.registry_server import RegistryReply, registry_that

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

Answers = dict[str, tuple[int, bytes]]
"""Path → status and body. Tests change it while the server runs."""

UNKNOWN_SCHEMA = (404, b'{"error_code": 40403, "message": "Schema not found"}')
UNKNOWN_SUBJECT = (404, b'{"error_code": 40401, "message": "Subject not found"}')
UNKNOWN_VERSION = (404, b'{"error_code": 40402, "message": "Version not found"}')
SOURCE = {"type": "record", "name": "Source", "namespace": "com.acme", "fields": [{"name": "app", "type": "string"}]}
ID = "/schemas/ids/1"


def answering(answers: Answers) -> AbstractContextManager[SchemaRegistry]:
    def reply(path: str) -> RegistryReply:
        status, body = answers.get(path, (500, b"{}"))
        return RegistryReply(status, [body], {"Content-Length": str(len(body))})

    return registry_that(reply)


def schema(kind: Any, *references: tuple[str, int], **more: Any) -> tuple[int, bytes]:
    """The registry's answer for a schema that refers to some versions of subjects."""
    referred = [{"name": subject, "subject": subject, "version": version} for subject, version in references]
    return 200, json.dumps({"schema": json.dumps(kind), "references": referred, **more}).encode()


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": field, "type": kind} for field, kind in fields.items()]}


def version(subject: str, number: int | str) -> str:
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
        registry.ask_anew()
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
        ((200, b"[" * 100_000), "without what was asked for"),
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


def deep_schema(levels: int) -> str:
    return '{"type":"array","items":' * levels + '"int"' + "}" * levels


def event_with(kind: str) -> str:
    return json.dumps(record("a.Event", deep="PLACE")).replace('"PLACE"', kind)


def of_text(text: str, *references: tuple[str, int], **more: Any) -> tuple[int, bytes]:
    """The registry's answer for a schema with a text."""
    status, answer = schema(None, *references, **more)
    return status, json.dumps({**json.loads(answer), "schema": text}).encode()


def problem_of(answers: Answers) -> tuple[str, str, tuple[str, ...]]:
    """The problem of schema 1, its cause, and the records that it tells."""
    with answering(answers) as registry:
        found = registry.writer_schema(1)
    assert found is not None
    return found.problem, found.cause, found.records


@pytest.mark.parametrize("levels", [300, 990, 100_000])
def test_a_schema_that_is_nested_too_deeply_is_no_outage(levels: int) -> None:
    text = event_with(deep_schema(levels))

    problem, cause, records = problem_of({ID: of_text(text)})

    assert problem == "is nested more than 300 levels deep"
    assert (cause, records) == ("schema-incompatible", ("a.Event",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<html>", "is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (
            '{"type": "record", "name": "a.Event", "fields": [',
            "is not JSON: Expecting value: line 1 column 50 (char 49)",
        ),
        ("1" * 5_000, "is not JSON: Exceeds the limit"),
    ],
)
def test_a_schema_that_is_not_json_is_no_outage(text: str, problem: str) -> None:
    assert problem_of({ID: of_text(text)})[0].startswith(problem)


@pytest.mark.parametrize("fields", [None, 7, ["f"], [{"name": "f"}], {"name": "f"}])
def test_a_schema_that_is_not_of_the_form_of_avro_is_no_outage(fields: Any) -> None:
    event = {"type": "record", "name": "a.Event", "fields": fields}
    answers = {ID: schema(event, ("sources", 1)), version("sources", 1): schema(SOURCE)}

    problem, cause, records = problem_of(answers)

    assert problem.startswith("is not valid Avro: ")
    assert (cause, records) == ("schema-incompatible", ("a.Event",))


def test_a_reference_that_is_nested_too_deeply_is_no_outage() -> None:
    answers = {ID: schema(record("a.Event", source="a.Deep"), ("deep", 1))}
    answers[version("deep", 1)] = of_text(json.dumps(record("a.Deep", f="X")).replace('"X"', deep_schema(990)))

    assert problem_of(answers)[0] == "is nested more than 300 levels deep"


def test_references_that_are_nested_in_each_other_too_deeply_are_no_outage() -> None:
    answers = {ID: schema(record("a.Event", f="a.R0"), ("r", 1))}
    for n in range(200):
        answers[version("r", n + 1)] = schema(record(f"a.R{n}", f=f"a.R{n + 1}"), ("r", n + 2))
    answers[version("r", 201)] = schema(record("a.R200"))

    assert problem_of(answers)[0] == "is nested more than 300 levels deep"


def test_a_schema_with_rules_that_are_not_known_here_is_read() -> None:
    assert read({ID: schema(SOURCE, ruleSet={"domainRules": [{"name": "r", "kind": "A_LATER_KIND"}]})}) == SOURCE


def test_a_schema_that_refers_to_too_many_others_is_no_outage() -> None:
    references = [("sources", n) for n in range(1001)]

    assert problem_of({ID: schema(SOURCE, *references)})[0] == "refers to more than 1000 others"


def test_schemas_of_a_start_that_cannot_be_used_are_left() -> None:
    event = record("a.Event", id="string")
    answers: Answers = {
        "/subjects/events-value/versions": (200, b"[1, 2, 3, 4]"),
        version("events-value", 1): of_text(event_with(deep_schema(990)), id=6),
        version("events-value", 2): (500, b"{}"),
        version("events-value", 3): (200, b" " * (5 << 20)),
        version("events-value", 4): schema(event, id=9),
    }

    with answering(answers) as registry, capture_logs() as logs:
        assert registry.schema_ids("events", []) == [6, 9]
        found = registry.writer_schema(6)

    assert found is not None
    assert found.problem == "is nested more than 300 levels deep"
    assert sorted(line["version"] for line in logs) == [2, 3]


@pytest.mark.parametrize("text", ["<html>", event_with(deep_schema(990))], ids=["not JSON", "too deep"])
def test_a_schema_that_cannot_be_used_hides_no_other_from_a_model_that_is_bound(text: str) -> None:
    answers: Answers = {
        "/subjects": (200, b'["events-a.Event", "events-value"]'),
        version("events-value", "latest"): of_text(text),
        version("events-a.Event", "latest"): schema(record("a.Event", id="string")),
    }

    with answering(answers) as registry:
        found = registry.newest("events", "Event")

    assert found is not None
    assert found["fields"] == record("a.Event", id="string")["fields"]


@pytest.mark.parametrize(
    ("schema_type", "text", "records", "named"),
    [
        ("JSON", '{"title": "FundsAdded", "type": "object"}', ("FundsAdded",), "JSON Schema"),
        ("JSON", '{"type": "object", "title": 7}', (), "JSON Schema"),
        ("JSON", "[" * 100_000, (), "JSON Schema"),
        ("PROTOBUF", 'syntax = "proto3"; message A { message B {} } // message C {', ("A", "B"), "Protobuf"),
        ("PROTOBUF", "/*" * 1_000_000 + "message A {}", (), "Protobuf"),
        ("XSD", "<xs:schema/>", (), "XSD"),
    ],
    ids=["titled", "not titled", "too deep", "messages", "comments", "another"],
)
def test_a_schema_of_another_format_tells_which_and_the_names_of_its_records(
    schema_type: str, text: str, records: tuple[str, ...], named: str
) -> None:
    problem, cause, told = problem_of({ID: of_text(text, schemaType=schema_type)})

    assert problem == f"is {named}, and only Avro is read"
    assert (cause, told) == ("schema-type-unsupported", records)


def counted(path: str, times: list[str]) -> Answers:
    """Answers that keep the paths that were asked for."""

    class Counting(dict[str, tuple[int, bytes]]):
        def get(self, asked: str, _default: Any = None) -> Any:
            times.append(asked)
            return UNKNOWN_SCHEMA if asked.startswith(path) else (500, b"{}")

    return Counting()


def test_no_event_loop_waits_for_the_registry() -> None:
    answers = {ID: schema(SOURCE)}

    async def read_on_loop(registry: SchemaRegistry) -> None:
        with pytest.raises(MustAskError) as refused:
            registry.writer_schema(1)
        await asyncio.to_thread(refused.value.ask)
        assert registry.writer_schema(1) is not None

    with answering(answers) as registry:
        asyncio.run(read_on_loop(registry))


def test_an_unknown_id_is_not_asked_for_again_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    now = 100.0
    monkeypatch.setattr("balance_service.avro.registry.time.monotonic", lambda: now)

    with answering(counted("/schemas/ids", asked)) as registry:
        for _ in range(3):
            assert registry.writer_schema(1) is None
        assert len(asked) == 1
        now += 5
        assert registry.writer_schema(1) is None
        assert len(asked) == 2
        registry.ask_anew()
        assert registry.writer_schema(1) is None
        assert len(asked) == 3


def test_an_unknown_guid_is_not_asked_for_again_within_seconds() -> None:
    asked: list[str] = []

    with answering(counted("/schemas/guids", asked)) as registry:
        for _ in range(3):
            assert registry.id_of(GUID) is None
        assert len(asked) == 1
        registry.ask_anew()
        assert registry.id_of(GUID) is None
        assert len(asked) == 2


def test_a_batch_asks_its_questions_together() -> None:
    began, here = time.monotonic(), Barrier(8)

    # Would not return if one waited for another.
    answers = list(ask_together(lambda n: (here.wait(10), n)[1], range(64)))

    assert answers == [*range(64)]
    assert time.monotonic() - began < 10


def test_an_error_ends_the_questions_of_a_batch() -> None:
    asked: list[int] = []

    def ask(number: int) -> None:
        asked.append(number)
        time.sleep(0.01)
        raise RetriableError("down")

    with pytest.raises(RetriableError):
        list(ask_together(ask, range(1_000)))

    assert len(asked) < 100


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


def test_all_records_of_a_union_of_many_are_found_in_a_moment() -> None:
    union = [record(f"a.R{n}", id="string") for n in range(2_000)]
    answers: Answers = {"/subjects": (200, b'["events-value"]'), version("events-value", "latest"): schema(union)}

    with answering(answers) as registry:
        began = time.thread_time()
        found = registry.records_of("events")
        took = time.thread_time() - began

    assert len(found) == 2_000
    assert took < 2


def test_one_record_of_a_union_of_many_that_name_each_other_is_found_in_a_moment() -> None:
    names = [f"a.R{n}" for n in range(500)]
    union = [record("a.All", **{f"f{n}": ["null", other] for n, other in enumerate(names)})]
    union += [record(name, all=["null", "a.All"]) for name in names]
    answers: Answers = {"/subjects": (200, b'["events-value"]'), version("events-value", "latest"): schema(union)}

    with answering(answers) as registry:
        began = time.thread_time()
        found = registry.newest("events", "R7")
        took = time.thread_time() - began

    assert found is not None
    assert found["name"] == "R7"
    assert took < 1


def test_records_that_are_nested_in_each_other_too_deeply_hide_no_others() -> None:
    union = [record(f"a.R{n}", f=["null", f"a.R{n + 1}"]) for n in range(300)]
    answers: Answers = {"/subjects": (200, b'["events-value"]'), version("events-value", "latest"): schema(union)}

    with answering(answers) as registry:
        assert registry.newest("events", "R0") is None
        assert registry.newest("events", "R290") is not None


def test_the_newest_schema_of_a_record_is_not_missing_while_something_else_answers() -> None:
    answers: Answers = {"/subjects": (200, b'["orders-value"]')}
    answers["/subjects/orders-value/versions/latest"] = (200, b"{}")

    with answering(answers) as registry, pytest.raises(RetriableError, match="without what was asked for"):
        registry.newest("orders", "Order")
