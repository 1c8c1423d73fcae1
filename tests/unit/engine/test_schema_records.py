"""The texts of schemas that a task writes before the first records that need them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import NoRegistry
from balance_service.avro.schemas import load_schema
from balance_service.engine.commit import write_position
from balance_service.engine.records import POSITION_KEY, Position
from balance_service.engine.schema_records import NO_SCHEMAS, SchemaRecords, SentSchemas
from balance_service.engine.store import StateStore
from balance_service.errors import RetriableError
from balance_service.testing.fakes import FakeWriter

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.avro.schemas import Schema

BEGUN = Position(7, 1, "topic", source="orders:0")


class Application:
    """The schemas of an application without a registry, and of one stage that sends to two topics."""

    def __init__(self, position: Schema | None = None) -> None:
        self.own = OwnSchemas(NoRegistry())
        self.positions = self.own.codec("changelog", position or load_schema("Position"))
        self.own.codec("changelog", load_schema("Letter"))
        self.own.codec("rekeyed", load_schema("Player"))
        self.own.codec("decisions", load_schema("DeadLetterDecision"))
        self.schemas = SchemaRecords(
            self.own.records("changelog"),
            [
                SentSchemas("rekeyed", 3, self.own.records("rekeyed"), lambda _key, _text: {}),
                SentSchemas("decisions", 1, self.own.records("decisions"), lambda key, _text: {"signature": key[-2:]}),
            ],
        )

    def begin(self, store: StateStore, writer: FakeWriter) -> None:
        records, outputs = self.schemas.missing(store, BEGUN.offset, 5)
        write_position(BEGUN, self.positions, store, writer, None, records, outputs)


def test_texts_are_written_with_the_first_position_and_never_again(tmp_path: Path) -> None:
    app, writer = Application(), FakeWriter()
    store = StateStore(tmp_path / "store", app.positions)

    app.begin(store, writer)
    app.begin(store, writer)

    (first, _, _), (second, _, _) = writer.commits
    assert dict(first) == {
        **app.own.records("changelog"),
        **app.own.records("rekeyed"),
        **app.own.records("decisions"),
    }
    assert second == []
    ((key, text),) = app.own.records("rekeyed").items()
    ((of_decisions, _),) = app.own.records("decisions").items()
    sent = [(one.topic, one.partition, one.key, one.headers) for one in writer.sent]
    assert sent == [
        *(("rekeyed", partition, key, []) for partition in range(3)),
        ("decisions", 0, of_decisions, [("signature", of_decisions[-2:])]),
    ]
    assert {one.value for one in writer.sent if one.topic == "rekeyed"} == {text}
    assert store.schema_text(key) == text
    store.close()
    assert store.schema_text(key) is None


def test_a_task_whose_commit_fails_writes_the_texts_at_its_next_one(tmp_path: Path) -> None:
    app = Application()
    store = StateStore(tmp_path / "store", app.positions)
    with pytest.raises(RetriableError):
        app.begin(store, FakeWriter(RetriableError("the broker is away")))
    writer = FakeWriter()

    app.begin(store, writer)

    assert dict(writer.commits[0][0]).keys() >= app.own.records("changelog").keys()
    assert len(writer.sent) == 4


def test_a_store_of_another_version_is_read_and_gets_the_text_of_this_one(tmp_path: Path) -> None:
    older, newer_schema = Application(), copy.deepcopy(load_schema("Position"))
    newer_schema["fields"].append({"name": "new", "type": "long", "default": 3})
    store = StateStore(tmp_path / "store", older.positions)
    older.begin(store, FakeWriter())
    store.close()
    newer = Application(newer_schema)

    store = StateStore(tmp_path / "store", newer.positions)

    assert store.position is not None
    assert store.position.offset == BEGUN.offset
    written: dict[bytes, Any] = dict(newer.schemas.missing(store, 0, 0)[0])
    assert written.keys() == newer.own.records("changelog").keys() - older.own.records("changelog").keys()
    assert len(written) == 1


def test_a_store_of_positions_is_read_while_it_is_restored_from_a_changelog_of_another_version(tmp_path: Path) -> None:
    older, newer_schema = Application(), copy.deepcopy(load_schema("Position"))
    newer_schema["fields"].append({"name": "new", "type": "long", "default": 3})
    newer = Application(newer_schema)
    store = StateStore(tmp_path / "store", newer.positions)
    frame = older.positions.encode(BEGUN.record())

    store.apply([*older.own.records("changelog").items(), (POSITION_KEY, frame)], 4)

    assert store.position == BEGUN


def test_with_a_registry_there_is_nothing_to_write(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "store", Application().positions)

    assert NO_SCHEMAS.missing(store, 0, 0) == ([], [])
