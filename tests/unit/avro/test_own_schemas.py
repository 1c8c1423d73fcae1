"""The service's own records: with a registry or without, read in either form."""

from __future__ import annotations

import copy
import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.codec import FrameReader, UndecodableError
from balance_service.avro.frames import fingerprint_of, frame_header, schema_key
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import NoRegistry, SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.errors import ConfigurationError, UnreadableRecordError
from balance_service.settings import load_settings
from tests.support.fakes import FakeRegistry

if TYPE_CHECKING:
    from balance_service.avro.schemas import Schema

STATES = load_schema("BalanceState")
STATE = {"customerId": "Zoë", "amount": Decimal("12.34")}


class Store:
    """A place with the texts of schemas."""

    def __init__(self, texts: dict[bytes, bytes]) -> None:
        self.texts = texts
        self.asked = 0

    def schema_text(self, key: bytes) -> bytes | None:
        self.asked += 1
        return self.texts.get(key)


def without_registry(**more: Any) -> OwnSchemas:
    return OwnSchemas(NoRegistry(), **more)


def with_scale(scale: int) -> Schema:
    schema = copy.deepcopy(STATES)
    (amount,) = [field for field in schema["fields"] if field["name"] == "amount"]
    amount["type"]["scale"] = scale
    return schema


def with_field(name: str) -> Schema:
    schema = copy.deepcopy(STATES)
    schema["fields"].append({"name": name, "type": "long", "default": 0})
    return schema


def test_a_record_without_a_registry_has_the_fingerprint_of_its_schema() -> None:
    codec = without_registry().codec("changelog", STATES)
    frame = codec.encode(STATE)

    assert frame.startswith(frame_header(fingerprint_of(STATES)))
    assert codec.decode(frame) == STATE


def test_the_texts_of_a_topic_are_those_of_its_codecs() -> None:
    schemas = without_registry()
    schemas.codec("changelog", STATES)
    schemas.codec("changelog", load_schema("Position"))
    schemas.codec("other", load_schema("Letter"))

    texts = schemas.records("changelog")

    assert texts.keys() == {schema_key(fingerprint_of(one)) for one in (STATES, load_schema("Position"))}
    assert json.loads(texts[schema_key(fingerprint_of(STATES))])["name"] == STATES["name"]
    assert schemas.records("nothing") == {}


def test_with_a_registry_nothing_changes() -> None:
    registry = FakeRegistry()
    schemas = OwnSchemas(registry)

    assert schemas.codec("changelog", STATES).encode(STATE).startswith(frame_header(1))
    assert schemas.records("changelog") == {}


def test_another_version_is_read_by_the_text_in_a_store() -> None:
    older = without_registry()
    frame = older.codec("changelog", STATES).encode(STATE)
    newer, store = without_registry(), Store(older.records("changelog"))
    newer.look_in(store)

    codec = newer.codec("changelog", with_field("times"))

    assert codec.decode(frame) == {**STATE, "times": 0}
    assert codec.decode(frame) == {**STATE, "times": 0}
    assert store.asked == 1


def test_a_text_is_searched_for_only_if_no_store_has_it_and_not_all_the_time() -> None:
    older = without_registry()
    frame, texts = older.codec("rekeyed", STATES).encode(STATE), older.records("rekeyed")
    searched: list[bytes] = []

    def search(key: bytes) -> bytes | None:
        searched.append(key)
        return None

    schemas = without_registry(search=search)
    assert schemas.writer_schema(fingerprint_of(STATES)) is None
    assert schemas.writer_schema(fingerprint_of(STATES)) is None
    assert searched == [*texts]

    found = without_registry(search=texts.get).codec("rekeyed", with_field("times"))
    assert found.decode(frame) == {**STATE, "times": 0}


def test_a_record_whose_text_is_lost_is_named() -> None:
    frame = without_registry().codec("changelog", with_field("times")).encode({**STATE, "times": 1})

    with pytest.raises(UnreadableRecordError, match="has lost the record with the text of that schema"):
        without_registry().codec("changelog", STATES).decode(frame)


def test_a_decimal_of_another_scale_is_not_read_as_another_amount() -> None:
    older = without_registry()
    frame = older.codec("changelog", STATES).encode(STATE)
    newer, store = without_registry(), Store(older.records("changelog"))
    newer.look_in(store)

    assert newer.codec("changelog", with_scale(4)).decode(frame) == STATE
    assert newer.codec("changelog", with_scale(4)).encode(STATE) != frame


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (schema_key(fingerprint_of(STATES)), json.dumps(with_field("times"))),
        (schema_key(fingerprint_of(STATES)), "no JSON"),
        (schema_key(fingerprint_of(STATES)), '{"type": "record"}'),
        (schema_key(fingerprint_of(STATES)), "7"),
        (schema_key(fingerprint_of(STATES)), '"'),
    ],
)
def test_a_text_that_has_another_fingerprint_than_its_key_is_not_taken(key: bytes, text: str) -> None:
    schemas = without_registry()

    assert schemas.learn(key, text.encode())
    assert schemas.writer_schema(fingerprint_of(STATES)) is None


def test_only_records_under_reserved_keys_are_texts() -> None:
    schemas = without_registry()

    assert not schemas.learn(b"schema/", json.dumps(STATES).encode())
    assert schemas.learn(b"\xffschema/", None)


# Both forms


def test_an_application_keeps_to_the_form_that_it_began_with() -> None:
    registry = FakeRegistry()
    begun_without = without_registry().codec("generations", STATES).encode(STATE)
    begun_with = OwnSchemas(registry).codec("generations", STATES).encode(STATE)

    later_with_registry = OwnSchemas(registry)
    later_with_registry.settle(begun_without, "generations")
    assert later_with_registry.codec("changelog", STATES).encode(STATE) == begun_without

    still_with_registry = OwnSchemas(registry)
    still_with_registry.settle(begun_with, "generations")
    assert still_with_registry.codec("changelog", STATES).encode(STATE) == begun_with


def test_records_of_either_form_are_read_in_one_topic() -> None:
    registry = FakeRegistry()
    frames = [schemas.codec("t", STATES).encode(STATE) for schemas in (without_registry(), OwnSchemas(registry))]
    assert frames[0] != frames[1]

    for has_fingerprints in (True, False):
        schemas = OwnSchemas(registry)
        schemas.has_fingerprints = has_fingerprints
        # Another process has written the text.
        other = without_registry()
        other.codec("t", STATES)
        for key, text in other.records("t").items():
            schemas.learn(key, text)
        codec = schemas.codec("t", STATES)
        assert [codec.decode(frame) for frame in frames] == [STATE, STATE]


def test_an_application_that_began_with_a_registry_needs_it() -> None:
    begun = OwnSchemas(FakeRegistry()).codec("app-generations", STATES).encode(STATE)

    with pytest.raises(ConfigurationError, match=r"'app-generations' name schemas of a registry.*REGISTRY_URL is not"):
        without_registry().settle(begun, "app-generations")
    with pytest.raises(ConfigurationError, match="BALANCE_SCHEMA_REGISTRY_URL is not set"):
        without_registry().codec("app-generations", STATES).decode(begun)


def test_producers_schemas_are_the_registrys() -> None:
    registry = FakeRegistry()
    schemas = OwnSchemas(registry)

    assert schemas.of_producers is registry
    assert registry.of_producers is registry


def test_records_are_shown_by_their_texts() -> None:
    schemas = without_registry()
    frame = schemas.codec("changelog", STATES).encode(STATE)
    reader = FrameReader(schemas)
    assert (reader.record(frame).rpartition(".")[2], reader.value(frame)) == ("BalanceState", STATE)

    unknown = FrameReader(without_registry())
    with pytest.raises(UndecodableError, match=r"fingerprint [0-9a-f]{16}, whose text was not found"):
        unknown.record(frame)
    with pytest.raises(UndecodableError, match="BALANCE_SCHEMA_REGISTRY_URL is not set"):
        unknown.record(frame_header(1) + b"body")


@pytest.mark.parametrize("given", [{}, {"BALANCE_SCHEMA_REGISTRY_URL": ""}])
def test_without_an_address_there_is_no_registry(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BALANCE_SCHEMA_REGISTRY_URL", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    registry = SchemaRegistry.from_settings(load_settings())

    assert not registry.is_set
    registry.forget("topic")
    registry.ask_anew()
    registry.close()
    with pytest.raises(ConfigurationError, match="set it to the registry's address"):
        registry.register("subject", STATES)
