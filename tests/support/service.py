"""What the e2e tests do: run real processes of the service, ask them over HTTP, look at what they left in Kafka."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from balance_service.devtools.local.instances import LocalInstance
from balance_service.kafka.partitioner import partition_of
from tests.support.paths import ADD_FUNDS, GET_BALANCE
from tests.support.waiting import PATIENCE_SECONDS, eventually

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from balance_service.devtools.local.stack import LocalStack

PARTITIONS = 2
SESSION_TIMEOUT_SECONDS = 6.0
STOP_SECONDS = 10.0
_WARM_UP_SECONDS = 60.0
_MOVE_SECONDS = 60.0
_CATCH_UP_SECONDS = 90.0
_RESERVED = b"\xff"

_numbers = itertools.count(100)
# A connection for each request: who was asked before may have been killed since.
_http = httpx.Client(timeout=30, verify=False, limits=httpx.Limits(max_keepalive_connections=0))


def application(**settings: str) -> dict[str, str]:
    """Settings of an application whose names nobody else uses."""
    name = uuid.uuid4().hex[:8]
    return {
        "BALANCE_TOPIC": f"balance-{name}",
        "BALANCE_APPLICATION_ID": f"app-{name}",
        "BALANCE_SESSION_TIMEOUT_MS": str(int(SESSION_TIMEOUT_SECONDS * 1000)),
        **settings,
    }


def on(stack: LocalStack, settings: Mapping[str, str]) -> dict[str, str]:
    """The settings, with the addresses of the stack."""
    return {
        "BALANCE_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "BALANCE_SCHEMA_REGISTRY_URL": stack.schema_registry_url,
        **settings,
    }


# Instances


def new_instance(stack: LocalStack, settings: Mapping[str, str]) -> LocalInstance:
    """An instance with a port and a state directory of its own, not started yet."""
    return LocalInstance(next(_numbers), stack, environment=settings)


@contextmanager
def running(*instances: LocalInstance) -> Iterator[Sequence[LocalInstance]]:
    """These instances, started side by side; whichever are left are stopped at the end."""
    try:
        for instance in instances:
            instance.launch()
        for instance in instances:
            instance.wait_ready()
        yield instances
    finally:
        for instance in instances:
            instance.stop()


@contextmanager
def one_of_two(stack: LocalStack, settings: dict[str, str]) -> Iterator[tuple[LocalInstance, LocalInstance]]:
    """Two instances, the first of them up; either may be stopped and launched meanwhile."""
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first):
        try:
            yield first, second
        finally:
            second.stop()


def process_of(instance: LocalInstance) -> psutil.Process:
    """The service's own process, below its guard."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # some are short-lived, or killed and not reaped yet
            is_service = process.cmdline()[1:] == ["-m", "balance_service", "serve"]
            if is_service and process.environ()["BALANCE_HTTP_PORT"] == instance.environment["BALANCE_HTTP_PORT"]:
                return process
    raise AssertionError(f"{instance.name} is not running")


def terminate(instance: LocalInstance) -> tuple[int, float]:
    """SIGTERM; returns the exit code, and how many seconds it took."""
    process = process_of(instance)
    guard = process.parent()
    assert guard is not None
    began = time.monotonic()
    process.terminate()
    code = guard.wait(STOP_SECONDS + 5)  # it ends with its child's exit code
    took = time.monotonic() - began
    instance.stop()
    assert code is not None
    return int(code), took


def status(instance: LocalInstance) -> dict[str, Any]:
    """What an instance knows of itself and of the others."""
    known: dict[str, Any] = _http.get(f"{instance.url}/api/status", timeout=10).json()
    return known


def owned(instance: LocalInstance) -> set[int]:
    """The partitions whose tasks run in an instance."""
    try:
        return {task["partition"] for task in status(instance)["tasks"] if task["state"] == "RUNNING"}
    except httpx.HTTPError:
        return set()


def tasks(instance: LocalInstance, role: str, state: str) -> dict[int, Mapping[str, Any]]:
    """The tasks of an instance in a role and a state, by partition."""
    known = status(instance)["tasks"]
    return {task["partition"]: task for task in known if (task["role"], task["state"]) == (role, state)}


def wait_until_spread(instances: Sequence[LocalInstance]) -> None:
    """Wait until every instance owns something, nothing is owned twice, and each knows of all."""

    def spread() -> bool:
        parts = [owned(instance) for instance in instances]
        everything = sorted(itertools.chain(*parts)) == list(range(PARTITIONS))
        return everything and all(parts) and all(_heard_of(i) >= _addresses(instances) for i in instances)

    eventually(spread, f"every instance owns a partition: {[owned(i) for i in instances]}", _MOVE_SECONDS)


def _heard_of(instance: LocalInstance) -> set[str]:
    servers = status(instance)["applicationServers"]
    return {server["applicationServer"] for server in servers if not server["suspect"]}


def _addresses(instances: Iterable[LocalInstance]) -> set[str]:
    return {address(instance) for instance in instances}


def address(instance: LocalInstance) -> str:
    """Under which peers reach it."""
    return instance.environment["BALANCE_APPLICATION_SERVER"]


# Queries and commands


def ask(url: str, customer: str, position: str | None = None, **headers: str) -> httpx.Response:
    """A customer's balance, asked once."""
    parameters = {"customerId": customer} | ({} if position is None else {"minPosition": position})
    return _http.get(url + GET_BALANCE, params=parameters, headers=headers)


def ask_again(url: str, customer: str, position: str | None = None) -> httpx.Response:
    """The same, asked again as long as it is 503, as any client would."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (answer := ask(url, customer, position)).status_code == 503:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)
    return answer


def add(url: str, customer: str, amount: str) -> str:
    """Add funds; returns the position at which they are visible."""
    answer = _http.post(url + ADD_FUNDS, json={"customerId": customer, "amount": amount})
    assert answer.status_code == 202, answer.text
    return answer.headers["Balance-Position"]


def warm_up(url: str) -> None:
    """The first query and commit of a process take seconds; so that no test waits for them."""
    deadline = time.monotonic() + _WARM_UP_SECONDS
    while time.monotonic() < deadline:
        appended = _http.post(url + ADD_FUNDS, json={"customerId": "warm-up", "amount": 1})
        if appended.status_code == 202:
            answer = ask(url, "warm-up", appended.headers["Balance-Position"])
            if answer.status_code == 200:
                return
    raise TimeoutError(f"{url} is not warm after {_WARM_UP_SECONDS} s")


def customers_of(partition: int, count: int) -> list[str]:
    """Customers whose events lie in one partition."""
    names = (f"customer-{n}" for n in itertools.count())
    mine = (name for name in names if partition_of(name.encode(), PARTITIONS) == partition)
    return list(itertools.islice(mine, count))


def amount_of(answer: httpx.Response) -> Decimal:
    """The amount of a 200, to the digit."""
    assert answer.status_code == 200, (answer.status_code, answer.text)
    amount = json.loads(answer.text, parse_float=Decimal)["amount"]
    assert isinstance(amount, Decimal), answer.text
    return amount


def all_balances(instance: LocalInstance, customers: Iterable[str], ends: Mapping[int, int]) -> dict[str, Decimal]:
    """Every balance as one instance answers it, itself or through a peer, at or after the topic's ends.

    503 is asked again, as any client would; an unknown customer is left out.
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
