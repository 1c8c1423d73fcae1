"""Leaderboard: the read of a table into an empty store, and the time of a score through both re-keys to an answer.

Measures this service only. Rows per second count from the first poll at which some rows of the table `players` are
read. Freshness is the time from the acknowledgement of a score until `/leaderboard/{productId}` has it, while scores
arrive.
"""

from __future__ import annotations

import io
import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import fastavro
import httpx
import numpy as np
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from balance_service.avro.frames import frame_header
from balance_service.avro.schemas import load_schema
from balance_service.errors import BalanceServiceError
from bench.background import Background, at_rate
from bench.invoices import registered
from bench.load import PRODUCER, create_topic, end_offsets, produce
from bench.probes import Probes
from bench.sides import OurSide, delete_internal_topics, new_application_id

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.synchronize import Event

    from balance_service.devtools.local.stack import LocalStack
    from bench.background import Count
    from bench.figures import Figures

    SchemaIds = Mapping[str, int]

_RECORDS = {"players": "Player", "products": "Product", "score-events": "ScoreEvent"}
_POLICIES = {"players": "compact", "products": "compact", "score-events": "delete", "high-scores": "compact"}
_SCHEMAS = {record: fastavro.parse_schema(load_schema(record)) for record in _RECORDS.values()}
_GAMES = 100
# Games of probes only, so that no other score is the highest.
_PROBED_GAMES = range(_GAMES, _GAMES + 8)
_MOST_AT_ONCE = 10_000
_LOOK_EVERY_SECONDS = 0.02
_WARM_SECONDS = 10.0
_PATIENCE_SECONDS = 120.0
_ANSWER_SECONDS = 10.0
_PAUSE_SECONDS = 0.05


def measure_leaderboard(stack: LocalStack, players: int, rate: int, probes: int, figures: Figures) -> None:
    """Measure with one instance.

    Args:
        players: rows of the table.
        rate: scores per second that arrive during the probes.

    Raises:
        BalanceServiceError: the instance makes no progress.
    """
    side = OurSide(stack, models=["leaderboard"])
    schema_ids = _fill(stack, players)
    application_id = new_application_id("leaderboard")
    with ExitStack() as cleanup:
        cleanup.callback(delete_internal_topics, stack, application_id)
        instance = side.instance(1, "score-events", application_id)
        cleanup.callback(instance.wipe)
        cleanup.callback(instance.stop)
        instance.launch()
        client = cleanup.enter_context(httpx.Client(base_url=instance.url, timeout=_ANSWER_SECONDS, trust_env=False))
        figures.add(side.name, "restore", f"table of {players:,} rows", keys=_rows_a_second(client, players))
        scores = (_scores_at_rate, stack.bootstrap_servers, schema_ids["score-events"], players, rate)
        with Background(*scores, from_count=rate):
            prober, warm = _Prober(stack, client, schema_ids["score-events"]), time.monotonic() + _WARM_SECONDS
            while time.monotonic() < warm:
                prober.probe()
            waits = [prober.probe() for _ in range(probes)]
    p50, p99 = (float(v) * 1000 for v in np.percentile(waits, (50, 99)))
    figures.add(side.name, "freshness", f"leaderboard, {rate:,} scores/s", p50=p50, p99=p99)


def _fill(stack: LocalStack, players: int) -> SchemaIds:
    """Create the topics and write the rows of both tables; returns topic → schema id."""
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    for topic, policy in _POLICIES.items():
        create_topic(admin, topic, policy=policy)
    schema_ids = {topic: registered(stack, topic, record) for topic, record in _RECORDS.items()}
    producer = Producer({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0, **PRODUCER})
    for topic, count in (("players", players), ("products", _PROBED_GAMES.stop)):
        for number in range(count):
            frame = _frame(schema_ids[topic], _RECORDS[topic], {"id": number, "name": f"name {number}"})
            produce(producer, topic, str(number).encode(), frame)
    if producer.flush(_PATIENCE_SECONDS):
        raise BalanceServiceError("not all rows were acknowledged: is the broker still up?")
    if (written := sum(end_offsets(admin, "players").values())) != players:
        raise BalanceServiceError(f"the table is not whole: {written} of {players} rows were written")
    return schema_ids


def _frame(schema_id: int, record: str, fields: Mapping[str, Any]) -> bytes:
    body = io.BytesIO()
    fastavro.schemaless_writer(body, _SCHEMAS[record], fields)
    return frame_header(schema_id) + body.getvalue()


def _rows_a_second(client: httpx.Client, players: int) -> float | None:
    """Rows per second until the table is complete and every task runs; None if that took less than a poll."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    began: tuple[float, int] | None = None
    ended: float | None = None
    while time.monotonic() < deadline:
        now, status = time.monotonic(), _status(client)
        table = [t for t in status.get("tables", ()) if t["table"] == "players"]
        rows = sum(max(0, t["position"]) for t in table)
        if rows and began is None:
            began = now, rows
        if rows == players and ended is None:
            ended = now
        states = [t["state"] for t in status.get("tasks", ())]
        if began and ended and states and set(states) == {"RUNNING"}:
            return (players - began[1]) / (ended - began[0]) if ended > began[0] else None
        time.sleep(_LOOK_EVERY_SECONDS)
    raise BalanceServiceError(f"the tables and tasks are not ready in {_PATIENCE_SECONDS:.0f} s")


def _status(client: httpx.Client) -> Mapping[str, Any]:
    try:
        status: Mapping[str, Any] = client.get("/api/status").json()
    except (httpx.HTTPError, ValueError):
        return {}
    return status


class _Prober:
    """Sends scores, each the highest of its game, and polls until they are visible."""

    def __init__(self, stack: LocalStack, client: httpx.Client, schema_id: int) -> None:
        self._client = client
        self._schema_id = schema_id
        self._probes = Probes(stack, "score-events")
        self._sent = 0

    def probe(self) -> float:
        """Seconds from acknowledgement to visibility."""
        # Random, so that probes have no fixed phase relative to commits.
        time.sleep(random.uniform(0, 2 * _PAUSE_SECONDS))  # noqa: S311  (no secret)
        self._sent += 1
        game, score = _PROBED_GAMES[self._sent % len(_PROBED_GAMES)], float(self._sent)
        frame = _frame(self._schema_id, "ScoreEvent", {"score": score, "product_id": game, "player_id": 1})
        return self._probes.seconds(None, frame, lambda: self._highest(game) == score)

    def _highest(self, game: int) -> float | None:
        answer = self._client.get(f"/leaderboard/{game}")
        return None if answer.is_error else float(answer.json()[0]["score"])


def _scores_at_rate(bootstrap_servers: str, schema_id: int, players: int, rate: int, stop: Event, count: Count) -> None:
    source = np.random.default_rng(rate)
    producer = Producer({"bootstrap.servers": bootstrap_servers, "log_level": 0, **PRODUCER, "linger.ms": 5})

    def send(due: int) -> None:
        drawn = (source.random(due), source.integers(0, _GAMES, due), source.integers(0, players, due))
        for score, game, player in zip(*(column.tolist() for column in drawn), strict=True):
            fields = {"score": score, "product_id": game, "player_id": player}
            produce(producer, "score-events", None, _frame(schema_id, "ScoreEvent", fields))

    at_rate(rate, _MOST_AT_ONCE, send, stop, count)
    producer.flush(_ANSWER_SECONDS)
