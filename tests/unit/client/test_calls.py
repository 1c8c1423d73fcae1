"""Calls against a real local server: what they send, how they read replies, retries and errors."""

from __future__ import annotations

import json
import socket
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.client import (
    Balance,
    Client,
    ClientError,
    FundsAdded,
    InvalidCallError,
    NotAllowedError,
    NotAnInstanceError,
    PartitionAnswer,
    Position,
    ServerFailedError,
    State,
    UnavailableError,
    exchange,
)
from balance_service.client.exchange import pause_after
from balance_service.errors import ConfigurationError
from tests.support.scripted_server import OF_ALL, Drop, Received, Scripted, answer, problem, scripted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.unit.client.running import Run

QUICK = {"retry_seconds": 10.0}
ONCE = {"retry_seconds": 0.0}
PROVENANCE: dict[str, Any] = {
    "application_server": "localhost:5051",
    "role": "active",
    "position": Position(1, 4),
    "epoch": 3,
    "lag": 0,
    "age": None,
}
ADDED = Scripted(202, b"", {"Balance-Position": "1:4"})
BUSY = problem(503, "no instance answers for partition 1 now", Retry_After="1")
NO_CUSTOMER = answer('{"detail": "no such customer"}', 404)


@dataclass
class Spent:
    card: str
    day: int
    total: int


def of_all(body: str, **headers: str) -> Scripted:
    return Scripted(200, body.encode(), {**OF_ALL, **headers})


def targets(received: Iterable[Received]) -> list[str]:
    return [request.target for request in received]


@pytest.mark.parametrize("key", ["\ud800", "k" * 70_000])
def test_a_key_that_no_request_can_have_is_an_invalid_call(run: Run, key: str) -> None:
    with scripted() as (url, received), pytest.raises(InvalidCallError):
        run(url, "get", "balance", key)

    assert received == []


# Retries


def test_no_attempt_begins_after_a_pause_that_outlasted_the_time_for_attempts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may be stopped, or a machine suspended, during the pause."""
    now = iter([0.0, 0.0, 1.0])
    monkeypatch.setattr(exchange, "elapsed", lambda: next(now, 100.0))
    monkeypatch.setattr(exchange, "pause_after", lambda *_: 0.0)
    with scripted(BUSY, ADDED) as (url, received), pytest.raises(UnavailableError, match="outlasted"):
        run(url, "get_balance", "alice", options=QUICK)

    assert len(received) == 1


# Queries


def test_a_balance_is_exact_and_says_where_it_is_from(run: Run) -> None:
    with scripted(answer('{"amount":9999999999999999.99}')) as (url, received):
        balance = run(url, "get_balance", "Zoë & Söhne/1")

    assert balance == Balance(customer_id="Zoë & Söhne/1", amount=Decimal("9999999999999999.99"), **PROVENANCE)
    assert targets(received) == ["/api/customers.getBalance?customerId=Zo%C3%AB+%26+S%C3%B6hne%2F1"]


def test_a_balance_keeps_the_digits_that_the_service_sends(run: Run) -> None:
    with scripted(answer('{"amount":12.30}')) as (url, _):
        assert str(run(url, "get_balance", "c1").amount) == "12.30"


def test_an_answer_to_a_query_with_an_age_says_how_old_it_is(run: Run) -> None:
    with scripted(answer('{"amount":1.00}', Balance_Age="12.3")) as (url, received):
        balance = run(url, "get_balance", "c1", max_age=60.0)

    assert balance.age == 12.3
    assert targets(received) == ["/api/customers.getBalance?customerId=c1&maxAge=60.000"]


def test_an_unknown_customer_has_no_amount_at_a_position(run: Run) -> None:
    with scripted(NO_CUSTOMER) as (url, _):
        assert run(url, "get_balance", "c1") == Balance(customer_id="c1", amount=None, **PROVENANCE)


def test_a_state_has_the_exact_numbers_of_its_value(run: Run) -> None:
    body = '{"key":"c/1","value":{"additions":2,"greatest":0.10,"first":"2026-01-01T00:00:00.000Z"}}'
    with scripted(answer(body)) as (url, received):
        state = run(url, "get", "activity", "c/1", min_position=Position(1, 3), max_lag=5)

    value = {"additions": 2, "greatest": Decimal("0.10"), "first": "2026-01-01T00:00:00.000Z"}
    assert state == State(key="c/1", value=value, **PROVENANCE)
    assert str(state.value["greatest"]) == "0.10"
    assert targets(received) == ["/api/models/activity/keys/c%2F1?minPosition=1%3A3&maxLag=5"]


def test_a_composite_key_is_named_by_its_columns(run: Run) -> None:
    columns: dict[str, str | int] = {"card": "a b", "day": 20}
    body = '{"key":{"card":"a b","day":20},"value":{"total":3}}'
    with scripted(answer(body), NO_CUSTOMER) as (url, received):
        state = run(url, "get", "spent", columns, into=Spent, max_lag=5)
        missing = run(url, "get", "spent", columns)

    assert state == State(key="card=a%20b&day=20", columns=columns, value=Spent("a b", 20, 3), **PROVENANCE)
    assert missing == State(key="card=a%20b&day=20", columns=columns, value=None, **PROVENANCE)
    assert targets(received) == [
        "/api/models/spent/keys?card=a+b&day=20&maxLag=5",
        "/api/models/spent/keys?card=a+b&day=20",
    ]


def test_a_state_has_the_same_key_as_its_entry(run: Run) -> None:
    body = '{"key":{"card":"c1","day":20},"value":1}'
    listed = '{"entries":[{"key":{"card":"c1","day":20},"value":1}],"next":null}'
    with scripted(answer(body), of_all(listed)) as (url, _):
        state = run(url, "get", "spent", {"day": "20", "card": "c1"})
        (entry,) = run(url, "entries", "spent")

    assert (state.key, state.columns) == ("card=c1&day=20", {"card": "c1", "day": 20})
    assert (entry.key, entry.columns) == (state.key, state.columns)


def test_entries_are_those_with_the_first_columns_of_a_composite_key(run: Run) -> None:
    body = '{"entries":[{"key":{"card":"a","day":2},"value":{"total":3}}],"next":null}'
    with scripted(of_all(body)) as (url, received):
        (entry,) = run(url, "entries", "spent", within={"card": "a"}, start=1, end=7, into=Spent)

    assert (entry.key, entry.columns, entry.value) == ("card=a&day=2", {"card": "a", "day": 2}, Spent("a", 2, 3))
    assert targets(received) == ["/api/models/spent/entries?card=a&from=1&to=7&limit=1000"]


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (("get", "spent", {"card": "c1", "maxLag": 5}), {}),
        (("entries", "spent"), {"within": {"from": 5}, "start": 1}),
        (("changes", "spent"), {"within": {"from": 5}}),
        (("changes", "spent"), {"key": {"card": "c1", "generation": 2}}),
    ],
)
def test_a_column_with_the_name_of_a_parameter_is_refused(run: Run, call: tuple[Any, ...], given: Any) -> None:
    with (
        scripted() as (url, received),
        pytest.raises(InvalidCallError, match="is a parameter of queries, and so no column"),
    ):
        run(url, *call, **given)

    assert not received


@pytest.mark.parametrize("key", [".", ".."])
def test_a_key_of_dots_does_not_change_the_path(run: Run, key: str) -> None:
    with scripted(answer('{"key":"","value":1}')) as (url, received):
        run(url, "get", "activity", key)

    assert targets(received) == [f"/api/models/activity/keys/{'%2E' * len(key)}"]


def test_an_unknown_read_model_is_an_error_and_no_missing_state(run: Run) -> None:
    with scripted(problem(404, "there is no read model 'x' here")) as (url, _), pytest.raises(InvalidCallError) as no:
        run(url, "get", "x", "c1")

    assert (str(no.value), no.value.status) == ("there is no read model 'x' here", 404)


def test_a_path_in_the_url_is_kept(run: Run) -> None:
    with scripted(answer('{"amount":1}')) as (url, received):
        run(f"{url}/balances/", "get_balance", "c1")

    assert targets(received) == ["/balances/api/customers.getBalance?customerId=c1"]


def test_entries_are_requested_page_by_page(run: Run) -> None:
    pages = (
        of_all('{"entries":[{"key":"a","value":{"amount":1.10}},{"key":"b","value":{"amount":2}}],"next":"b"}'),
        of_all('{"entries":[{"key":"c","value":{"amount":3}}],"next":null}'),
    )
    with scripted(*pages) as (url, received):
        entries = run(url, "entries", "balance", start="a", prefix="", page_size=2)

    assert [(entry.key, entry.value["amount"]) for entry in entries] == [("a", Decimal("1.10")), ("b", 2), ("c", 3)]
    assert entries[0].scan.partitions == {
        0: PartitionAnswer(offset=12, role="active", epoch=3, lag=0),
        1: PartitionAnswer(offset=40, role="standby", epoch=5, lag=None),
    }
    assert targets(received) == [
        "/api/models/balance/entries?from=a&prefix=&limit=2",
        "/api/models/balance/entries?from=a&prefix=&limit=2&after=b",
    ]


def test_all_pages_are_of_the_generation_that_answered_the_first_one(run: Run) -> None:
    pages = (
        of_all('{"entries":[{"key":"a","value":1}],"next":"a"}', **{"Balance-Generation": "2"}),
        of_all('{"entries":[{"key":"b","value":2}],"next":null}', **{"Balance-Generation": "2"}),
    )
    with scripted(*pages) as (url, received):
        entries = run(url, "entries", "balance")

    assert [entry.scan.generation for entry in entries] == [2, 2]
    assert targets(received)[1] == "/api/models/balance/entries?limit=1000&after=a&generation=2"


def test_a_switch_that_is_sent_again_names_the_same_generation(run: Run) -> None:
    """Without its number, a second request would lead back to the former one."""
    generations = [{"generation": 1, "status": "serving"}, {"generation": 2, "status": "ready"}]
    state = {"generations": generations, "comparison": None, "keptUntil": None, "problem": ""}
    status = answer(json.dumps(state))
    with scripted(status, Drop(), status) as (url, received):
        run(url, "switch", "balance", reason="a test", options=QUICK)

    asked, *sent = received
    assert asked.target == "/api/models/balance/generations"
    assert [json.loads(request.body) for request in sent] == [{"model": "balance", "reason": "a test", "to": 2}] * 2


def test_a_page_is_requested_when_it_is_needed(run: Run) -> None:
    page = of_all('{"entries":[{"key":"a","value":1},{"key":"b","value":2}],"next":"b"}')
    with scripted(page) as (url, received):
        assert len(run(url, "entries", "balance", take=2)) == 2

    assert len(received) == 1


def test_a_count_names_the_partitions_that_it_lacks(run: Run) -> None:
    with scripted(of_all('{"count":3}', **{"Balance-Missing": "2,5"})) as (url, received):
        count = run(url, "count", "balance", partial=True)

    assert (count.count, count.scan.missing) == (3, {2, 5})
    assert targets(received) == ["/api/models/balance/count?partial=true"]


def test_the_top_says_whether_it_is_cut_off(run: Run) -> None:
    body = '{"entries":[{"key":"a","value":{"amount":0.30}}]%s}'
    with scripted(of_all(body % ""), of_all(body % ',"next":"a"')) as (url, received):
        whole = run(url, "top", "balance", by="amount", limit=1)
        cut_off = run(url, "top", "balance", by="amount", limit=1)

    assert [str(entry.value["amount"]) for entry in whole.entries] == ["0.30"]
    assert (whole.is_cut_off, cut_off.is_cut_off) == (False, True)
    assert received[0].target == "/api/models/balance/top?by=amount&limit=1"


def test_a_path_that_a_read_model_declares_is_sent_unchanged(run: Run) -> None:
    with scripted(answer("[1.10]"), answer('{"detail":"no such game"}', 404)) as (url, received):
        found, missing = run(url, "query", "/leaderboard/1?limit=2"), run(url, "query", "/leaderboard/2")

    assert (str(found[0]), missing) == ("1.10", None)
    assert targets(received) == ["/leaderboard/1?limit=2", "/leaderboard/2"]


@pytest.mark.parametrize("path", ["http://other.example/", "leaderboard", "/\n"])
def test_a_query_does_not_leave_the_url(run: Run, path: str) -> None:
    with scripted(answer("1")) as (url, received), pytest.raises(InvalidCallError, match="is not a path below the URL"):
        run(url, "query", path)

    assert received == []


def test_an_instance_says_why_it_is_not_ready(run: Run) -> None:
    ready = Scripted(200, b'{"status":"ready","problems":["activity: no schema"]}')
    with scripted(ready, problem(503, "no lease", Retry_After="1"), problem(404, "nothing here")) as (url, received):
        first, second = run(url, "ready"), run(url, "ready")
        with pytest.raises(InvalidCallError):
            run(url, "ready")

    assert (first.is_ready, first.problems) == (True, ("activity: no schema",))
    assert (second.is_ready, second.reasons) == (False, "no lease")
    assert len(received) == 3


# Commands


@pytest.mark.parametrize(
    ("amount", "sent"),
    [
        (Decimal("9999999999999999.99"), "9999999999999999.99"),
        (Decimal("1E+2"), "100"),
        (7, "7"),
        ("0.10", "0.10"),
    ],
)
def test_an_amount_is_sent_with_exactly_its_digits(run: Run, amount: Any, sent: str) -> None:
    with scripted(ADDED) as (url, received):
        run(url, "add_funds", "c1", amount)

    assert received[0].json == {"customerId": "c1", "amount": sent}


def test_a_float_is_refused_before_it_is_sent(run: Run) -> None:
    with scripted(ADDED) as (url, received), pytest.raises(InvalidCallError, match=r"0\.1 is a float; give a Decimal"):
        run(url, "add_funds", "c1", 0.1)

    assert received == []


def test_each_addition_has_a_key_of_its_own_and_returns_it(run: Run) -> None:
    with scripted(ADDED) as (url, received):
        added = [run(url, "add_funds", "c1", 1), run(url, "add_funds", "c1", 1)]
        chosen = run(url, "add_funds", "c1", 1, idempotency_key="order-1041")

    keys = [request.headers["idempotency-key"] for request in received]
    assert [one.idempotency_key for one in added] == keys[:2]
    assert len({uuid.UUID(key) for key in keys[:2]}) == 2
    assert chosen == FundsAdded(position=Position(1, 4), idempotency_key="order-1041")
    assert keys[2] == "order-1041"


@pytest.mark.parametrize("key", ["", "a b", "é", "x" * 129, "a\r\nb"])
def test_an_idempotency_key_that_no_header_can_hold_is_refused(run: Run, key: str) -> None:
    with scripted(ADDED) as (url, received), pytest.raises(InvalidCallError, match="1 to 128 visible ASCII"):
        run(url, "add_funds", "c1", 1, idempotency_key=key)

    assert received == []


@pytest.mark.shows("client")
def test_the_retries_of_an_addition_keep_its_idempotency_key(run: Run) -> None:
    with scripted(Drop(), problem(503, "the event may have been written"), Drop(), ADDED) as (url, received):
        added = run(url, "add_funds", "c1", 1, options=QUICK)

    assert added.position == Position(1, 4)
    assert [request.headers["idempotency-key"] for request in received] == [added.idempotency_key] * 4


def test_the_error_of_an_addition_has_the_key_for_another_call(run: Run) -> None:
    def refusal(*replies: Any, **options: float) -> ClientError:
        with scripted(*replies) as (url, received), pytest.raises(ClientError) as failed:
            run(url, "add_funds", "c1", 1, options=options)
        assert {request.headers["idempotency-key"] for request in received} == {failed.value.idempotency_key}
        return failed.value

    assert isinstance(refusal(Drop(), **ONCE), UnavailableError)
    assert isinstance(refusal(Drop(), problem(401, "the token has expired"), **QUICK), NotAllowedError)


@pytest.mark.shows("client")
@pytest.mark.parametrize("window_seconds", [61.0, 3.0])
def test_an_addition_is_not_retried_when_its_window_is_about_to_end(run: Run, window_seconds: float) -> None:
    # An attempt may take twice the timeout of 30 s, so a window of 61 s leaves one second.
    options = {"retry_seconds": 600.0, "idempotency_window_seconds": window_seconds}
    with (
        scripted(problem(503, "unavailable", Retry_After="2"), ADDED) as (url, received),
        pytest.raises(UnavailableError),
    ):
        run(url, "add_funds", "c1", 1, options=options)

    assert len(received) == 1


# Read your writes


def test_a_query_waits_for_the_clients_own_additions() -> None:
    with (
        scripted(
            Scripted(202, b"", {"Balance-Position": "1:7"}),
            Scripted(202, b"", {"Balance-Position": "1:5"}),
            answer('{"key":"c1","value":{"amount":1}, "amount":1}'),
        ) as (url, received),
        Client(url, read_your_writes=True) as client,
    ):
        client.add_funds("c1", 1)
        client.add_funds("c1", 1)
        client.get_balance("c1")
        client.get("balance", "c1", min_position=Position(1, 3))
        client.get_balance("c1", min_position=Position(1, 9))
        client.get("activity", "c1")
        client.get_balance("c2")

    assert targets(received)[2:] == [
        "/api/customers.getBalance?customerId=c1&minPosition=1%3A7",
        "/api/models/balance/keys/c1?minPosition=1%3A7",
        "/api/customers.getBalance?customerId=c1&minPosition=1%3A9",
        # The position is one of the source of `balance`, which another read model may not have.
        "/api/models/activity/keys/c1",
        "/api/customers.getBalance?customerId=c2",
    ]


def test_the_partition_that_a_key_has_now_counts() -> None:
    with (
        scripted(ADDED, Scripted(202, b"", {"Balance-Position": "0:2"}), answer('{"amount":1}')) as (url, received),
        Client(url, read_your_writes=True) as client,
    ):
        client.add_funds("c1", 1)
        client.add_funds("c1", 1)
        client.get_balance("c1")

    assert received[2].target.endswith("&minPosition=0%3A2")


def test_a_query_does_not_wait_by_default() -> None:
    with scripted(ADDED, answer('{"amount":1}')) as (url, received), Client(url) as client:
        client.add_funds("c1", 1)
        client.get_balance("c1")

    assert received[1].target == "/api/customers.getBalance?customerId=c1"


# Retries and errors


def test_a_call_is_retried_after_the_time_that_the_reply_names(run: Run) -> None:
    with scripted(BUSY, answer('{"amount":1}')) as (url, received):
        assert run(url, "get_balance", "c1", options=QUICK).amount == 1

    assert received[1].at - received[0].at >= 1


@pytest.mark.parametrize("reply", [Drop(), problem(429, "slow down"), Scripted(502), Scripted(504, b"<html>")])
def test_a_reply_that_may_change_is_retried(run: Run, reply: Any) -> None:
    with scripted(reply, reply, answer('{"amount":1}')) as (url, received):
        assert run(url, "get_balance", "c1", options=QUICK).amount == 1

    assert len(received) == 3


def test_the_pause_between_attempts_is_random_and_grows_up_to_a_limit() -> None:
    for failures, longest in ((1, 0.1), (2, 0.2), (3, 0.4), (50, 5.0)):
        pauses = [pause_after(failures) for _ in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
    assert 30 < pause_after(1, retry_after=30.0) <= 30.1


def test_retries_end_in_time_with_the_error_of_the_last_attempt(run: Run) -> None:
    with scripted(BUSY) as (url, received), pytest.raises(UnavailableError) as failed:
        run(url, "get_balance", "c1", options={"retry_seconds": 0.5})

    assert (str(failed.value), failed.value.status) == ("no instance answers for partition 1 now", 503)
    assert failed.value.retry_after == 1
    assert len(received) == 1


def test_a_server_that_is_not_there_is_named(run: Run) -> None:
    with pytest.raises(UnavailableError, match=r"^the instance at 127\.0\.0\.1:1 does not answer \(.+\)$") as failed:
        run("http://127.0.0.1:1", "get_balance", "c1", options=ONCE)

    assert (failed.value.status, failed.value.is_late) == (None, False)


def test_an_instance_that_never_answers_is_not_taken_for_one_that_is_not_there(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UnavailableError) as failed:
            run(url, "get_balance", "c1", options={**ONCE, "timeout_seconds": 0.1})

    assert (failed.value.status, failed.value.is_late) == (None, True)


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (problem(400, "minPosition is malformed"), InvalidCallError, "minPosition is malformed"),
        (problem(401, "a token is required"), NotAllowedError, "a token is required"),
        (problem(403, "the token lacks balance:read"), NotAllowedError, "the token lacks balance:read"),
        (problem(500, "an internal error occurred"), ServerFailedError, "an internal error occurred"),
        (Scripted(404, b"<html>Nothing</html>"), InvalidCallError, "404: <html>Nothing</html>"),
        (Scripted(302, b"", {"Location": "/login"}), NotAnInstanceError, "it answers 302 Found"),
        (Scripted(200, b"<html>"), NotAnInstanceError, "it answers 200 OK without JSON"),
        (answer("[1]"), NotAnInstanceError, "it answers 200 OK without a JSON object"),
        (answer('{"status":"UP"}'), NotAnInstanceError, "it answers 200 OK without 'amount'"),
        (Scripted(200, b'{"amount":1}'), NotAnInstanceError, "it answers 200 OK without Balance-Application-Server"),
    ],
)
def test_an_error_is_named_by_its_remedy_and_not_retried(
    run: Run, reply: Scripted, error: type[ClientError], message: str
) -> None:
    with scripted(reply) as (url, received), pytest.raises(error) as failed:
        run(url, "get_balance", "c1", options=QUICK)

    about = f"the server at {url.removeprefix('http://')} is not an instance: " if error is NotAnInstanceError else ""
    assert str(failed.value) == about + message
    assert failed.value.status == reply.status
    assert len(received) == 1


def test_an_addition_that_another_server_takes_is_not_confirmed(run: Run) -> None:
    with (
        scripted(Scripted(200, b"{}")) as (url, _),
        pytest.raises(NotAnInstanceError, match="without Balance-Position"),
    ):
        run(url, "add_funds", "c1", 1)


def test_a_token_is_sent_with_every_request_and_may_change(run: Run) -> None:
    tokens = iter(["first", "second"])
    with scripted(problem(503, "unavailable"), answer('{"amount":1}')) as (url, received):
        run(url, "get_balance", "c1", options={"token": lambda: next(tokens)})
        run(url, "get_balance", "c1", options={"token": "fixed"})

    sent = [request.headers["authorization"] for request in received]
    assert sent == ["Bearer first", "Bearer second", "Bearer fixed"]


@pytest.mark.parametrize("url", ["ftp://h", "balances.example", "localhost:5051", "http://", "http://a..b:1"])
def test_an_unusable_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an http or https URL; give one"):
        Client(url)


def test_a_position_is_parsed_and_shown() -> None:
    assert str(Position.parse("1:42")) == "1:42"
    for text in ("", "1", "1:", "-1:2", "1:2:3", "1:42 "):
        with pytest.raises(InvalidCallError, match="a position is partition:offset"):
            Position.parse(text)


# Dead letters


def test_dead_letters_are_listed_page_by_page_and_decided(run: Run) -> None:
    listed = (
        Scripted(200, b'{"deadLetters":[{"id":"balance/1:1"}],"next":"balance/1:1"}'),
        Scripted(200, b'{"deadLetters":[{"id":"balance/1:2"}],"next":null}'),
    )
    decided = Scripted(202, b'{"accepted":["balance/1:1"],"refused":[{"id":"balance/1:2","reason":"applied"}]}')
    one = Scripted(200, b'{"id":"balance/1:1","valueBase64":null}')
    with scripted(*listed, one, decided) as (url, received):
        letters = run(url, "dead_letters", cause="key-null")
        shown = run(url, "dead_letter", "balance/1:1")
        outcome = run(url, "discard", [letter["id"] for letter in letters], reason="a test")

    assert [letter["id"] for letter in letters] == ["balance/1:1", "balance/1:2"]
    assert shown["id"] == "balance/1:1"
    assert (outcome.accepted, outcome.refused) == (("balance/1:1",), {"balance/1:2": "applied"})
    assert targets(received) == [
        "/api/deadLetters?cause=key-null&limit=500",
        "/api/deadLetters?cause=key-null&limit=500&after=balance%2F1%3A1",
        "/api/deadLetters/balance%2F1%3A1",
        "/api/deadLetters.discard",
    ]
    assert received[3].json == {"ids": ["balance/1:1", "balance/1:2"], "reason": "a test"}


@pytest.mark.parametrize(
    ("key", "text"), [(-5, "-5"), (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"), (b"\0\xff", "00ff")]
)
def test_a_key_may_be_a_number_a_uuid_or_bytes(key: Any, text: str) -> None:
    page = Scripted(200, b'{"entries":[],"next":null}', OF_ALL)
    with scripted(answer(f'{{"key":"{text}","value":1}}'), page) as (url, received), Client(url) as client:
        assert client.get("m", key).key == text
        assert [*client.entries("m", start=key)] == []

    assert targets(received) == [f"/api/models/m/keys/{text}", f"/api/models/m/entries?from={text}&limit=1000"]


def test_a_row_of_a_table_is_asked_for_by_its_topic_and_key(run: Run) -> None:
    known, unknown = answer('{"key": "a/b", "value": {"name": "Ada"}}'), answer('{"detail": "no such row"}', 404)
    with scripted(known, unknown) as (url, received):
        found = run(url, "row", "players", "a/b", min_position=Position(1, 4), max_lag=3)
        assert run(url, "row", "players", 5).value is None

    assert found == State(key="a/b", value={"name": "Ada"}, **PROVENANCE)
    assert [one.target for one in received] == [
        "/api/tables/players/keys/a%2Fb?minPosition=1%3A4&maxLag=3",
        "/api/tables/players/keys/5",
    ]
