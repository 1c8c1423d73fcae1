"""Queries of read models whose key is the record's own: by its readable form, on the partition of its bytes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from yarl import URL

from balance_service.cluster.directory import PublishedModel
from balance_service.http.app import make_app, routes_of
from balance_service.http.key_target import target_of_any_model
from balance_service.http.model_queries import ModelAnswers, ModelQueries
from balance_service.http.openapi import document
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.queries import Queries
from balance_service.http.route import Handlers
from balance_service.http.scatter import Scatter
from balance_service.http.streams.changes import Changes
from balance_service.http.streams.event_stream import Streams
from balance_service.http.streams.feed import Pace
from balance_service.http.streams.link import Links
from balance_service.http.streams.part import Reader
from balance_service.kafka.partitioner import Partitioning, partition_of
from balance_service.model.read_model import Routes
from balance_service.model.record_keys import KeyFormat, RecordKey
from balance_service.observability.metrics import Metrics
from balance_service.testing import Driver, event
from tests.support.fakes import IdleInstance
from tests.support.querying import PARTITION, PARTITIONS, Instance
from tests.support.record_keys import totals_of

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.model.read_model import ReadModel

VALUES: dict[KeyFormat, list[Any]] = {
    "string": [f"c{number}" for number in range(40)],
    "int": [*range(-20, 20)],
    "long": [*range(-20, 20), 2**63 - 1, -(2**63)],
    "uuid": [UUID(int=number << 64) for number in range(40)],
    "bytes": [bytes([number, 255]) for number in range(216, 256)],
}


def model_of(form: KeyFormat) -> ReadModel:
    base = type(totals_of(form, f"own-{form}"))
    made: ReadModel = type("Own", (base,), {"queries": Routes("/api/own.getTotal", key="id")})()
    return made


def text_of(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def asked(folder: Path, model: ReadModel, *targets: str, stream: bool = False) -> list[tuple[int, Any]]:
    """The status and the parsed body of each answer of an instance with the states of the keys of its partition."""
    key_type = model.key_type
    assert isinstance(key_type, RecordKey)
    form = key_type.key_format
    with Driver(model) as driver:
        driver.given(*(event("Order", {"amount": 1}, record_key=value) for value in VALUES[form]))
        codec, states = driver.state_codec, driver.states()
    placed = {key: frame for key, frame in states.items() if partition_of(key_type.sent(key), PARTITIONS) == PARTITION}
    instance = Instance(folder / "store")
    instance.store.write([*placed.items()], len(placed))
    instance.move_to(20)

    async def run() -> list[tuple[int, Any]]:
        proxy, task = Proxy(), instance.task(PARTITION)
        routing = replace(
            instance.routing,
            read_model=model.name,
            partitioning=Partitioning(PARTITIONS, "murmur2", form),
            task=lambda partition: task if partition == PARTITION else None,
            view=lambda frame: model.view_of(codec.decode(frame)),
            number=codec.number,
        )
        path = f"/api/models/{model.name}"
        scheduler = instance.scatter(path).scheduler
        scatter = Scatter(
            routing=routing, proxy=proxy, path=path, generation=1, timeout_seconds=1.0, scheduler=scheduler
        )
        reader = Reader(
            generation=1,
            routing=routing,
            key_type=key_type,
            scheduler=scheduler,
            on_coalesced=instance.coalesced.append,
        )
        answers = ModelAnswers(
            Queries(routing=routing, proxy=proxy, timeout_seconds=1.0, metrics=Metrics()),
            scatter,
            Changes(reader, Links(proxy, instance.address), Pace()),
            model.description(),
        )
        handlers = Handlers(Operations(IdleInstance(), Streams(10)))
        known = {model.name: model}
        handlers.add(ModelQueries(known, {model.name: answers}, dict, lambda *_: answers, {}, Streams(10)))
        found: list[tuple[int, Any]] = []
        async with TestServer(make_app(handlers, routes_of([model], []))) as server, ClientSession() as client:
            for target in targets:
                url = URL(f"http://{server.host}:{server.port}{target}", encoded=True)
                headers = {"Accept": "text/event-stream"} if stream else {}
                async with client.get(url, headers=headers) as response:
                    if not stream:
                        found.append((response.status, json.loads(await response.text())))
                    while stream and not found:
                        line = await response.content.readline()
                        if line.startswith(b"data: ") and b'"key"' in line:
                            found.append((response.status, json.loads(line[6:])))
        await proxy.close()
        return found

    return asyncio.run(run())


def here(form: KeyFormat) -> list[str]:
    """The texts of the keys on the instance's partition, in their order."""
    key_type = RecordKey.of_format(form)
    placed = [value for value in VALUES[form] if partition_of(key_type.record_key(value), PARTITIONS) == PARTITION]
    return sorted(map(text_of, placed), key=key_type.parse)


@pytest.mark.parametrize("form", VALUES)
def test_a_key_is_asked_for_by_its_readable_form(tmp_path: Path, form: KeyFormat) -> None:
    key, model = here(form)[0], model_of(form)
    (at_generic, at_declared) = asked(
        tmp_path, model, f"/api/models/{model.name}/keys/{key}", f"/api/own.getTotal?id={key}"
    )
    (followed,) = asked(tmp_path / "again", model, f"/api/models/{model.name}/keys/{key}", stream=True)

    assert at_generic == (200, {"key": key, "value": {"total": 1, "orders": 1}})
    assert at_declared == (200, {"total": 1, "orders": 1})
    assert followed[1]["key"] == key


@pytest.mark.parametrize("form", VALUES)
def test_entries_are_in_the_order_of_their_values(tmp_path: Path, form: KeyFormat) -> None:
    model, keys = model_of(form), here(form)
    path = f"/api/models/{model.name}/entries?partial=true&limit=1000"
    everything, ranged, after = asked(
        tmp_path, model, path, f"{path}&from={keys[1]}&to={keys[3]}", f"{path}&after={keys[2]}"
    )

    assert [entry["key"] for entry in everything[1]["entries"]] == keys
    assert [entry["key"] for entry in ranged[1]["entries"]] == keys[1:4]
    assert [entry["key"] for entry in after[1]["entries"]] == keys[3:]


@pytest.mark.parametrize("form", ["uuid", "bytes"])
def test_an_answer_has_the_canonical_form_of_a_key(tmp_path: Path, form: KeyFormat) -> None:
    # With a letter.
    key, model = here(form)[-1], model_of(form)
    ((status, answer),) = asked(tmp_path, model, f"/api/models/{model.name}/keys/{key.upper()}")

    assert (status, answer["key"]) == (200, key)


@pytest.mark.parametrize(
    ("form", "key", "said"),
    [
        ("int", str(2**31), "key must be a number of at most 32 bits, such as 42"),
        ("long", "x", "key must be a number of at most 64 bits, such as 42"),
        ("uuid", "x", "key must be a UUID, such as 123e4567-e89b-12d3-a456-426614174000"),
        ("bytes", "abc", "key must be 1 to 128 bytes in hexadecimal digits, such as 00ff"),
    ],
)
def test_what_is_no_key_is_refused(tmp_path: Path, form: KeyFormat, key: str, said: str) -> None:
    model = model_of(form)
    answers = asked(
        tmp_path,
        model,
        f"/api/models/{model.name}/keys/{key}",
        f"/api/own.getTotal?id={key}",
        f"/api/models/{model.name}/entries?from={key}",
        f"/api/models/{model.name}/entries?after={key}",
    )

    assert [(status, answer["detail"]) for status, answer in answers] == [(400, said)] * 4


def test_only_a_canonical_key_is_answered_ahead() -> None:
    target = target_of_any_model("m", RecordKey.of_format("uuid"))
    key = "123e4567-e89b-12d3-a456-426614174000"

    assert target.key_of(key) == key.encode()
    assert target.key_of(key.upper()) is None
    assert target.key_of("x") is None
    assert target_of_any_model("m", RecordKey.of_format("long")).key_of("-5") == RecordKey.of_format("long").parse("-5")


@pytest.mark.parametrize("form", VALUES)
def test_an_instance_that_does_not_know_a_model_learns_the_form_of_its_keys(form: KeyFormat) -> None:
    published = PublishedModel.of(PublishedModel("m", PARTITIONS, "murmur2", key_format=form).record())

    assert published.key_type == RecordKey.of_format(form)
    assert published.partitioning == Partitioning(PARTITIONS, "murmur2", form)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [("long", "^(?:0|-?[1-9][0-9]{0,18})$"), ("bytes", "^(?:[0-9a-fA-F]{2}){1,128}$")],
)
def test_the_document_describes_the_readable_form(form: KeyFormat, pattern: str) -> None:
    described = document(routes_of([model_of(form)], []))["paths"]
    (declared,) = [one for one in described["/api/own.getTotal"]["get"]["parameters"] if one["name"] == "id"]
    (after,) = [one for one in described["/api/models/{model}/entries"]["get"]["parameters"] if one["name"] == "after"]

    assert declared["schema"]["pattern"] == pattern
    assert after["schema"] == {"type": "string"}
