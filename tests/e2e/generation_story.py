"""An application with one read model that has outputs, while its instances die, stall and lose topics.

A recount of all topics says what it should have sent, and what it should answer.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import httpx
from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import NewTopic

from balance_service.devtools.local.stack import LocalInstance, LocalStack
from tests.chaos.cluster import Member, stage_of
from tests.chaos.systems import PARTITIONS, Hops, SystemWorkload
from tests.support.commands import run
from tests.support.kafka import admin, read_topic
from tests.support.operator import Operator
from tests.support.service import application, on, retried
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DROP = ("store-removed", "subjects-deleted", "changelog-deleted")
# At "begun", the transaction that lets a running task send has begun, and the broker has nothing of it.
SWITCH = ("successor-held", "others-fenced", "begun/rebuilds", "produced/rebuilds", "committed/rebuilds", "taken-over")
STALLS = ("successor-held", "others-fenced", "begun/rebuilds", "taken-over")
_POINTS = ("generations-changed", "generations-written", "compared", *SWITCH, *DROP)
# The instances of two stories on one stack need folders of their own.
_NUMBERS = itertools.count(1)
_FEW_RECORDS = 2
_SECONDS = 180.0
_ASK_EVERY_SECONDS = 1.0
_LATE_SECONDS = 2.0


@contextmanager
def arcade(folder: Path) -> Iterator[tuple[LocalStack, SystemWorkload]]:
    """A stack of its own, because the shipped models have fixed topic names."""
    with LocalStack(folder) as stack:
        settings = on(stack, application(BALANCE_MODELS="rewards,leaderboard", BALANCE_PARTITIONS=str(PARTITIONS)))
        created = run(settings, "topics", "create")
        assert created.code == 0, created
        with SystemWorkload(stack, random.randrange(10**6)) as workload:
            yield stack, workload


class Story(Operator):
    """The instances of an application with one read model, while records are appended."""

    def __init__(
        self, stack: LocalStack, workload: SystemWorkload, model: str, instances: int, *, stalls: bool = False
    ) -> None:
        """Args:
        stalls: whether the instances stop at the fail points of a switch, and do not die there.
        """
        super().__init__(model, self._answering, _SECONDS)
        self.stack = stack
        self.workload = workload
        settings = application(
            BALANCE_MODELS=model,
            BALANCE_PARTITIONS=str(PARTITIONS),
            BALANCE_RETRY_EVERY="2",
            BALANCE_SPARK_DRIVER_MEMORY="640m",
        )
        self.application_id = settings["BALANCE_APPLICATION_ID"]
        self.members = []
        for number in range(instances):
            instance = LocalInstance(next(_NUMBERS), stack, environment=settings)
            self.members.append(Member(instance, stack, _FEW_RECORDS, is_next_small=number % 2 == 0))
        self._offers = stack.data_dir / self.application_id
        actions = {point: "stop" if stalls and point in SWITCH else "kill" for point in _POINTS}
        self._points = ",".join(f"{point}={action}" for point, action in actions.items())

    def __enter__(self) -> Self:
        self._offers.mkdir()
        try:
            for member in self.members:
                self._launch(member)
            self.wait_ready()
            self.workload.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.workload.stop()
        finally:
            self._stop()
        for member in self.members:
            member.keep_log()
        assert [line for member in self.members for line in member.unexpected()] == []

    def _stop(self) -> None:
        for member in self.members:
            member.signal_all(signal.SIGCONT)
            member.stop()

    def _launch(self, member: Member) -> None:
        member.launch(f"{self._points},claims={self._offers}")

    def _answering(self) -> list[str]:
        return [member.instance.url for member in self.members if member.running and not member.is_stopped()]

    def wait_ready(self) -> None:
        for member in self.members:
            member.wait_ready()

    # Faults

    def die_at(self, *points: str, verb: str = "", **body: Any) -> None:
        """Has one instance die at each fail point, and starts it again at once.

        Args:
            verb: a request that leads there; without one, the instances get there by themselves.
            body: of the request.
        """
        for point in points:
            (self._offers / point).touch()
        left, asked_at = set(points), 0.0
        deadline = time.monotonic() + _SECONDS
        while left:
            assert time.monotonic() < deadline, f"{left} not reached: {self.generations()}"
            for member in self.members:
                if not member.running:
                    strike = member.strike()
                    assert strike is not None, f"{member.name} ended unexpectedly"
                    left.remove(strike.point)
                    member.kill()
                    self._launch(member)
            if verb and len(left) == len(points) and time.monotonic() > asked_at + _ASK_EVERY_SECONDS:
                self.post(verb, **body)
                asked_at = time.monotonic()
            time.sleep(0.05)

    def stall(self, point: str, verb: str, **body: Any) -> Member:
        """Stops an instance at a fail point of its switch, and returns it."""
        (self._offers / point.partition("/")[0]).touch()
        self.ask(verb, **body)
        stalled: list[Member] = []

        def is_stalled() -> bool:
            stalled[:] = [member for member in self.members if member.is_stopped()]
            return bool(stalled)

        eventually(is_stalled, lambda: f"no instance stalls: {self.generations()}", _SECONDS)
        return stalled[0]

    def restart(self) -> None:
        """Kills all instances, and starts them again: each task is opened with what the changelogs have."""
        for member in self.members:
            member.kill()
        for member in self.members:
            self._launch(member)
        self.wait_ready()

    def lose_changelog(self, generation: int) -> None:
        """Replaces the changelog of a generation by an empty one; returns once all tasks have written to that."""
        name = f"{self.application_id}-{stage_of(self._model, generation)}-changelog"
        before = self._topic_id(name)
        admin(self.stack).delete_topics([name])[name].result(10)
        topic = NewTopic(name, PARTITIONS, 1, config={"cleanup.policy": "compact"})

        def is_replaced() -> bool:
            # A task may be faster.
            with suppress(KafkaException):
                admin(self.stack).create_topics([topic])[name].result(10)
            with suppress(KafkaException):
                return self._topic_id(name) != before
            return False

        def written() -> set[int]:
            return {record.partition() for record in read_topic(self.stack, name)}

        eventually(is_replaced, f"{name} is not replaced", _SECONDS)
        eventually(lambda: len(written()) == PARTITIONS, lambda: f"only {written()} of {name} are written", _SECONDS)

    def _topic_id(self, topic: str) -> str:
        described = admin(self.stack).describe_topics(TopicCollection([topic]))[topic].result(10)
        return str(described.topic_id)

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

    def another(self) -> int:
        """Returns another generation that could serve; builds one if there is none."""
        for number, status in self.statuses().items():
            if status == "kept":
                return number
        return self.make_ready()

    def wait_switched(self, to: int) -> None:
        self.wait_settled()
        assert self.statuses()[to] == "serving"

    def wait_gone(self, number: int) -> None:
        """Waits until nothing of a dropped generation is left: no topic, no subject, no store, no task."""
        name = stage_of(self._model, number)
        changelog = f"{self.application_id}-{name}-changelog"

        def left() -> list[str]:
            topics = admin(self.stack).list_topics(timeout=10).topics
            subjects = httpx.get(f"{self.stack.schema_registry_url}/subjects", timeout=10).json()
            folders = [path for member in self.members for path in member.state_dir.iterdir()]
            tasks = [task["task"] for member in self.members for task in (member.status() or {}).get("tasks", ())]
            return [
                *(topic for topic in topics if topic == changelog),
                *(subject for subject in subjects if subject.startswith(f"{changelog}-")),
                *(str(path) for path in folders if path.name.rpartition("_")[0] == name),
                *(task for task in tasks if task.rpartition("_")[0] == name),
            ]

        eventually(lambda: left() == [], lambda: str(left()), _SECONDS)
        assert number not in self.statuses()

    # The recount

    def check(self) -> None:
        """Checks that each output was sent once, and that each instance answers what a recount of the topics finds."""
        self.wait_ready()
        self.workload.stop()
        try:
            eventually(lambda: self._violations() == [], lambda: str(self._violations()), _SECONDS)
            # An output that is sent twice may come late.
            time.sleep(_LATE_SECONDS)
            assert self._violations() == []
            expected = self._expected()
            for member in self.members:
                for path, body in expected.items():
                    answer = retried(partial(httpx.get, f"{member.instance.url}{path}"))
                    assert _exact(answer.text) == _exact(body), path
        finally:
            self.workload.start()

    def _violations(self) -> list[Any]:
        return [*Hops(self.stack, self.application_id).violations([self._model])]

    def _expected(self) -> dict[str, str]:
        """Returns path → answer."""
        hops = Hops(self.stack, self.application_id)
        if self._model == "leaderboard":
            return {"/leaderboard": json.dumps(hops.leaderboard())}
        path = "/api/customers.getRewards?customerCardNo="
        return {f"{path}{card}": f'{{"points":{expected:.4f}}}' for card, expected in hops.points().items()}


def _exact(text: str) -> Any:
    """Returns the content of a JSON text, with the digits of its numbers."""
    return json.loads(text, parse_float=str)
