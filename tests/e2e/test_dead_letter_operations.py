"""Dead letters from an operator's view: lists, the command line, and decisions while instances are killed."""

from __future__ import annotations

import base64
import itertools
import json
import struct
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from balance_service.devtools.local.processes import READY_TIMEOUT_SECONDS
from tests.e2e.clients import assert_problem
from tests.e2e.dead_letters import PoisonWriter, customer_in, decide, get, letter, list_order, pages, wait_for
from tests.support.commands import Done, assert_refused
from tests.support.commands import run as run_command
from tests.support.service import (
    PARTITIONS,
    amount_of,
    application,
    ask_again,
    one_of_two,
    owned,
    wait_until_spread,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

    Pair = tuple[LocalInstance, LocalInstance]

_FAR_APART = 2_100
_LONG_KEY = "a-customer-whose-name-is-longer-than-a-column"
_GARBAGE = b"no frame, and more than a line"
_AMOUNTS = ("1.00", "0.10", "0.01")
# The first commit after those of the partitions' epochs.
_FIRST = PARTITIONS + 1


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """Disables retries for the duration of the tests."""
    return application(BALANCE_RETRY_EVERY="86400")


@pytest.fixture(scope="module")
def instances(stack: LocalStack, settings: dict[str, str]) -> Iterator[Pair]:
    """The first instance runs; otherwise both are in the state that the previous test left."""
    with one_of_two(stack, settings) as instances:
        yield instances


@pytest.fixture
def instance(instances: Pair) -> LocalInstance:
    """The first instance, which runs alone and owns all partitions."""
    first, second = instances
    second.stop()
    if not first.running:
        _launch(first)
    _wait_until_alone(first)
    return first


@pytest.fixture
def pair(instances: Pair) -> Pair:
    """Both instances, which run and own a partition each."""
    for instance in instances:
        if not instance.running:
            _launch(instance)
    wait_until_spread(instances)
    return instances


@pytest.fixture(scope="module")
def poison(stack: LocalStack, settings: dict[str, str], instances: Pair) -> Iterator[PoisonWriter]:
    with PoisonWriter(stack, settings) as writer:
        yield writer


@pytest.fixture
def waiting(instance: LocalInstance, poison: PoisonWriter) -> Iterator[list[str]]:
    """The ids of two waiting dead letters with different causes, in list order. There are no other waiting ones."""
    _discard_waiting(instance)
    key = str(uuid.uuid4())
    ids = [poison.put(key, _GARBAGE, headers=[("trace", b"t1"), ("trace", b"\xff")]), poison.put(key, b"\0")]
    wait_for(instance, "waiting", *ids)
    yield ids
    _discard_waiting(instance)


# Lists


def test_pages_of_any_size_have_every_letter_once(pair: Pair, poison: PoisonWriter) -> None:
    # Earlier tests write no dead letters with this cause.
    short = [poison.put(customer_in(number % PARTITIONS), b"\0") for number in range(11)]
    garbage = poison.put(customer_in(0), b"garbage")
    wait_for(pair[0], "waiting", *short, garbage)
    expected = sorted(short, key=list_order)
    assert decide(pair[0], "discard", *short[:3]).status_code == 202

    for instance, size in itertools.product(pair, (2, 7, 1000)):
        found = pages(instance, cause="frame-missing", limit=str(size))
        assert ids_of(found) == expected
        assert max(map(len, found)) <= size
        everything = ids_of(pages(instance, limit=str(size)))
        assert everything == sorted(set(everything), key=list_order)
        assert set(everything) >= {*expected, garbage}
        discarded = pages(instance, cause="frame-missing", status="discarded", model="balance", limit=str(size))
        assert ids_of(discarded) == sorted(short[:3], key=list_order)
    assert pages(pair[0], cause="frame-missing", status="scheduled") == [[]]


def test_large_letters_shorten_a_page_and_none_is_left_out(pair: Pair, poison: PoisonWriter) -> None:
    large = b"\1" * 450_000
    letters = [poison.put(customer_in(number % PARTITIONS), large) for number in range(6)]
    letters += [poison.put(customer_in(number % PARTITIONS), b"garbage") for number in range(4)]
    wait_for(pair[0], "waiting", *letters)

    for instance in pair:
        found = pages(instance, cause="magic-byte-unknown", status="waiting")
        assert ids_of(found) == sorted(set(ids_of(found)), key=list_order)
        assert set(ids_of(found)) >= set(letters)
        assert len(found) > PARTITIONS


@pytest.mark.parametrize(
    ("parameters", "status", "why"),
    [
        ({"model": "purchases"}, 404, "does not host a read model 'purchases'"),
        ({"status": "lost"}, 400, "status must be one of"),
        ({"limit": "0"}, 400, "limit must be a number from 1 to 1000"),
        ({"limit": "1001"}, 400, "limit must be a number from 1 to 1000"),
        ({"after": "balance"}, 400, "an id is stage/partition:offset"),
    ],
)
def test_an_invalid_list_request_is_refused(pair: Pair, parameters: dict[str, str], status: int, why: str) -> None:
    for instance in pair:
        assert_problem(get(instance, **parameters), status, why)


def test_letters_far_apart_in_their_topic_are_listed_by_both_instances(pair: Pair, poison: PoisonWriter) -> None:
    customer = customer_in(0)
    event = poison.frame(customer, "0.01")
    letters = []
    for _ in range(20):
        for _ in range(_FAR_APART):
            poison.send(customer, event)
        letters.append(poison.put(customer, b"\0far"))
    wait_for(pair[0], "waiting", letters[-1])

    for instance in pair:
        assert set(ids_of(pages(instance, cause="frame-missing"))) >= set(letters)


def test_a_letter_with_a_large_record_is_shown_by_both_instances(pair: Pair, poison: PoisonWriter) -> None:
    large = b"\1" * 900_000
    letters = [poison.put(customer_in(partition), large) for partition in range(PARTITIONS)]

    for instance in pair:
        for one in letters:
            assert base64.b64decode(letter(instance, one)["valueBase64"]) == large
        assert set(ids_of(pages(instance, cause="magic-byte-unknown"))) >= set(letters)


# The command line


def test_list_prints_a_table(instance: LocalInstance, poison: PoisonWriter) -> None:
    scheduled = poison.put_unknown(poison.unknown_id(), _LONG_KEY, "5.00")
    since, due = (f"{letter(instance, scheduled)[name][:19]}Z" for name in ("failedAt", "dueAt"))

    done = run(instance, "list", "--status", "scheduled", "--cause", "schema-id-unknown", "--model", "balance")

    assert (done.code, done.stderr) == (0, ""), done
    header, row, detail = (line.split() for line in done.stdout.splitlines())
    assert " ".join(detail).startswith("the registry does not know schema ")
    assert header == ["ID", "KEY", "CAUSE", "STATUS", "SINCE", "TRIED", "DUE"]
    assert row == [scheduled, f"{_LONG_KEY[:31]}…", "schema-id-unknown", "scheduled", since, "0", due]
    assert run(instance, "discard", scheduled, "--reason", "the test is over").code == 0
    assert run(instance, "list", "--status", "scheduled").stdout == "There are none.\n"


def test_list_prints_json_lines_and_filters(instance: LocalInstance, waiting: list[str]) -> None:
    garbage, short = waiting

    listed = [json.loads(line) for line in run(instance, "list", "--json", "--status", "waiting").stdout.splitlines()]
    assert sorted(one["id"] for one in listed) == sorted(waiting)
    for one in listed:
        alone = get(instance, f"/{one['id']}").json()
        assert alone.pop("decoded") is None
        assert alone.pop("problem")
        assert one == alone
    of_a_cause = run(instance, "list", "--json", "--status", "waiting", "--cause", "frame-missing").stdout
    assert json.loads(of_a_cause)["id"] == short
    limited = run(instance, "list", "--status", "waiting", "--limit", "1").stdout
    assert "There are more than 1;" in limited
    assert [one in limited for one in sorted(waiting)] == [True, False]
    assert garbage in run(instance, "list", "--model", "balance", "--limit", "1000").stdout


def test_show_prints_a_letter_with_its_record(instance: LocalInstance, waiting: list[str]) -> None:
    garbage, _ = waiting

    told = json.loads(run(instance, "show", garbage, "--json").stdout)
    assert told == get(instance, f"/{garbage}").json()
    assert base64.b64decode(told["valueBase64"]) == _GARBAGE
    done = run(instance, "show", garbage)

    assert (done.code, done.stderr) == (0, ""), done
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert ["id", garbage] in lines
    assert ["cause", "magic-byte-unknown"] in lines
    assert ["dueAt", "-"] in lines
    first = lines.index(["headers", '{"name": "trace", "value": "t1"}'])
    assert " ".join(lines[first + 1]) == '{"name": "trace", "valueBase64": "/w=="}'
    assert ["value", "30 bytes"] in lines
    assert done.stdout.splitlines()[-4].endswith("no frame, and mo")
    assert done.stdout.splitlines()[-3].endswith("re than a line")
    assert lines[-1] == ["balance-service", f"dead-letters discard {garbage} --reason R"]


def test_letters_are_redriven_and_discarded_by_their_ids(
    instance: LocalInstance, poison: PoisonWriter, waiting: list[str]
) -> None:
    customer, schema_id = str(uuid.uuid4()), poison.unknown_id()
    healing = poison.put_unknown(schema_id, customer, "5.00")
    wait_for(instance, "scheduled", healing)
    poison.make_known(schema_id)

    done = run(instance, "redrive", healing, *waiting, "--reason", "the schema is known")

    assert (done.code, done.stdout) == (0, "1 to be tried again, 2 refused\n"), done
    refused = [line.split(": not done: ") for line in done.stderr.splitlines()]
    assert refused == [
        [waiting[0], "its cause, magic-byte-unknown, never goes away: discard it"],
        [waiting[1], "its cause, frame-missing, never goes away: discard it"],
    ]
    wait_for(instance, "applied", healing)
    assert str(amount_of(ask_again(instance.url, customer))) == "5.00"
    done = run(instance, "discard", waiting[0], "--reason", "not ours")
    assert (done.code, done.stdout, done.stderr) == (0, "1 discarded, 0 refused\n", "")
    decided = {one["id"]: (one["decision"], one["reason"]) for one in poison.decisions(healing, *waiting)}
    assert decided == {healing: ("redrive", "the schema is known"), waiting[0]: ("discard", "not ours")}


def test_letters_are_redriven_and_discarded_by_filter(
    instance: LocalInstance, poison: PoisonWriter, waiting: list[str]
) -> None:
    customers, schema_id = [str(uuid.uuid4()) for _ in range(4)], poison.unknown_id()
    healing = [poison.put_unknown(schema_id, customer, "5.00") for customer in customers]
    wait_for(instance, "scheduled", *healing)
    poison.make_known(schema_id)

    done = run(instance, "redrive", "--cause", "schema-id-unknown", "--reason", "the schema is known")
    assert (done.code, done.stdout) == (0, "4 to be tried again, 0 refused\n"), done
    wait_for(instance, "applied", *healing)
    done = run(instance, "discard", "--cause", "frame-missing", "--model", "balance", "--reason", "too short")
    assert (done.code, done.stdout) == (0, "1 discarded, 0 refused\n"), done

    assert [letter(instance, one)["status"] for one in waiting] == ["waiting", "discarded"]
    done = run(instance, "discard", "--cause", "frame-missing", "--reason", "too short")
    assert (done.code, done.stdout) == (0, "0 discarded, 0 refused\n"), done


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("show", "balance/0:999999"), "there is no such dead letter"),
        (("list", "--model", "purchases"), "does not host a read model 'purchases'"),
        (("list", "--status", "lost"), "status must be one of"),
        (("discard", "balance/0:999999", "--reason", "x"), "there is no such dead letter"),
        (("discard", "balance/0:999999", "--reason", " "), "reason must be a text"),
    ],
)
def test_an_invalid_request_is_refused_with_one_error_line(
    instance: LocalInstance, arguments: tuple[str, ...], why: str
) -> None:
    assert_refused(run(instance, *arguments), 1, why)


@pytest.mark.parametrize("malformed", ["balance", "../status", "?limit=1", "balance/0:0?x=y", "balance/0:0/.."])
def test_a_malformed_id_is_refused_by_the_command_line(instance: LocalInstance, malformed: str) -> None:
    for done in (run(instance, "show", malformed), run(instance, "discard", malformed, "--reason", "x")):
        assert done.code in (1, 2), done
        assert "an id is stage/partition:offset" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_command_fails_if_its_decision_is_refused_for_every_letter(
    instance: LocalInstance, waiting: list[str]
) -> None:
    garbage, _ = waiting

    assert_refused(run(instance, "redrive", garbage, "--reason", "x"), 1, garbage, "never goes away: discard it")
    assert run(instance, "discard", garbage, "--reason", "x").code == 0
    assert_refused(run(instance, "discard", garbage, "--reason", "x"), 1, garbage, "it is discarded already")


@pytest.mark.shows("stands-still", "decision")
def test_the_record_that_a_partition_stands_still_at_is_set_aside_by_any_instance(
    stack: LocalStack, pair: Pair, poison: PoisonWriter
) -> None:
    customer, stuck = customer_in(0), customer_in(0)
    (other,) = (instance for instance in pair if owned(instance) != {0})
    behind, unread = poison.frame(customer, "1.00"), poison.unknown_id()
    stack.registry.stop()
    try:
        letter_id = poison.put(stuck, struct.pack(">bI", 0, unread) + b"body")
        _, partition, offset = list_order(letter_id)
        poison.put(customer, behind)
        status = partial(run_command, other.environment, "status")
        eventually(lambda: "WAITING" in status().stdout, lambda: status().stdout)

        late = run(other, "set-aside", "balance", "0", str(offset + 1), "--reason", "x")
        assert_refused(late, 1, f"balance/0:{offset + 1}: the task's position is ", f"next record has offset {offset}")
        nowhere = run(other, "set-aside", "balance", str(PARTITIONS), "0", "--reason", "x")
        assert_refused(nowhere, 1, f"balance/{PARTITIONS}:0: its topic has no such partition")

        done = run(other, "set-aside", "balance", str(partition), str(offset), "--reason", "no registry")
        assert (done.code, done.stdout) == (0, f"{letter_id} is a dead letter now: redrive or discard it later\n")
        eventually(lambda: ask_again(other.url, customer).status_code == 200, "the event behind counts")
    finally:
        stack.registry.start()
    found = letter(other, letter_id)
    assert (found["cause"], found["status"], found["key"]) == ("set-aside", "waiting", stuck)
    assert found["detail"] == "127.0.0.1 set it aside: no registry"
    (decision,) = poison.decisions(letter_id)
    assert (decision["decision"], decision["cause"], decision["reason"]) == ("setAside", "set-aside", "no registry")
    again = run(other, "set-aside", "balance", str(partition), str(offset), "--reason", "x")
    assert_refused(again, 1, f"{letter_id}: it is a dead letter already: redrive or discard it")
    assert run(other, "discard", letter_id, "--reason", "the test is over").code == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--reason", "x"), "select dead letters either by ids or by"),
        (("balance/0:0", "--cause", "frame-missing", "--reason", "x"), "select dead letters either by ids or by"),
        (("balance/0:0",), "--reason"),
    ],
)
@pytest.mark.parametrize("decision", ["redrive", "discard"])
def test_a_decision_without_letters_or_reason_is_a_usage_error(
    instance: LocalInstance, decision: str, arguments: tuple[str, ...], why: str
) -> None:
    done = run(instance, decision, *arguments)

    assert done.code == 2, done
    assert "Error: " in done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr


# Decisions while instances are killed


@pytest.mark.shows("retried-once")
def test_an_instance_killed_repeatedly_during_retries_counts_each_letter_once(
    instance: LocalInstance, poison: PoisonWriter
) -> None:
    customer, schema_id = customer_in(0), poison.unknown_id()
    letters = [poison.put_unknown(schema_id, customer, amount) for amount in _AMOUNTS]
    wait_for(instance, "scheduled", *letters)
    poison.make_known(schema_id)

    _launch_armed(instance, "letters-read=kill")
    _wait_until_alone(instance)
    assert decide(instance, "redrive", *letters).status_code == 202
    for failpoint in ("produced", "committed"):
        _wait_until_killed(instance)
        _launch_armed(instance, f"{failpoint}=kill@{_FIRST}")
    _wait_until_killed(instance)
    _launch(instance)
    _wait_until_alone(instance)

    wait_for(instance, "applied", *letters)
    poison.add(customer, "0.50")
    _wait_for_balance(instance, customer, "1.61")
    assert [decision["id"] for decision in poison.decisions(*letters)] == letters
    written = [letter_id for letter_id, _ in poison.written()]
    assert [written.count(letter_id) for letter_id in letters] == [1] * len(letters)


@pytest.mark.shows("decision")
def test_a_decision_survives_a_kill_of_its_instance_entirely_or_not_at_all(
    instance: LocalInstance, poison: PoisonWriter
) -> None:
    garbage = poison.put(customer_in(0), b"garbage")
    wait_for(instance, "waiting", garbage)

    for failpoint in ("produced", "committed"):
        _launch_armed(instance, f"{failpoint}=kill@{_FIRST}")
        _wait_until_alone(instance)
        assert (letter(instance, garbage)["status"], poison.decisions(garbage)) == ("waiting", [])
        with pytest.raises(httpx.TransportError):
            decide(instance, "discard", garbage)
        _wait_until_killed(instance)
    _launch(instance)
    _wait_until_alone(instance)

    assert (letter(instance, garbage)["status"], len(poison.decisions(garbage))) == ("discarded", 1)


@pytest.mark.shows("retried-once")
def test_letters_redriven_from_two_instances_at_once_count_once(pair: Pair, poison: PoisonWriter) -> None:
    schema_id = poison.unknown_id()
    customers = [customer_in(number % PARTITIONS) for number in range(6)]
    letters = [poison.put_unknown(schema_id, customer, "5.00") for customer in customers]
    wait_for(pair[0], "scheduled", *letters)
    poison.make_known(schema_id)

    with ThreadPoolExecutor(2 * len(letters)) as pool:
        decided = {
            letter_id: [pool.submit(decide, instance, "redrive", letter_id) for instance in pair]
            for letter_id in letters
        }
    for letter_id, answers in decided.items():
        told = [(answer.result().status_code, answer.result().json().get("detail")) for answer in answers]
        assert (202, None) in told
        assert set(told) <= {(202, None), (409, f"{letter_id}: it is applied already")}
    wait_for(pair[1], "applied", *letters)
    for instance in pair:
        assert_problem(decide(instance, "redrive", *letters), 409, f"{letters[0]}: it is applied already")

    for customer in customers:
        poison.add(customer, "0.50")
        _wait_for_balance(pair[0], customer, "5.50")


def _launch_armed(instance: LocalInstance, failpoint: str) -> None:
    """Restarts an instance with an armed fail point."""
    instance.stop()
    instance.environment["BALANCE_FAILPOINTS"] = failpoint
    try:
        instance.launch()
    finally:
        del instance.environment["BALANCE_FAILPOINTS"]


def _wait_until_killed(instance: LocalInstance) -> None:
    eventually(lambda: not instance.running, "the instance has started and been killed", READY_TIMEOUT_SECONDS)
    assert "a fail point strikes" in instance.log.read_text()


def _launch(instance: LocalInstance) -> None:
    """Starts an instance again after its process has ended."""
    instance.kill()
    instance.launch()


def _wait_until_alone(instance: LocalInstance) -> None:
    instance.wait_ready()
    eventually(lambda: owned(instance) == set(range(PARTITIONS)), "the instance owns all partitions")


def _wait_for_balance(instance: LocalInstance, customer: str, amount: str) -> None:
    def balance() -> str:
        return str(amount_of(ask_again(instance.url, customer)))

    eventually(lambda: balance() == amount, balance)


# Helpers


def ids_of(found: list[list[dict[str, Any]]]) -> list[str]:
    return [one["id"] for page in found for one in page]


def run(instance: LocalInstance, *arguments: str) -> Done:
    return run_command(instance.environment, "dead-letters", *arguments)


def _discard_waiting(instance: LocalInstance) -> None:
    assert run(instance, "discard", "--status", "waiting", "--reason", "the test is over").code == 0
