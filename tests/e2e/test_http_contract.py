"""The HTTP contract of one running instance: exact digits, statuses, headers, limits and command bodies."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.clients import add, assert_problem, body_of, post, read
from tests.e2e.conftest import READ_TIMEOUT_SECONDS
from tests.support.api import ADD_FUNDS, GET_BALANCE

if TYPE_CHECKING:
    import httpx

_GET_PATHS = (GET_BALANCE, "/health/live", "/health/ready", "/metrics", "/api/status", "/openapi.json")


def test_a_tenth_and_two_tenths_are_exactly_three_tenths(http: httpx.Client, customer: str) -> None:
    add(http, customer, "0.1")

    answer = read(http, customer, add(http, customer, "0.2"))

    assert answer.content == b'{"amount":0.30}'
    assert answer.headers["Content-Type"] == "application/json"


@pytest.mark.shows("exact")
@pytest.mark.parametrize("amount", ["9999999999999999.99", '"9999999999999999.99"'])
def test_sixteen_digits_and_two_decimals_keep_every_digit(http: httpx.Client, customer: str, amount: str) -> None:
    add(http, customer, amount)

    answer = read(http, customer, add(http, customer, "0.02"))

    assert answer.content == b'{"amount":10000000000000000.01}'


@pytest.mark.shows("accepted")
def test_a_write_is_visible_at_its_position(http: httpx.Client, customer: str) -> None:
    for cents in range(1, 11):
        position = add(http, customer, "0.01")

        answer = read(http, customer, position)

        assert answer.text == f'{{"amount":0.{cents:02}}}'
        assert int(answer.headers["Balance-Position"].split(":")[1]) >= int(position.split(":")[1])


def test_an_answer_says_where_it_came_from(http: httpx.Client, customer: str) -> None:
    position = add(http, customer, "1")

    headers = read(http, customer, position).headers

    assert headers["Balance-Application-Server"] == f"{http.base_url.host}:{http.base_url.port}"
    assert headers["Balance-Role"] == "active"
    assert headers["Balance-Position"] == position
    assert int(headers["Balance-Epoch"]) >= 1
    assert int(headers["Balance-Lag"]) >= 0


@pytest.mark.shows("404")
def test_an_unknown_customer_is_a_404_with_a_position(http: httpx.Client, customer: str) -> None:
    answer = http.get(GET_BALANCE, params={"customerId": customer})

    assert_problem(answer, 404, "no such customer")
    assert answer.headers["Balance-Role"] == "active"
    assert ":" in answer.headers["Balance-Position"]


def test_a_position_beyond_the_end_is_a_503_after_the_read_timeout(http: httpx.Client, customer: str) -> None:
    partition, offset = add(http, customer, "1").split(":")
    began = time.monotonic()

    answer = read(http, customer, f"{partition}:{int(offset) + 1000}")

    assert READ_TIMEOUT_SECONDS - 0.1 < time.monotonic() - began < READ_TIMEOUT_SECONDS + 5
    assert_problem(answer, 503, "was not reached in time")
    assert int(answer.headers["Retry-After"]) >= 1


def test_a_position_of_another_partition_is_a_400(http: httpx.Client, customer: str) -> None:
    partition, offset = add(http, customer, "1").split(":")

    for other in (1 - int(partition), 2, 9999999999):
        assert_problem(read(http, customer, f"{other}:{offset}"), 400, f"partition {other}")


@pytest.mark.parametrize("position", ["", ":", "0", "0:", ":0", "-1:0", "0:-1", "a:b", "0:1:2", "0:1.5", " 0:1"])
def test_a_malformed_position_is_a_400(http: httpx.Client, customer: str, position: str) -> None:
    assert_problem(read(http, customer, position), 400, "minPosition")


@pytest.mark.parametrize(
    "query",
    [
        "",
        "customerId",
        "customerId=",
        "customerid=c1",
        "customerId=c1&customerId=c1",
        "customerId=c1&customer%49d=c2",
        "customerId=%ff",
        "customerId=%c3%28",
        "customerId=%ed%a0%80",
        "customerId=a%00b",
        "customerId=a%0a",
        "customerId=%7f",
        "customerId=%c2%85",
        "customerId=c1&minPosition=0:1&minPosition=0:1",
        pytest.param("customerId=c1" + "&x=1" * 20, id="too many parameters"),
    ],
)
def test_a_query_without_exactly_one_valid_id_is_a_400(http: httpx.Client, query: str) -> None:
    assert_problem(http.get(f"{GET_BALANCE}?{query}"), 400)


@pytest.mark.parametrize("letter", ["a", "é", "客", "😀"])
def test_an_id_has_at_most_256_bytes_of_utf_8(http: httpx.Client, letter: str) -> None:
    size = len(letter.encode())
    longest = letter * (256 // size) + "x" * (256 % size)
    assert len(longest.encode()) == 256

    position = add(http, longest, "1")

    assert read(http, longest, position).status_code == 200
    assert_problem(http.get(GET_BALANCE, params={"customerId": longest + "x"}), 400, "256 bytes")
    assert_problem(post(http, body_of(longest + "x", "1")), 400, "256 bytes")


@pytest.mark.parametrize(
    "prefix",
    [
        "a b",
        "a+b",
        "a&b=c#d?e",
        "50%",
        "%41",
        "/../x",
        "Zoë",
        "Zoe\u0308",
        "客户",
        "👩\u200d👧",
        '"\\',
        "\u2028",
    ],
)
def test_an_id_may_be_any_text_and_arrives_unchanged(http: httpx.Client, customer: str, prefix: str) -> None:
    position = add(http, prefix + customer, "1")

    assert read(http, prefix + customer, position).text == '{"amount":1.00}'
    assert read(http, customer, None).status_code == 404


def test_a_plus_in_a_query_is_a_space(http: httpx.Client, customer: str) -> None:
    position = add(http, f"a {customer}", "1")

    assert http.get(f"{GET_BALANCE}?customerId=a+{customer}&minPosition={position}").status_code == 200
    assert http.get(f"{GET_BALANCE}?customerId=a%2B{customer}").status_code == 404


@pytest.mark.parametrize("path", ["/console/", "/nope", "/api", "/api/customers.getBalance/", "/api//status", "/%ff"])
def test_an_unknown_path_is_a_404_problem(http: httpx.Client, path: str) -> None:
    assert_problem(http.get(path), 404, "nothing at this path")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", _GET_PATHS)
def test_read_paths_accept_get_only(http: httpx.Client, path: str, method: str) -> None:
    answer = http.request(method, path)

    assert_problem(answer, 405, "Allow")
    assert answer.headers["Allow"] == "GET,HEAD"


@pytest.mark.parametrize("path", _GET_PATHS)
def test_head_returns_the_headers_of_get_without_a_body(http: httpx.Client, path: str) -> None:
    got, answer = http.get(path), http.head(path)

    assert (answer.status_code, answer.content) == (got.status_code, b"")
    assert answer.headers["Content-Type"] == got.headers["Content-Type"]


def test_head_of_a_command_is_a_405(http: httpx.Client) -> None:
    answer = http.head(ADD_FUNDS)

    assert (answer.status_code, answer.content, answer.headers["Allow"]) == (405, b"", "POST")


@pytest.mark.shows("browser")
@pytest.mark.parametrize("path", [*_GET_PATHS, ADD_FUNDS, "/nope"])
def test_responses_must_not_be_stored(http: httpx.Client, path: str) -> None:
    headers = http.get(path).headers

    assert (headers["Cache-Control"], headers["Vary"]) == ("no-store", "Accept")
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_health_reports_a_ready_instance(http: httpx.Client) -> None:
    live, ready = http.get("/health/live"), http.get("/health/ready")

    assert (live.status_code, live.json()) == (200, {"status": "live"})
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "problems": []})


def test_metrics_count_queries_events_and_tasks(http: httpx.Client, customer: str) -> None:
    before = _samples(http)
    read(http, customer, add(http, customer, "1"))

    after = _samples(http)

    counters = ("read", "applied", "ignored", "duplicates", "dead_lettered")
    for name in counters:
        assert after[f"balance_events_{name}_total"].keys() == {_task(0), _task(1)}, name
    active = ("role", "active")
    for name in ("position", "lag", "store_bytes", "restored_records", "records_to_restore"):
        assert after[f"balance_{name}"].keys() == {_task(p) | {active} for p in (0, 1)}, name
    for name in ("balance_events_read_total", "balance_events_applied_total", "balance_position"):
        assert sum(after[name].values()) == sum(before[name].values()) + 1, name
    assert sum(after["balance_rebalances_total"].values()) >= 1
    assert sum(after["balance_batch_duration_seconds_count"].values()) >= 1
    answered = frozenset({("read_model", "balance"), ("answered", "local"), ("status", "200")})
    counts = [s["balance_query_duration_seconds_count"].get(answered, 0) for s in (before, after)]
    assert counts[1] == counts[0] + 1
    assert after["balance_task_state"] == {_task(p) | {active, ("state", "RUNNING")}: 1 for p in (0, 1)}


def test_the_status_lists_every_task_and_every_instance(http: httpx.Client) -> None:
    address = f"{http.base_url.host}:{http.base_url.port}"

    status = http.get("/api/status").json()

    assert status["applicationServer"] == address
    assert (status["ready"], status["leaseHolds"], status["partitions"]) == (True, True, 2)
    assert [task["task"] for task in status["tasks"]] == ["balance_0", "balance_1"]
    for partition, task in enumerate(status["tasks"]):
        assert (task["readModel"], task["partition"], task["state"]) == ("balance", partition, "RUNNING")
        assert task["role"].lower() == "active"
        assert task["epoch"] >= 1
        assert task["position"] >= 0
        assert task["lag"] >= 0
        assert task["storeBytes"] > 0
        assert {"reason", "restored", "toRestore"} < task.keys()
    (server,) = status["applicationServers"]
    assert (server["applicationServer"], server["suspect"]) == (address, False)
    assert server["incarnation"]
    shared = ("task", "partition", "role", "state", "epoch")
    assert [{name: task[name] for name in shared} for task in server["tasks"]] == [
        {name: task[name] for name in shared} for task in status["tasks"]
    ]


def _samples(http: httpx.Client) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    # The instance refreshes its metrics at most once per second.
    time.sleep(1.1)
    answer = http.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def _task(partition: int) -> frozenset[tuple[str, str]]:
    return frozenset({("read_model", "balance"), ("partition", str(partition))})


_MAX_BODY_BYTES = 16 << 10


@pytest.mark.parametrize(
    ("amount", "balance"),
    [
        ("1", "1.00"),
        ('"1"', "1.00"),
        ("12.34", "12.34"),
        ('"12.34"', "12.34"),
        ("0.01", "0.01"),
        ("1e2", "100.00"),
        ("25E-2", "0.25"),
        ("1.500", "1.50"),
        ('"007.50"', "7.50"),
    ],
)
def test_an_amount_may_be_a_number_or_a_decimal_string(
    http: httpx.Client, customer: str, amount: str, balance: str
) -> None:
    answer = read(http, customer, add(http, customer, amount))

    assert answer.text == f'{{"amount":{balance}}}'


def test_an_invalid_amount_is_refused_and_not_written(http: httpx.Client, customer: str) -> None:
    amounts = ["0", "0.00", "-1", "-0.01", "0.001", "1.234", "12345678901234567", "1e16", "1e400", "1e-400"]
    amounts += ["true", "null", "[]", "{}", "[1]", "NaN", "Infinity", "-Infinity"]
    strings = [
        "",
        "0",
        "-1",
        "+1",
        " 1",
        "1 ",
        "1e2",
        "1_000",
        "1,5",
        ".5",
        "1.",
        "abc",
        "NaN",
        "Infinity",
        "٣",
    ]
    strings += ["0.001", "12345678901234567", "1\n", "0x10"]
    amounts += [json.dumps(text) for text in strings]

    statuses = {amount: post(http, body_of(customer, amount)).status_code for amount in amounts}
    statuses["missing"] = post(http, json.dumps({"customerId": customer}).encode()).status_code

    assert set(statuses.values()) == {400}, statuses
    assert read(http, customer, add(http, customer, "1")).text == '{"amount":1.00}'


def test_a_command_is_answered_202_with_an_empty_body_and_a_position(http: httpx.Client, customer: str) -> None:
    first, second = (post(http, body_of(customer, "1")) for _ in range(2))

    assert (first.status_code, first.content) == (202, b"")
    partition, offset = first.headers["Balance-Position"].split(":")
    assert second.headers["Balance-Position"] == f"{partition}:{int(offset) + 1}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"junk",
        b"customerId=c1&amount=1",
        b'{"customerId": "c1", "amount": 1',
        b'{"customerId": "c\xff", "amount": 1}',
        pytest.param(b"[" * 8000, id="nested too deep"),
        b"null",
        b'["c1", 1]',
        b'{"amount":1}',
        b'{"customerId": null, "amount": 1}',
        b'{"customerId": 1, "amount": 1}',
        b'{"customerId": ["c1"], "amount": 1}',
        b'{"customerId": "", "amount": 1}',
        b'{"customerId": "\\ud800", "amount": 1}',
        b'{"customerId": "a\\u0000b", "amount": 1}',
        b'{"customerId": "a\\u0085b", "amount": 1}',
    ],
)
def test_an_invalid_body_is_a_400(http: httpx.Client, body: bytes) -> None:
    assert_problem(post(http, body), 400)


def test_a_compressed_body_is_a_415(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = http.post(ADD_FUNDS, content=b"not gzip", headers=headers)

    assert_problem(answer, 415, "Content-Encoding")


def test_a_body_has_at_most_16_kib(http: httpx.Client, customer: str) -> None:
    fits = body_of(customer, "1").ljust(_MAX_BODY_BYTES)

    assert post(http, fits).status_code == 202
    assert_problem(post(http, fits + b" "), 413)
    assert_problem(http.post(ADD_FUNDS, content=iter([fits, b" "]), headers={"Content-Type": "application/json"}), 413)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_a_command_accepts_post_only(http: httpx.Client, method: str) -> None:
    answer = http.request(method, ADD_FUNDS)

    assert_problem(answer, 405, "Allow")
    assert answer.headers["Allow"] == "POST"


@pytest.mark.shows("browser")
@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "text/json"])
def test_a_body_of_another_content_type_is_a_415(http: httpx.Client, customer: str, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}

    assert_problem(http.post(ADD_FUNDS, content=body_of(customer, "1"), headers=headers), 415, "application/json")
