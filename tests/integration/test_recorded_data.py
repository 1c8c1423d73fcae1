"""Goes on with data that former versions wrote: topics, schemas, and the stores of an instance; see `tests/data`."""

from __future__ import annotations

import copy
import tarfile
from collections import Counter, defaultdict
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.devtools.local.stack import LocalInstance, LocalStack
from tests.chaos.systems import Hops
from tests.data.record import answers, exact, letters
from tests.e2e.dead_letters import PoisonWriter, decide, wait_for
from tests.integration.purchases import invoice
from tests.support.kafka import Rows, read_topic
from tests.support.operator import Operator
from tests.support.service import running, status
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

_RECORDINGS = sorted(path.parent for path in Path(__file__).parents[1].glob("data/*/expected.json"))
_SECONDS = 60.0


class _Recording:
    """Recorded data that an instance of this version goes on with, and what it should say."""

    def __init__(self, expected: dict[str, Any], stack: LocalStack, instance: LocalInstance) -> None:
        self._stack = stack
        self._instance = instance
        self._application_id = expected["settings"]["BALANCE_APPLICATION_ID"]
        self.expected = expected
        self.values = copy.deepcopy(expected["answers"])
        self.letters: dict[str, list[str]] = dict(expected["letters"])
        self.generations: dict[str, dict[str, str]] = copy.deepcopy(expected["generations"])
        self.records: dict[str, int] = dict(expected["records"])

    def check(self) -> None:
        """Waits until all generations have the expected states, and compares the rest."""
        for model, statuses in self.generations.items():
            assert self._operator(model).statuses() == {int(number): is_ for number, is_ in statuses.items()}
            for generation in map(int, statuses):
                self._wait_for_states(model, generation)
        assert letters(self._instance) == self.letters
        eventually(
            lambda: self._open_letters() == self._expected_letters(),
            lambda: f"{self._open_letters()}, not {self._expected_letters()}",
            _SECONDS,
        )
        assert {topic: len(read_topic(self._stack, topic)) for topic in self.records} == self.records
        found = [violation.detail for violation in Hops(self._stack, self._application_id).violations(_WITH_OUTPUTS)]
        assert found == self.expected["violations"]

    def _wait_for_states(self, model: str, generation: int) -> None:
        def found() -> Any:
            return answers(self._instance.url, generation, model).get(model)

        eventually(lambda: found() == self.values[model], lambda: f"{model}.g{generation}: {found()}", _SECONDS)

    def read_from_changelogs(self) -> dict[str, int]:
        """Returns task → the number of changelog records that its store was restored from."""
        return {task["task"]: task["restored"] for task in status(self._instance)["tasks"]}

    def _open_letters(self) -> dict[str, Counter[str]]:
        """Returns stage of a generation → number of open dead letters by cause and status, as positions have it."""
        found = defaultdict[str, Counter[str]](Counter)
        for task in status(self._instance)["tasks"]:
            for one in task["deadLetters"]:
                found[task["task"].rpartition("_")[0]][f"{one['cause']}/{one['status']}"] += one["count"]
        return dict(found)

    def _expected_letters(self) -> dict[str, Counter[str]]:
        found = defaultdict[str, Counter[str]](Counter)
        for letter_id, (cause, is_) in self.letters.items():
            stage = letter_id.partition("/")[0]
            for generation in self.generations.get(stage, ["1"]):
                name = stage if generation == "1" else f"{stage}.g{generation}"
                if is_ not in ("applied", "discarded"):
                    found[name][f"{cause}/{is_}"] += 1
        return dict(found)

    # What goes on

    def writer(self) -> PoisonWriter:
        return PoisonWriter(self._stack, self.expected["settings"])

    def switch_back(self, model: str) -> None:
        """Has the generation that was kept serve, and send the outputs."""
        operator, statuses = self._operator(model), self.generations[model]
        (kept,) = (number for number, is_ in statuses.items() if is_ == "kept")
        operator.ask("switch", to=int(kept))
        operator.wait_settled()
        self.generations[model] = {number: "serving" if number == kept else "kept" for number in statuses}

    def append(self, poison: PoisonWriter) -> None:
        """Appends an event for each read model, and one that was applied before."""
        applied = next(m for m in read_topic(self._stack, "balance") if m.headers())
        poison.send(applied.key(), applied.value(), headers=applied.headers(), timestamp=applied.timestamp()[1])
        poison.send("customer-0", poison.frame("customer-0", "0.25", occurredOn=datetime(2026, 7, 1, tzinfo=UTC)))
        assert poison.producer.flush(20) == 0
        self._count("customer-0", "0.25", "2026-07-01T00:00:00.000Z")
        with Rows(self._stack, "pos", "PosInvoice") as rows:
            rows.put("store-1", invoice(1000, "card-1", "50.00"))
        points = self.values["rewards"]["card-1"]
        points["points"] = str(Decimal(points["points"]) + 1)
        with Rows(self._stack, "score-events", "ScoreEvent") as rows:
            rows.put(None, {"score": 1000.0, "product_id": 1, "player_id": 2})
        best = {"playerId": 2, "productId": 1, "playerName": "player 2", "gameName": "game 1", "score": "1000.0"}
        self.values["leaderboard"]["1"] = [best, *self.values["leaderboard"]["1"][:2]]
        for topic in ("notifications", "high-scores", *(name for name in self.records if "-by-" in name)):
            self.records[topic] += 1

    def heal(self) -> None:
        """Redrives an event whose schema was not registered when it was read."""
        event = self.expected["healing"]
        for model in ("balance", "activity"):
            answer = decide(self._instance, "redrive", letter := f"{model}/{event['place']}")
            # A task that has opened retries its dead letters.
            assert answer.status_code == 202 or "applied already" in answer.text, answer.text
            wait_for(self._instance, "applied", letter)
            self.letters[letter] = [self.letters[letter][0], "applied"]
            self.records[f"{self._application_id}-dead-letter-decisions"] += answer.status_code == 202
        self._count(event["customer"], event["amount"], event["occurredOn"])

    def discard(self) -> None:
        """Discards a dead letter that waits for that."""
        self._decide("discard", "discarded", next(one for one, is_ in self.letters.items() if is_[1] == "waiting"))

    def _decide(self, decision: str, outcome: str, *ids: str) -> None:
        answer = decide(self._instance, decision, *ids)
        assert answer.status_code == 202, answer.text
        wait_for(self._instance, outcome, *ids)
        for one in ids:
            self.letters[one] = [self.letters[one][0], outcome]
        self.records[f"{self._application_id}-dead-letter-decisions"] += len(ids)

    def _count(self, customer: str, amount: str, at: str) -> None:
        """Counts an event of less than the customer's greatest amount."""
        balance, activity = (self.values[model][customer] for model in ("balance", "activity"))
        balance["amount"] = str(Decimal(balance["amount"]) + Decimal(amount))
        activity |= {"additions": activity["additions"] + 1, "latest": max(activity["latest"], at)}

    def _operator(self, model: str) -> Operator:
        return Operator(model, lambda: [self._instance.url], _SECONDS)


_ROOT = Path(__file__).parents[2]
_WITH_OUTPUTS = ("rewards", "leaderboard")


@pytest.fixture(params=_RECORDINGS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    """A folder of `tests/data`."""
    found: Path = request.param
    return found


def test_an_instance_goes_on_with_recorded_stores(folder: Path, tmp_path: Path) -> None:
    with _restored(folder, tmp_path, has_stores=True) as recorded:
        recorded.check()
        # A version that gives stores another format restores them.
        assert set(recorded.read_from_changelogs().values()) == {0}

        for model in ("balance", "rewards"):
            recorded.switch_back(model)
        with recorded.writer() as poison:
            recorded.append(poison)
        recorded.heal()
        recorded.discard()
        recorded.check()


def test_an_instance_restores_its_stores_from_recorded_changelogs(folder: Path, tmp_path: Path) -> None:
    with _restored(folder, tmp_path, has_stores=False) as recorded:
        recorded.check()
        assert 0 not in recorded.read_from_changelogs().values()


@contextmanager
def _restored(folder: Path, tmp_path: Path, *, has_stores: bool) -> Iterator[_Recording]:
    """A stack with recorded data, and an instance."""
    expected = exact((folder / "expected.json").read_text())
    _unpack(folder / "broker.tar.gz", tmp_path)
    with LocalStack(tmp_path) as stack:
        # The shipped `rewards` has a transform since: under the same version, it would not fold those generations.
        models = expected["settings"]["BALANCE_MODELS"].replace("rewards", "bench.own_folds:Rewards")
        environment = {**expected["settings"], "BALANCE_MODELS": models, "PYTHONPATH": str(_ROOT)}
        instance = LocalInstance(1, stack, environment=environment)
        with PoisonWriter(stack, expected["settings"]) as poison:
            # Before the instance registers schemas that are new since, which would take the id.
            poison.make_known(expected["healing"]["schemaId"])
        if has_stores:
            _unpack(folder / "instance.tar.gz", instance.state_dir)
        with running(instance):
            yield _Recording(expected, stack, instance)


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
