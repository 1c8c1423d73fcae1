"""Runs real processes of the service and queries them over HTTP."""

from __future__ import annotations

import itertools
import json
import re
import time
import uuid
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from balance_service.devtools.local.stack import LocalInstance
from balance_service.kafka.partitioner import partition_of
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.waiting import PATIENCE_SECONDS, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from balance_service.devtools.local.stack import LocalStack

PARTITIONS = 2
SESSION_TIMEOUT_SECONDS = 6.0
STOP_SECONDS = 10.0
_WARM_UP_SECONDS = 60.0
_MOVE_SECONDS = 60.0
_CATCH_UP_SECONDS = 90.0
_WRONG = re.compile(r'"level": "(warning|error|critical)"')
_SAID_LINES, _SAID_CHARACTERS = 8, 400

_numbers = itertools.count(100)
# Keeps no connections alive: a test may have killed the instance since the last request.
_http = httpx.Client(timeout=30, verify=False, limits=httpx.Limits(max_keepalive_connections=0))


def application(**settings: str) -> dict[str, str]:
    """Returns settings with a unique topic and application id."""
    name = uuid.uuid4().hex[:8]
    return {
        "BALANCE_TOPIC": f"balance-{name}",
        "BALANCE_APPLICATION_ID": f"app-{name}",
        "BALANCE_SESSION_TIMEOUT_MS": str(int(SESSION_TIMEOUT_SECONDS * 1000)),
        **settings,
    }


def on(stack: LocalStack, settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings with the addresses of the stack."""
    return {**stack.addresses, **settings}


# Instances


def new_instance(stack: LocalStack, settings: Mapping[str, str]) -> LocalInstance:
    """Returns an instance with its own port and state directory, not started."""
    return LocalInstance(next(_numbers), stack, environment=settings)


@contextmanager
def running(*instances: LocalInstance) -> Iterator[Sequence[LocalInstance]]:
    """Starts instances in parallel, waits until all are ready, and stops them at the end."""
    try:
        for instance in instances:
            instance.launch()
        for instance in instances:
            instance.wait_ready()
        yield instances
    except Exception as error:
        for instance in instances:
            error.add_note(_said(instance))
        raise
    finally:
        for instance in instances:
            instance.stop()


def _said(instance: LocalInstance) -> str:
    """Returns what an instance logged last, first of all what is wrong: CI keeps no logs."""
    lines = instance.log.read_text(errors="replace").splitlines() if instance.log.exists() else []
    wrong = [line for line in lines if _WRONG.search(line)]
    said = dict.fromkeys((*wrong[-_SAID_LINES:], *lines[-_SAID_LINES:]))
    return "\n".join(f"{instance.name}: {line[:_SAID_CHARACTERS]}" for line in said)


@contextmanager
def one_of_two(stack: LocalStack, settings: dict[str, str]) -> Iterator[tuple[LocalInstance, LocalInstance]]:
    """Two instances; the first is running. The test may stop and launch both."""
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first):
        try:
            yield first, second
        finally:
            second.stop()


def process_of(instance: LocalInstance) -> psutil.Process:
    """Returns the process of the service, a child of its guard."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a process may end during the loop, or be a zombie
            is_service = process.cmdline()[1:] == ["-m", "balance_service", "serve"]
            if is_service and process.environ()["BALANCE_HTTP_PORT"] == instance.environment["BALANCE_HTTP_PORT"]:
                return process
    raise AssertionError(f"{instance.name} is not running")


def terminate(instance: LocalInstance) -> tuple[int, float]:
    """Sends SIGTERM; returns the exit code and the seconds until exit."""
    process = process_of(instance)
    guard = process.parent()
    assert guard is not None
    began = time.monotonic()
    process.terminate()
    code = guard.wait(STOP_SECONDS + 5)  # the guard exits with its child's exit code
    took = time.monotonic() - began
    instance.stop()
    assert code is not None
    return int(code), took


def status(instance: LocalInstance) -> dict[str, Any]:
    """Returns the response of /api/status."""
    known: dict[str, Any] = _http.get(f"{instance.url}/api/status", timeout=10).json()
    return known


def owned(instance: LocalInstance) -> set[int]:
    """Returns the partitions whose tasks run in an instance."""
    try:
        return {task["partition"] for task in status(instance)["tasks"] if task["state"] == "RUNNING"}
    except httpx.HTTPError:
        return set()


def tasks(instance: LocalInstance, role: str, state: str) -> dict[int, Mapping[str, Any]]:
    """Returns the tasks of an instance with a role and a state, by partition."""
    known = status(instance)["tasks"]
    return {task["partition"]: task for task in known if (task["role"], task["state"]) == (role, state)}


def wait_until_spread(instances: Sequence[LocalInstance]) -> None:
    """Waits until every instance owns a partition, no partition has two owners, and all instances know each other."""

    def spread() -> bool:
        parts = [owned(instance) for instance in instances]
        everything = sorted(itertools.chain(*parts)) == list(range(PARTITIONS))
        return everything and all(parts) and all(_known_servers(i) >= _addresses(instances) for i in instances)

    eventually(spread, f"every instance owns a partition: {[owned(i) for i in instances]}", _MOVE_SECONDS)


def _known_servers(instance: LocalInstance) -> set[str]:
    servers = status(instance)["applicationServers"]
    return {server["applicationServer"] for server in servers if not server["suspect"]}


def _addresses(instances: Iterable[LocalInstance]) -> set[str]:
    return {address(instance) for instance in instances}


def address(instance: LocalInstance) -> str:
    """Returns the address at which peers reach an instance."""
    return instance.environment["BALANCE_APPLICATION_SERVER"]


# Queries and commands


def ask(url: str, customer: str, position: str | None = None, **headers: str) -> httpx.Response:
    """Queries a balance once."""
    parameters = {"customerId": customer} | ({} if position is None else {"minPosition": position})
    return _http.get(url + GET_BALANCE, params=parameters, headers=headers)


def retried(request: Callable[[], httpx.Response], statuses: Collection[int] = (503,)) -> httpx.Response:
    """Repeats a request while its response has one of the statuses, at most for PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (answer := request()).status_code in statuses:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)
    return answer


def ask_again(url: str, customer: str, position: str | None = None) -> httpx.Response:
    """Queries a balance; retries on 503."""
    return retried(lambda: ask(url, customer, position))


def add(url: str, customer: str, amount: str) -> str:
    """Adds funds; returns the position at which they are visible."""
    answer = _http.post(url + ADD_FUNDS, json={"customerId": customer, "amount": amount})
    assert answer.status_code == 202, answer.text
    return answer.headers["Balance-Position"]


def warm_up(url: str) -> None:
    """Makes the first query and commit of a process, which take seconds."""
    deadline = time.monotonic() + _WARM_UP_SECONDS
    while time.monotonic() < deadline:
        appended = _http.post(url + ADD_FUNDS, json={"customerId": "warm-up", "amount": 1})
        if appended.status_code == 202:
            answer = ask(url, "warm-up", appended.headers["Balance-Position"])
            if answer.status_code == 200:
                return
    raise TimeoutError(f"{url} has not answered a query within {_WARM_UP_SECONDS} s")


def customers_of(partition: int, count: int) -> list[str]:
    """Returns customers whose events lie in a partition."""
    names = (f"customer-{n}" for n in itertools.count())
    mine = (name for name in names if partition_of(name.encode(), PARTITIONS) == partition)
    return list(itertools.islice(mine, count))


def amount_of(answer: httpx.Response) -> Decimal:
    """Returns the exact amount in a 200 response."""
    assert answer.status_code == 200, (answer.status_code, answer.text)
    amount = json.loads(answer.text, parse_float=Decimal)["amount"]
    assert isinstance(amount, Decimal), answer.text
    return amount


def all_balances(instance: LocalInstance, customers: Iterable[str], ends: Mapping[int, int]) -> dict[str, Decimal]:
    """Returns the balances that an instance answers, locally or through a peer, at or after the end offsets.

    Retries on 503; leaves out unknown customers.
    """
    found = {}
    deadline = time.monotonic() + _CATCH_UP_SECONDS
    with httpx.Client(base_url=instance.url, timeout=30, verify=False) as http:
        for customer in customers:
            partition = partition_of(customer.encode(), PARTITIONS)
            parameters = {"customerId": customer, "minPosition": f"{partition}:{ends[partition]}"}
            while (answer := http.get(GET_BALANCE, params=parameters)).status_code == 503:
                assert time.monotonic() < deadline, f"{instance.name} is not caught up: {answer.text}"
            if answer.status_code != 404:
                found[customer] = amount_of(answer)
    return found
