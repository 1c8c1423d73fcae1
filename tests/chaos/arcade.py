"""Purchases, scores, player updates and invalid records for the systems test."""

from __future__ import annotations

import itertools
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from balance_service.devtools.local.processes import READY_TIMEOUT_SECONDS
from balance_service.kafka.partitioner import partition_of
from tests.integration.purchases import invoice
from tests.integration.rows import Rows

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack

PARTITIONS = 2
TOPICS = ("pos", "players", "products", "score-events")
_CARDS, _GAMES, _PLAYERS = 12, (2, 10, 300), 20
# Players without a row, so that their scores join nothing; one per partition, so that each has dead letters to retry.
_STRANGERS = tuple(
    next(player for player in itertools.count(90_000) if partition_of(str(player).encode(), PARTITIONS) == partition)
    for partition in range(PARTITIONS)
)
_PAUSE_SECONDS = 0.1
# Covers a broker restart on a busy machine and the reconnection of producers.
_FLUSH_SECONDS = READY_TIMEOUT_SECONDS + 60
_A_STEP = 4


class SystemWorkload:
    """Appends records with increasing timestamps, from a thread between `start` and `stop`.

    Waits until a row is acknowledged before it sends a later score, so that a recount knows which row a score joins.
    """

    def __init__(self, stack: LocalStack, seed: int) -> None:
        self._chooser = random.Random(seed)
        self._pos, self._players, self._products, self._scores = (
            Rows(stack, topic, schema)
            for topic, schema in zip(TOPICS, ("PosInvoice", "Player", "Product", "ScoreEvent"), strict=True)
        )
        self._now_ms = int(time.time() * 1000)
        self.sent = 0
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="arcade", daemon=True)

    def __enter__(self) -> Self:
        for game in _GAMES:
            self._products.put(str(game), {"id": game, "name": f"game {game}"}, timestamp=self._tick())
        for player in range(_PLAYERS):
            self._rename(player)
        self._flush()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        for rows in (self._pos, self._players, self._products, self._scores):
            rows.__exit__()

    def start(self) -> None:
        """Appends until `stop`."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="arcade", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops appending; returns once everything is acknowledged. Raises the error of the thread, if any."""
        self._stopping.set()
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises the error of the thread, if any."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_PAUSE_SECONDS):
                self._step()
                self._flush()
        except BaseException as error:
            self._failure = error

    def _step(self) -> None:
        chance = self._chooser.random()
        if chance < 0.2:
            player = self._chooser.randrange(_PLAYERS)
            if chance < 0.02:
                self._players.put(str(player), None, timestamp=self._tick())
            else:
                self._rename(player)
            self._flush()
        elif chance < 0.25:
            self._pos.put_raw("store-1", b"no frame", timestamp=self._tick())
            self._scores.put_raw(None, b"no frame", timestamp=self._tick())
        for _ in range(_A_STEP):
            self._sell()
            self._score()

    def _sell(self) -> None:
        number, chooser = self.sent, self._chooser
        sold = invoice(
            number,
            f"card-{chooser.randrange(_CARDS)}",
            f"{chooser.randrange(1, 10_000)}.10",
            kind=chooser.choice(("PRIME", "PRIME", "REGULAR")),
            delivery=chooser.choice(("TAKEAWAY", "Home-Delivery")),
        )
        self._pos.put(sold["storeId"], sold, timestamp=self._tick())
        self.sent += 1

    def _score(self) -> None:
        chooser = self._chooser
        player = chooser.choice(_STRANGERS) if chooser.random() < 0.02 else chooser.randrange(_PLAYERS)
        scored = {"score": float(self.sent), "product_id": chooser.choice(_GAMES), "player_id": player}
        self._scores.put(None, scored, timestamp=self._tick())

    def _rename(self, player: int) -> None:
        row: dict[str, Any] = {"id": player, "name": f"player {player} since {self._now_ms}"}
        self._players.put(str(player), row, timestamp=self._tick())

    def _tick(self) -> int:
        self._now_ms += 1
        return self._now_ms

    def _flush(self) -> None:
        for rows in (self._pos, self._players, self._products, self._scores):
            rows.flush(_FLUSH_SECONDS)
