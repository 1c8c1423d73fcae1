"""Two instances: both return the owner's answer while one is added, paused or stopped."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.e2e.clients import Poller
from tests.support.service import (
    PARTITIONS,
    SESSION_TIMEOUT_SECONDS,
    STOP_SECONDS,
    add,
    address,
    application,
    ask,
    ask_again,
    customers_of,
    one_of_two,
    owned,
    process_of,
    status,
    terminate,
    wait_until_spread,
)
from tests.support.waiting import SHARED, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import httpx

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

    Pair = tuple[LocalInstance, LocalInstance]

_CUSTOMERS = [customer for partition in range(PARTITIONS) for customer in customers_of(partition, 20)]
_STAYING_SILENT_SECONDS = 3.0 * SHARED
_MOVING_SILENT_SECONDS = 15.0 * SHARED


@pytest.fixture(scope="module")
def instances(stack: LocalStack) -> Iterator[Pair]:
    """The first instance runs and is never stopped; the second is in the state that the previous test left."""
    with one_of_two(stack, application()) as instances:
        yield instances


@pytest.fixture
def alone(instances: Pair) -> Pair:
    """The first instance runs and owns all partitions; the second does not run."""
    first, second = instances
    if second.running:
        terminate(second)
    eventually(lambda: owned(first) == set(range(PARTITIONS)), "the first instance owns all partitions")
    return instances


@pytest.fixture
def pair(instances: Pair) -> Pair:
    """Both instances run and own a partition each."""
    _, second = instances
    if not second.running:
        second.launch()
        second.wait_ready()
    wait_until_spread(instances)
    return instances


@pytest.fixture
def balances(instances: Pair) -> dict[str, str]:
    """Customer → expected body; each test adds an amount first."""
    return _add_and_read(instances[0], _CUSTOMERS, "0.10")


def test_an_added_instance_takes_a_partition_without_a_wrong_answer(alone: Pair, balances: dict[str, str]) -> None:
    staying, joining = alone

    with Poller(alone, balances, may_be_away=[joining]) as poller:
        joining.launch()
        joining.wait_ready()
        wait_until_spread(alone)
        for instance in alone:
            _assert_answers_everything(instance, balances)

    assert not poller.wrong, poller.wrong[:5]
    assert poller.counts[joining.name, 200] > 0
    (stayed,), (moved,) = owned(staying), owned(joining)
    assert poller.silences[staying.name, stayed] < _STAYING_SILENT_SECONDS
    assert poller.silences[staying.name, moved] < _MOVING_SILENT_SECONDS


def test_both_instances_give_the_same_answer_locally_and_forwarded(pair: Pair, balances: dict[str, str]) -> None:
    for customer, body in balances.items():
        answers = [ask(instance.url, customer) for instance in pair]

        assert [(answer.status_code, answer.text) for answer in answers] == [(200, body)] * 2
        owner, epoch, position = (
            {answer.headers[f"Balance-{name}"] for answer in answers}
            for name in ("Application-Server", "Epoch", "Position")
        )
        assert len(owner) == len(epoch) == len(position) == 1
        assert owner < {address(instance) for instance in pair}
    owners = {ask(pair[0].url, customer).headers["Balance-Application-Server"] for customer in balances}
    assert owners == {address(instance) for instance in pair}, "each instance answers for one partition"


def test_a_forwarded_query_is_a_421_if_the_instance_does_not_own_the_customer(
    pair: Pair, balances: dict[str, str]
) -> None:
    for customer, body in balances.items():
        owner = ask(pair[0].url, customer).headers["Balance-Application-Server"]
        for instance in pair:
            answer = ask(instance.url, customer, **{"Balance-Forwarded": "127.0.0.1:1"})

            if address(instance) == owner:
                assert (answer.status_code, answer.text) == (200, body)
            else:
                assert answer.status_code == 421
                assert "does not own partition" in answer.json()["detail"]


def test_an_unknown_customer_is_a_404_from_both_instances(pair: Pair) -> None:
    for partition in range(PARTITIONS):
        (unknown,) = customers_of(partition, 21)[20:]

        assert [ask(instance.url, unknown).status_code for instance in pair] == [404, 404]


@pytest.mark.shows("owner")
def test_an_owner_paused_beyond_its_session_never_gives_an_old_answer(pair: Pair, balances: dict[str, str]) -> None:
    awake, paused = pair
    (partition,) = owned(paused)
    theirs = customers_of(partition, 20)
    process = process_of(paused)
    tree = [process, *process.children(recursive=True)]
    assert len(tree) > 1, "the tree includes the JVM"

    with ThreadPoolExecutor(len(theirs)) as pool:
        try:
            _send(tree, "suspend")
            time.sleep(SESSION_TIMEOUT_SECONDS + 1)
            eventually(lambda: owned(awake) == set(range(PARTITIONS)), "the other instance takes over")
            _assert_answers_everything(awake, balances)
            balances |= _add_and_read(awake, theirs, "0.07")
            # The requests wait in the socket of the paused process, which reads them first.
            waiting = [pool.submit(ask, paused.url, customer) for customer in theirs]
            time.sleep(0.5)
        finally:
            _send(tree, "resume")
        with Poller(pair, balances) as poller:
            for customer, answer in zip(theirs, waiting, strict=True):
                _assert_right_or_503(answer.result(), balances[customer])
            wait_until_spread(pair)
            for instance in pair:
                _assert_answers_everything(instance, balances)

    assert not poller.wrong, poller.wrong[:5]
    assert process.is_running(), "the paused process continues"
    assert poller.counts[paused.name, 200] > 0


def test_a_stopped_instance_leaves_at_once_and_the_other_answers_everything(
    pair: Pair, balances: dict[str, str]
) -> None:
    staying, leaving = pair
    with Poller([staying], balances) as poller:
        code, seconds = terminate(leaving)
        eventually(lambda: owned(staying) == set(range(PARTITIONS)), "the other instance owns all partitions")
        _assert_answers_everything(staying, balances)

    assert code == 0, leaving.log
    assert seconds < STOP_SECONDS
    assert not poller.wrong, poller.wrong[:5]
    # A member that leaves ends its session at once.
    assert max(poller.silences.values()) < SESSION_TIMEOUT_SECONDS
    listed = [server["applicationServer"] for server in status(staying)["applicationServers"]]
    assert listed == [address(staying)]


def _add_and_read(instance: LocalInstance, customers: Sequence[str], amount: str) -> dict[str, str]:
    positions = [add(instance.url, customer, amount) for customer in customers]
    return {c: _answer(instance, c, position).text for c, position in zip(customers, positions, strict=True)}


def _assert_answers_everything(instance: LocalInstance, balances: dict[str, str]) -> None:
    answers = {customer: _answer(instance, customer).text for customer in balances}
    assert answers == balances


def _answer(instance: LocalInstance, customer: str, position: str | None = None) -> httpx.Response:
    """Queries a balance until the answer is 200."""
    answer = ask_again(instance.url, customer, position)
    assert answer.status_code == 200, (customer, answer.text)
    return answer


def _assert_right_or_503(answer: httpx.Response, body: str) -> None:
    is_right = answer.status_code == 200 and answer.text == body
    assert is_right or (answer.status_code == 503 and "Retry-After" in answer.headers), answer.text


def _send(tree: list[psutil.Process], what: str) -> None:
    for process in tree:
        # The JVM runs short-lived programs now and then.
        with suppress(psutil.NoSuchProcess):
            getattr(process, what)()
