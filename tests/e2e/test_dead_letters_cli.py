"""`balance-service dead-letters`: for people and for programs."""

from __future__ import annotations

import base64
import json
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.e2e.letters import Unread, get, letter, wait_for
from tests.support.commands import Done, assert_refused
from tests.support.commands import run as run_command
from tests.support.service import amount_of, application, ask_again, new_instance, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

_LONG_KEY = "a-customer-whose-name-is-longer-than-a-column"
_GARBAGE = b"no frame, and more than a line"


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """Nothing is tried again before somebody decides so."""
    return application(BALANCE_RETRY_EVERY="86400")


@pytest.fixture(scope="module")
def instance(stack: LocalStack, settings: dict[str, str]) -> Iterator[LocalInstance]:
    with running(new_instance(stack, settings)) as (instance,):
        yield instance


@pytest.fixture(scope="module")
def unread(stack: LocalStack, settings: dict[str, str], instance: LocalInstance) -> Iterator[Unread]:
    with Unread(stack, settings) as writer:
        yield writer


@pytest.fixture
def waiting(instance: LocalInstance, unread: Unread) -> Iterator[list[str]]:
    """All the letters that wait for an operator, of two causes; in their order."""
    key = str(uuid.uuid4())
    ids = [unread.put(key, _GARBAGE, headers=[("trace", b"t1"), ("trace", b"\xff")]), unread.put(key, b"\0")]
    wait_for(instance, "waiting", *ids)
    yield ids
    assert run(instance, "discard", "--status", "waiting", "--reason", "the test is over").code == 0


def test_letters_are_listed_for_people(instance: LocalInstance, unread: Unread) -> None:
    scheduled = unread.put_unknown(unread.unknown_id(), _LONG_KEY, "5.00")
    due = letter(instance, scheduled)["dueAt"]

    done = run(instance, "list", "--status", "scheduled", "--cause", "schema-id-unknown", "--model", "balance")

    assert (done.code, done.stderr) == (0, ""), done
    header, row = (line.split() for line in done.stdout.splitlines())
    assert header == ["ID", "KEY", "CAUSE", "STATUS", "TRIED", "DUE"]
    assert row == [scheduled, f"{_LONG_KEY[:31]}…", "schema-id-unknown", "scheduled", "0", due]
    assert run(instance, "discard", scheduled, "--reason", "the test is over").code == 0
    assert run(instance, "list", "--status", "scheduled").stdout == "There are none.\n"


def test_letters_are_listed_for_programs_by_what_is_asked_for(instance: LocalInstance, waiting: list[str]) -> None:
    garbage, short = waiting

    listed = [json.loads(line) for line in run(instance, "list", "--json", "--status", "waiting").stdout.splitlines()]
    assert sorted(one["id"] for one in listed) == sorted(waiting)
    assert {one["id"]: one for one in listed} == {one: get(instance, f"/{one}").json() for one in waiting}
    of_a_cause = run(instance, "list", "--json", "--status", "waiting", "--cause", "frame-missing").stdout
    assert json.loads(of_a_cause)["id"] == short
    limited = run(instance, "list", "--status", "waiting", "--limit", "1").stdout
    assert "There are more than 1;" in limited
    assert [one in limited for one in sorted(waiting)] == [True, False]
    assert garbage in run(instance, "list", "--model", "balance", "--limit", "1000").stdout


def test_a_letter_is_shown_with_its_record(instance: LocalInstance, waiting: list[str]) -> None:
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
    assert done.stdout.splitlines()[-2].endswith("no frame, and mo")
    assert done.stdout.splitlines()[-1].endswith("re than a line")


def test_letters_are_redriven_and_discarded_by_their_ids(
    instance: LocalInstance, unread: Unread, waiting: list[str]
) -> None:
    customer, schema_id = str(uuid.uuid4()), unread.unknown_id()
    healing = unread.put_unknown(schema_id, customer, "5.00")
    wait_for(instance, "scheduled", healing)
    unread.learn(schema_id)

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
    decided = {one["id"]: (one["decision"], one["reason"]) for one in unread.decisions(healing, *waiting)}
    assert decided == {healing: ("redrive", "the schema is known"), waiting[0]: ("discard", "not ours")}


def test_letters_are_redriven_and_discarded_by_what_they_have_in_common(
    instance: LocalInstance, unread: Unread, waiting: list[str]
) -> None:
    customers, schema_id = [str(uuid.uuid4()) for _ in range(4)], unread.unknown_id()
    healing = [unread.put_unknown(schema_id, customer, "5.00") for customer in customers]
    wait_for(instance, "scheduled", *healing)
    unread.learn(schema_id)

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
def test_what_makes_no_sense_is_refused_in_one_sentence(
    instance: LocalInstance, arguments: tuple[str, ...], why: str
) -> None:
    assert_refused(run(instance, *arguments), 1, why)


@pytest.mark.parametrize("malformed", ["balance", "../status", "?limit=1", "balance/0:0?x=y", "balance/0:0/.."])
def test_what_is_no_id_is_refused_wherever_it_would_lead(instance: LocalInstance, malformed: str) -> None:
    for done in (run(instance, "show", malformed), run(instance, "discard", malformed, "--reason", "x")):
        assert done.code in (1, 2), done
        assert "an id is stage/partition:offset" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_decision_that_is_refused_for_every_letter_fails(instance: LocalInstance, waiting: list[str]) -> None:
    garbage, _ = waiting

    assert_refused(run(instance, "redrive", garbage, "--reason", "x"), 1, garbage, "never goes away: discard it")
    assert run(instance, "discard", garbage, "--reason", "x").code == 0
    assert_refused(run(instance, "discard", garbage, "--reason", "x"), 1, garbage, "it is discarded already")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--reason", "x"), "name dead letters by their ids, or by"),
        (("balance/0:0", "--cause", "frame-missing", "--reason", "x"), "name dead letters by their ids, or by"),
        (("balance/0:0",), "--reason"),
    ],
)
@pytest.mark.parametrize("decision", ["redrive", "discard"])
def test_a_decision_about_nothing_or_without_a_reason_is_a_usage_error(
    instance: LocalInstance, decision: str, arguments: tuple[str, ...], why: str
) -> None:
    done = run(instance, decision, *arguments)

    assert done.code == 2, done
    assert "Error: " in done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def run(instance: LocalInstance, *arguments: str) -> Done:
    return run_command(instance.environment, "dead-letters", *arguments)
