"""Change streams against a real local server: events, provenance, and new connections after every kind of end."""

from __future__ import annotations

import threading
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.client import (
    Change,
    InvalidCallError,
    NotAllowedError,
    NotAnInstanceError,
    SnapshotBegin,
    SnapshotEnd,
    Source,
    UnavailableError,
)
from tests.support.scripted_server import Drop, Scripted, answer, problem, scripted, stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.client.running import Run

SOURCE = b": partition 1 epoch 3 at localhost:5051\n\n"
SOURCES = {1: Source(1, 3, "localhost:5051")}
HANGS: Any = (60.0,)


def state(value: str, event_id: str | None = None, key: str = "c1") -> bytes:
    line = b"" if event_id is None else f"id: {event_id}\n".encode()
    return b"event: state\n" + line + f'data: {{"key":"{key}","value":{value},"generation":1}}\n\n'.encode()


def change(value: Any, positions: dict[int, int], key: str = "c1", sources: Any = SOURCES) -> Change[Any]:
    return Change(key=key, value=value, generation=1, positions=positions, sources=sources)


def values(events: list[Any]) -> list[Any]:
    return [event.value for event in events]


def test_the_present_value_and_each_change_are_reported_exactly(run: Run) -> None:
    parts = (SOURCE, state("null", "1/1:0"), b": alive\n\n", state('{"amount":0.10}', "1/1:4"), *HANGS)
    with scripted(stream(*parts)) as (url, received):
        changes = run(url, "changes", "balance", key="c/1", take=2)

    assert changes == [change(None, {1: 0}), change({"amount": Decimal("0.10")}, {1: 4})]
    assert str(changes[1].value["amount"]) == "0.10"
    assert received[0].target == "/api/models/balance/keys/c%2F1"
    assert received[0].headers["accept"] == "text/event-stream"
    assert "last-event-id" not in received[0].headers


def test_a_moved_partition_is_reported_by_its_new_source(run: Run) -> None:
    moved = b": partition 1 epoch 4 at localhost:5052\n\n"
    with scripted(stream(SOURCE, state("1", "1/1:1"), moved, state("2", "1/1:2"), *HANGS)) as (url, _):
        first, second = run(url, "changes", "balance", key="c1", take=2)

    assert (first.sources, second.sources) == (SOURCES, {1: Source(1, 4, "localhost:5052")})


def test_a_lost_stream_goes_on_from_its_last_complete_event(run: Run) -> None:
    cut = state("2", "1/1:2")[:-1]
    with scripted(stream(state("1", "1/1:1"), cut), Drop(), stream(state("2", "1/1:2"), *HANGS)) as (url, received):
        changes = run(url, "changes", "balance", key="c1", take=2)

    assert values(changes) == [1, 2]
    assert [request.headers.get("last-event-id") for request in received] == [None, "1/1:1", "1/1:1"]


def test_a_range_begins_with_a_snapshot(run: Run) -> None:
    snapshot = (
        b'event: snapshot-begin\nid:\ndata: {"generation":1}\n\n',
        state("1", key="a"),
        state("2", key="b"),
        b'event: snapshot-end\nid: 1/0:12,1:40@aA+/-_9\ndata: {"generation":1}\n\n',
        state("3", "1/0:13@aA+/-_9;1:40@b", key="a"),
    )
    with scripted(stream(*snapshot, *HANGS)) as (url, received):
        events = run(url, "changes", "balance", prefix="a", start="a", end="b", take=5)

    assert events == [
        SnapshotBegin(1),
        change(1, {}, key="a", sources={}),
        change(2, {}, key="b", sources={}),
        SnapshotEnd(1, {0: 12, 1: 40}),
        change(3, {0: 13, 1: 40}, key="a", sources={}),
    ]
    assert received[0].target == "/api/models/balance/changes?from=a&to=b&prefix=a"


def test_a_snapshot_that_breaks_off_is_requested_again_from_its_start(run: Run) -> None:
    begin = b'event: snapshot-begin\nid:\ndata: {"generation":1}\n\n'
    parts = (state("0", "1/0:1,1:1"), begin, state("1", key="a"))
    with scripted(stream(*parts), stream(begin, *HANGS)) as (url, received):
        run(url, "changes", "balance", take=4)

    assert "last-event-id" not in received[1].headers


def test_a_silent_connection_is_dead(run: Run) -> None:
    with scripted(stream(state("1", "1/1:1"), *HANGS), stream(state("2", "1/1:2"), *HANGS)) as (url, received):
        changes = run(url, "changes", "balance", key="c1", take=2, options={"silence_seconds": 0.3})

    assert values(changes) == [1, 2]
    assert received[1].headers["last-event-id"] == "1/1:1"


def test_a_connection_that_shows_it_is_alive_is_kept(run: Run) -> None:
    parts = (b": alive\n\n", 0.5) * 5
    with scripted(stream(*parts, state("1", "1/1:1"), *HANGS)) as (url, received):
        run(url, "changes", "balance", key="c1", take=1, options={"silence_seconds": 1.5})

    assert len(received) == 1


def test_the_end_of_a_token_is_an_error_unless_there_is_another_token(run: Run) -> None:
    ended = stream(state("1", "1/1:1"), b'event: end\ndata: {"detail": "the token has expired"}\n\n')
    with scripted(ended, problem(401, "the token has expired")) as (url, _), pytest.raises(NotAllowedError):
        run(url, "changes", "balance", key="c1", options={"token": "old"})
    tokens = iter(["old", "new"])
    with scripted(ended, stream(state("2", "1/1:2"), *HANGS)) as (url, received):
        assert values(run(url, "changes", "balance", key="c1", take=2, options={"token": lambda: next(tokens)})) == [
            1,
            2,
        ]
    assert received[1].headers["authorization"] == "Bearer new"


def test_a_stream_waits_for_a_place(run: Run) -> None:
    busy = problem(503, "1000 streams are open", Retry_After="1")
    with scripted(busy, stream(state("1", "1/1:1"), *HANGS)) as (url, received):
        run(url, "changes", "balance", key="c1", take=1)

    assert received[1].at - received[0].at >= 1


def test_only_a_stream_that_was_never_open_fails_for_lack_of_an_instance(run: Run) -> None:
    never = {"retry_seconds": 0.0}
    with scripted(Drop()) as (url, received), pytest.raises(UnavailableError):
        run(url, "changes", "balance", key="c1", options=never)
    assert len(received) == 1
    again = (Drop(), problem(503, "starting"), stream(state("2", "1/1:2"), *HANGS))
    with scripted(stream(state("1", "1/1:1")), *again) as (url, received):
        assert values(run(url, "changes", "balance", key="c1", take=2, options=never)) == [1, 2]
    assert len(received) == 4


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (problem(404, "there is no read model 'x' here"), InvalidCallError),
        (problem(403, "the token lacks balance:read"), NotAllowedError),
        (answer('{"key":"c1","value":1}'), NotAnInstanceError),
        (stream(b"event: state\nid: 1/1:1\ndata: nothing\n\n"), NotAnInstanceError),
        (stream(state("1", "one")), NotAnInstanceError),
    ],
)
def test_a_refusal_ends_the_stream(run: Run, reply: Scripted, error: type[Exception]) -> None:
    with scripted(reply) as (url, received), pytest.raises(error):
        run(url, "changes", "balance", key="c1")

    assert len(received) == 1


def test_the_end_of_the_iteration_closes_the_connection(run: Run) -> None:
    closed = threading.Event()

    def parts() -> Iterator[bytes | float]:
        try:
            while True:
                yield state("1", "1/1:1")
                yield 0.01
        finally:
            closed.set()

    with scripted(lambda _: Scripted(200, parts(), {"Content-Type": "text/event-stream"})) as (url, _):
        run(url, "changes", "balance", key="c1", take=1)

        assert closed.wait(5)


def test_a_key_and_a_range_exclude_each_other(run: Run) -> None:
    with pytest.raises(InvalidCallError, match="either a key, or start, end, prefix and within"):
        run("http://127.0.0.1:1", "changes", "balance", key="c1", prefix="c")
