"""The workload of the systems test, and a recount of every step from purchases and scores to answers."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import defaultdict
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from confluent_kafka import Producer

from balance_service.devtools.local.processes import READY_TIMEOUT_SECONDS
from balance_service.kafka.partitioner import partition_of
from tests.chaos.audit import Decoder
from tests.chaos.checks import Violation
from tests.integration.purchases import invoice, masked, origin_of
from tests.support.kafka import Rows, read_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from confluent_kafka import Message

    from balance_service.devtools.local.stack import LocalStack

MODELS = ("rewards", "purchases", "leaderboard")
TRANSFORMED = "item-sales"
"""The name of `item_sales.ItemSales`."""
PARTITIONS = 2
TOPICS = ("pos", "players", "products", "score-events")
KEPT = "kept-rows"
"""The name of `kept_rows.KeptRows`, and its topic."""
COMPACTED = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.0",
    "max.compaction.lag.ms": "1000",
    "segment.ms": "1000",
}
_CARDS, _GAMES, _PLAYERS, _KEPT = 12, (2, 10, 300), 20, 10
# Players without a row, so that their scores join nothing; one per partition, so that each has dead letters to retry.
_STRANGERS = tuple(
    next(player for player in itertools.count(90_000) if partition_of(str(player).encode(), PARTITIONS) == partition)
    for partition in range(PARTITIONS)
)
_PAUSE_SECONDS = 0.1
# Covers a broker restart on a busy machine and the reconnection of producers.
_FLUSH_SECONDS = READY_TIMEOUT_SECONDS + 60
_A_STEP = 4
_QUANTITIES = (1, 2, 3)
# Share of invoices whose lines have no quantity, and so no price.
_UNPRICED = 0.08
# After so many invoices, their schema is another one.
_SALES_A_SCHEMA = 200


class SystemWorkload:
    """Appends records with increasing timestamps, from a thread between `start` and `stop`.

    Waits until a row is acknowledged before it sends a later score, so that a recount knows which row a score joins.
    """

    def __init__(self, stack: LocalStack, seed: int, mistakes: float = 1.0, *, keeps_rows: bool = False) -> None:
        """Args:
        mistakes: factor of the share of records that become dead letters, and of new schemas.
        keeps_rows: whether there is a topic of kept rows.
        """
        self._mistakes = mistakes
        self._keeps_rows = keeps_rows
        self._chooser = random.Random(seed)
        self._pos, self._players, self._products, self._scores = (
            Rows(stack, topic, schema)
            for topic, schema in zip(TOPICS, ("PosInvoice", "Player", "Product", "ScoreEvent"), strict=True)
        )
        # Records of a key stay in their order, also after a broker was restarted.
        self._rows = Producer(
            {
                "bootstrap.servers": stack.bootstrap_servers,
                "partitioner": "murmur2_random",
                "enable.idempotence": True,
                "message.timeout.ms": int(1000 * _FLUSH_SECONDS),
            }
        )
        self.kept: dict[str, str | None] = {}
        """The newest row of each key that can be applied, as an answer has it; None for a deleted one."""
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
        elif chance < 0.2 + 0.05 * self._mistakes:
            self._pos.put_raw("store-1", b"no frame", timestamp=self._tick())
            self._scores.put_raw(None, b"no frame", timestamp=self._tick())
        if self._keeps_rows:
            self._keep()
        for _ in range(_A_STEP):
            self._sell()
            self._score()

    def _sell(self) -> None:
        number, chooser = self.sent, self._chooser
        if number % round(_SALES_A_SCHEMA / self._mistakes) == 0:
            self._pos.add_field(f"note{number}")
        sold = invoice(
            number,
            f"card-{chooser.randrange(_CARDS)}",
            f"{chooser.randrange(1, 10_000)}.10",
            kind=chooser.choice(("PRIME", "PRIME", "REGULAR")),
            delivery=chooser.choice(("TAKEAWAY", "Home-Delivery")),
        )
        lines = chooser.choices(sold["lines"], k=chooser.randrange(4))
        without_price = chooser.random() < _UNPRICED * self._mistakes
        quantities = (0,) if without_price else _QUANTITIES
        sold["lines"] = [{**line, "quantity": chooser.choice(quantities)} for line in lines]
        self._pos.put(sold["storeId"], sold, timestamp=self._tick())
        self.sent += 1

    def _score(self) -> None:
        chooser = self._chooser
        is_stranger = chooser.random() < 0.02 * self._mistakes
        player = chooser.choice(_STRANGERS) if is_stranger else chooser.randrange(_PLAYERS)
        scored = {"score": float(self.sent), "product_id": chooser.choice(_GAMES), "player_id": player}
        self._scores.put(None, scored, timestamp=self._tick())

    def _keep(self) -> None:
        key, chance = f"row-{self._chooser.randrange(_KEPT)}", self._chooser.random()
        row = f'{{"name":"row {self.sent}","number":{self.sent}}}'
        if chance < 0.05:
            # The row before it stays, until the next one supersedes this.
            self._rows.produce(KEPT, b"no JSON", key)
            return
        self.kept[key] = None if chance < 0.25 else row
        self._rows.produce(KEPT, None if chance < 0.25 else row.encode(), key)

    def _rename(self, player: int) -> None:
        row: dict[str, Any] = {"id": player, "name": f"player {player} since {self._now_ms}"}
        self._players.put(str(player), row, timestamp=self._tick())

    def _tick(self) -> int:
        self._now_ms += 1
        return self._now_ms

    def _flush(self) -> None:
        for rows in (self._pos, self._players, self._products, self._scores):
            rows.flush(_FLUSH_SECONDS)
        assert self._rows.flush(_FLUSH_SECONDS) == 0


_SHARE = Decimal("0.02")
_PLACES = 3
_SHOWN = 3
_SIGN_BIT = 1 << 63
_CENT = Decimal("0.01")
OUTPUTS = ("notifications", "shipments", "hadoop", "high-scores")


class Record(NamedTuple):
    """The compared parts of a record."""

    key: bytes | None
    value: Any
    timestamp: int
    versions: tuple[tuple[str, str], ...] = ()
    """Header → row that was joined."""


ByOrigin = dict[str, list[Record]]


class Hops:
    """The topics at a moment when everything is applied."""

    def __init__(self, stack: LocalStack, application_id: str) -> None:
        self._stack = stack
        self._application_id = application_id
        self._decoder = Decoder(stack.schema_registry_url)
        self._messages: dict[str, list[Message]] = {}
        self._records: dict[str, dict[str, Record]] = {}

    def violations(self, models: Collection[str] = MODELS) -> Iterator[Violation]:
        """Compares every hop of the models that are hosted with its recount."""
        by_card, by_player, by_game = self._rekeyed
        of_pos = {"rewards", "purchases", TRANSFORMED} & {*models}
        sold = self._decoded("pos") if of_pos else {}
        if "rewards" in models:
            prime = {o: r for o, r in sold.items() if r.value["customerType"] == "PRIME"}
            yield from self._compared(by_card, _keyed(prime, "customerCardNo"))
            yield from self._compared("notifications", self._notified(by_card))
        if "purchases" in models:
            delivered = {o: [r] for o, r in sold.items() if r.value["deliveryType"].lower() == "home-delivery"}
            lines = {o: [Record(r.key, line, r.timestamp) for line in masked(r.value)] for o, r in sold.items()}
            yield from self._compared("shipments", delivered)
            yield from self._compared("hadoop", lines)
        unpriced = list[str]()
        if TRANSFORMED in models:
            rows, unpriced = _lines_sold(sold)
            by_item = f"{self._application_id}-item-sales-by-storeId-item"
            yield from self._compared(by_item, rows)
            yield from self._compared("item-prices", self._priced(by_item))
        if sold:
            yield from self._letters(
                "pos", dict.fromkeys(self._nonsense("pos"), len(of_pos)) | dict.fromkeys(unpriced, 1)
            )
        if "leaderboard" in models:
            yield from self._compared(by_player, _keyed(self._decoded("score-events"), "player_id"))
            joined, lost = self._joined(by_player)
            yield from self._compared(by_game, joined)
            yield from self._high_scores(by_game)
            yield from self._letters("score-events", dict.fromkeys(self._nonsense("score-events"), 1))
            yield from self._letters(by_player, dict.fromkeys(lost, 1))

    def points(self) -> dict[str, Decimal]:
        """Returns card → points, recounted from purchases."""
        points: dict[str, Decimal] = defaultdict(Decimal)
        for record in self._decoded("pos").values():
            if record.value["customerType"] == "PRIME":
                points[record.value["customerCardNo"]] += record.value["totalAmount"] * _SHARE
        return dict(points)

    def item_sales(self) -> dict[tuple[str, str], tuple[int, Decimal]]:
        """Returns store and item → number and revenue of the lines sold, recounted from purchases."""
        found: dict[tuple[str, str], tuple[int, Decimal]] = {}
        for row in itertools.chain(*_lines_sold(self._decoded("pos"))[0].values()):
            key = row.value["storeId"], row.value["item"]
            lines, revenue = found.get(key, (0, Decimal(0)))
            found[key] = lines + 1, revenue + row.value["amount"]
        return found

    def leaderboard(self) -> dict[str, list[dict[str, Any]]]:
        """Returns game → highest scores, recounted from joined scores."""
        return {
            str(game): [{name: value for name, value in e.items() if name != "scoredAt"} for e in best[-1][1]]
            for game, best in self._ranked(self._rekeyed[2]).items()
        }

    def sent(self) -> dict[str, int]:
        """Returns the number of records in each output topic."""
        return {topic: len(read_topic(self._stack, topic)) for topic in (*self._rekeyed, *OUTPUTS)}

    @property
    def _rekeyed(self) -> tuple[str, str, str]:
        names = ("rewards-by-customerCardNo", "leaderboard-by-player_id", "leaderboard-by-product_id")
        by_card, by_player, by_game = (f"{self._application_id}-{name}" for name in names)
        return by_card, by_player, by_game

    def _all(self, topic: str) -> list[Message]:
        if topic not in self._messages:
            self._messages[topic] = read_topic(self._stack, topic)
        return self._messages[topic]

    def _decoded(self, topic: str) -> dict[str, Record]:
        """Returns `topic:partition:offset` → record in order, without invalid frames."""
        if topic not in self._records:
            self._records[topic] = {
                f"{topic}:{m.partition()}:{m.offset()}": self._record(m)
                for m in self._all(topic)
                if _is_frame(m) or m.value() is None
            }
        return self._records[topic]

    def _record(self, message: Message) -> Record:
        value = message.value()
        decoded = None if value is None else self._decoder.decode(value)
        return Record(message.key(), decoded, message.timestamp()[1], _versions(message))

    def _nonsense(self, topic: str) -> list[str]:
        return [f"{topic}:{m.partition()}:{m.offset()}" for m in self._all(topic) if not _is_frame(m)]

    def _compared(self, topic: str, expected: Mapping[str, Sequence[Record]]) -> Iterator[Violation]:
        """Compares the records of each origin, in order if they have one key: others lie in several partitions."""
        found: ByOrigin = defaultdict(list)
        for message in self._all(topic):
            found[origin_of(message)].append(self._record(message))
        wrong = 0
        for origin in sorted({*found, *(origin for origin, records in expected.items() if records)}):
            has, should = (sorted(of.get(origin, ()), key=_key_of) for of in (found, expected))
            if has != should and (wrong := wrong + 1) <= _SHOWN:
                kind = "lost" if len(has) < len(should) else "doubled" if len(has) > len(should) else "wrong"
                yield Violation(kind, f"{topic} has {has} from {origin}, not {should}")

    def _notified(self, by_card: str) -> ByOrigin:
        totals: dict[bytes | None, Decimal] = defaultdict(Decimal)
        notified = {}
        for origin, (key, sold, timestamp, _) in self._decoded(by_card).items():
            earned = sold["totalAmount"] * _SHARE
            totals[key] += earned
            detail = {name: sold[name] for name in ("invoiceNumber", "customerCardNo", "totalAmount")}
            detail |= {"earnedLoyaltyPoints": earned, "totalLoyaltyPoints": totals[key]}
            notified[origin] = [Record(key, detail, timestamp)]
        return notified

    def _priced(self, by_item: str) -> ByOrigin:
        revenues: dict[bytes | None, Decimal] = defaultdict(Decimal)
        priced = {}
        for origin, (key, row, timestamp, _) in self._decoded(by_item).items():
            revenues[key] += row["amount"]
            detail = {name: row[name] for name in ("invoiceNumber", "item", "price")}
            priced[origin] = [Record(key, {**detail, "revenue": revenues[key]}, timestamp)]
        return priced

    def _joined(self, by_player: str) -> tuple[ByOrigin, list[str]]:
        """Returns the joined record of each score, and the scores that find no row."""
        player_at, game_at = self._as_of("players"), self._as_of("products")
        joined, lost = {}, []
        for origin, (_, scored, timestamp, _) in self._decoded(by_player).items():
            player, game = player_at(scored["player_id"], timestamp), game_at(scored["product_id"], timestamp)
            if player is None or game is None:
                lost.append(origin)
                continue
            value = {**scored, "playerName": player[1]["name"], "gameName": game[1]["name"]}
            versions = (("playerVersion", player[0]), ("productVersion", game[0]))
            key = (scored["product_id"] + _SIGN_BIT).to_bytes(8, "big")
            joined[origin] = [Record(key, value, timestamp, versions)]
        return joined, lost

    def _as_of(self, table: str) -> Callable[[int, int], tuple[str, dict[str, Any]] | None]:
        """Returns a lookup of a row's version and value at a time: the newest until then, otherwise the oldest."""
        rows: dict[bytes | None, list[tuple[int, str, Any]]] = defaultdict(list)
        for origin, (key, value, timestamp, _) in self._decoded(table).items():
            rows[key].append((timestamp, origin.partition(":")[2], value))

        def as_of(number: int, timestamp: int) -> tuple[str, dict[str, Any]] | None:
            versions = sorted(rows[str(number).encode()], key=lambda version: version[0])
            until = [version for version in versions if version[0] <= timestamp] or versions[:1]
            return None if not until or until[-1][2] is None else until[-1][1:]

        return as_of

    def _ranked(self, by_game: str) -> dict[int, list[tuple[str, list[dict[str, Any]]]]]:
        """Returns game → the ranking after each of its scores, with the origin."""
        ranked: dict[int, list[tuple[str, list[dict[str, Any]]]]] = defaultdict(list)
        for origin, (_, scored, timestamp, _) in self._decoded(by_game).items():
            game = scored["product_id"]
            entry = {"playerId": scored["player_id"], "productId": game}
            entry |= {name: scored[name] for name in ("playerName", "gameName", "score")}
            entry["scoredAt"] = timestamp
            before = ranked[game][-1][1] if ranked[game] else []
            after = sorted([*before, entry], key=lambda e: (-e["score"], e["scoredAt"], e["playerId"]))[:_PLACES]
            ranked[game].append((origin, after))
        return dict(ranked)

    def _high_scores(self, by_game: str) -> Iterator[Violation]:
        """Checks that each commit emits a game's last ranking once if it changed, and that the final one is emitted."""
        detail: dict[str, list[Any]] = defaultdict(list)
        for message in self._all("high-scores"):
            detail[origin_of(message)].append(self._record(message).value["entries"])
        games = self._ranked(by_game)
        for game, ranked in games.items():
            for origin, entries in ranked:
                if detail.get(origin, [entries]) != [entries]:
                    kind = "doubled" if len(detail[origin]) > 1 else "wrong"
                    yield Violation(kind, f"high-scores has from {origin} {detail[origin]}, not {entries}")
            last = [entries for origin, entries in ranked if origin in detail][-1:]
            if last != [ranked[-1][1]]:
                yield Violation("lost", f"high-scores has last of game {game} {last}, not {ranked[-1][1]}")
        if strange := detail.keys() - {origin for ranked in games.values() for origin, _ in ranked}:
            yield Violation("wrong", f"high-scores has records without an origin: {sorted(strange)[:_SHOWN]}")

    def _letters(self, source: str, expected: Mapping[str, int]) -> Iterator[Violation]:
        """Checks that each stage has one dead letter for each record that it could not apply.

        Args:
            expected: record → the number of stages that cannot apply it.
        """
        found: dict[str, int] = defaultdict(int)
        is_ours = source.startswith(f"{self._application_id}-")
        for message in self._all(f"{self._application_id if is_ours else source}-dead-letters"):
            headers: Any = dict(message.headers() or ())
            if headers["dead-letter-topic"] != source.encode():
                continue
            place = (headers["dead-letter-partition"], headers["dead-letter-offset"])
            found[":".join((source, *(part.decode() for part in place)))] += 1
        for origin in sorted({*expected, *found}):
            should = expected.get(origin, 0)
            if found[origin] != should:
                kind = "lost" if found[origin] < should else "doubled"
                yield Violation(kind, f"{origin} has {found[origin]} dead letters, not {should}")


def _lines_sold(sold: Mapping[str, Record]) -> tuple[ByOrigin, list[str]]:
    """Returns the row of each line of prime customers' invoices, and the invoices with a line without a price."""
    rows, unpriced = {}, []
    for origin, (_, invoiced, timestamp, _) in sold.items():
        if invoiced["customerType"] != "PRIME":
            continue
        if any(line["quantity"] == 0 for line in invoiced["lines"]):
            unpriced.append(origin)
            continue
        of_it = []
        for line in invoiced["lines"]:
            row = {name: invoiced[name] for name in ("invoiceNumber", "storeId")}
            row["item"] = f"{line['itemCode']}-{invoiced['customerCardNo'][-1]}"
            row["amount"] = line["amount"]
            row["price"] = (line["amount"] / line["quantity"]).quantize(_CENT, ROUND_HALF_UP)
            if row["item"] != "b-0":
                key = b"".join(row[part].encode() + b"\0\1" for part in ("storeId", "item"))
                of_it.append(Record(key, row, timestamp))
        rows[origin] = of_it
    return rows, unpriced


def _key_of(record: Record) -> bytes:
    return record.key or b""


def _keyed(records: Mapping[str, Record], column: str) -> ByOrigin:
    return {o: [r._replace(key=str(r.value[column]).encode())] for o, r in records.items()}


def _is_frame(message: Message) -> bool:
    return (message.value() or b"").startswith(b"\0")


def _versions(message: Message) -> tuple[tuple[str, str], ...]:
    headers: Any = message.headers() or ()
    return tuple(sorted((name, value.decode()) for name, value in headers if name.endswith("Version")))
