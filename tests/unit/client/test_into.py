"""Answers become dataclasses, by the types of their fields."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import httpx
import pytest

from balance_service import scale
from balance_service.client import InvalidCallError, SnapshotBegin
from tests.support.scripted_server import OF_ALL, Scripted, answer, scripted, stream

if TYPE_CHECKING:
    from tests.unit.client.running import Run


class Kind(Enum):
    SMALL = "s"
    LARGE = "l"


@dataclass
class Place:
    city: str
    since: date | None = None


@dataclass
class Spending:
    customerId: str  # noqa: N815
    orders: int
    total: Annotated[Decimal, scale(2)]
    ratio: float = 0.0
    last: datetime | None = None
    kind: Kind = Kind.SMALL
    places: list[Place] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    photo: bytes = b""
    ref: UUID | None = None


@dataclass
class Numbered:
    id: int
    games: int


MODELS = Scripted(
    body=json.dumps({"models": [{"name": "spent", "key": "customerId"}, {"name": "games", "key": "id"}]}).encode()
)


def of(value: str, key: str = "ada") -> Scripted:
    return answer(f'{{"key":"{key}","value":{value}}}')


def test_an_answer_becomes_the_dataclass_of_the_states(run: Run) -> None:
    value = (
        '{"orders":3,"total":166.00,"ratio":2,"last":"2026-01-02T03:04:05.678Z","kind":"LARGE",'
        '"places":[{"city":"Oslo","since":"2026-01-02"}],"counts":{"a":1},"photo":"AAE=",'
        '"ref":"00000000-0000-0000-0000-000000000001","later":1}'
    )
    with scripted(of(value), MODELS) as (url, received):
        found = run(url, "get", "spent", "ada", into=Spending).value

    assert found == Spending(
        "ada",
        3,
        Decimal("166.00"),
        2.0,
        datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC),
        Kind.LARGE,
        [Place("Oslo", date(2026, 1, 2))],
        {"a": 1},
        b"\0\1",
        UUID(int=1),
    )
    assert isinstance(found.ratio, float)
    assert [request.target for request in received] == ["/api/models/spent/keys/ada", "/api/models"]


def test_a_number_that_is_not_finite_is_a_float(run: Run) -> None:
    with scripted(of('{"customerId":"ada","orders":1,"total":0.10,"ratio":"inf"}')) as (url, received):
        assert run(url, "get", "spent", "ada", into=Spending).value.ratio == float("inf")

    assert len(received) == 1


def test_a_key_without_a_state_stays_none(run: Run) -> None:
    with scripted(answer('{"detail": "no such key"}', 404)) as (url, _):
        assert run(url, "get", "spent", "ada", into=Spending).value is None


def test_a_list_and_a_number_are_read_too(run: Run) -> None:
    with scripted(of('[{"city":"Oslo"}]')) as (url, _):
        assert run(url, "get", "spent", "ada", into=list[Place]).value == [Place("Oslo")]
    with scripted(of("1.5")) as (url, _):
        assert run(url, "get", "spent", "ada", into=float).value == 1.5


def test_entries_become_dataclasses_with_their_keys(run: Run) -> None:
    entries = [{"key": key, "value": {"games": 2}} for key in ("1", "-2")]
    page = Scripted(200, json.dumps({"entries": entries, "next": None}).encode(), OF_ALL)
    with scripted(page, MODELS) as (url, received):
        found = [entry.value for entry in run(url, "entries", "games", into=Numbered)]

    assert found == [Numbered(1, 2), Numbered(-2, 2)]
    assert len(received) == 2


WHOLE = {"customerId": "ada", "orders": 3, "total": 1}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"orders": "3"}, "Spending.orders is int, and the answer has '3' there"),
        ({"orders": True}, "Spending.orders is int, and the answer has True there"),
        ({"orders": 1.5}, "Spending.orders is int, and the answer has 1.5 there"),
        ({"total": "1.00"}, "Spending.total is Decimal, and the answer has '1.00' there"),
        ({"total": None}, "Spending.total is Decimal, and the answer has null there"),
        ({"last": "yesterday"}, "Spending.last is datetime, and the answer has 'yesterday' there"),
        ({"kind": "MEDIUM"}, "Spending.kind is Kind, and the answer has 'MEDIUM' there"),
        ({"places": [{"city": "x"}, {"city": 5}]}, "Spending.places[1].city is str, and the answer has 5 there"),
        ({"places": {}}, "Spending.places is list[tests.unit.client.test_into.Place], and the answer has {} there"),
        ({"counts": {"a": "b"}}, "Spending.counts['a'] is int, and the answer has 'b' there"),
        ({"photo": "?"}, "Spending.photo is bytes, and the answer has '?' there"),
    ],
)
def test_the_error_names_the_field_that_does_not_fit(run: Run, given: dict[str, Any], why: str) -> None:
    with scripted(of(json.dumps({**WHOLE, **given}))) as (url, _), pytest.raises(InvalidCallError) as refused:
        run(url, "get", "spent", "ada", into=Spending)

    assert str(refused.value) == why


def test_the_error_names_the_field_that_the_answer_lacks(run: Run) -> None:
    with scripted(of('{"total":1}'), MODELS) as (url, _), pytest.raises(InvalidCallError) as refused:
        run(url, "get", "spent", "ada", into=Spending)

    assert str(refused.value) == "Spending.orders has no default, and the answer has only total, customerId"


def test_the_entries_of_a_top_become_dataclasses_with_their_keys(run: Run) -> None:
    entries = [{"key": "1", "value": {"games": 5}}, {"key": "2", "value": {"games": 3}}]
    page = Scripted(200, json.dumps({"entries": entries}).encode(), OF_ALL)
    with scripted(page, MODELS) as (url, received):
        found = run(url, "top", "games", by="games", into=Numbered)

    assert [entry.value for entry in found.entries] == [Numbered(1, 5), Numbered(2, 3)]
    assert len(received) == 2


def changes_of(*values: dict[str, Any] | None) -> Scripted:
    events = "".join(
        f"event: state\ndata: {json.dumps({'key': '7', 'value': value, 'generation': 1})}\nid: 1/0:{number}@a\n\n"
        for number, value in enumerate(values, 1)
    )
    return stream(f'event: snapshot-begin\ndata: {{"generation": 1}}\n\n{events}'.encode(), 60.0)


def test_changes_become_dataclasses_with_their_keys_and_a_deletion_stays_none(run: Run) -> None:
    with scripted(changes_of({"games": 5}, None, {"games": 6}), MODELS) as (url, received):
        begin, *found = run(url, "changes", "games", into=Numbered, take=4)

    assert begin == SnapshotBegin(1)
    assert [change.value for change in found] == [Numbered(7, 5), None, Numbered(7, 6)]
    assert [request.target for request in received] == ["/api/models/games/changes", "/api/models"]


@pytest.mark.parametrize("error", [RuntimeError, httpx.ReadError])
def test_an_error_of_the_class_ends_the_stream_and_is_no_lost_connection(run: Run, error: type[Exception]) -> None:
    @dataclass
    class Positive(Numbered):
        def __post_init__(self) -> None:
            raise error(f"{self.games} games are too few")

    with (
        scripted(changes_of({"games": -1}), MODELS) as (url, received),
        pytest.raises(error, match="-1 games are too few"),
    ):
        run(url, "changes", "games", into=Positive, take=2)

    assert len(received) == 2


def test_a_change_that_does_not_fit_ends_the_stream_with_the_name_of_its_field(run: Run) -> None:
    with (
        scripted(changes_of({"games": "many"}), MODELS) as (url, _),
        pytest.raises(InvalidCallError, match=r"Numbered\.games is int, and the answer has 'many' there"),
    ):
        run(url, "changes", "games", into=Numbered, take=2)
