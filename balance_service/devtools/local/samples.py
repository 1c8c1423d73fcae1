"""Sample events for each read model, and queries that they answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from balance_service.devtools.produce import produce
from balance_service.errors import BalanceServiceError
from balance_service.process.package import resource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from balance_service.devtools.local.stack import LocalInstance
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings

_POLL_SECONDS = 0.1
_VISIBLE_SECONDS = 60.0
_TIMEOUT_SECONDS = 30.0
_FUNDS = (
    ("alice", "12.34"),
    ("bob", "100"),
    ("alice", "0.10"),
    ("alice", "0.20"),
    ("carol", "9999999999999999.99"),
)


@dataclass(frozen=True, slots=True)
class SampleFile:
    """Lines for `produce`, in `samples/<topic>.txt`."""

    topic: str
    key_separator: str | None = "|"

    @property
    def path(self) -> str:
        return f"samples/{self.topic}.txt"


@dataclass(frozen=True, slots=True)
class Samples:
    """The sample files of a read model, queries that they answer, and the topics that the model writes."""

    files: tuple[SampleFile, ...] = ()
    queries: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


_INVOICES = SampleFile("pos")
SAMPLES: Mapping[str, Samples] = {
    "balance": Samples(
        queries=(
            "/api/customers.getBalance?customerId=alice",
            "/api/models/balance/entries",
            "/api/models/balance/keys/alice",
        )
    ),
    "activity": Samples(queries=("/api/models/activity/entries", "/api/models/activity/keys/alice")),
    "symbols": Samples(
        (SampleFile("symbols"),), ("/api/models/symbols/keys/ACME", "/api/models/symbols/top?by=price&limit=2")
    ),
    "purchases": Samples((_INVOICES,), writes=("shipments", "hadoop")),
    "rewards": Samples(
        (_INVOICES,),
        ("/api/customers.getRewards?customerCardNo=4929000000001815", "/api/models/rewards/entries"),
        ("notifications",),
    ),
    "leaderboard": Samples(
        # A score is joined with the player's row as of its time, so players come first.
        (SampleFile("players"), SampleFile("products"), SampleFile("score-events", key_separator=None)),
        ("/leaderboard/1", "/leaderboard", "/leaderboard/count", "/leaderboard/1/6"),
        ("high-scores",),
    ),
}


def add_samples(instances: Sequence[LocalInstance], settings: Settings, models: Sequence[ReadModel]) -> list[str]:
    """Append samples for the hosted read models, and wait until each instance answers queries to them.

    Args:
        settings: with the addresses of the local stack.
        models: the known models.

    Returns:
        Commands to try.

    Raises:
        BalanceServiceError: a query is not answered in time.
    """
    hosted = {model: SAMPLES.get(model, Samples()) for model in settings.models}
    files = dict.fromkeys(file for samples in hosted.values() for file in samples.files)
    for file in files:
        lines = resource(file.path).read_bytes().splitlines()
        produce(settings, models, file.topic, lines, key_separator=file.key_separator)
    with httpx.Client(timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
        if "balance" in hosted:
            _add_funds(client, instances)
        for samples in hosted.values():
            _wait_until_answered(client, [f"{i.url}{query}" for i in instances for query in samples.queries])
    return [*_queries(instances, hosted), *_commands(instances[0], settings, files, hosted)]


def _queries(instances: Sequence[LocalInstance], hosted: Mapping[str, Samples]) -> list[str]:
    """For each model, the first query to every instance, to show that each one answers, and the others to one."""
    commands = []
    for samples in hosted.values():
        first, others = samples.queries[:1], samples.queries[1:]
        commands += [f"curl -i '{instance.url}{query}'" for query in first for instance in instances]
        commands += [f"curl -i '{instances[-1].url}{query}'" for query in others]
    return commands


def _commands(
    instance: LocalInstance, settings: Settings, files: Iterable[SampleFile], hosted: Mapping[str, Samples]
) -> list[str]:
    command = (
        f"BALANCE_BOOTSTRAP_SERVERS={settings.bootstrap_servers} "
        f"BALANCE_SCHEMA_REGISTRY_URL={settings.schema_registry_url} .venv/bin/balance-service"
    )
    commands = []
    if "balance" in hosted:
        commands.append(
            f"curl -i -X POST {instance.url}/api/balance.addFunds "
            """-H 'Content-Type: application/json' -d '{"customerId": "alice", "amount": 1.23}'"""
        )
    for file in files:
        separator = "" if file.key_separator is None else f" --key-separator '{file.key_separator}'"
        commands.append(f"{command} produce {file.topic}{separator} < {file.path}")
    written = dict.fromkeys(topic for samples in hosted.values() for topic in samples.writes)
    commands += [f"{command} tail {topic} --from-beginning" for topic in written]
    return [*commands, f"curl {instance.url}/api/status"]


def _add_funds(client: httpx.Client, instances: Sequence[LocalInstance]) -> None:
    for customer, amount in _FUNDS:
        answer = client.post(
            f"{instances[0].url}/api/balance.addFunds", json={"customerId": customer, "amount": amount}
        )
        if answer.is_error:
            raise BalanceServiceError(f"adding funds failed: {answer.text}")
        read = f"/api/customers.getBalance?customerId={customer}&minPosition={answer.headers['Balance-Position']}"
        _wait_until_answered(client, [f"{instance.url}{read}" for instance in instances])


def _wait_until_answered(client: httpx.Client, urls: Iterable[str]) -> None:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    for url in urls:
        while (answer := client.get(url)).is_error:
            if time.monotonic() > deadline:
                raise BalanceServiceError(f"{url} did not answer from the samples in time: {answer.text}")
            time.sleep(_POLL_SECONDS)
