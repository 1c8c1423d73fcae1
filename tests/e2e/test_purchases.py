"""Purchases and rewards on two instances: either one answers for every card. Chaos tests them under kills."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from balance_service.devtools.local.stack import LocalStack
from tests.integration.purchases import Till, invoice, points_of
from tests.support.kafka import ends_of
from tests.support.service import application, new_instance, running, status
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance

PATH = "/api/customers.getRewards"
CARDS = 9


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[LocalStack]:
    """A stack of its own, because the shipped models have fixed topic names."""
    with LocalStack(tmp_path / "stack") as stack:
        yield stack


def test_both_instances_answer_for_every_card(own_stack: LocalStack) -> None:
    settings = application(BALANCE_MODELS="rewards,purchases")
    instances = [new_instance(own_stack, settings) for _ in range(2)]
    sold = [_sale(number) for number in range(1, 40)]
    with running(*instances), Till(own_stack, "pos") as till:
        till.sell(*sold)
        eventually(lambda: _is_caught_up(own_stack, instances), lambda: str([status(i) for i in instances]))

        for instance in instances:
            _assert_answers(instance, points_of(sold))
        with httpx.Client(base_url=instances[0].url) as http:
            assert http.get(PATH, params={"customerCardNo": "nobody"}).json()["detail"] == "no such customer"
            assert http.get(PATH, params={}).status_code == 400
            assert {m["name"] for m in http.get("/api/models").json()["models"]} == {"purchases", "rewards"}
            refused = http.get("/api/models/purchases/keys/store-1")
            assert (refused.status_code, refused.json()["detail"]) == (
                404,
                "the read model 'purchases' keeps no states: it only emits",
            )
        stages = {task["task"].rpartition("_")[0] for task in itertools.chain(*(status(i)["tasks"] for i in instances))}
        assert stages == {"rewards-by-customerCardNo", "rewards", "purchases"}


def _sale(number: int) -> dict[str, Any]:
    kind, delivery = ("PRIME", "REGULAR")[number % 3 == 0], ("TAKEAWAY", "Home-Delivery")[number % 2]
    return invoice(number, f"card-{number % CARDS}", f"{number}.10", kind=kind, delivery=delivery)


def _assert_answers(instance: LocalInstance, points: dict[str, Decimal]) -> None:
    """Checks that an instance answers for every card, owned or not."""
    with httpx.Client(base_url=instance.url, timeout=30) as http:
        for card, expected in points.items():
            answer = http.get(PATH, params={"customerCardNo": card})
            assert answer.status_code == 200, answer.text
            assert Decimal(answer.text.removeprefix('{"points":').removesuffix("}")) == expected
            assert answer.headers["Balance-Role"] == "active"
        assert http.get("/api/models/rewards/count").json() == {"count": len(points)}


def _is_caught_up(stack: LocalStack, instances: list[LocalInstance]) -> bool:
    """Whether every stage has reached the end of its source, earlier stages first."""
    tasks = {t["task"]: t for i in instances for t in status(i)["tasks"] if t["state"] == "RUNNING"}
    models = {m["name"]: m["source"] for m in status(instances[0])["models"]}
    sources = {"rewards-by-customerCardNo": "pos", **models}
    return all(
        tasks.get(f"{stage}_{partition}", {"position": -1})["position"] >= end
        for stage, source in sources.items()
        for partition, end in ends_of(stack, source).items()
    )
