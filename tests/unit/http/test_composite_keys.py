"""Queries of a read model whose key has several columns."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from yarl import URL

from balance_service import api
from balance_service.cluster.directory import PublishedModel, key_columns
from balance_service.errors import ConfigurationError
from balance_service.http.app import make_app, routes_of
from balance_service.http.key_target import declared_target, target_of_any_model
from balance_service.http.model_queries import (
    ChangesParameters,
    CompositeKeyParameters,
    EntriesParameters,
    ModelAnswers,
    ModelQueries,
    TopParameters,
)
from balance_service.http.openapi import document
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.queries import Queries
from balance_service.http.route import Handlers
from balance_service.http.scatter import Scatter
from balance_service.http.streams.changes import Changes
from balance_service.http.streams.event_stream import Streams
from balance_service.http.streams.feed import Pace
from balance_service.http.streams.link import Links
from balance_service.http.streams.part import Reader, Selection
from balance_service.kafka.partitioner import partition_of
from balance_service.model.keys import TEXT
from balance_service.model.read_model import Collection, Routes
from balance_service.observability.metrics import Metrics
from balance_service.testing import Driver
from tests.support.composite import Purchase, SpentPerDay
from tests.support.fakes import IdleInstance
from tests.support.querying import PARTITION, PARTITIONS, Instance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from aiohttp import ClientResponse

    from balance_service.avro.codec import AvroCodec


T = TypeVar("T")


class SpentCollection(SpentPerDay):
    name = "spent-collection"
    queries = Collection("/spent", key=("card", "day"), noun="card and day")


class SpentWithRoute(SpentPerDay):
    queries = Routes("/api/cards.getSpent", key=("cardNo", "date"), noun="card and day")


MODEL, COLLECTION = SpentWithRoute(), SpentCollection()
NAME = MODEL.name
KNOWN = {model.name: model for model in (MODEL, COLLECTION)}
ALL = f"/api/models/{NAME}"
CARDS, DAYS = ("a", "a&b=", "ab", "é c"), range(-20, 20)


def stored() -> tuple[AvroCodec, Mapping[bytes, bytes]]:
    """The states of some cards and days that the one partition of the instance has, and their codec."""
    with Driver(MODEL) as driver:
        driver.given(*(Purchase(card, day, 100 * day) for card in CARDS for day in DAYS))
        states = driver.states().items()
        ours = {key: frame for key, frame in states if partition_of(key, PARTITIONS) == PARTITION}
        return driver.state_codec, ours


CODEC, STATES = stored()
KEYS = [MODEL.key_type.fields(key) for key in sorted(STATES)]
WITH_DAYS = {card: [key["day"] for key in KEYS if key["card"] == card] for card in CARDS}


def asked(folder: Path, *targets: str, headers: Mapping[str, str] | None = None) -> list[tuple[int, Any]]:
    """The status and the parsed body of each answer of an instance that has the states."""

    async def answer_to(response: ClientResponse) -> tuple[int, Any]:
        return response.status, json.loads(await response.text())

    return requested(folder, targets, headers or {}, answer_to)


def followed(folder: Path, target: str, count: int) -> list[Any]:
    """The data of the first events with a state."""

    async def events_of(response: ClientResponse) -> list[Any]:
        found: list[Any] = []
        async with asyncio.timeout(30):
            while len(found) < count:
                line = await response.content.readline()
                data = json.loads(line[6:]) if line.startswith(b"data: ") else {}
                found += [data] if "key" in data else []
        return found

    (found,) = requested(folder, [target], {"Accept": "text/event-stream"}, events_of)
    return found


def requested(
    folder: Path, targets: Sequence[str], headers: Mapping[str, str], read: Callable[[ClientResponse], Awaitable[T]]
) -> list[T]:
    instance = Instance(folder / "store")
    instance.store.write([*STATES.items()], len(STATES))
    instance.move_to(20)

    async def run() -> list[T]:
        proxy = Proxy()
        # A stream follows one task.
        task = instance.task(PARTITION)
        routing = replace(
            instance.routing,
            read_model=NAME,
            task=lambda partition: task if partition == PARTITION else None,
            view=lambda frame: MODEL.view_of(CODEC.decode(frame)),
            number=CODEC.number,
        )
        queries = Queries(routing=routing, proxy=proxy, timeout_seconds=1.0, metrics=Metrics())
        scatter = instance.scatter(ALL)
        scatter = Scatter(
            routing=routing,
            proxy=proxy,
            path=ALL,
            generation=1,
            timeout_seconds=1.0,
            scheduler=scatter.scheduler,
        )
        reader = Reader(
            generation=1,
            routing=routing,
            key_type=MODEL.key_type,
            scheduler=scatter.scheduler,
            on_coalesced=instance.coalesced.append,
        )
        changes = Changes(reader, Links(proxy, instance.address), Pace())
        answers = ModelAnswers(queries, scatter, changes, MODEL.description())
        handlers = Handlers(Operations(IdleInstance(), Streams(10)))
        handlers.add(ModelQueries(KNOWN, dict.fromkeys(KNOWN, answers), dict, lambda *_: answers, {}, Streams(10)))
        found = []
        async with (
            TestServer(make_app(handlers, routes_of([*KNOWN.values()], []))) as server,
            ClientSession() as client,
        ):
            for target in targets:
                url = URL(f"http://{server.host}:{server.port}{target}", encoded=True)
                async with client.get(url, headers=headers) as response:
                    found.append(await read(response))
        await proxy.close()
        return found

    return asyncio.run(run())


def test_a_key_is_asked_for_by_its_columns(tmp_path: Path) -> None:
    day = int(WITH_DAYS["a&b="][0])
    at_generic, at_declared, in_other_order = asked(
        tmp_path,
        f"{ALL}/keys?card=a%26b%3D&day={day}",
        f"/api/cards.getSpent?cardNo=a%26b%3D&date={day}",
        f"{ALL}/keys?day={day}&card=a%26b%3D&maxLag=1000000",
    )

    assert at_generic == (200, {"key": {"card": "a&b=", "day": day}, "value": {"total": 100 * day, "purchases": 1}})
    assert in_other_order == at_generic
    assert at_declared == (200, {"total": 100 * day, "purchases": 1})


REFUSED = {
    f"{ALL}/keys/a": f"the key of '{NAME}' is card, day: ask for {ALL}/keys?card=…&day=…",
    f"{ALL}/keys": "the key must be of the form card=…&day=…",
    f"{ALL}/keys?card=a": "the key must be of the form card=…&day=…",
    f"{ALL}/keys?card=a&day=1&dya=2": "the query has 'dya', which is not known here; it may have card, day, "
    "generation, maxAge, maxLag, minPosition",
    f"{ALL}/keys?card=a&day=1&Last-Event-ID=1/0:1": "the query has 'Last-Event-ID', which is not known here; it may "
    "have card, day, generation, maxAge, maxLag, minPosition",
    f"{ALL}/keys?card=a&day=x": "day must be a number of at most 64 bits, such as 42",
    f"{ALL}/keys?card=&day=1": "card must have 1 to 256 bytes of UTF-8",
    f"{ALL}/keys?card=a&card=b&day=1": "card is given more than once",
    f"{ALL}/keys?card={'c' * 247}&day=1": "card and day together must have at most 256 bytes",
    "/api/cards.getSpent?cardNo=a": "date is missing",
    "/api/cards.getSpent?cardNo=a&date=1&day=1": "the query has 'day', which is not known here; "
    "it may have cardNo, date, generation, maxAge, maxLag, minPosition",
    f"{ALL}/entries?day=1": "card is missing: a range is one of the first columns of the key",
    f"{ALL}/entries?card=a&from=x": "day must be a number of at most 64 bits, such as 42",
    f"{ALL}/entries?card=a&prefix=1": "prefix requires text, and day is a number: use from, to",
    f"{ALL}/entries?after=a": "the key must be of the form card=…&day=…",
    f"{ALL}/entries?city=x": "the query has 'city', which is not known here; it may have after, card, day, from, "
    "generation, limit, maxLag, partial, prefix, to",
    f"{ALL}/changes?card=a&prefix=1": "prefix requires text, and day is a number: use from, to",
}


def test_a_query_that_composite_keys_do_not_have_is_refused(tmp_path: Path) -> None:
    answers = dict(zip(REFUSED, asked(tmp_path, *REFUSED), strict=True))

    assert {target: (status, problem["detail"]) for target, (status, problem) in answers.items()} == {
        target: (400, why) for target, why in REFUSED.items()
    }


def test_a_peer_may_name_parameters_that_are_not_known_here(tmp_path: Path) -> None:
    day = int(WITH_DAYS["a"][0])
    more = "newer=1&Last-Event-ID=x"
    (one,) = asked(tmp_path / "one", f"{ALL}/keys?card=a&day={day}&{more}", headers={FORWARDED_HEADER: "localhost:1"})
    (listed,) = asked(
        tmp_path / "all",
        f"{ALL}/entries?card=a&to={day}&partitions={PARTITION}&{more}",
        headers={FORWARDED_HEADER: "localhost:1"},
    )

    state = {"key": {"card": "a", "day": day}, "value": {"total": 100 * day, "purchases": 1}}
    assert one == (200, state)
    assert listed[0] == 200, listed


def test_the_keys_with_the_same_first_columns_are_a_range(tmp_path: Path) -> None:
    within, ranged, cards, everything, top = asked(
        tmp_path,
        f"{ALL}/entries?card=a&partial=true",
        f"{ALL}/entries?card=a&from=-5&to=7&partial=true",
        f"{ALL}/entries?prefix=a&partial=true&limit=1000",
        f"{ALL}/entries?partial=true&limit=1000",
        f"{ALL}/top?by=total&limit=1&partial=true",
    )

    def keys(answer: tuple[int, Any]) -> list[Any]:
        assert answer[0] == 200
        return [entry["key"] for entry in answer[1]["entries"]]

    assert keys(within) == [{"card": "a", "day": day} for day in WITH_DAYS["a"]]
    assert keys(ranged) == [{"card": "a", "day": day} for day in WITH_DAYS["a"] if -5 <= int(day) <= 7]
    assert keys(cards) == [key for key in KEYS if str(key["card"]).startswith("a")]
    assert keys(everything) == KEYS
    assert keys(top)[0]["day"] == max(int(key["day"]) for key in KEYS)


def test_a_key_is_followed_by_its_columns(tmp_path: Path) -> None:
    day = int(WITH_DAYS["a&b="][0])

    (event,) = followed(tmp_path, f"{ALL}/keys?card=a%26b%3D&day={day}", 1)

    assert event == {
        "key": {"card": "a&b=", "day": day},
        "value": {"total": 100 * day, "purchases": 1},
        "generation": 1,
    }


def test_the_keys_with_the_same_first_columns_are_followed(tmp_path: Path) -> None:
    days = [day for day in WITH_DAYS["a"] if int(day) >= 1]

    events = followed(tmp_path, f"{ALL}/changes?card=a&from=1", len(days))

    assert [event["key"] for event in events] == [{"card": "a", "day": day} for day in days]


def test_pages_go_on_after_a_composite_key(tmp_path: Path) -> None:
    found: list[int] = []
    target = f"{ALL}/entries?card=a%26b%3D&partial=true&limit=3"
    following: str | None = ""
    while following is not None:
        more = f"&after={quote(following, safe='')}" if following else ""
        ((status, page),) = asked(tmp_path / str(len(found)), target + more)
        assert status == 200
        found += [entry["key"]["day"] for entry in page["entries"]]
        following = page["next"]

    assert found == WITH_DAYS["a&b="]


def test_a_collection_has_a_path_for_each_column(tmp_path: Path) -> None:
    day = int(WITH_DAYS["a&b="][0])
    one, everything, ranged, no_day, empty = asked(
        tmp_path,
        f"/spent/a%26b%3D/{day}",
        "/spent?partial=true&limit=1000",
        "/spent/a/-5/7?partial=true",
        "/spent/a/x",
        "/spent/a/7/-5?partial=true",
    )

    assert one == (200, {"total": 100 * day, "purchases": 1})
    assert [entry["key"] for entry in everything[1]] == KEYS
    assert [entry["key"]["day"] for entry in ranged[1]] == [day for day in WITH_DAYS["a"] if -5 <= int(day) <= 7]
    assert no_day[0] == 400
    assert empty == (200, [])


def test_the_document_names_the_columns_in_the_paths_of_a_collection() -> None:
    described = document(routes_of([COLLECTION], []))["paths"]

    def parameters(path: str) -> list[tuple[str, str]]:
        return [(one["name"], one["in"]) for one in described[path]["get"]["parameters"]]

    assert parameters("/spent/{card}/{day}")[:2] == [("card", "path"), ("day", "path")]
    assert {("card", "path"), ("from", "path"), ("to", "path")} <= {*parameters("/spent/{card}/{from}/{to}")}


@pytest.mark.parametrize("names", ["card", ("card", "day", "shop"), ("day", "day"), ("card", "from")])
def test_a_declared_query_names_a_parameter_for_each_column(names: Any) -> None:
    with pytest.raises(ConfigurationError, match="has queries with the key"):
        type("Wrong", (SpentPerDay,), {"queries": Routes("/spent", key=names)})()


def test_no_parameter_of_queries_is_a_column() -> None:
    kinds = (CompositeKeyParameters, EntriesParameters, ChangesParameters, TopParameters)
    named = frozenset[str]().union(*(kind.not_in_header for kind in kinds)) - {"within"}

    assert named <= api.NO_PART_NAMES


def test_peers_are_asked_by_the_columns() -> None:
    text = "card=a%26b&day=7"
    at_generic = target_of_any_model(NAME, MODEL.key_type).query(text)
    at_declared = declared_target(MODEL, MODEL.queries).query(text)

    assert (at_generic.path, at_generic.parameters) == (f"{ALL}/keys", {"card": "a&b", "day": "7"})
    assert (at_declared.path, at_declared.parameters) == ("/api/cards.getSpent", {"cardNo": "a&b", "date": "7"})
    assert at_generic.peers_echo_key
    assert not at_declared.peers_echo_key
    assert at_generic.echoed_key == {"card": "a&b", "day": 7}


def test_peers_follow_the_same_range() -> None:
    selection = Selection(start="1", within={"card": "a"})

    assert Selection.of(selection.parameters()) == selection
    assert selection.bounds(MODEL.key_type) == MODEL.key_type.range(start="1", within={"card": "a"})
    with pytest.raises(TypeError):
        Selection.of({"within": {"card": 1}})


def test_an_instance_that_does_not_know_a_model_learns_its_columns() -> None:
    published = PublishedModel(NAME, PARTITIONS, "murmur2", key_columns=key_columns(MODEL.key_type))

    assert PublishedModel.of(published.record()).key_type == MODEL.key_type
    assert key_columns(TEXT) == ()


def test_the_document_names_the_columns_of_a_declared_key() -> None:
    described = document(routes_of([MODEL], []))["paths"]
    declared = described["/api/cards.getSpent"]["get"]["parameters"]

    assert [(one["name"], one["in"], one["required"]) for one in declared][:2] == [
        ("cardNo", "query", True),
        ("date", "query", True),
    ]
    assert "pattern" in declared[1]["schema"]
    columns = next(p for p in described["/api/models/{model}/keys"]["get"]["parameters"] if p["name"] == "key")
    assert (columns["in"], columns["schema"]) == (
        "query",
        {"type": "object", "additionalProperties": {"type": "string"}},
    )
