"""A client that makes many scans at once uses only its own share; other clients and operators are served."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING

import aiohttp
import httpx
import pytest

from balance_service import api
from tests.support.api import GET_BALANCE
from tests.support.commands import run
from tests.support.service import application, on
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalInstance, LocalStack

KEYS = 40_000
ATTACKERS, ROUNDS, ROUND_SECONDS = 20, 3, 4.0
# A different address is a different client.
ATTACKER, CLIENT, OPERATOR = "127.0.0.1", "127.0.0.2", "127.0.0.3"
TOP = f"{api.MODELS}/balance/top?by=amount"
ENTRIES = f"{api.MODELS}/balance/entries"
PROMISED_RATIO, NOISE_RATIO, NOISE_SECONDS = 3, 2, 0.1


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return application()


@pytest.fixture(scope="module")
def many_keys(stack: LocalStack, settings: dict[str, str], pair: tuple[LocalInstance, LocalInstance]) -> LocalInstance:
    """One of two instances that hold many keys."""
    done = run(on(stack, settings), "load", "--events", str(2 * KEYS), "--customers", str(KEYS), seconds=120)
    assert done.code == 0, done
    counts = [0]

    def is_settled() -> bool:
        counts.append(count(pair[0].url))
        return counts[-1] > KEYS / 2 and counts[-1] == counts[-2]

    eventually(is_settled, lambda: f"only {counts[-1]} keys", 120)
    return pair[0]


def count(url: str) -> int:
    """Returns the current number of keys."""
    return int(httpx.get(f"{url}{api.MODELS}/balance/count", timeout=10).json().get("count", 0))


def session(address: str) -> aiohttp.ClientSession:
    """Opens a client session with a local address."""
    connector = aiohttp.TCPConnector(local_addr=(address, 0))
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=15))


@dataclass
class Asked:
    """The answers to one kind of request."""

    statuses: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    async def ask(self, client: aiohttp.ClientSession, url: str) -> int:
        began = time.monotonic()
        async with client.get(url) as answer:
            await answer.read()
        self.statuses.append(answer.status)
        self.seconds.append(time.monotonic() - began)
        return answer.status

    @property
    def share_answered(self) -> float:
        return self.statuses.count(200) / len(self.statuses)


@dataclass
class Round:
    """Requests of all clients for some seconds."""

    url: str
    seconds: float = ROUND_SECONDS
    one_key: Asked = field(default_factory=Asked)
    scans: Asked = field(default_factory=Asked)
    letters: Asked = field(default_factory=Asked)
    attacks: Asked = field(default_factory=Asked)

    async def run(self, attackers: int = 0) -> None:
        until = time.monotonic() + self.seconds
        async with session(ATTACKER) as attacker, session(CLIENT) as client, session(OPERATOR) as operator:
            async with client.get(f"{self.url}{ENTRIES}?limit=500") as answer:
                keys = [entry["key"] for entry in (await answer.json())["entries"]]

            async def repeat(asked: Asked, by: aiohttp.ClientSession, targets: list[str], pause: float) -> None:
                while time.monotonic() < until:
                    status = await asked.ask(by, self.url + random.choice(targets))
                    # Clients back off briefly after a refusal.
                    await asyncio.sleep(pause if status == 200 else 0.05)

            one_key = [f"{GET_BALANCE}?customerId={key}" for key in keys]
            await asyncio.gather(
                repeat(self.one_key, client, one_key, 0.004),
                repeat(self.scans, client, [ENTRIES, TOP], 0.1),
                repeat(self.letters, operator, [api.DEAD_LETTERS], 0.1),
                *(repeat(self.attacks, attacker, [TOP], 0.0) for _ in range(attackers)),
            )


@pytest.mark.shows("scans")
def test_many_scans_of_one_client_delay_neither_other_scans_nor_operators_nor_key_queries(
    many_keys: LocalInstance,
) -> None:
    at_rest = [Round(many_keys.url) for _ in range(ROUNDS)]
    attacked = [Round(many_keys.url) for _ in range(ROUNDS)]
    for rest, attack in zip(at_rest, attacked, strict=True):
        asyncio.run(rest.run())
        asyncio.run(attack.run(ATTACKERS))

    scans = [status for attack in attacked for status in attack.scans.statuses]
    letters = [status for attack in attacked for status in attack.letters.statuses]
    assert scans.count(200) >= 0.95 * len(scans)
    assert letters.count(200) >= 0.95 * len(letters)
    assert all(attack.one_key.share_answered == 1 for attack in attacked)
    bound = max(NOISE_RATIO * PROMISED_RATIO * p99(at_rest), NOISE_SECONDS)
    assert p99(attacked) <= bound, f"{p99(attacked)} under attack, {p99(at_rest)} at rest"


def p99(rounds: list[Round]) -> float:
    return median(quantiles(some.one_key.seconds, n=100)[-1] for some in rounds)


@pytest.mark.shows("scans")
def test_scans_whose_clients_have_disconnected_are_cancelled(many_keys: LocalInstance) -> None:
    async def asked_after(gone: int) -> float:
        """Returns the seconds of a top query after some clients have cancelled theirs."""
        async with session(ATTACKER) as client:
            for _ in range(gone):
                # On a busy machine this process may notice the timeout only after the response.
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05), client.get(many_keys.url + TOP):
                        pass
            asked = Asked()
            assert await asked.ask(client, many_keys.url + TOP) == 200
            return asked.seconds[0]

    undisturbed = median(asyncio.run(asked_after(0)) for _ in range(3))
    disturbed = median(asyncio.run(asked_after(10)) for _ in range(3))
    assert disturbed <= 3 * undisturbed + 0.2
