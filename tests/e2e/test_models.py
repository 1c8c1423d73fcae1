"""Two read models on two instances, and a third instance with one of them: every query through every instance."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.service import PARTITIONS, add, application, customers_of, new_instance, retried, running, status
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

_CUSTOMERS = sorted(customer for partition in range(PARTITIONS) for customer in customers_of(partition, 15))
_AMOUNTS = {customer: [Decimal(n + 1), Decimal("0.10")] for n, customer in enumerate(_CUSTOMERS)}
_SECONDS = 60.0


@pytest.fixture(scope="module")
def instances(stack: LocalStack) -> Iterator[Sequence[LocalInstance]]:
    """Two instances with both read models, and a third, started last, with the balance only."""
    settings = application()
    both = settings | {"BALANCE_MODELS": "balance,activity"}
    first, second, third = new_instance(stack, both), new_instance(stack, both), new_instance(stack, settings)
    with running(first, second):
        wait_until_both_own(first, second)
        for customer, amounts in _AMOUNTS.items():
            for amount in amounts:
                add(first.url, customer, str(amount))
        with running(third):
            eventually(lambda: _count(third, "activity") == len(_CUSTOMERS), "all events are folded", _SECONDS)
            yield first, second, third


def wait_until_both_own(first: LocalInstance, second: LocalInstance) -> None:
    """Waits until each instance owns one partition of both read models."""

    def spread() -> bool:
        tasks = [[t["task"] for t in status(i)["tasks"] if t["state"] == "RUNNING"] for i in (first, second)]
        return sorted(map(len, tasks)) == [2, 2] and not status(first)["unhosted"]

    eventually(spread, lambda: f"{status(first)['tasks']} {status(second)['tasks']}", _SECONDS)


def get(instance: LocalInstance, path: str, **parameters: str) -> httpx.Response:
    """Sends a GET to an instance; retries on 503."""
    return retried(lambda: httpx.get(f"{instance.url}/api/models{path}", params=parameters, timeout=30))


def exact(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_float=Decimal)


def _count(instance: LocalInstance, model: str) -> int:
    return int(exact(get(instance, f"/{model}/count"))["count"])


def test_every_instance_lists_both_models(instances: Sequence[LocalInstance]) -> None:
    for instance in instances:
        models = {model["name"]: model["fields"] for model in exact(get(instance, ""))["models"]}

        assert models["balance"] == {"amount": "decimal(38,2)"}
        assert models["activity"].keys() == {"additions", "first", "latest", "greatest"}


def test_every_instance_answers_for_every_key_of_both_models(instances: Sequence[LocalInstance]) -> None:
    for instance in instances:
        for customer, amounts in _AMOUNTS.items():
            balance = exact(get(instance, f"/balance/keys/{customer}"))
            activity = exact(get(instance, f"/activity/keys/{customer}"))

            assert balance == {"key": customer, "value": {"amount": sum(amounts)}}
            assert activity["value"]["additions"] == len(amounts)
            assert activity["value"]["greatest"] == max(amounts)
            assert activity["value"]["first"] <= activity["value"]["latest"]


def test_the_generic_key_route_returns_the_same_as_the_models_own(instances: Sequence[LocalInstance]) -> None:
    for instance in instances:
        own = httpx.get(f"{instance.url}/api/customers.getBalance", params={"customerId": _CUSTOMERS[0]}, timeout=30)
        generic = get(instance, f"/balance/keys/{_CUSTOMERS[0]}")

        assert generic.text == f'{{"key":"{_CUSTOMERS[0]}","value":{own.text}}}'
        for header in ("Balance-Application-Server", "Balance-Role", "Balance-Position", "Balance-Epoch"):
            assert generic.headers[header] == own.headers[header]


def test_pages_list_the_entries_of_all_instances_in_order(instances: Sequence[LocalInstance]) -> None:
    for instance in instances:
        found: list[tuple[str, Decimal]] = []
        after: dict[str, str] = {}
        while True:
            page = exact(get(instance, "/balance/entries", limit="7", **after))
            found += [(entry["key"], entry["value"]["amount"]) for entry in page["entries"]]
            if page["next"] is None:
                break
            after = {"after": page["next"]}

        assert found == [(customer, sum(amounts)) for customer, amounts in sorted(_AMOUNTS.items())]


def test_ranges_include_both_ends_and_prefixes_filter_keys(instances: Sequence[LocalInstance]) -> None:
    start, end = _CUSTOMERS[3], _CUSTOMERS[8]
    for instance in instances:
        ranged = exact(get(instance, "/balance/entries", **{"from": start, "to": end}))
        prefixed = exact(get(instance, "/balance/entries", prefix="customer-1"))

        assert [entry["key"] for entry in ranged["entries"]] == _CUSTOMERS[3:9]
        assert [entry["key"] for entry in prefixed["entries"]] == [c for c in _CUSTOMERS if c.startswith("customer-1")]


@pytest.mark.shows("whole-range")
def test_the_top_covers_all_instances_and_gives_the_position_of_each_partition(
    instances: Sequence[LocalInstance],
) -> None:
    greatest = sorted(_AMOUNTS, key=lambda customer: (-sum(_AMOUNTS[customer]), customer))[:4]
    for instance in instances:
        answer = get(instance, "/balance/top", by="amount", limit="4")

        assert [entry["key"] for entry in exact(answer)["entries"]] == greatest
        positions = dict(pair.split(":") for pair in answer.headers["Balance-Position"].split(","))
        assert sorted(positions) == [str(partition) for partition in range(PARTITIONS)]
        assert sum(map(int, positions.values())) >= 2 * len(_CUSTOMERS)
        assert "Balance-Missing" not in answer.headers


def test_an_invalid_query_is_refused_with_a_detail(instances: Sequence[LocalInstance]) -> None:
    instance = instances[0]
    url = f"{instance.url}/api/models"

    assert httpx.get(f"{url}/nothing/count").status_code == 404
    assert httpx.get(f"{url}/balance/keys/nobody").json()["detail"] == "no such key"
    for path, detail in {
        "/balance/top?by=colour": "by must be a numeric field: amount",
        "/balance/entries?limit=1001": "limit must be a number from 1 to 1000",
        "/balance/entries?limit=0": "limit must be a number from 1 to 1000",
        "/balance/top": "by is missing",
        "/balance/count?partial=yes": "partial must be true or false",
    }.items():
        answer = httpx.get(url + path)
        assert (answer.status_code, answer.json()["detail"]) == (400, detail)


@pytest.mark.shows("whole-range")
def test_an_unavailable_partition_is_refused_or_left_out_on_request(instances: Sequence[LocalInstance]) -> None:
    first, second, _ = instances
    second.kill()
    try:
        url = f"{first.url}/api/models/activity/count"
        refused = httpx.get(url, timeout=30)
        partial = httpx.get(url, params={"partial": "true"}, timeout=30)

        assert refused.status_code == 503
        assert "no instance could answer for partitions" in refused.json()["detail"]
        assert partial.status_code == 200
        assert partial.headers["Balance-Missing"] in ("0", "1")
        assert partial.json()["count"] == len(_CUSTOMERS) // PARTITIONS
    finally:
        second.launch()
        second.wait_ready()
