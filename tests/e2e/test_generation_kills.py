"""Instances die at the steps of a rebuild, and a recount of all topics ends the test."""

from __future__ import annotations

import random
import time
import uuid
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Self

import httpx
import pytest

from balance_service.devtools.local.stack import LocalInstance, LocalStack
from tests.chaos.cluster import Member
from tests.chaos.systems import PARTITIONS, Hops, SystemWorkload
from tests.support.commands import run
from tests.support.kafka import admin
from tests.support.operator import Operator
from tests.support.service import application, on, retried
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(900)

_POINTS = "generations-changed=kill,generations-written=kill,compared=kill"
_FEW_RECORDS = 2
_SECONDS = 180.0
_ASK_EVERY_SECONDS = 1.0
_LATE_SECONDS = 2.0


@pytest.fixture(scope="module")
def kills_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack of its own, because the shipped models have fixed topic names."""
    with LocalStack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(scope="module")
def workload(kills_stack: LocalStack) -> Iterator[SystemWorkload]:
    settings = on(kills_stack, application(BALANCE_MODELS="rewards,leaderboard", BALANCE_PARTITIONS=str(PARTITIONS)))
    created = run(settings, "topics", "create")
    assert created.code == 0, created
    with SystemWorkload(kills_stack, random.randrange(10**6)) as workload:
        yield workload


@pytest.fixture(scope="module")
def rewards(kills_stack: LocalStack, workload: SystemWorkload) -> Iterator[Story]:
    with Story(kills_stack, workload, "rewards", 2) as story:
        yield story


class Story(Operator):
    """The instances of an application with one read model, while records are appended."""

    def __init__(self, stack: LocalStack, workload: SystemWorkload, model: str, instances: int) -> None:
        super().__init__(model, self._answering, _SECONDS)
        self._stack = stack
        self._workload = workload
        settings = application(
            BALANCE_MODELS=model,
            BALANCE_PARTITIONS=str(PARTITIONS),
            BALANCE_RETRY_EVERY="2",
            BALANCE_SPARK_DRIVER_MEMORY="640m",
        )
        self.application_id = settings["BALANCE_APPLICATION_ID"]
        self.members = []
        for number in range(instances):
            instance = LocalInstance(number + 1, stack, environment=settings)
            self.members.append(Member(instance, stack, _FEW_RECORDS, is_next_small=number % 2 == 0))
        self._offers = {member: stack.data_dir / "offers" / uuid.uuid4().hex for member in self.members}

    def __enter__(self) -> Self:
        try:
            for member, folder in self._offers.items():
                folder.mkdir(parents=True)
                self._launch(member)
            self.wait_ready()
            self._workload.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._workload.stop()
        self._stop()
        for member in self.members:
            member.keep_log()
        assert [line for member in self.members for line in member.unexpected()] == []

    def _stop(self) -> None:
        for member in self.members:
            member.stop()

    def _launch(self, member: Member) -> None:
        member.launch(f"{_POINTS},claims={self._offers[member]}")

    def _stage(self, generation: int) -> str:
        return self._model if generation == 1 else f"{self._model}.g{generation}"

    def _answering(self) -> list[str]:
        return [member.instance.url for member in self.members if member.running]

    def wait_ready(self) -> None:
        for member in self.members:
            member.wait_ready()

    # Faults

    def die_at(self, *points: str, verb: str = "", **body: Any) -> None:
        """Kills one instance at each fail point, and starts it again at once.

        Args:
            verb: a request that leads there; without one, the instances get there by themselves.
            body: of the request.
        """
        for folder, point in product(self._offers.values(), points):
            (folder / point).touch()
        left, asked_at = set(points), 0.0
        deadline = time.monotonic() + _SECONDS
        while left:
            assert time.monotonic() < deadline, f"{left} not reached: {self.generations()}"
            for member in self.members:
                if not member.running:
                    strike = member.strike()
                    assert strike is not None, f"{member.name} ended unexpectedly"
                    # Another one may have died there at the same moment.
                    left.discard(strike.point)
                    for folder in self._offers.values():
                        (folder / strike.point).unlink(missing_ok=True)
                    member.kill()
                    self._launch(member)
            if verb and len(left) == len(points) and time.monotonic() > asked_at + _ASK_EVERY_SECONDS:
                self.post(verb, **body)
                asked_at = time.monotonic()
            time.sleep(0.05)

    # Generations

    def leave_one(self) -> None:
        """Drops all generations but the serving one, and checks that nothing of them is left."""
        for number, status in self.statuses().items():
            if status != "serving":
                self.ask("drop", generation=number)
                self.wait_gone(number)

    def make_ready(self) -> int:
        """Returns a generation that could serve; builds one if there is none."""
        if not {"building", "ready"} & {*self.statuses().values()}:
            self.leave_one()
            self.ask("rebuild", switch="never", keepOld=3600)
        number = self.the("ready")
        compared = self.generations()["comparison"]
        assert {name: keys for name, keys in compared.items() if name != "equal"} == {
            "different": 0,
            "onlyServing": 0,
            "onlyBuilding": 0,
        }
        return number

    def wait_gone(self, number: int) -> None:
        """Waits until nothing of a dropped generation is left: no topic, no store, no task."""
        name = self._stage(number)
        changelog = f"{self.application_id}-{name}-changelog"

        def left() -> list[str]:
            topics = admin(self._stack).list_topics(timeout=10).topics
            folders = [path for member in self.members for path in member.state_dir.iterdir()]
            tasks = [task["task"] for member in self.members for task in (member.status() or {}).get("tasks", ())]
            return [
                *(topic for topic in topics if topic == changelog),
                *(str(path) for path in folders if path.name.rpartition("_")[0] == name),
                *(task for task in tasks if task.rpartition("_")[0] == name),
            ]

        eventually(lambda: left() == [], lambda: str(left()), _SECONDS)
        assert number not in self.statuses()

    # The recount

    def check(self) -> None:
        """Checks that each output was sent once, and that each instance answers what a recount of the topics finds."""
        self.wait_ready()
        self._workload.stop()
        try:
            eventually(lambda: self._violations() == [], lambda: str(self._violations()), _SECONDS)
            # An output that is sent twice may come late.
            time.sleep(_LATE_SECONDS)
            assert self._violations() == []
            expected = self._expected()
            for member in self.members:
                for path, body in expected.items():
                    answer = retried(partial(httpx.get, f"{member.instance.url}{path}"))
                    assert answer.text == body, path
        finally:
            self._workload.start()

    def _violations(self) -> list[Any]:
        return [*Hops(self._stack, self.application_id).violations([self._model])]

    def _expected(self) -> dict[str, str]:
        """Returns path → answer."""
        points = Hops(self._stack, self.application_id).points()
        path = "/api/customers.getRewards?customerCardNo="
        return {f"{path}{card}": f'{{"points":{expected:.4f}}}' for card, expected in points.items()}


@pytest.mark.shows("rebuild", "outputs-once")
def test_a_rebuild_survives_a_kill_at_each_step(rewards: Story) -> None:
    rewards.leave_one()
    before = rewards.statuses()
    rebuild: dict[str, Any] = {"verb": "rebuild", "switch": "never", "keepOld": 3600}

    rewards.die_at("generations-changed", **rebuild)
    assert rewards.statuses() == before
    rewards.die_at("generations-written", "compared", **rebuild)
    # The comparison of the next one that gets there.
    rewards.die_at("generations-changed")
    rewards.die_at("generations-written")

    assert rewards.make_ready() > max(before)
    rewards.check()
