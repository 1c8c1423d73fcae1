"""`produce` and `tail`: what a person feeds into a topic, and what they see come out of it."""

from __future__ import annotations

import json
import uuid
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from tests.support.commands import Done, assert_refused, run, started
from tests.support.kafka import create_topic, ends_of
from tests.support.service import application, on
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalInstance, LocalStack

FUNDS_ADDED = "parts.code.balance.events.FundsAdded"
_AT = "2026-01-01T00:00:00.000Z"


def event(customer: str, amount: str) -> str:
    return f'{{"id": "{uuid.uuid4()}", "occurredOn": "{_AT}", "customerId": "{customer}", "amount": {amount}}}'


def keyed(customer: str, *amounts: str, separator: str = "|") -> bytes:
    return "".join(f"{customer}{separator}{event(customer, amount)}\n" for amount in amounts).encode()


def lines_of(done: Done) -> list[Any]:
    assert (done.code, done.stderr) == (0, ""), done
    # Not splitlines(): it also splits at characters that a JSON string may hold, such as U+2028.
    return [json.loads(line, parse_float=Decimal) for line in done.stdout.removesuffix("\n").split("\n")]


@pytest.fixture
def topic(stack: LocalStack) -> str:
    """The source of an application that nobody else has, created."""
    name = f"balance-{uuid.uuid4().hex[:8]}"
    create_topic(stack, name, {})
    return name


@pytest.fixture
def environment(stack: LocalStack, topic: str) -> dict[str, str]:
    return on(stack, application(BALANCE_TOPIC=topic))


def test_what_is_produced_is_folded_and_shown_to_the_digit(warm_instance: LocalInstance) -> None:
    environment, customer = warm_instance.environment, f"produced\u2028{uuid.uuid4()}"
    amounts = ("12.34", '"0.10"', "9999999999999999.99")

    produced = run(
        environment, "produce", environment["BALANCE_TOPIC"], "--key-separator", "|", stdin=keyed(customer, *amounts)
    )

    assert (produced.code, produced.stdout, produced.stderr) == (0, "3 records acknowledged\n", ""), produced

    def balance() -> Done:
        return run(environment, "get-balance", customer, "--json")

    eventually(lambda: balance().stdout == '{"amount":10000000000000012.43}\n', "all three are in the balance")
    with started(environment, "tail", environment["BALANCE_TOPIC"], "--from-beginning") as tail:
        eventually(lambda: tail.stdout.count(customer) == 6, "tail shows all three, each with its key")
        tail.interrupt()
        shown = [line for line in lines_of(tail.wait(10)) if line["key"] == customer]
    assert [line["value"]["amount"] for line in shown] == [
        Decimal("12.34"),
        Decimal("0.10"),
        Decimal("9999999999999999.99"),
    ]
    assert {line["record"] for line in shown} == {FUNDS_ADDED}
    assert {line["value"]["occurredOn"] for line in shown} == {_AT}


def test_a_bad_line_ends_it_with_its_number_and_field_and_nothing_after_it_is_sent(
    stack: LocalStack, topic: str, environment: dict[str, str]
) -> None:
    lines = keyed("c1", "1", "2") + b"\n" + keyed("c1", "3.001", "4")

    done = run(environment, "produce", topic, "--key-separator", "|", stdin=lines)

    assert_refused(done, 1, "line 4: 'amount' must be a number", "not 3.001; 2 records before it were acknowledged")
    assert sum(ends_of(stack, topic).values()) == 2
    shown = lines_of(run(environment, "tail", topic, "--from-beginning", "--limit", "2"))
    assert [line["value"]["amount"] for line in shown] == [1, 2]


def test_only_what_is_committed_is_shown_with_all_that_it_carries(
    stack: LocalStack, topic: str, environment: dict[str, str]
) -> None:
    producer = Producer({"bootstrap.servers": stack.bootstrap_servers, "transactional.id": f"{topic}-writer"})
    producer.init_transactions(30)
    for number, end in enumerate((producer.abort_transaction, producer.commit_transaction)):
        producer.begin_transaction()
        headers: list[tuple[str, str | bytes | None]] = [
            ("origin", b"pos:1:42"),
            ("twice", b"a"),
            ("twice", b"\xff"),
            ("none", None),
            ("twice", b"b"),
        ]
        producer.produce(topic, b"no frame", b"\x80\x01", partition=1, headers=headers, timestamp=number + 1)
        producer.produce(topic, None, None, partition=1, timestamp=number + 1)
        assert producer.flush(10) == 0
        end()

    shown = lines_of(run(environment, "tail", topic, "--from-beginning", "--limit", "2"))

    assert shown == [
        {
            "partition": 1,
            "offset": 3,
            "timestamp": "1970-01-01T00:00:00.002Z",
            "keyBase64": "gAE=",
            "headers": [
                {"name": "origin", "value": "pos:1:42"},
                {"name": "twice", "value": "a"},
                {"name": "twice", "valueBase64": "/w=="},
                {"name": "none", "value": None},
                {"name": "twice", "value": "b"},
            ],
            "problem": "a record's frame starts with 110, not 0",
            "valueBase64": "bm8gZnJhbWU=",
        },
        {
            "partition": 1,
            "offset": 4,
            "timestamp": "1970-01-01T00:00:00.002Z",
            "key": None,
            "headers": [],
            "value": None,
        },
    ]


def test_tail_begins_at_the_end_and_shows_what_comes(topic: str, environment: dict[str, str]) -> None:
    def produce(amount: str) -> None:
        assert (
            run(environment, "produce", topic, "--key-separator", ": ", stdin=keyed("c1", amount, separator=": ")).code
            == 0
        )

    produce("1")
    with started(environment, "tail", topic, "--limit", "1") as tail:
        # Where it begins is known once it shows something, so it is fed until it does.
        for number in range(2, 100):
            produce(str(number))
            if tail.stdout:
                break
        (shown,) = lines_of(tail.wait(10))

    assert shown["value"]["amount"] > 1


def test_a_topic_that_is_not_there_or_that_nobody_reads_is_named(stack: LocalStack) -> None:
    environment = on(stack, application())
    missing = environment["BALANCE_TOPIC"]

    assert_refused(
        run(environment, "produce", missing, stdin=b"{}"), 2, f"topic '{missing}' does not exist", "topics create"
    )
    assert_refused(run(environment, "tail", missing), 2, f"topic '{missing}' does not exist")
    assert_refused(run(environment, "produce", "other"), 2, "no read model reads topic 'other'", missing)
    assert_refused(run(environment, "produce", missing, "--record", "Player"), 2, "has no record Player", "FundsAdded")


def test_a_separator_must_be_something(stack: LocalStack) -> None:
    done = run(on(stack, application()), "produce", "balance", "--key-separator", "")

    assert done.code == 2
    assert "--key-separator must not be empty" in done.stderr
