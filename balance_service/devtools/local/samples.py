"""Sample events for each read model, and queries that they answer."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service import api
from balance_service.devtools.produce import produce
from balance_service.errors import BalanceServiceError
from balance_service.process.package import resource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from balance_service.client import Client
    from balance_service.devtools.local.stack import LocalInstance
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings

_POLL_SECONDS = 0.1
_VISIBLE_SECONDS = 60.0
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
            f"{api.GET_BALANCE}?customerId=alice",
            f"{api.MODELS}/balance/entries",
            f"{api.MODELS}/balance/keys/alice",
        )
    ),
    "activity": Samples(queries=(f"{api.MODELS}/activity/entries", f"{api.MODELS}/activity/keys/alice")),
    "symbols": Samples(
        (SampleFile("symbols"),), (f"{api.MODELS}/symbols/keys/ACME", f"{api.MODELS}/symbols/top?by=price&limit=2")
    ),
    "purchases": Samples((_INVOICES,), writes=("shipments", "hadoop")),
    "rewards": Samples(
        (_INVOICES,),
        ("/api/customers.getRewards?customerCardNo=4929000000001815", f"{api.MODELS}/rewards/entries"),
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
        models: the hosted models.

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
    with ExitStack() as cleanup:
        clients = [cleanup.enter_context(i.client(retry_seconds=_VISIBLE_SECONDS)) for i in instances]
        if "balance" in hosted:
            _add_funds(clients)
        for samples in hosted.values():
            for client in clients:
                for query in samples.queries:
                    _wait_until_answered(client, query)
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
    url = settings.schema_registry_url
    registry = "" if url is None else f"BALANCE_SCHEMA_REGISTRY_URL={url} "
    command = f"BALANCE_BOOTSTRAP_SERVERS={settings.bootstrap_servers} {registry}.venv/bin/balance-service"
    commands = []
    if "balance" in hosted:
        commands.append(
            f"curl -i -X POST {instance.url}{api.ADD_FUNDS} "
            """-H 'Content-Type: application/json' -d '{"customerId": "alice", "amount": 1.23}'"""
        )
    for file in files:
        separator = "" if file.key_separator is None else f" --key-separator '{file.key_separator}'"
        commands.append(f"{command} produce {file.topic}{separator} < {file.path}")
    written = dict.fromkeys(topic for samples in hosted.values() for topic in samples.writes)
    commands += [f"{command} tail {topic} --from-beginning" for topic in written]
    return [*commands, f"curl {instance.url}{api.STATUS}"]


def _add_funds(clients: Sequence[Client]) -> None:
    for customer, amount in _FUNDS:
        added = clients[0].add_funds(customer, amount)
        for client in clients:
            client.get_balance(customer, min_position=added.position)


def _wait_until_answered(client: Client, query: str) -> None:
    """Waits until the key that a query names has a state."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while client.query(query) is None:
        if time.monotonic() > deadline:
            raise BalanceServiceError(f"{client.url}{query} did not answer from the samples in time")
        time.sleep(_POLL_SECONDS)
