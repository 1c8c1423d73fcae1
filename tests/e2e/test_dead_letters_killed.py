"""Dead letters redriven while instances are killed, and from two at once: each event counts once, whatever happens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from balance_service.devtools.local.processes import READY_TIMEOUT_SECONDS
from tests.e2e.http_api import assert_problem
from tests.e2e.letters import Unread, decide, letter, of_partition, wait_for
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

_AMOUNTS = ("1.00", "0.10", "0.01")
# The first commit after those of the partitions' epochs.
_FIRST = PARTITIONS + 1


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """Nothing is tried again before somebody decides so."""
    return application(BALANCE_RETRY_EVERY="86400")


@pytest.fixture(scope="module")
def instances(stack: LocalStack, settings: dict[str, str]) -> Iterator[Pair]:
    """The first is up; either is as the test before left it."""
    with one_of_two(stack, settings) as instances:
        yield instances


@pytest.fixture
def instance(instances: Pair) -> LocalInstance:
    """The first one up and the owner of everything, the second one not running."""
    first, second = instances
    second.stop()
    if not first.running:
        _launch(first)
    _wait_until_alone(first)
    return first


@pytest.fixture
def pair(instances: Pair) -> Pair:
    """Both up, with a partition each."""
    for instance in instances:
        if not instance.running:
            _launch(instance)
    wait_until_spread(instances)
    return instances


@pytest.fixture(scope="module")
def unread(stack: LocalStack, settings: dict[str, str], instances: Pair) -> Iterator[Unread]:
    with Unread(stack, settings) as writer:
        yield writer


def test_an_instance_that_is_killed_again_and_again_while_it_tries_letters_again_counts_each_once(
    instance: LocalInstance, unread: Unread
) -> None:
    customer, schema_id = of_partition(0), unread.unknown_id()
    letters = [unread.put_unknown(schema_id, customer, amount) for amount in _AMOUNTS]
    wait_for(instance, "scheduled", *letters)
    unread.learn(schema_id)

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
    unread.add(customer, "0.50")
    _wait_for_balance(instance, customer, "1.61")
    assert [decision["id"] for decision in unread.decisions(*letters)] == letters
    written = [letter_id for letter_id, _ in unread.written()]
    assert [written.count(letter_id) for letter_id in letters] == [1] * len(letters)


def test_a_decision_whose_instance_is_killed_is_kept_in_full_or_not_at_all(
    instance: LocalInstance, unread: Unread
) -> None:
    garbage = unread.put(of_partition(0), b"garbage")
    wait_for(instance, "waiting", garbage)

    for failpoint in ("produced", "committed"):
        _launch_armed(instance, f"{failpoint}=kill@{_FIRST}")
        _wait_until_alone(instance)
        assert (letter(instance, garbage)["status"], unread.decisions(garbage)) == ("waiting", [])
        with pytest.raises(httpx.TransportError):
            decide(instance, "discard", garbage)
        _wait_until_killed(instance)
    _launch(instance)
    _wait_until_alone(instance)

    assert (letter(instance, garbage)["status"], len(unread.decisions(garbage))) == ("discarded", 1)


def test_letters_that_are_redriven_from_two_instances_at_once_count_once(pair: Pair, unread: Unread) -> None:
    schema_id = unread.unknown_id()
    customers = [of_partition(number % PARTITIONS) for number in range(6)]
    letters = [unread.put_unknown(schema_id, customer, "5.00") for customer in customers]
    wait_for(pair[0], "scheduled", *letters)
    unread.learn(schema_id)

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
        unread.add(customer, "0.50")
        _wait_for_balance(pair[0], customer, "5.50")


def _launch_armed(instance: LocalInstance, failpoint: str) -> None:
    """Launch it anew, to be killed there."""
    instance.stop()
    instance.environment["BALANCE_FAILPOINTS"] = failpoint
    try:
        instance.launch()
    finally:
        del instance.environment["BALANCE_FAILPOINTS"]


def _wait_until_killed(instance: LocalInstance) -> None:
    eventually(lambda: not instance.running, "it is up, and killed", READY_TIMEOUT_SECONDS)
    assert "a fail point strikes" in instance.log.read_text()


def _launch(instance: LocalInstance) -> None:
    """Launch it, and forget the process that has ended."""
    instance.kill()
    instance.launch()


def _wait_until_alone(instance: LocalInstance) -> None:
    instance.wait_ready()
    eventually(lambda: owned(instance) == set(range(PARTITIONS)), "it owns everything")


def _wait_for_balance(instance: LocalInstance, customer: str, amount: str) -> None:
    def balance() -> str:
        return str(amount_of(ask_again(instance.url, customer)))

    eventually(lambda: balance() == amount, balance)
