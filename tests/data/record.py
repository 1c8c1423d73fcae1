"""Records the data of a small application, as the version of this checkout writes them; see README.md.

`python -m tests.data.record FOLDER` starts a broker, a registry and an instance, and takes about two minutes.
"""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
import httpx
from confluent_kafka import Producer

from balance_service.avro.schemas import load_schema
from balance_service.devtools.local.stack import LocalInstance, LocalStack
from tests.chaos.systems import Hops
from tests.e2e.dead_letters import PoisonWriter, decide, pages, wait_for
from tests.integration.purchases import invoice
from tests.support.commands import run
from tests.support.kafka import Rows, read_topic
from tests.support.operator import Operator
from tests.support.recount import recount, schema_of
from tests.support.service import on
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = {
    "BALANCE_APPLICATION_ID": "recorded",
    "BALANCE_MODELS": "balance,activity,rewards,leaderboard",
    "BALANCE_TOPIC": "balance",
    "BALANCE_PARTITIONS": "2",
    "BALANCE_RETRY_EVERY": "86400",
    "BALANCE_SPARK_DRIVER_MEMORY": "640m",
}
_OF_FUNDS = ("balance", "activity")
_BY_CARD, _BY_PLAYER, _BY_GAME = "rewards-by-customerCardNo", "leaderboard-by-player_id", "leaderboard-by-product_id"
_SECONDS = 120.0
_KEPT_SECONDS = 10 * 365 * 86_400
"""The longest time that the HTTP API takes."""
# A version forgets a closed dead letter after some days. A recording is read for years.
_SERVE = f"""
from balance_service.cli.main import main
from balance_service.engine import dead_letter

dead_letter.KEPT_CLOSED_MS = {_KEPT_SECONDS * 1000}
main()
"""
_FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)
_LOSSY = {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 4}
_STRANGERS = (90_001, 90_002)
"""Players without a row; the second one gets it later."""


class _Instance(LocalInstance):
    """An instance that keeps closed dead letters for long."""

    def launch(self) -> None:
        self.run([self._python, "-c", _SERVE, "serve"], self.environment)


class _Recorder:
    """Appends events, decides about dead letters, and knows what becomes of each."""

    def __init__(self, stack: LocalStack, instance: LocalInstance) -> None:
        self._stack = stack
        self._instance = instance
        self._funds = PoisonWriter(stack, SETTINGS)
        self._events = 0
        self.letters: dict[str, list[str]] = {}
        """Dead letter → cause and status."""
        self.discarded: list[tuple[int, int]] = []
        """Partition and offset of events that would count otherwise."""
        self.schema_id = self._funds.unknown_id()
        """Is registered in the course of the recording."""
        self.healing: dict[str, Any] = {}
        """An event whose schema is not registered."""
        self.healed_score = ""
        """The dead letter of a score whose player came later."""

    # Events

    def add_funds(self, rounds: int) -> None:
        """Appends events, each third one with an idempotency key, and each ninth one twice."""
        for _ in range(rounds):
            for customer in range(9):
                name, number = f"customer-{customer}", self._events
                frame = self._frame(name, f"{number}.{number % 100:02}")
                headers = [("idempotency-key", f"key-{number}".encode())] if number % 3 == 0 else None
                for _ in range(2 if number % 9 == 0 else 1):
                    self._funds.send(name, frame, headers=headers)
        assert self._funds.producer.flush(20) == 0

    def abort(self) -> None:
        """Appends an event in a transaction that is aborted."""
        producer = Producer({"bootstrap.servers": self._stack.bootstrap_servers, "transactional.id": "aborts"})
        producer.init_transactions(20)
        producer.begin_transaction()
        producer.produce("balance", self._frame("customer-1", "1000000.00"), b"customer-1", partition=0)
        producer.flush(20)
        producer.abort_transaction(20)

    def sell(self, first: int, count: int) -> None:
        with Rows(self._stack, "pos", "PosInvoice") as rows:
            for number in range(first, first + count):
                kind = "REGULAR" if number % 4 == 0 else "PRIME"
                sold = invoice(number, f"card-{number % 7}", f"{number}.10", kind=kind)
                rows.put(sold["storeId"], sold)

    def name(self, *players: int) -> None:
        with Rows(self._stack, "players", "Player") as rows:
            for player in players:
                rows.put(str(player), {"id": player, "name": f"player {player}"})

    def score(self, first: int, *players: int) -> None:
        with Rows(self._stack, "score-events", "ScoreEvent") as rows:
            for number, player in enumerate(players, first):
                rows.put(None, {"score": float(number), "product_id": 1 + number % 2, "player_id": player})

    def _frame(self, customer: str, amount: str, **more: Any) -> bytes:
        self._events += 1
        return self._funds.frame(customer, amount, occurredOn=self._now, **more)

    @property
    def _now(self) -> datetime:
        """The time of the last event."""
        return _FIRST_DAY + timedelta(hours=self._events)

    # Dead letters

    def poison(self, cause: str, key: str, value: bytes, status: str = "waiting", **more: Any) -> str:
        """Appends a record to the events that both of their read models cannot apply; returns its place."""
        place = self._funds.put(key, value, **more).partition("/")[2]
        for model in _OF_FUNDS:
            self.letters[f"{model}/{place}"] = [cause, status]
        wait_for(self._instance, status, *(f"{model}/{place}" for model in _OF_FUNDS))
        return place

    def poison_with_schema(self, schema_id: int, customer: str, amount: str) -> str:
        frame = struct.pack(">bI", 0, schema_id) + self._frame(customer, amount)[5:]
        return self.poison("schema-id-unknown", customer, frame, "scheduled")

    def poison_of_other(self, topic: str, stage: str) -> str:
        """Appends a record without a frame; returns the id of its dead letter."""
        with Rows(self._stack, topic, "PosInvoice") as rows:
            rows.put_raw("store-1", b"no frame")
        *_, last = (m for m in read_topic(self._stack, topic) if m.value() == b"no frame")
        return self._expect(f"{stage}/{last.partition()}:{last.offset()}", "magic-byte-unknown", "waiting")

    def strangers(self) -> list[str]:
        """Scores players without a row; returns the ids of their dead letters."""
        self.score(100, *_STRANGERS)

        def found() -> dict[str, str]:
            rekeyed = read_topic(self._stack, topic_of(_BY_PLAYER))
            return {m.key().decode(): f"{_BY_GAME}/{m.partition()}:{m.offset()}" for m in rekeyed}

        eventually(lambda: {*map(str, _STRANGERS)} <= found().keys(), "the scores are re-keyed")
        return [self._expect(found()[str(player)], "join-missing", "scheduled") for player in _STRANGERS]

    def _expect(self, letter_id: str, cause: str, status: str) -> str:
        self.letters[letter_id] = [cause, status]
        wait_for(self._instance, status, letter_id)
        return letter_id

    def decide(self, decision: str, *ids: str) -> None:
        """Has an operator decide about dead letters, and waits for the outcome."""
        answer = decide(self._instance, decision, *ids)
        assert answer.status_code == 202, answer.text
        status = {"redrive": "applied", "discard": "discarded"}[decision]
        for one in ids:
            self._expect(one, self.letters[one][0], status)

    def discard_event(self, place: str) -> None:
        partition, offset = map(int, place.split(":"))
        self.discarded.append((partition, offset))
        self.decide("discard", *(f"{model}/{place}" for model in _OF_FUNDS))

    # The run

    def before_the_rebuilds(self) -> None:
        """The records that both generations fold, the newer one in a replay."""
        self.add_funds(12)
        self.abort()
        with Rows(self._stack, "products", "Product") as rows:
            for game in (1, 2):
                rows.put(str(game), {"id": game, "name": f"game {game}"})
        self.name(1, 2, 3, 4)
        self.sell(1, 30)
        self.score(1, *[1, 2, 3, 4] * 6)
        garbage = self.poison("magic-byte-unknown", "customer-1", b"no frame")
        self.decide("discard", f"balance/{garbage}")
        healing = self.poison_with_schema(self.schema_id, "customer-2", "5.00")
        discarded = self.poison_with_schema(self.schema_id, "customer-3", "7.00")
        self.discard_event(discarded)
        self._funds.make_known(self.schema_id)
        self.decide("redrive", *(f"{model}/{healing}" for model in _OF_FUNDS))
        self.decide("discard", self.poison_of_other("pos", _BY_CARD))
        _, self.healed_score = self.strangers()
        self.name(_STRANGERS[1])
        self.decide("redrive", self.healed_score)

    def after_the_switches(self) -> None:
        """The records that both generations fold on arrival."""
        self.add_funds(8)
        self.sell(31, 20)
        self.score(25, *[4, 3, 2, 1] * 3)
        self.poison("frame-missing", "customer-4", b"\0")
        self.poison("key-is-not-customer-id", "customer-5", self._frame("customer-6", "11.00"))
        lossy = load_schema("FundsAdded")
        fields = [{**field, "type": _LOSSY} if field["name"] == "amount" else field for field in lossy["fields"]]
        self.poison(
            "decimal-loses-digits",
            "customer-7",
            self._frame("customer-7", "1.2345", schema={**lossy, "fields": fields}),
        )
        # The first event has this key.
        reused = [("idempotency-key", b"key-0")]
        first = self._frame("customer-0", "12345.00")
        self.poison("idempotency-key-reused", "customer-0", first, headers=reused)
        garbage = self.poison("magic-byte-unknown", "customer-8", b"no frame either")
        self.decide("discard", f"balance/{garbage}")
        # The instances of later versions may register schemas of their own.
        schema_id = self._funds.unknown_id() + 10
        place = self.poison_with_schema(schema_id, "customer-2", "17.00")
        self.healing = {
            "place": place,
            "schemaId": schema_id,
            "customer": "customer-2",
            "amount": "17.00",
            "occurredOn": _text(self._now),
        }
        self.poison_of_other("pos", _BY_CARD)
        self.poison_of_other("score-events", _BY_PLAYER)

    def funds(self) -> dict[str, dict[str, Any]]:
        """Returns customer → balance and activity, recounted from the topic."""
        found: dict[str, dict[str, Any]] = defaultdict(lambda: {"additions": 0, "greatest": Decimal("-Infinity")})
        balances = recount(self._stack.bootstrap_servers, self._stack.schema_registry_url, "balance")
        for event in self._valid_events():
            one, at = found[event["customerId"]], _text(event["occurredOn"])
            one["additions"] += 1
            one["first"] = min(one.get("first", at), at)
            one["latest"] = max(one.get("latest", at), at)
            one["greatest"] = max(one["greatest"], event["amount"])
        for customer, one in found.items():
            one["amount"] = balances[customer]
        for message in read_topic(self._stack, "balance"):
            if (message.partition(), message.offset()) in self.discarded:
                event = self._decoded(message.value())
                found[event["customerId"]]["amount"] -= event["amount"]
        return dict(found)

    def _valid_events(self) -> Iterator[dict[str, Any]]:
        """Yields the events that count, first to last of each customer."""
        seen: set[Any] = set()
        for message in read_topic(self._stack, "balance"):
            event = self._decoded(message.value())
            token = dict(message.headers() or ()).get("idempotency-key")
            name = (message.key(), token or (message.partition(), message.offset()))
            is_left_out = (message.partition(), message.offset()) in self.discarded or name in seen
            if event is None or event["customerId"].encode() != message.key() or is_left_out:
                continue
            if event["amount"] != round(event["amount"], 2):
                continue
            seen.add(name)
            yield event

    def _decoded(self, value: bytes) -> Any:
        if len(value) < 5 or value[0] != 0:
            return None
        schema = schema_of(self._stack.schema_registry_url, int.from_bytes(value[1:5], "big"))
        return None if schema is None else fastavro.schemaless_reader(io.BytesIO(value[5:]), schema, None)


def _text(at: datetime) -> str:
    """Returns a time as answers have it."""
    return f"{at:%FT%T}.000Z"


def record(folder: Path) -> None:
    """Writes `broker.tar.gz`, `instance.tar.gz` and `expected.json`."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as data:
        expected = _run(LocalStack(Path(data)))
        assert Path(data, "kafka/data/.kafka_cleanshutdown").exists()
        _pack(folder / "broker.tar.gz", Path(data), "kafka/data", "registry/registry.mv.db")
        _pack(folder / "instance.tar.gz", Path(data, "instance-1"), "")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def _run(stack: LocalStack) -> dict[str, Any]:
    """Runs the application; returns what every later version should find."""
    with stack:
        settings = on(stack, SETTINGS)
        created = run(settings, "topics", "create")
        assert created.code == 0, created
        instance = _Instance(1, stack, environment=settings)
        try:
            instance.start()
            recorder = _Recorder(stack, instance)
            recorder.before_the_rebuilds()
            for model, switch in (("balance", "always"), ("rewards", "always"), ("leaderboard", "never")):
                operator = Operator(model, lambda: [instance.url], _SECONDS)
                operator.ask("rebuild", switch=switch, keepOld=_KEPT_SECONDS)
                if switch == "always":
                    operator.wait_settled()
                else:
                    operator.the("ready")
            recorder.after_the_switches()
            expected = _expected(stack, recorder)
            eventually(
                lambda: answers(instance.url) == expected["answers"],
                lambda: f"{answers(instance.url)}, not {expected['answers']}",
                _SECONDS,
            )
            assert letters(instance) == recorder.letters
        finally:
            instance.stop()
        hops = Hops(stack, SETTINGS["BALANCE_APPLICATION_ID"])
        assert [violation.detail for violation in hops.violations(["rewards", "leaderboard"])] == expected["violations"]
        expected["records"] = {topic: len(read_topic(stack, topic)) for topic in _sent_topics()}
        return expected


def _expected(stack: LocalStack, recorder: _Recorder) -> dict[str, Any]:
    funds, hops = recorder.funds(), Hops(stack, SETTINGS["BALANCE_APPLICATION_ID"])
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    expected = {
        "commit": commit,
        "recordedAt": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": SETTINGS,
        "answers": {
            "balance": {customer: {"amount": one.pop("amount")} for customer, one in funds.items()},
            "activity": funds,
            "rewards": {card: {"points": f"{points:.4f}"} for card, points in hops.points().items()},
            "leaderboard": hops.leaderboard(),
        },
        "generations": {
            "balance": {"1": "kept", "2": "serving"},
            "activity": {"1": "serving"},
            "rewards": {"1": "kept", "2": "serving"},
            "leaderboard": {"1": "serving", "2": "ready"},
        },
        "letters": recorder.letters,
        "healing": recorder.healing,
        # The recount of a score that was joined later expects no dead letter.
        "violations": [f"{topic_of(_BY_PLAYER)}:{recorder.healed_score.partition('/')[2]} has 1 dead letters, not 0"],
    }
    # As read from the file.
    return exact(json.dumps(expected, default=str))  # type: ignore[no-any-return]


def topic_of(stage: str) -> str:
    """Returns the topic that a stage writes for the next one."""
    return f"{SETTINGS['BALANCE_APPLICATION_ID']}-{stage}"


def _sent_topics() -> list[str]:
    """Returns the topics of outputs, between stages, of dead letters and of decisions."""
    sources = ("balance", "pos", "score-events", SETTINGS["BALANCE_APPLICATION_ID"])
    return [
        "notifications",
        "high-scores",
        *map(topic_of, (_BY_CARD, _BY_PLAYER, _BY_GAME, "dead-letter-decisions")),
        *(f"{source}-dead-letters" for source in sources),
    ]


def answers(url: str, generation: int | None = None, *models: str) -> dict[str, Any]:
    """Returns read model → key → value, with the digits of numbers, as an instance answers; empty if it does not."""
    found = {}
    for model in models or SETTINGS["BALANCE_MODELS"].split(","):
        parameters = {"limit": 1000} | ({} if generation is None else {"generation": generation})
        answer = httpx.get(f"{url}/api/models/{model}/entries", params=parameters, timeout=30)
        if not answer.is_success:
            return {}
        found[model] = {entry["key"]: entry["value"] for entry in exact(answer.text)["entries"]}
    return found


def letters(instance: LocalInstance) -> dict[str, list[str]]:
    """Returns dead letter → cause and status, as an instance lists them."""
    return {one["id"]: [one["cause"], one["status"]] for page in pages(instance) for one in page}


def exact(text: str) -> Any:
    """Returns the content of a JSON text, with the digits of its numbers."""
    return json.loads(text, parse_float=str)


def _pack(target: Path, folder: Path, *names: str) -> None:
    """Writes files to an archive, without logs and locks."""
    with tarfile.open(target, "w:gz", compresslevel=9) as archive:
        for name in names:
            archive.add(folder / name, name or ".", filter=_kept)


def _kept(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(file.name).name
    if name in (".lock", "LOCK") or name.startswith("LOG"):
        return None
    file.uid = file.gid = 0
    file.uname = file.gname = ""
    return file


if __name__ == "__main__":
    record(Path(sys.argv[1]))
