"""`Application` with its own models in a custom program."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Annotated

import httpx
import pytest

from balance_service import Application, Event, ReadModel, Routes, Stream, add, col, scale
from balance_service.read_models.add_funds import ADD_FUNDS
from balance_service.spark.jvm import launch_jvm
from tests.integration.engines import settings_for
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.settings import Settings


@dataclass
class Savings:
    """The total and the largest amount of a customer."""

    customerId: str  # noqa: N815  (the name in the events)
    total: Annotated[Decimal, scale(2)] = Decimal("0.00")
    largest: Annotated[Decimal, scale(2)] | None = None


class Saved(ReadModel):
    """FundsAdded → Savings, of amounts above 1."""

    name = "saved"
    source = Stream("balance", "FundsAdded").where(col("amount") > Decimal(1)).by("customerId")
    state = Savings
    queries = Routes("/api/saved.get", key="customerId", noun="saver")

    def fold(self, savings: Savings | None, funds: Event) -> Savings:
        before = savings or Savings(funds["customerId"])
        largest = max(before.largest or funds["amount"], funds["amount"])
        return Savings(before.customerId, add(before.total, funds["amount"]), largest)


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    launch_jvm(load := settings_for(stack, names, tmp_path / "state", http_port=0), jvm_scratch())
    return load


async def _until(ask: Callable[[], Awaitable[httpx.Response]], status: int, wanted: str | None = None) -> None:
    """Sends requests until the response is the expected one."""
    async with asyncio.timeout(90):
        while True:
            answer = await ask()
            if answer.status_code == status and wanted in (None, answer.text):
                return
            await asyncio.sleep(0.1)


def test_an_application_folds_and_answers_while_it_runs_and_continues_after_a_restart(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BALANCE_DISCOUNT", "5")
    monkeypatch.setenv("BALANCE_SERVICE_HOST", "10.0.0.1")

    async def added(*amounts: str) -> None:
        async with (
            Application(settings, models=[Saved], commands=[ADD_FUNDS]) as application,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{application.port}", timeout=30, trust_env=False) as http,
        ):
            for amount in amounts:
                body = {"customerId": "ada", "amount": amount}
                await _until(partial(http.post, "/api/balance.addFunds", json=body), httpx.codes.ACCEPTED, "")
            wanted = {1: '{"total":12.00,"largest":12.00}', 2: '{"total":15.50,"largest":12.00}'}
            query = partial(http.get, "/api/saved.get?customerId=ada")
            await _until(query, httpx.codes.OK, wanted[len(amounts)])
            assert (await http.get("/api/saved.get?customerId=bob")).json()["detail"] == "no such saver"
            await _until(partial(http.get, "/health/ready"), httpx.codes.OK)
            status = (await http.get("/api/status")).json()
            assert status["unknownSettings"] == ["BALANCE_DISCOUNT"]
            assert [cause["kind"] for cause in status["causes"]] == ["unknown-setting"]
            details = (await http.get("/api/instance")).json()
            assert details["jvm"]["memoryBytes"] > details["heapBytes"] > 0
            assert (await http.get("/api/history")).json()["actions"][-1]["action"] == "begin"

    # The filter drops amounts up to 1.
    asyncio.run(added("12.00"))
    asyncio.run(added("1.00", "3.50"))
