"""Dead letters on two instances: retries, operators' decisions, and exactly one effect for each event."""

from __future__ import annotations

import base64
import itertools
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.e2e.clients import assert_problem
from tests.e2e.dead_letters import PoisonWriter, customer_in, decide, get, letter, list_order, pages, wait_for
from tests.support.commands import run
from tests.support.kafka import admin, changelogs_of
from tests.support.service import (
    PARTITIONS,
    amount_of,
    application,
    ask_again,
    on,
    owned,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

    Pair = tuple[LocalInstance, LocalInstance]


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return application(BALANCE_RETRY_EVERY="1")


@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_an_event_counts_as_soon_as_its_schema_is_registered(pair: Pair, poison: PoisonWriter, partition: int) -> None:
    customer, schema_id = customer_in(partition), poison.unknown_id()
    poison.add(customer, "1.00")
    unknown = poison.put_unknown(schema_id, customer, "5.00")

    found = letter(pair[0], unknown)
    assert (found["cause"], found["status"], found["key"]) == ("schema-id-unknown", "scheduled", customer)
    assert found["dueAt"] is not None
    assert balances(pair, customer) == ["1.00", "1.00"]

    poison.make_known(schema_id)
    wait_for(pair[0], "applied", unknown)
    assert balances(pair, customer) == ["6.00", "6.00"]
    assert letter(pair[1], unknown)["dueAt"] is None

    # The query was planned before the schema was registered.
    later = poison.put_unknown(schema_id, customer, "0.50")
    eventually(lambda: balances(pair, customer) == ["6.50", "6.50"], lambda: str(balances(pair, customer)))
    assert get(pair[0], f"/{later}").status_code == 404
    assert [one for one, _ in poison.written()].count(unknown) == 1


@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_garbage_is_listed_by_both_instances_and_discarded_through_the_one_that_does_not_own_it(
    pair: Pair, poison: PoisonWriter, partition: int
) -> None:
    key = customer_in(partition)
    headers = [("trace", b"t1"), ("b", b"1"), ("none", None), ("b", b"\xff\0"), ("b", b"1")]
    garbage = poison.put(key, b"garbage", headers=headers)
    expected = {
        "id": garbage,
        "model": "balance",
        "cause": "magic-byte-unknown",
        "status": "waiting",
        "attempt": 0,
        "detail": "a record's frame starts with 103, not 0",
        "dueAt": None,
        "redriveRefused": "its cause, magic-byte-unknown, never goes away: discard it",
        "discardWarning": "",
        "key": key,
        "headers": [
            {"name": "trace", "value": "t1"},
            {"name": "b", "value": "1"},
            {"name": "none", "value": None},
            {"name": "b", "valueBase64": "/wA="},
            {"name": "b", "value": "1"},
        ],
        "valueBase64": base64.b64encode(b"garbage").decode(),
    }
    decoded = {"decoded": None, "problem": "a record's frame starts with 103, not 0"}
    found = letter(pair[0], garbage)
    assert found["recordAt"] <= found["failedAt"]
    expected |= {name: found[name] for name in ("recordAt", "failedAt")}
    assert found == expected | decoded
    for instance in pair:
        assert [one for page in pages(instance) for one in page if one["id"] == garbage] == [expected]
        assert get(instance, f"/{garbage}").json() == expected | decoded
        assert get(instance, f"/{garbage.replace('/', '%2F')}").json() == expected | decoded

    (other,) = [instance for instance in pair if partition not in owned(instance)]
    final = f"{garbage}: its cause, magic-byte-unknown, never goes away: discard it"
    assert_problem(decide(other, "redrive", garbage), 409, final)
    done = decide(other, "discard", garbage, reason="not ours")
    assert (done.status_code, done.json()) == (202, {"accepted": [garbage], "refused": []})

    for instance in pair:
        discarded = {"status": "discarded", "redriveRefused": "it is discarded already"}
        assert letter(instance, garbage) == expected | decoded | discarded
        assert_problem(decide(instance, "discard", garbage), 409, f"{garbage}: it is discarded already")
        assert_problem(decide(instance, "redrive", garbage), 409, f"{garbage}: it is discarded already")
    (decision,) = poison.decisions(garbage)
    told = {name: decision[name] for name in ("id", "decision", "cause", "by", "reason")}
    assert told == {
        "id": garbage,
        "decision": "discard",
        "cause": "magic-byte-unknown",
        "by": "127.0.0.1",
        "reason": "not ours",
    }


def test_a_key_that_is_not_text_is_shown_in_base64(pair: Pair, poison: PoisonWriter) -> None:
    key = b"@\xff\0" + uuid.uuid4().bytes
    garbage = poison.put(key, b"garbage")

    wait_for(pair[0], "waiting", garbage)

    for instance in pair:
        found = letter(instance, garbage)
        assert (found["key"], base64.b64decode(found["keyBase64"])) == (None, key)
    assert decide(pair[0], "discard", garbage).status_code == 202


def test_a_decision_applies_to_the_open_letters_and_is_refused_for_the_others(pair: Pair, poison: PoisonWriter) -> None:
    garbage = [poison.put(customer_in(partition), b"garbage") for partition in range(PARTITIONS)]
    wait_for(pair[0], "waiting", *garbage)
    refused = {
        garbage[0]: "it is discarded already",
        "balance/0:999999": "there is no such dead letter, or it was closed more than seven days ago",
    }
    assert decide(pair[0], "discard", garbage[0]).status_code == 202

    done = decide(pair[1], "discard", *garbage, "balance/0:999999")

    assert done.status_code == 202
    assert done.json()["accepted"] == garbage[1:]
    assert {one["id"]: one["reason"] for one in done.json()["refused"]} == refused
    assert [decision["id"] for decision in poison.decisions(*garbage)] == garbage


def test_a_decision_about_many_letters_with_a_long_reason_is_forwarded_to_their_owner(pair: Pair) -> None:
    for partition, instance in itertools.product(range(PARTITIONS), pair):
        nowhere = [f"balance/{partition}:{10**17 + number}" for number in range(100)]

        answer = decide(instance, "discard", *nowhere, reason="\N{BROKEN HEART}" * 200)

        assert_problem(answer, 404, f"{nowhere[0]}: there is no such dead letter")


@pytest.mark.parametrize(
    ("nowhere", "why"),
    [
        ("balance/0:999999", "there is no such dead letter"),
        ("balance/1:999999", "there is no such dead letter"),
        ("balance/7:0", "there is no such dead letter"),
        ("purchases/0:0", "hosts no read model with that stage"),
    ],
)
def test_an_unknown_dead_letter_is_a_404(pair: Pair, nowhere: str, why: str) -> None:
    for instance in pair:
        assert_problem(get(instance, f"/{nowhere}"), 404, why)
        for decision in ("redrive", "discard"):
            assert_problem(decide(instance, decision, nowhere), 404, why)


@pytest.mark.parametrize("malformed", ["balance", "balance/0", "balance/0:x", "balance/-1:0", "%FF/0:0", "balance/0:"])
def test_a_malformed_id_is_a_400(pair: Pair, malformed: str) -> None:
    assert_problem(get(pair[0], f"/{malformed}"), 400, "an id is stage/partition:offset")
    assert_problem(get(pair[0], f"/{malformed.replace('/', '%2F')}"), 400, "an id is stage/partition:offset")
    assert_problem(decide(pair[0], "discard", malformed), 400, "an id is stage/partition:offset")


def test_the_cause_filter_accepts_up_to_200_characters(pair: Pair) -> None:
    for instance in pair:
        assert get(instance, cause="\N{BROKEN HEART}" * 200).json() == {"deadLetters": [], "next": None, "missing": []}
        assert_problem(get(instance, cause="x" * 201), 400, "cause must be text of 1 to 200 characters")


@pytest.mark.shows("discarded", "rebuild")
def test_a_discarded_event_never_counts_and_a_rebuild_writes_no_dead_letter_twice(
    stack: LocalStack, settings: dict[str, str], pair: Pair, poison: PoisonWriter, tmp_path: Path
) -> None:
    first, second = pair
    customer, last, discarded = _with_one_of_each(first, poison)
    told, written = pages(first), poison.written()
    assert written

    first.stop()
    second.stop()
    done = run(
        on(stack, settings) | {"BALANCE_STATE_DIR": str(tmp_path / "state")}, "rebuild", "--offline", seconds=120
    )
    assert done.code == 0, done
    _launch_alone(first)

    assert balances([first], customer, last) == ["1.50"]
    assert letter(first, discarded)["status"] == "discarded"
    assert pages(first) == told
    assert poison.written() == written


@pytest.mark.shows("discarded")
def test_a_discarded_event_does_not_count_after_the_changelog_was_lost(
    stack: LocalStack, settings: dict[str, str], pair: Pair, poison: PoisonWriter
) -> None:
    first, second = pair
    customer, last, discarded = _with_one_of_each(first, poison)
    changelog = changelogs_of(stack, settings)[-1]

    first.stop()
    second.stop()
    admin(stack).delete_topics([changelog])[changelog].result(10)
    _launch_alone(first)

    assert balances([first], customer, last) == ["1.50"]
    assert letter(first, discarded)["status"] == "discarded"


def _with_one_of_each(asked: LocalInstance, poison: PoisonWriter) -> tuple[str, str, str]:
    """Makes a customer with balance 1.50 and three dead letters: one waiting, one discarded, one applied.

    Returns:
        The customer, the id of the applied letter, and the id of the discarded one.
    """
    customer, schema_id = customer_in(0), poison.unknown_id()
    poison.add(customer, "1.00")
    poison.put(customer, b"garbage")
    discarded = poison.put_unknown(schema_id, customer, "5.00")
    last = poison.put_unknown(schema_id, customer, "0.50")
    wait_for(asked, "scheduled", discarded, last)
    assert decide(asked, "discard", discarded).status_code == 202
    poison.make_known(schema_id)
    wait_for(asked, "applied", last)
    assert balances([asked], customer) == ["1.50"]
    assert_problem(decide(asked, "redrive", discarded), 409, "it is discarded already")
    return customer, last, discarded


def _launch_alone(instance: LocalInstance) -> None:
    instance.launch()
    eventually(lambda: owned(instance) == set(range(PARTITIONS)), "the instance owns all partitions")


def balances(asked: Sequence[LocalInstance], customer: str, after: str | None = None) -> list[str]:
    """Returns the balance from each instance, at or after the record of dead letter `after`."""
    position = None
    if after is not None:
        _, partition, offset = list_order(after)
        position = f"{partition}:{offset + 1}"
    return [str(amount_of(ask_again(instance.url, customer, position))) for instance in asked]
